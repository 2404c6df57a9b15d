"""Count what an item costs, over the port of the store and in messages; times aren't tested."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job.processes import MARK
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.messages import Decoder
from kinetic._runner.protocol.outcomes import digest
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.workers import EXIT_DONE, Terms, WorkerId
from kinetic._runner.worker import pull
from kinetic._runner.worker.supervisor import TELL_PAUSE_S, Supervisor

SCOPE, KEY = "batches/grp-000000000000/", bytes(32)
ITEMS = 300
VALUE = wire.Outcome(wire.Kind.VALUE, started=1.0, ended=1.0, body=digest(b""))


Store = dict[str, tuple[bytes, Mapping[str, str]]]


def store_of(items: int) -> Store:
    """Return a store with the manifest and the inputs of a batch."""
    store: Store = {f"{SCOPE}manifest": (b"", {})}
    for number, slot in enumerate((wire.Slot(0, items), wire.Slot(total=items))):
        name = wire.input_key(SCOPE, number)
        store[name] = b"", slot.signed(KEY, SCOPE, name)
    return store


def requests_of(
    worker: pull.Pull, store: Store, run: Callable[[], wire.Outcome] = lambda: VALUE
) -> Counter[type]:
    """Return how many operations of each kind a worker needs until it leaves."""
    counts = Counter[type]()
    steps, answer, code = worker.steps(), None, None
    while code is None:
        try:
            operation = steps.send(answer)
        except StopIteration as end:
            code = end.value
            continue
        counts[type(operation)] += 1
        match operation:
            case pull.Create(name, body, metadata):
                answer = name not in store
                store.setdefault(name, (body, metadata))
            case pull.Read(name):
                answer = store.get(name)
            case pull.List(prefix):
                names = sorted(name for name in store if name.startswith(prefix))
                answer = [(name, store[name][1]) for name in names]
            case pull.Fetch():
                answer = True
            case pull.Wait():
                answer = pull.Ended(run(), b"")
            case _:
                answer = None
    assert code == EXIT_DONE
    return counts


def requests_of_all(items: int) -> Counter[type]:
    terms = Terms(workers=1, budgets=RetryBudgets())
    worker = pull.Pull(WorkerId(0, "job", 0), "me", KEY, SCOPE, terms, lambda: 0.0)
    return requests_of(worker, store_of(items))


def test_an_item_takes_two_objects_one_look_at_the_requests_and_no_listing() -> None:
    few, many = requests_of_all(ITEMS), requests_of_all(2 * ITEMS)
    more = {kind: many[kind] - few[kind] for kind in many}
    assert more.pop(pull.List) <= 1, "one listing for a block of 500 items"
    per_item = {kind: count / ITEMS for kind, count in more.items() if count}
    assert per_item == {
        pull.Create: 2.0,
        pull.Read: 1.0,
        pull.Fetch: 1.0,
        pull.Ready: 1.0,
        pull.Start: 1.0,
        pull.Wait: 1.0,
    }


def test_a_worker_of_lazy_inputs_lists_no_item_again_that_is_final() -> None:
    """Each input is stored when all earlier items have ended; another worker runs each second."""
    store: Store = {f"{SCOPE}manifest": (b"", {})}
    worker = pull.Pull(WorkerId(0, "job", 0), "me", KEY, SCOPE, Terms(workers=2), lambda: 0.0)
    stored, listed, is_running = 0, Counter[str](), False

    def store_slot(slot: wire.Slot) -> None:
        name = wire.input_key(SCOPE, stored)
        store[name] = b"", slot.signed(KEY, SCOPE, name)

    steps, answer, code = worker.steps(), None, None
    while code is None:
        try:
            operation = steps.send(answer)
        except StopIteration as end:
            code = end.value
            continue
        match operation:
            case pull.Create(name, body, metadata):
                answer = name not in store
                store.setdefault(name, (body, metadata))
            case pull.Read(name):
                answer = store.get(name)
            case pull.List(prefix):
                names = sorted(name for name in store if name.startswith(prefix))
                listed.update(names)
                answer = [(name, store[name][1]) for name in names]
            case pull.Fetch():
                answer = True
            case pull.Start():
                answer, is_running = None, True
            case pull.Wait() if is_running:
                answer, is_running = pull.Ended(VALUE, b""), False
            case pull.Wait():
                answer = pull.News.CHANGE
                store_slot(wire.Slot(stored, 1) if stored < ITEMS else wire.Slot(total=ITEMS))
                if stored % 2:
                    name = wire.attempt_key(SCOPE, stored, 1, "outcome")
                    store[name] = b"", VALUE.signed(KEY, SCOPE, stored, 1)
                stored += 1
            case _:
                answer = None
    assert code == EXIT_DONE
    attempts = [count for name, count in listed.items() if "/attempts/" in name]
    assert max(attempts) <= 10, "at most the items whose numbers begin alike"
    assert sum(attempts) <= 3 * ITEMS


def test_a_busy_worker_counts_what_others_use_of_the_budget_within_a_minute() -> None:
    """Each of its items takes 10 s, and meanwhile another worker ends one that took 100 s."""
    terms = Terms(workers=2, budgets=RetryBudgets(), budget_s=1000.0)
    store, now = store_of(ITEMS), 0.0
    worker = pull.Pull(WorkerId(0, "job", 0), "me", KEY, SCOPE, terms, lambda: now)

    def run() -> wire.Outcome:
        nonlocal now
        index, now = round(now / 5) + 1, now + 10
        outcome = VALUE._replace(started=1.0, ended=101.0, executor="other")
        store[wire.attempt_key(SCOPE, index, 1, "claim")] = b"", wire.claim_metadata("other")
        name = wire.attempt_key(SCOPE, index, 1, "outcome")
        store[name] = b"", outcome.signed(KEY, SCOPE, index, 1)
        return VALUE._replace(ended=11.0)

    requests_of(worker, store, run)
    assert now == 120, "1000 s are used after 100 s, and it adds up after 60 s and after 120 s"
    (stop,) = (name for name in store if "/control/" in name and b"budget" in store[name][0])
    assert stop == wire.control_key(SCOPE, 0)


class Peer:
    """The supervisor's end of a worker's connection, and the time."""

    def __init__(self, folder: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/socket")
        self._listener.listen()
        self.now = 0.0
        self._channel: socket.socket | None = None
        self._decoder = Decoder()

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages about items that have come since the last call."""
        if self._channel is None:
            self._channel, _ = self._listener.accept()
            self._channel.setblocking(False)
        found: list[dict[str, Any]] = []
        while True:
            try:
                data = self._channel.recv(1 << 16)
            except BlockingIOError:
                break
            found += [header for header, _ in self._decoder.feed(data)]
        return [it for it in found if it["op"] == "items"]

    def close(self) -> None:
        self._listener.close()
        if self._channel is not None:
            self._channel.close()


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, f"{tmp_path}:mark")
    found = Peer(tmp_path)
    yield found
    found.close()


