"""Workers of a submission: their names, their rounds, and what each of them may do.

A platform starts workers, and workers run items. The rules are on the page about the protocol of
workers (``docs/workers.md``). This module does no I/O.

- A *round* is one start of workers, such as one Kubernetes Job. The first has the number 0. Each
  later one has the number of the request that opened it, counted from 1.
- A *rank* is the number of a worker within its round. The platform replaces a worker that died: the
  new one has the same rank, and one more *restart*.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, Self

from . import signing, wire
from .frames import MALFORMED
from .retry_budgets import RetryBudgets

ALL_FINAL, NO_PRODUCER = "all final", "no producer"
"""The causes of a ``done`` request: every item is final; no process stores the other inputs."""

EXIT_DONE, EXIT_REPLACE, EXIT_SURPLUS = 0, 43, 44
"""Exit codes of a worker. 0: every item is final, and the platform may end the other workers. 44:
nothing is left for this worker. 43 or another: the platform replaces the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a submission says to all its workers; times in seconds.

    ``workers`` is how many the first round began with. ``backoff_s`` is the pause before the first
    retry of an item. ``budget_s`` limits the running time of all
    attempts together, and ``lifetime_s`` the time since the start. ``single`` marks a job without a
    batch.
    """

    workers: int = 1
    budgets: RetryBudgets = field(default_factory=RetryBudgets)
    backoff_s: float = 1.0
    fail_fast: bool = False
    cancel_running: bool = False
    budget_s: float | None = None
    lifetime_s: float | None = None
    single: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the terms that JSON describes; ignore unknown fields."""
        known: dict[str, Any] = {name: fields[name] for name in cls.__slots__ if name in fields}
        known["budgets"] = RetryBudgets(**known["budgets"])
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """How the workers of a submission run its items.

    ``outputs`` is the base of the items' output directories. ``created`` is when the submission
    was made, in seconds since the epoch; `Terms.lifetime_s` counts from then. With the isolation
    ``"process"``, each item has a process of its own. With ``"worker"``, items run one after
    another in one interpreter, which is replaced after ``recycle`` items (None: never). ``init`` is
    the pickle of a mapping: from arguments of the function to the functions that make them.
    """

    terms: Terms
    outputs: str
    created: float
    isolation: Literal["process", "worker"] = "process"
    init: wire.Input | None = None
    recycle: int | None = None

    def encode(self) -> str:
        """Return one line of JSON, the inverse of `decode`."""
        return json.dumps({**asdict(self), "init": self.init})

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read what `encode` has written; ignore unknown fields."""
        fields = json.loads(text)
        known: dict[str, Any] = {name: fields[name] for name in cls.__slots__ if name in fields}
        known["terms"] = Terms.of(known["terms"])
        if init := known.get("init"):
            known["init"] = wire.Input(*init)
        return cls(**known)


class WorkerId(NamedTuple):
    """A worker, as claims and outcomes name it.

    ``job`` is what the platform calls the round. It differs if the round was started twice.
    ``disruptions`` counts the ends of this rank that the platform caused.
    """

    round: int
    job: str
    rank: int
    restarts: int = 0
    disruptions: int = 0

    def __str__(self) -> str:
        """Return the text in claims and outcomes."""
        return f"{self.round}.{self.job}.{self.rank}.{self.restarts}.{self.disruptions}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the worker that *text* names; None if it names none."""
        try:
            number, job, *counts = text.split(".")
            rank, restarts, disruptions = map(int, counts)
            return cls(int(number), job, rank, restarts, disruptions)
        except ValueError:
            return None

    @property
    def place(self) -> tuple[int, str, int]:
        """What this worker shares with the workers that it replaces, and with its replacement."""
        return self[:3]

    @property
    def key(self) -> str:
        """The last part of the name of its registration; a replacement has another."""
        return f"{self.round:06d}.{self.job}.{self.rank:06d}.{self.restarts:04d}"


class Registration(NamedTuple):
    """What a worker says when it begins, in ``workers/``: the workers before it have ended.

    ``failure`` says why the worker can't open the submission; empty if it has opened it.
    """

    worker: WorkerId
    executor: str
    failure: str = ""

    def signed(self, key: bytes, scope: str) -> tuple[str, dict[str, str]]:
        """Return the name and the metadata of the object."""
        name = wire.worker_key(scope, self.worker.key)
        text = json.dumps([str(self.worker), self.executor, self.failure])
        return name, {"worker": text, "mac": signing.sign(key, scope, name, text.encode())}

    @classmethod
    def verified(
        cls, name: str, metadata: Mapping[str, str], key: bytes, scope: str
    ) -> Self | None:
        """Return what the object says; None without a valid signature."""
        text = metadata.get("worker", "")
        if not signing.is_signed(metadata, key, scope, name, text.encode(errors="replace")):
            return None
        try:
            worker_text, executor, failure = json.loads(text)
            worker = WorkerId.parse(worker_text)
        except MALFORMED:
            return None
        return None if worker is None else cls(worker, executor, failure)


