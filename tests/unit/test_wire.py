"""Test the wire format: states of items, signatures, round trips, and damaged content."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._runner.protocol import frames, signing, wire
from kinetic._runner.protocol.manifest import Manifest
from kinetic._runner.protocol.retry_budgets import UNVERIFIED, RetryBudgets
from kinetic._runner.protocol.wire import (
    Attempt,
    ItemState,
    Kind,
    Outcome,
    Request,
    item_state,
)
from kinetic.aio._lease import UNKNOWN, Lease

ERROR = Outcome(kind=Kind.ERROR, reason="user error")
PREEMPTED = Outcome(kind=Kind.LOST, reason="preempted")
VALUE = Outcome(kind=Kind.VALUE)
CANCELLED = Outcome(kind=Kind.CANCELLED)
STOP = Request(kind="stop")


def attempts(*outcomes: Outcome | None) -> dict[int, Attempt]:
    """Return claimed attempts from number 1; ``None`` is an attempt without an outcome."""
    return {number: Attempt("pod", outcome) for number, outcome in enumerate(outcomes, start=1)}


@pytest.mark.parametrize(
    ("requests", "found", "retries", "state", "attempt"),
    [
        ([], attempts(), 0, ItemState.OPEN, 1),
        ([], attempts(None), 0, ItemState.OPEN, 1),
        ([], attempts(VALUE), 0, ItemState.SUCCEEDED, 1),
        ([], attempts(ERROR), 0, ItemState.FAILED, 1),
        ([], attempts(ERROR), 1, ItemState.OPEN, 2),
        ([], attempts(ERROR, ERROR), 1, ItemState.FAILED, 2),
        ([], attempts(ERROR, VALUE), 1, ItemState.SUCCEEDED, 2),
        ([], attempts(PREEMPTED, PREEMPTED), 0, ItemState.OPEN, 3),
        ([], attempts(*[PREEMPTED] * 4), 0, ItemState.FAILED, 4),
        ([], attempts(CANCELLED), 0, ItemState.OPEN, 2),
        ([STOP], attempts(), 0, ItemState.CANCELLED, 1),
        ([STOP], attempts(None), 0, ItemState.CANCELLING, 1),
        ([STOP], attempts(VALUE), 0, ItemState.SUCCEEDED, 1),
        ([STOP], attempts(ERROR), 3, ItemState.FAILED, 1),
        ([STOP], attempts(CANCELLED), 0, ItemState.CANCELLED, 2),
        ([Request(kind="stop", items=(1,))], attempts(), 0, ItemState.OPEN, 1),
        ([STOP, Request(kind="retry", bases={0: 1})], attempts(CANCELLED), 0, ItemState.OPEN, 2),
        ([Request(kind="retry", bases={0: 1})], attempts(ERROR), 0, ItemState.OPEN, 2),
        ([Request(kind="retry", bases={0: 1})], attempts(ERROR, ERROR), 0, ItemState.FAILED, 2),
        # the request retired attempt 1, which may have started and has no outcome
        ([STOP, Request(kind="retry", bases={0: 1})], {}, 0, ItemState.OPEN, 2),
        (
            [Request(kind="retry", bases={0: 2})],
            {1: Attempt("pod", VALUE)},
            0,
            ItemState.SUCCEEDED,
            1,
        ),
        (
            [Request(kind="retry", bases={0: 1})],
            {2: Attempt("pod", VALUE)},
            0,
            ItemState.SUCCEEDED,
            2,
        ),
    ],
)
def test_the_state_of_an_item_follows_from_its_objects(
    requests: list[Request],
    found: dict[int, Attempt],
    retries: int,
    state: ItemState,
    attempt: int,
) -> None:
    item = item_state(wire.standing(0, requests), found, RetryBudgets(user=retries))
    assert (item.state, item.attempt) == (state, attempt)


outcomes = st.sampled_from([ERROR, PREEMPTED, VALUE, CANCELLED])


@given(st.lists(outcomes, max_size=6), st.lists(outcomes, max_size=3), st.integers(0, 3))
def test_a_value_stays_whatever_comes_after(
    before: list[Outcome], after: list[Outcome], retries: int
) -> None:
    """Once an item has succeeded, later objects don't change its state."""
    budgets = RetryBudgets(user=retries)
    first = item_state(wire.Standing(), attempts(*before), budgets)
    later = item_state(wire.standing(0, [STOP]), attempts(*before, *after), budgets)
    if first.state is ItemState.SUCCEEDED:
        assert later == first