@pytest.fixture
def channel(peer: Peer) -> Iterator[Supervisor]:
    found = Supervisor("me", single=False, clock=lambda: peer.now)
    yield found
    found.close()


def test_short_items_share_messages(peer: Peer, channel: Supervisor) -> None:
    messages = peer.messages()
    for index in range(1000):
        channel.started(index, 1, 10 * index)
        peer.now += 0.0005
        channel.ended(index, 1, 10 * index + 5)
        messages += peer.messages()
    channel.flush()
    messages += peer.messages()
    assert len(messages) <= 1000 * 0.0005 / TELL_PAUSE_S + 2
    ended = [it for message in messages for it in message["ended"]]
    assert ended == [[index, 1, 10 * index + 5] for index in range(1000)]
    assert not any("running" in message for message in messages)


def test_an_item_that_runs_for_long_is_told_once(peer: Peer, channel: Supervisor) -> None:
    channel.started(7, 2, 100)
    assert not peer.messages()
    peer.now = channel.flush_at
    channel.flush()
    assert [it["running"] for it in peer.messages()] == [[7, 2, 100]]
    channel.ended(7, 2, 150)
    channel.flush()
    assert [it["ended"] for it in peer.messages()] == [[[7, 2, 150]]]
    channel.flush(urgent=True)
    assert not peer.messages(), "there is nothing to tell"


def test_a_worker_without_an_item_tells_at_once(peer: Peer, channel: Supervisor) -> None:
    for index in range(2):
        channel.started(index, 1, 0)
        channel.ended(index, 1, 0)
        channel.flush(urgent=True)
        assert [it["urgent"] for it in peer.messages()] == [True]