class Registry:
    """The registrations of a submission that a process has read."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, str, int], Registration] = {}
        self.opened = False  # whether any worker has opened the submission
        self._failed = set[tuple[int, str, int]]()

    def add(self, registration: Registration) -> None:
        """Note one registration; their order doesn't matter."""
        worker = registration.worker
        known = self._latest.get(worker.place)
        if known is None or known.worker.restarts < worker.restarts:
            self._latest[worker.place] = registration
        self.opened = self.opened or not registration.failure
        if registration.failure:
            self._failed.add(worker.place)

    def successor(self, worker: WorkerId) -> WorkerId | None:
        """Return the worker that has replaced *worker*; None if none has."""
        latest = self._latest.get(worker.place)
        if latest is None or latest.worker.restarts <= worker.restarts:
            return None
        return latest.worker

    def ranks(self, worker: WorkerId) -> set[int]:
        """Return the ranks that have registered in the round of *worker*."""
        return {place[2] for place in self._latest if place[:2] == worker.place[:2]}

    @property
    def failed_openings(self) -> int:
        """How many ranks couldn't open the submission."""
        return len(self._failed)


class Requests:
    """The effect of all requests that a process has read, slot after slot.

    ``round`` is the number of the current round, and ``done`` the cause for which it is over, or
    empty. ``leaving`` are the ranks of this round that a client has asked to leave.
    """

    def __init__(self) -> None:
        self.count = 0
        self.round = 0
        self.done = ""
        self.leaving: frozenset[int] = frozenset()
        self._general = wire.Standing()
        self._named: dict[int, wire.Standing] = {}
        self._stopped_at = 0  # the number of the last stop of all items
        self.retries = 0
        """The number of the last request to retry; 0 without one."""

    def add(self, request: wire.Request) -> None:
        """Read the request of the next slot."""
        self.count += 1
        named: Iterable[int] = (*request.bases, *(request.items or ()))
        if request.kind == "stop" and request.items is None:
            named = self._named
            self._stopped_at = self.count
        for index in tuple(named):
            self._named[index] = self.standing(index).after(index, request, self.count)
        self._general = self._general.after(None, request, self.count)
        if request.kind == "retry":
            self.retries = self.count
        if self.removing:
            return
        if request.kind == "done":
            self.done = request.cause
        elif request.kind == "round" or request.opens_round:
            self.round, self.done, self.leaving = self.count, "", frozenset()
        elif request.kind == "leave":
            self.leaving |= {*request.ranks}

    def standing(self, index: int) -> wire.Standing:
        """Return the effect on the item *index*."""
        return self._named.get(index, self._general)

    @property
    def removing(self) -> bool:
        """Whether a cleanup removes the objects."""
        return self._general.removing

    @property
    def all_stopped(self) -> bool:
        """Whether a stop of all items is the last word on them: no retry came after it."""
        return self._stopped_at > self.retries


class Duty(Enum):
    """What an item asks of one worker."""

    FINAL = "nothing, unless a request retries it"
    DEAD = "close its claim: the claimant's replacement has registered"
    FRESH = "take it: nobody has ever claimed it"
    FREE = "take it: no living worker is responsible for it"
    MINE = "this worker's rank is responsible for it"
    OTHERS = "another rank of this round is responsible for it"
    FOREIGN = "wait: only a client can tell whether the claimant of another round is dead"


def duty(
    item: wire.Item,
    attempts: Mapping[int, wire.Attempt],
    base: int,
    registry: Registry,
    me: WorkerId,
) -> Duty:
    """Decide what *me* has to do about an item that is in this state.

    A rank is responsible for an item that it has claimed, and for one that its outcome left open.
    So it must stay, itself or replaced, until another claims the item, or the item is final.
    """
    if item.state.final:
        return Duty.FINAL
    attempt = attempts.get(item.attempt)
    is_claimed = attempt is not None and attempt.executor is not None
    if attempt is not None and is_claimed:
        owner = WorkerId.parse(attempt.worker)
        if owner is None:
            return Duty.FOREIGN  # a client's claim, which the client closes next
        if registry.successor(owner) is not None:
            return Duty.DEAD
    else:
        before = attempts.get(item.attempt - 1) if item.attempt - 1 > base else None
        outcome = before.outcome if before is not None else None
        owner = WorkerId.parse(outcome.writer) if outcome is not None else None
        # A superseded worker is a zombie, or its rank may have left since: it owes nothing.
        if owner is None or registry.successor(owner) is not None:
            return Duty.FRESH if item.attempt == 1 and base == 0 else Duty.FREE
    if owner.place[:2] != me.place[:2]:
        return Duty.FOREIGN if is_claimed else Duty.FREE
    return Duty.MINE if owner.rank == me.rank else Duty.OTHERS
