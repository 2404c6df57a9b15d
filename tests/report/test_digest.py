"""Check the statistics of a report on batches that are small enough to count by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._progress.standing import Goal
from kinetic._progress.tally import State
from kinetic._report.compare import merge
from kinetic._report.digest import POINTS, FailureGroup, compute_statistics, pattern
from kinetic._report.facts import Attempt, BatchReport, Item
from tests.report.batches import STARTED, search, sweep


def attempt(number: int, begun: float | None, ended: float | None, **fields: str) -> Attempt:
    return Attempt(
        number=number,
        begun=None if begun is None else STARTED + begun,
        ended=None if ended is None else STARTED + ended,
        **fields,
    )


def report(*items: Item, read_at: float = 100.0, total: int | None = None) -> BatchReport:
    return BatchReport(
        group_id="grp-1",
        created=STARTED,
        read_at=STARTED + read_at,
        total=len(items) if total is None else total,
        items=items,
    )


VALUE = {"kind": "value"}
ERROR = {"kind": "error", "reason": "user error"}
LOST = {"kind": "lost", "reason": "preempted"}

FOUR = report(
    Item(index=0, state=State.SUCCEEDED, attempts=(attempt(1, 0, 10, **VALUE),)),
    Item(
        index=1,
        state=State.SUCCEEDED,
        attempts=(attempt(1, 5, 8, **LOST), attempt(2, 9, 20, **VALUE)),
    ),
    Item(index=2, state=State.FAILED, attempts=(attempt(1, 10, 12, message="boom 1", **ERROR),)),
    Item(index=3, state=State.CANCELLED, attempts=(attempt(1, None, 15, kind="cancelled"),)),
)


def test_concurrency_counts_the_running_attempts() -> None:
    found = compute_statistics(FOUR)
    assert (found.begun, found.seconds, found.peak) == (STARTED, 20.0, 2)
    changes = ((0.0, 0), (0.0, 1), (5.0, 2), (8.0, 1), (9.0, 2), (12.0, 1), (20.0, 0))
    assert found.concurrency == tuple((at, count, count, count) for at, count in changes)
    assert found.mean == pytest.approx((5 * 1 + 3 * 2 + 1 + 3 * 2 + 8) / 20)


def test_states_count_the_items_over_time() -> None:
    points = dict(compute_statistics(FOUR).states)
    assert points[0.0] == (3, 1, 0, 0, 0, 0, 0)
    assert points[6.0] == (2, 2, 0, 0, 0, 0, 0)
    assert points[8.5] == (3, 1, 0, 0, 0, 0, 0), "between two attempts an item waits"
    assert points[11.0] == (1, 2, 1, 0, 0, 0, 0)
    assert points[20.0] == (0, 0, 2, 1, 1, 0, 0)
    assert {sum(counts) for counts in points.values()} == {4}


def test_an_item_cancelled_before_its_start_counts_as_waiting_until_the_end() -> None:
    done = Item(index=0, state=State.SUCCEEDED, attempts=(attempt(1, 0, 10, **VALUE),))
    found = compute_statistics(
        report(done, Item(index=1, state=State.CANCELLED), read_at=10.0)
    ).states
    assert {counts for _, counts in found[:-1]} == {(1, 1, 0, 0, 0, 0, 0)}
    assert found[-1][1] == (0, 0, 1, 0, 1, 0, 0)


def test_a_running_item_counts_until_now() -> None:
    running = report(
        Item(index=0, state=State.RUNNING, attempts=(attempt(1, 40, None),)),
        Item(index=1),
        read_at=50.0,
    )
    found = compute_statistics(running)
    assert (found.seconds, found.peak, found.concurrency[-1]) == (50.0, 1, (50.0, 1, 1, 1))
    assert found.durations is None
    assert found.slowest == (0,)
    assert found.states[-1][1] == (1, 1, 0, 0, 0, 0, 0)


def test_durations_are_those_of_the_successful_attempts() -> None:
    found = compute_statistics(FOUR).durations
    assert found is not None
    assert (found.count, found.least, found.p50, found.p95, found.most) == (2, 10, 10, 11, 11)
    assert found.total == 21
    assert [count for _, _, count in found.bins] == [1, 0, 1]


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=60))
def test_every_duration_is_in_one_bin_and_quantiles_are_real_durations(
    durations: list[float],
) -> None:
    items = [
        Item(index=index, state=State.SUCCEEDED, attempts=(attempt(1, 0, seconds, **VALUE),))
        for index, seconds in enumerate(durations)
    ]
    batch = report(*items, read_at=2e6)
    found = compute_statistics(batch).durations
    assert found is not None
    real = sorted(seconds for item in items if (seconds := item.seconds(0)) is not None)
    assert sum(count for _, _, count in found.bins) == len(real)
    for start, stop, count in found.bins:
        assert start <= stop
        assert count <= sum(start <= seconds <= stop for seconds in real)
    assert found.p50 in real and found.p95 in real
    assert sum(seconds <= found.p50 for seconds in real) >= len(real) / 2
    assert found.least == found.bins[0][0] and found.most == found.bins[-1][1]


def test_retries_are_counted_by_the_reason_of_the_attempt_before() -> None:
    batch = report(
        Item(
            index=0,
            state=State.SUCCEEDED,
            attempts=(
                attempt(1, 0, 1, **LOST),
                attempt(2, 1, 2, **LOST),
                attempt(3, 2, 3, **VALUE),
            ),
        ),
        Item(
            index=1,
            state=State.FAILED,
            attempts=(attempt(1, 0, 1, **ERROR), attempt(2, 1, 2, **LOST)),
        ),
    )
    assert compute_statistics(batch).retries == (
        ("preempted", 2, 1),
        ("user error", 1, 1),
    )


def test_an_item_cancelled_during_a_retry_has_the_failure_of_the_attempt_before() -> None:
    item = Item(
        index=0,
        state=State.FAILED,
        attempts=(
            attempt(1, 0, 1, message="boom", **ERROR),
            attempt(2, 1, 3, kind="cancelled", reason="cancelled"),
        ),
    )
    (group,) = compute_statistics(report(item)).failures
    assert (group.message, group.reason) == ("boom", "user error")


def test_an_item_that_waits_for_a_retry_has_no_current_attempt() -> None:
    item = Item(index=0, attempts=(attempt(1, 10, 14, **ERROR),))
    assert (item.last, item.earlier_attempts, item.seconds(STARTED + 50)) == (
        None,
        item.attempts,
        None,
    )
    found = compute_statistics(report(item, read_at=50.0))
    assert found.retries == (("user error", 1, 1),)
    assert found.states[-1][1] == (1, 0, 0, 0, 0, 0, 0)
    assert found.slowest == ()


def test_failures_are_grouped_by_their_messages_without_numbers() -> None:
    def failed(index: int, message: str, **fields: str) -> Item:
        return Item(
            index=index,
            state=State.FAILED,
            attempts=(attempt(1, 0, 1, message=message, **{**ERROR, **fields}),),
        )

    batch = report(
        failed(0, "ValueError: step 17 of 0x7f3a: nan"),
        failed(1, "KeyError: 'rate'"),
        failed(2, "ValueError: step 3.5e-4 of 0xdead: nan"),
        failed(3, "", reason="out of memory"),
        failed(4, "KeyError: 'rate'", reason="setup"),
    )
    assert compute_statistics(batch).failures == (
        FailureGroup("ValueError: step 17 of 0x7f3a: nan", "user error", (0, 2), 0),
        FailureGroup("KeyError: 'rate'", "user error", (1,), 1),
        FailureGroup("out of memory", "out of memory", (3,), 3),
        FailureGroup("KeyError: 'rate'", "setup", (4,), 4),
    )
    assert pattern("v2 of lr1 at 12ab34cd56ef78") == "v2 of lr1 at N"


@pytest.mark.parametrize("items", [(), (Item(index=0),)])
def test_a_batch_without_attempts_has_empty_statistics(items: tuple[Item, ...]) -> None:
    found = compute_statistics(report(*items, read_at=0.0))
    assert (found.seconds, found.peak, found.mean) == (0.0, 0, 0.0)
    assert found.durations is None
    assert not (found.states or found.retries or found.failures or found.slowest)


def test_clocks_that_differ_give_no_negative_times() -> None:
    early = report(
        Item(index=0, state=State.SUCCEEDED, attempts=(attempt(1, -30, -40, **VALUE),)),
        Item(index=1, state=State.SUCCEEDED, attempts=(attempt(1, 5, 6, **VALUE),)),
    )
    found = compute_statistics(early)
    assert found.begun == STARTED - 40
    assert found.seconds == 46
    assert min(at for at, *_ in found.concurrency) >= 0
    assert found.durations is not None and found.durations.least == 0


def test_thinned_lines_of_large_batches_keep_their_peaks() -> None:
    batch = sweep(3_000)
    found = compute_statistics(batch)
    assert len(found.concurrency) == POINTS + 1
    assert max(high for *_, high in found.concurrency) == found.peak == 16
    assert [at for at, *_ in found.concurrency] == sorted(at for at, *_ in found.concurrency)
    assert all(low <= mean <= high for _, low, mean, high in found.concurrency)
    means = [mean for _, _, mean, _ in found.concurrency[:-1]]
    assert sum(means) / POINTS == pytest.approx(found.mean)
    assert len(found.states) == POINTS + 1
    assert math.isclose(found.states[-1][0], found.seconds)


def test_the_rungs_of_a_sweep_say_how_many_trials_went_on() -> None:
    report = search(200)
    found = compute_statistics(report).rungs
    steps = [int(str(item.pruned["step"])) for item in report.items if item.pruned]
    assert [rung for rung, _, _ in found] == [1, 3, 9]
    for (rung, pruned, left), after in zip(found, (3, 9, 27), strict=True):
        assert pruned == sum(rung <= step < after for step in steps)
        assert left == sum(step >= after for step in steps) + 200 - len(steps)
    assert compute_statistics(sweep(5)).rungs == ()


def test_the_best_trial_is_that_of_the_metric_even_if_all_values_are_equal() -> None:
    goal = Goal(direction="maximize", metric="loss")
    results = [{"loss": "nan", "size": 1}, {"loss": 2.0, "size": 9}, {"loss": 2.0, "size": 3}]
    items = [Item(index=at, state=State.SUCCEEDED, result=it) for at, it in enumerate(results)]
    assert compute_statistics(replace(report(*items), goal=goal)).best == (1, 2.0)
    assert compute_statistics(replace(report(items[0]), goal=goal)).best is None
    assert compute_statistics(report(*items)).best is None


def test_the_curves_of_a_large_sweep_are_those_of_the_best_trials_and_of_every_nth() -> None:
    report = search(1_000)
    chosen = [*report.curves.by_item]
    assert len(chosen) == 200 and report.curves.reported == 1_000
    losses = {item.index: float(str(item.result["loss"])) for item in report.items if item.result}
    assert {*sorted(losses, key=losses.__getitem__)[:50]} <= {*chosen}
    assert max(after - before for before, after in pairwise(chosen)) <= 10


def test_a_comparison_has_the_items_of_all_batches_from_the_same_start() -> None:
    first, second = sweep(30), replace(sweep(50, seed=2), name="other", created=STARTED + 9e5)
    items = tuple(
        replace(
            item,
            attempts=tuple(
                attempt._replace(begun=attempt.begun + 9e5, ended=attempt.ended + 9e5)
                for attempt in item.attempts
                if attempt.begun is not None and attempt.ended is not None
            ),
        )
        for item in second.items
    )
    second = replace(second, items=items, read_at=second.read_at + 9e5)
    merged = merge([first, second])
    assert [(part.label, part.first) for part in merged.parts] == [("sweep", 0), ("other", 30)]
    assert [item.index for item in merged.items] == [*range(80)]
    found, alone = compute_statistics(merged), compute_statistics(second)
    assert found.seconds == pytest.approx(max(compute_statistics(first).seconds, alone.seconds))
    assert found.peak == 32, "both ran 16 at once"
    assert {*merged.examples} == {*first.examples, *(30 + index for index in second.examples)}


def test_a_running_item_of_a_comparison_has_run_until_the_snapshot_of_its_batch() -> None:
    running = Item(index=0, state=State.RUNNING, attempts=(attempt(1, 5, None),))
    ended = Item(index=0, state=State.SUCCEEDED, attempts=(attempt(1, 0, 7, **VALUE),))
    later = replace(report(ended, read_at=1e6), created=STARTED)
    merged = merge([report(running, read_at=15.0), later])
    assert [item.seconds(merged.read_at) for item in merged.items] == [10.0, 7.0]


def test_batches_of_a_comparison_have_different_labels() -> None:
    twins = [replace(sweep(1), group_id="grp-1"), replace(sweep(1), group_id="grp-2")]
    named = replace(sweep(1), name='a "b"', group_id="grp-3")
    labels = [part.label for part in merge([*twins, named]).parts]
    assert labels == ["grp-1", "grp-2", "a 'b'"]
