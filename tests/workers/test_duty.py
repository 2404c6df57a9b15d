"""Tables of what single workers read and decide, without a course of events."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from kinetic._runner.protocol import signing, wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.workers import (
    EXIT_DONE,
    EXIT_REPLACE,
    EXIT_SURPLUS,
    Duty,
    Registration,
    Registry,
    Requests,
    WorkerId,
    duty,
)
from kinetic._runner.worker import pull
from kinetic._runner.worker.pull import Terms

from .world import KEY, SCOPE

A, B = WorkerId(0, "j1", 0), WorkerId(0, "j1", 1)
ERROR = wire.Outcome(wire.Kind.ERROR, "error", started=10.0, ended=15.0)
VALUE = wire.Outcome(wire.Kind.VALUE, started=10.0, ended=15.0)
CANCELLED = wire.Outcome(wire.Kind.CANCELLED, "cancelled")


def replaced(worker: WorkerId, restarts: int = 1) -> WorkerId:
    return worker._replace(restarts=worker.restarts + restarts)


def registry(*workers: WorkerId) -> Registry:
    found = Registry()
    for worker in workers:
        found.add(Registration(worker, "pod"))
    return found


# --- the text of a worker ---


@pytest.mark.parametrize(
    "worker", [A, WorkerId(12, "0f3a-77", 199, 7, 3), WorkerId(3, "", 0, 10_000, 9_999)]
)
def test_a_claim_names_its_worker(worker: WorkerId) -> None:
    assert WorkerId.parse(str(worker)) == worker


@pytest.mark.parametrize(
    "text", ["", "client", "0.j1.0.0", "0.j1.0.0.0.0", "x.j1.0.0.0", "0.j1.0.x.0", "....", "0.j.1"]
)
def test_other_texts_name_no_worker(text: str) -> None:
    assert WorkerId.parse(text) is None


def test_a_replacement_has_the_same_place_and_another_name() -> None:
    assert replaced(A).place == A.place != B.place
    assert replaced(A).key > A.key
    assert A._replace(disruptions=1).key == A.key  # a second process of the same worker
    assert A._replace(job="j2").place != A.place


# --- registrations ---


@pytest.mark.parametrize("failure", ["", "no module named x", "“é”\n"])
def test_a_registration_says_who_began(failure: str) -> None:
    said = Registration(WorkerId(3, "j", 1, 2, 1), "pod7", failure)
    name, metadata = said.signed(KEY, SCOPE)
    assert name == f"{SCOPE}workers/000003.j.000001.0002"
    assert Registration.verified(name, metadata, KEY, SCOPE) == said


def signed(text: str) -> dict[str, str]:
    name = wire.worker_key(SCOPE, A.key)
    return {"worker": text, "mac": signing.sign(KEY, SCOPE, name, text.encode())}


def without(metadata: dict[str, str], field: str) -> dict[str, str]:
    return {name: value for name, value in metadata.items() if name != field}


NAME, METADATA = Registration(A, "pod").signed(KEY, SCOPE)


@pytest.mark.parametrize(
    ("name", "metadata", "key"),
    [
        (NAME, METADATA, b"another key"),
        (wire.worker_key(SCOPE, replaced(A).key), METADATA, KEY),  # under another name
        (NAME, {**METADATA, "worker": METADATA["worker"].replace("pod", "pad")}, KEY),
        (NAME, {**METADATA, "worker": "\ud800"}, KEY),
        (NAME, without(METADATA, "mac"), KEY),
        (NAME, without(METADATA, "worker"), KEY),
        (NAME, {}, KEY),
        (NAME, signed("{"), KEY),
        (NAME, signed("7"), KEY),
        (NAME, signed('["0.j1.0.0.0", "pod"]'), KEY),
        (NAME, signed('["client", "pod", ""]'), KEY),
    ],
)
def test_a_forged_or_damaged_registration_says_nothing(
    name: str, metadata: dict[str, str], key: bytes
) -> None:
    assert Registration.verified(name, metadata, key, SCOPE) is None


def test_the_order_of_registrations_does_not_matter() -> None:
    workers = [A, replaced(A), replaced(A, 2), B, A._replace(job="j2"), A._replace(round=4)]
    for seed in range(20):
        random.Random(seed).shuffle(workers)
        found = registry(*workers)
        assert found.successor(A) == found.successor(replaced(A)) == replaced(A, 2)
        assert found.successor(replaced(A, 2)) is None
        assert found.successor(B) is found.successor(A._replace(job="j2")) is None
        assert found.ranks(B) == {0, 1}
        assert found.ranks(A._replace(job="j2")) == {0}
        assert found.ranks(A._replace(round=9)) == set()


def test_a_rank_fails_to_open_once() -> None:
    found = Registry()
    for worker in (A, replaced(A), B):
        found.add(Registration(worker, "pod", "no module named x"))
    assert (found.failed_openings, found.opened) == (2, False)
    found.add(Registration(A, "pod"))
    assert (found.failed_openings, found.opened) == (2, True)


# --- requests ---


def after(*requests: wire.Request) -> Requests:
    found = Requests()
    for request in requests:
        found.add(request)
    return found


STOP = wire.Request(kind="stop", cause="cancelled")
CLEANUP = wire.Request(kind="stop", cause=wire.CLEANUP)
DONE = wire.Request(kind="done", cause="all final")
ROUND = wire.Request(kind="round")
RETRY = wire.Request(kind="retry", bases={1: 1})
RETRY_IN_ROUND = wire.Request(kind="retry", bases={1: 1}, opens_round=True)
LEAVE_0, LEAVE_2 = (wire.Request(kind="leave", ranks=(rank,)) for rank in (0, 2))


@pytest.mark.parametrize(
    ("requests", "round", "done", "leaving"),
    [
        ([], 0, "", set()),
        ([DONE], 0, "all final", set()),
        ([DONE, RETRY], 0, "all final", set()),
        ([DONE, RETRY_IN_ROUND], 2, "", set()),
        ([STOP, DONE, ROUND, DONE], 3, "all final", set()),
        ([LEAVE_0, LEAVE_2], 0, "", {0, 2}),
        ([LEAVE_0, ROUND, LEAVE_2], 2, "", {2}),
        ([LEAVE_0, CLEANUP, ROUND, DONE, LEAVE_2], 0, "", {0}),
        ([wire.Request(kind=wire.UNSIGNED), wire.Request(kind="sealed"), ROUND], 3, "", set()),
    ],
)
def test_requests_open_and_end_rounds(
    requests: list[wire.Request], round: int, done: str, leaving: set[int]
) -> None:
    found = after(*requests)
    assert (found.count, found.round, found.done) == (len(requests), round, done)
    assert found.leaving == leaving
    assert found.removing == (CLEANUP in requests)


@pytest.mark.parametrize(
    ("requests", "all_stopped", "retries"),
    [
        ([], False, 0),
        ([STOP], True, 0),
        ([STOP, RETRY], False, 2),
        ([RETRY, STOP], True, 1),
        ([wire.Request(kind="stop", items=(1,))], False, 0),
        ([STOP, wire.Request(kind="stop", items=(1,))], True, 0),
    ],
)
def test_a_retry_ends_a_stop_of_all_items(
    requests: list[wire.Request], all_stopped: bool, retries: int
) -> None:
    found = after(*requests)
    assert (found.all_stopped, found.retries) == (all_stopped, retries)


def any_request(rng: random.Random, items: int) -> wire.Request:
    some = tuple(sorted(rng.sample(range(items), rng.randint(1, items))))
    bases = {index: rng.randint(0, 3) for index in some}
    return rng.choice(
        [
            wire.Request(kind="stop", keep_running=rng.random() < 0.5),
            wire.Request(kind="stop", items=some, keep_running=rng.random() < 0.5),
            wire.Request(kind="retry", bases=bases, opens_round=rng.random() < 0.5),
            rng.choice([DONE, ROUND, LEAVE_0, CLEANUP, wire.Request(kind=wire.UNSIGNED)]),
        ]
    )


@pytest.mark.parametrize("seed", range(100))
def test_the_effect_of_requests_is_that_of_the_wire(seed: int) -> None:
    rng, items = random.Random(seed), 4
    requests = [any_request(rng, items) for _ in range(rng.randint(1, 12))]
    found = Requests()
    for count, request in enumerate(requests, 1):
        found.add(request)
        for index in range(items + 1):  # no request names the last one
            assert found.standing(index) == wire.standing(index, requests[:count])


# --- duties ---


def claimed(worker: WorkerId | None) -> wire.Attempt:
    return wire.Attempt("pod", None, None, "" if worker is None else str(worker))


def failed(writer: WorkerId | None) -> wire.Attempt:
    text = "" if writer is None else str(writer)
    return wire.Attempt("pod", ERROR._replace(writer=text), None, text)


OTHER_ROUND, OTHER_JOB = B._replace(round=3), B._replace(job="j2")


@pytest.mark.parametrize(
    ("attempts", "requests", "registered", "expected"),
    [
        ({}, [], [A, B], Duty.FRESH),
        ({1: wire.Attempt("pod", VALUE)}, [], [A, B], Duty.FINAL),
        ({}, [STOP], [A, B], Duty.FINAL),
        ({1: claimed(A)}, [], [A, B], Duty.MINE),
        ({1: claimed(B)}, [], [A, B], Duty.OTHERS),
        ({1: claimed(B)}, [], [], Duty.OTHERS),  # silence is no evidence
        ({1: claimed(B)}, [], [A, B, replaced(B)], Duty.DEAD),
        ({1: claimed(B)}, [STOP], [A, B, replaced(B)], Duty.DEAD),
        ({1: claimed(replaced(B))}, [], [A, B, replaced(B)], Duty.OTHERS),
        ({1: claimed(OTHER_ROUND)}, [], [A, B], Duty.FOREIGN),
        ({1: claimed(OTHER_JOB)}, [], [A, B], Duty.FOREIGN),
        ({1: claimed(OTHER_ROUND)}, [], [A, replaced(OTHER_ROUND)], Duty.DEAD),
        ({1: claimed(None)}, [], [A, B], Duty.FOREIGN),  # a client's
        ({1: failed(A)}, [], [A, B], Duty.MINE),
        ({1: failed(B)}, [], [A, B], Duty.OTHERS),
        ({1: failed(B)}, [], [A, B, replaced(B)], Duty.FREE),  # a zombie's outcome
        ({1: failed(OTHER_ROUND)}, [], [A, B], Duty.FREE),
        ({1: failed(None)}, [], [A, B], Duty.FREE),  # a client closed it
        ({1: failed(B), 2: claimed(A)}, [], [A, B], Duty.MINE),
        ({1: failed(A), 2: failed(B)}, [], [A, B], Duty.OTHERS),
        ({1: failed(B)}, [RETRY], [A, B], Duty.FREE),  # up to the base, nobody is responsible
        ({1: failed(A), 2: failed(B)}, [RETRY], [A, B], Duty.OTHERS),
    ],
)
def test_each_item_has_one_duty(
    attempts: dict[int, wire.Attempt],
    requests: list[wire.Request],
    registered: list[WorkerId],
    expected: Duty,
) -> None:
    standing = after(*requests).standing(1)
    item = wire.item_state(standing, attempts, RetryBudgets(user=3))
    assert duty(item, attempts, standing.base, registry(*registered), A) is expected


# --- what one worker does, against a store that nobody else uses ---


class Store:
    """Answers the operations of one worker; the child takes some seconds."""

    def __init__(self, terms: Terms, *, inputs: int = 1, age_s: float = 0.0) -> None:
        self.terms = terms
        self.age_s = age_s
        self.now = 0.0
        self.child_s = 10.0
        self.failure: pull.OpeningFailure | None = None
        self.outage = range(0)  # when reads fail, in seconds
        self.outcome = VALUE
        self.has_inputs = True
        self.ends_at: float | None = None  # the child, if one runs
        self.names: list[str] = []  # what was created, and what was started
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {f"{SCOPE}manifest": (b"", {})}
        self.put(wire.Slot(0, inputs), 0)
        self.put(wire.Slot(total=inputs), 1)

    def put(self, slot: wire.Slot, number: int) -> None:
        name = wire.input_key(SCOPE, number)
        self.objects[name] = b"", slot.signed(KEY, SCOPE, name)

    def ask(self, request: wire.Request) -> None:
        count = sum(name.startswith(f"{SCOPE}control/") for name in self.objects)
        name = wire.control_key(SCOPE, count)
        self.objects[name] = request.signed(KEY, SCOPE, name)

    def claim(self, worker: WorkerId, attempt: int = 1) -> None:
        name = wire.attempt_key(SCOPE, 0, attempt, "claim")
        self.objects[name] = b"", wire.claim_metadata("another", worker=str(worker))

    def play(self, me: WorkerId = A, executor: str = "pod") -> int:
        """Return the exit code."""
        worker = pull.Pull(me, executor, KEY, SCOPE, self.terms, lambda: self.now, self.age_s)
        steps = worker.steps()
        operation = next(steps)
        try:
            while True:
                if self.fails(operation):
                    operation = steps.throw(OSError("no answer"))
                else:
                    operation = steps.send(self.answer(operation))
                assert self.now < 7200, "the worker never ends"
        except StopIteration as end:
            return end.value

    def fails(self, operation: Any) -> bool:
        return isinstance(operation, pull.Read) and int(self.now) in self.outage

    def answer(self, operation: Any) -> Any:
        match operation:
            case pull.Create(name, body, metadata):
                if name in self.objects:
                    return False
                self.objects[name] = body, dict(metadata)
                self.names.append(name.removeprefix(SCOPE))
                return True
            case pull.Read(name):
                return self.objects.get(name)
            case pull.Open():
                return self.failure
            case pull.List(prefix):
                names = sorted(name for name in self.objects if name.startswith(prefix))
                return [(name, self.objects[name][1]) for name in names]
            case pull.Delete(name):
                del self.objects[name]
            case pull.Fetch(_, slot):
                return self.has_inputs and wire.input_key(SCOPE, slot) in self.objects
            case pull.Start(item, attempt):
                self.names.append(f"start {item}.{attempt}")
                self.ends_at = self.now + self.child_s
            case pull.Stop():
                self.names.append("stop")
                self.outcome = ERROR
                self.ends_at = self.now
            case pull.Wait(seconds):
                until = self.now + seconds
                if self.ends_at is not None and self.ends_at <= until:
                    self.now, self.ends_at = max(self.now, self.ends_at), None
                    return pull.Ended(self.outcome, b"")
                self.now = until
                return pull.News.TIME
        return None

    def kinds(self) -> Iterable[str]:
        """Return the kinds of the outcomes in the store, and the causes of the requests."""
        found = wire.attempts_of(
            [(name, metadata) for name, (_, metadata) in sorted(self.objects.items())], KEY, SCOPE
        )
        for attempts in found.values():
            yield from (it.outcome.kind.value for it in attempts.values() if it.outcome is not None)
        for name, (content, metadata) in sorted(self.objects.items()):
            if name.startswith(f"{SCOPE}control/"):
                request = wire.Request.verified(content, metadata, KEY, SCOPE, name)
                yield f"{request.kind} {request.cause}"


CLAIM_1, OUTCOME_1, CLAIM_2, OUTCOME_2 = (
    f"attempts/000000/00000000.{number:04d}.{part}"
    for number in (1, 2)
    for part in ("claim", "outcome")
)
SINGLE = Terms(single=True, budgets=RetryBudgets(user=1))


def test_a_single_job_registers_nothing_and_passes_nothing() -> None:
    store = Store(SINGLE)
    assert store.play() == EXIT_DONE
    assert store.names == [CLAIM_1, "start 0.1", OUTCOME_1]


def test_a_single_job_is_retried_in_the_same_process() -> None:
    store = Store(SINGLE)
    store.outcome = ERROR
    assert store.play() == EXIT_SURPLUS
    assert store.names == [CLAIM_1, "start 0.1", OUTCOME_1, CLAIM_2, "start 0.2", OUTCOME_2]


def test_the_replacement_of_a_single_job_closes_the_claim_before_it() -> None:
    store = Store(Terms(single=True, budgets=RetryBudgets(user=1)))
    store.claim(A)
    assert store.play(replaced(A)) == EXIT_DONE
    assert store.names == [OUTCOME_1, CLAIM_2, "start 0.2", OUTCOME_2]
    assert [*store.kinds()] == ["lost", "value"]


def test_the_second_process_of_a_single_job_asks_for_its_replacement() -> None:
    store = Store(SINGLE)
    store.claim(A)
    assert store.play() == EXIT_REPLACE
    assert (store.names, store.now) == ([], pull.CLAIMANT_S)


def test_a_long_problem_fits_into_a_registration() -> None:
    store = Store(Terms())
    store.failure = pull.OpeningFailure(ERROR, b"", "😀" * 30_000, passing=False)
    assert store.play() == EXIT_DONE
    assert [*store.kinds()] == ["error", "stop setup", "done all final"]
    _, metadata = store.objects[f"{SCOPE}workers/{A.key}"]
    assert sum(map(len, metadata.values())) < 8000, "as much as a bucket takes"


def test_an_item_survives_an_outage_of_the_store_while_it_runs() -> None:
    store = Store(Terms())
    store.child_s, store.outage = 3600.0, range(10, 3000)
    assert store.play() == EXIT_DONE
    assert [*store.kinds()] == ["value", "done all final"]


def test_a_worker_of_a_batch_declares_its_round_over() -> None:
    store = Store(Terms(), inputs=2)
    assert store.play() == EXIT_DONE
    assert store.names[0] == f"workers/{A.key}"
    assert store.names[-1] == "control/00000000"
    assert [*store.kinds()] == ["value", "value", "done all final"]


@pytest.mark.parametrize("requests", [[ROUND], [CLEANUP], [DONE, ROUND]])
def test_a_worker_of_an_earlier_round_takes_nothing(requests: list[wire.Request]) -> None:
    store = Store(Terms())
    for request in requests:
        store.ask(request)
    assert store.play() == EXIT_SURPLUS
    assert not any(name.startswith("start") for name in store.names)


def test_a_worker_of_a_removed_batch_leaves_no_object() -> None:
    store = Store(Terms())
    store.objects.clear()
    assert store.play() == EXIT_SURPLUS
    assert store.objects == {}


def test_the_second_process_of_a_worker_takes_nothing() -> None:
    store = Store(Terms())
    name, metadata = Registration(A, "another").signed(KEY, SCOPE)
    store.objects[name] = b"", metadata
    assert store.play() == EXIT_REPLACE
    assert store.names == []
    assert store.now >= pull.TWIN_S


def test_a_worker_whose_replacement_registered_takes_nothing() -> None:
    store = Store(Terms())
    name, metadata = Registration(replaced(A), "another").signed(KEY, SCOPE)
    store.objects[name] = b"", metadata
    assert store.play() == EXIT_REPLACE
    assert store.names == [f"workers/{A.key}"]


def test_a_worker_without_work_leaves_after_a_while() -> None:
    store = Store(Terms())
    store.claim(B)
    assert store.play() == EXIT_SURPLUS
    assert pull.SURPLUS_S <= store.now < 4 * pull.SURPLUS_S
    assert store.names == [f"workers/{A.key}"]


def test_a_worker_of_a_stopped_batch_does_not_wait_for_the_end_of_its_inputs() -> None:
    store = Store(Terms())
    del store.objects[wire.input_key(SCOPE, 1)]
    store.ask(wire.Request(kind="stop"))
    assert store.play() == EXIT_SURPLUS
    assert store.now < 60.0, "a silent producer counts as dead after ten minutes"
    assert not [name for name in store.names if name.startswith("control/")]


def test_a_claim_of_another_round_on_a_stopped_item_holds_nobody() -> None:
    store = Store(Terms())
    store.claim(OTHER_JOB)
    store.ask(STOP)
    assert store.play() == EXIT_DONE
    assert [*store.kinds()] == ["stop cancelled", "done all final"]


def test_running_time_beyond_the_budget_stops_all_items() -> None:
    store = Store(Terms(budget_s=9.0), inputs=4)  # the outcome says 5 s
    assert store.play() == EXIT_DONE
    assert [*store.kinds()] == ["value", "value", "stop budget", "done all final"]


def test_the_lifetime_ends_what_runs() -> None:
    store = Store(Terms(lifetime_s=60.0), inputs=2)
    store.child_s = 1000.0
    assert store.play() == EXIT_DONE
    assert "stop" in store.names
    assert [*store.kinds()] == ["cancelled", "stop timeout", "done all final"]
    assert 60.0 <= store.now < 120.0


def test_the_lifetime_counts_from_the_submission() -> None:
    store = Store(Terms(lifetime_s=60.0), inputs=2, age_s=60.0)
    assert store.play() == EXIT_DONE
    assert [*store.kinds()] == ["stop timeout", "done all final"]


def test_a_failure_stops_what_has_not_started() -> None:
    store = Store(Terms(fail_fast=True), inputs=3)
    store.outcome = ERROR
    assert store.play() == EXIT_DONE
    assert [*store.kinds()] == ["error", "stop fail_fast", "done all final"]


def test_a_retry_waits_for_twice_its_backoff_where_it_failed() -> None:
    store = Store(Terms(budgets=RetryBudgets(user=1), backoff_s=100.0))
    store.outcome = ERROR
    assert store.play() == EXIT_DONE
    assert store.names[1:5] == [CLAIM_1, "start 0.1", OUTCOME_1, CLAIM_2]
    assert store.now >= 2 * (store.child_s + 100.0)


def test_a_retry_waits_for_its_backoff_after_a_refused_claim() -> None:
    """The listing after a refused claim shows the failure of another worker."""
    store = Store(Terms(budgets=RetryBudgets(user=1), backoff_s=20.0))
    store.claim(B)
    outcome = ERROR._replace(writer=str(B))
    name = wire.attempt_key(SCOPE, 0, 1, "outcome")
    store.objects[name] = b"", outcome.signed(KEY, SCOPE, 0, 1)
    assert store.play() == EXIT_DONE
    assert store.names[1:4] == [CLAIM_2, "start 0.2", OUTCOME_2]
    assert store.now >= 20.0 + store.child_s


def test_a_worker_that_finds_no_input_withdraws_its_claim() -> None:
    store = Store(Terms())
    store.has_inputs = False
    assert store.play() == EXIT_SURPLUS
    assert store.names == [f"workers/{A.key}", CLAIM_1]
    assert f"{SCOPE}{CLAIM_1}" not in store.objects