def test_a_signature_is_valid_for_one_attempt_only() -> None:
    signed = VALUE.signed(b"key", "jobs/a/", 0, 1)
    assert Outcome.verified(signed, b"key", "jobs/a/", 0, 1) == VALUE
    for key, scope, index, attempt in [
        (b"other", "jobs/a/", 0, 1),
        (b"key", "jobs/b/", 0, 1),
        (b"key", "jobs/a/", 1, 1),
        (b"key", "jobs/a/", 0, 2),
    ]:
        with pytest.raises(ValueError, match="forged"):
            Outcome.verified(signed, key, scope, index, attempt)


def test_an_order_survives_json_and_ignores_unknown_fields() -> None:
    stored = wire.Input(name="inputs/0", start=0, stop=3, digest="d")
    order = wire.Order(
        store="file:///s",
        scope="jobs/a/",
        job_id="a",
        index=0,
        attempt=1,
        function=stored,
        arguments=stored,
        code=wire.Code(
            name="c",
            digest="d",
            overlay=wire.Input("e", 0, 1, "f"),
            sys_path=("", "src"),
            cwd="x",
        ),
        data=(wire.DataRef(uri="data/d", mount="/data"),),
    )
    sent = json.loads(order.encode())
    assert wire.Order.decode(json.dumps({**sent, "news": 1})) == order
    with pytest.raises(ValueError, match="format 2"):
        wire.Order.decode(json.dumps({**sent, "version": 2}))
    lacking = {name: value for name, value in sent.items() if name != "scope"}
    for garbled in (
        "[]",
        "{",
        json.dumps(lacking),
        json.dumps({**sent, "data": [{"url": "x"}]}),
        json.dumps({**sent, "code": {"name": "c"}}),
    ):
        with pytest.raises(ValueError, match=r"garbled|Expecting|format"):
            wire.Order.decode(garbled)


def test_a_request_survives_bytes() -> None:
    request = Request(kind="retry", items=(1, 2), bases={1: 3}, cause="c", keep_running=True)
    assert Request.from_bytes(request.to_bytes()) == request


def test_a_signed_request_is_valid_under_its_key_only() -> None:
    key, scope = b"key", "batches/g/"
    name, other = wire.control_key(scope, 0), wire.control_key(scope, 1)
    body, metadata = STOP.signed(key, scope, name)
    assert Request.verified(body, metadata, key, scope, name) == STOP
    unsigned = Request(kind=wire.UNSIGNED)
    assert Request.verified(body, metadata, key, scope, other) == unsigned
    assert Request.verified(body, metadata, key, "batches/h/", name) == unsigned
    assert Request.verified(body, metadata, b"another", scope, name) == unsigned
    assert Request.verified(body.replace(b"stop", b"halt"), metadata, key, scope, name) == unsigned
    assert Request.verified(body, {}, key, scope, name) == unsigned


@pytest.mark.parametrize("slot", [wire.Slot(3, 4, "f" * 64), wire.Slot(total=0)])
def test_a_slot_survives_its_metadata_but_no_change_of_them(slot: wire.Slot) -> None:
    key, scope = b"key", "batches/g/"
    name = wire.input_key(scope, 2)
    metadata = slot.signed(key, scope, name)
    with_nonce = {**metadata, "nonce": "of the creator"}
    assert wire.Slot.verified(with_nonce, key, scope, name) == slot
    changed = [{**metadata, field: "1"} for field in ("first", "count", "footer", "total", "mac")]
    left_out = [{f: v for f, v in metadata.items() if f != field} for field in metadata]
    for invalid in (*changed, *left_out, {}):
        with pytest.raises(ValueError, match="not what its submitter signed"):
            wire.Slot.verified(invalid, key, scope, name)


def test_signed_json_is_json_and_is_valid_under_its_key_only() -> None:
    key, scope, name = b"key", "jobs/j/", "jobs/j/handle.json"
    content = json.dumps({"a": [1], "mac": "a field of this name"}).encode()
    signed = signing.signed_json(key, scope, name, content)
    assert json.loads(signed).keys() == {"a", "mac"}
    assert signing.verified_json(key, scope, name, signed) == content
    for invalid in (signed.replace(b"1", b"2"), signed.replace(b"[1]", b"[1] ")):
        with pytest.raises(ValueError, match=name):
            signing.verified_json(key, scope, name, invalid)
    with pytest.raises(ValueError, match="elsewhere"):
        signing.verified_json(key, scope, "jobs/j/elsewhere", signed)
    for invalid in (content, b"", signed + b" ", b"[]"):
        with pytest.raises(KeyError):
            signing.verified_json(key, scope, name, invalid)


def test_listings_become_attempts_and_forged_ones_are_failures() -> None:
    scope, key = "batches/g/", b"key"
    entries = [
        (wire.attempt_key(scope, 7, 1, "claim"), {"executor": "pod-1"}),
        (wire.attempt_key(scope, 7, 1, "outcome"), ERROR.signed(key, scope, 7, 1)),
        (wire.attempt_key(scope, 7, 2, "claim"), {"executor": "pod-2"}),
    ]
    found = wire.attempts_of(entries, key, scope)
    assert found == {7: {1: Attempt("pod-1", ERROR), 2: Attempt("pod-2", None)}}
    moved = [(wire.attempt_key(scope, 8, 1, "outcome"), entries[1][1])]
    emptied = [(wire.attempt_key(scope, 9, 1, "outcome"), {})]
    unverified = Outcome(kind=Kind.ERROR, reason=UNVERIFIED)
    assert wire.attempts_of(moved, key, scope) == {8: {1: Attempt(None, unverified)}}
    assert wire.attempts_of(emptied, key, scope) == {9: {1: Attempt(None, unverified)}}


def test_an_unverified_outcome_fails_its_item_and_a_retry_skips_it() -> None:
    attempts = {1: Attempt("pod", Outcome(kind=Kind.ERROR, reason=UNVERIFIED))}
    budgets = RetryBudgets(user=3)
    assert wire.item_state(wire.Standing(), attempts, budgets).state is wire.ItemState.FAILED
    assert wire.retry_base(wire.Standing(), attempts, budgets) == 1
    retry = Request(kind="retry", bases={0: 1})
    assert wire.item_state(wire.standing(0, [retry]), attempts, budgets) == wire.Item(
        wire.ItemState.OPEN, 2
    )


TEXTS = st.text() | st.sampled_from(["é", "\udc80", "[" * 5000, "null", "1e999", '{"kind": []}'])


@given(st.dictionaries(st.sampled_from(["header", "mac", "executor"]), TEXTS))
def test_no_metadata_breaks_a_reader(metadata: dict[str, str]) -> None:
    name = wire.attempt_key("batches/g/", 7, 1, "outcome")
    [found] = wire.attempts_of([(name, metadata)], b"key", "batches/g/").values()
    assert found[1].outcome == Outcome(kind=Kind.ERROR, reason=UNVERIFIED)
    with pytest.raises(ValueError, match="is not what its submitter signed"):
        wire.Slot.verified(metadata, b"key", "batches/g/", "batches/g/inputs/0")
    with contextlib.suppress(ValueError):
        Outcome.parse(metadata.get("header", ""))


NESTED = b"[" * 100_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = ["frames", "version", "kind", "entries", "empty", "owner", "fence", "beat", "pid"]
FIELDS += ["token", "index", "attempt", "header", "mac", "body", "host", "boot", "started"]
BODIES = (
    st.binary(max_size=50)
    | st.just(NESTED)
    | st.dictionaries(st.sampled_from(FIELDS), VALUES).map(json.dumps).map(str.encode)
)


@pytest.mark.full
@given(BODIES)
def test_no_content_breaks_a_reader(body: bytes) -> None:
    """Readers either understand any content or report it as damaged."""
    text = body.decode("latin-1").lstrip("{")
    wire.parse_receipt('{"kinetic":' + text)
    wire.parse_receipt('{"kinetic":1,' + text)
    with contextlib.suppress(frames.FramesError):
        frames.unpack(body + struct.pack("<I4s", len(body), frames.MAGIC))
    with contextlib.suppress(ValueError):
        Manifest.from_bytes(body)
    assert isinstance(Lease.from_bytes(body), Lease)


PROCESS = {"host": "h", "boot": "b", "pid": 7, "started": "9"}


def test_the_stored_form_of_a_lease_is_stable() -> None:
    fields = {"fence": 2, "beat": 3, "held": True, "control_seen": 4, "nonce": "n"}
    stored = {"owner": PROCESS, **fields}
    lease = Lease.from_bytes(json.dumps({**stored, "news": 1}).encode())
    assert lease.beat == 3 and lease.holder_name == "process 7 on h"
    assert json.loads(lease.to_bytes()) == stored
    damaged = Lease.from_bytes(json.dumps({**stored, "beat": "3"}).encode())
    assert damaged == Lease(owner=UNKNOWN, held=False) and not damaged.owner.is_dead


def test_headers_of_a_later_minor_version_are_read() -> None:
    header = json.dumps({**VALUE._asdict(), "news": 1})
    assert Outcome.parse(header) == VALUE
