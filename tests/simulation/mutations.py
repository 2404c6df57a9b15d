"""Mutations that disable one rule of the engine; the simulation must catch each.

A mutation is a world that lies to the engine in one place, or a runner with one step changed. The
engine then acts as if the rule didn't exist. Some mutations set odds that provoke the case which
the rule covers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kinetic._runner.job import attempt
from kinetic._runner.job.opening import Opening
from kinetic._runner.protocol import signing, wire
from kinetic.aio._engine import ending, scheduler
from kinetic.aio._engine.submission import LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROUND, Evidence
from kinetic.aio.ports import Object, ObjectInfo, Observation, Phase
from kinetic.errors import Conflict, KineticError, NotFound

from .oracle import ROOT
from .scenario import Event, Plan
from .world import Behavior, Caller, Odds, PartyCluster, PartyStore, result_of


@dataclass(frozen=True)
class Mutation:
    """A behavior without one rule, the invariant it breaks, and the plan that shows it."""

    behavior: type[Behavior]
    breaks: str
    odds: Mapping[str, float] | None = None
    events: tuple[Event, ...] | None = None
    terms: Mapping[str, Any] | None = None
    lazy: bool | None = None

    def change(self, plan: Plan) -> Plan:
        """Return the plan of a seed with this mutation's odds, events, and terms."""
        odds = plan.odds if self.odds is None else replace(Odds(errors=0.2), **self.odds)
        events = plan.events if self.events is None else self.events
        if self.events is not None:  # vary the times with the seed
            shift = plan.seed % 17 / 4
            events = tuple(replace(event, at=event.at + shift) for event in events)
        lazy = plan.lazy if self.lazy is None else self.lazy
        terms = plan.terms | dict(self.terms or {})
        return replace(plan, odds=odds, events=events, lazy=lazy, terms=terms)


# --- the runner ---


class NoClaim(Behavior):
    """Runners check the store, but claim nothing."""

    class Opening(Opening):
        def claim(self) -> bool:
            return True


class CheckBeforeClaim(Behavior):
    """The runner reads requests and outcomes before its claim, not after."""

    class Opening(Opening):
        checked: bool | None = None

        def may_run(self) -> bool:
            if self.checked is None:
                self.checked = super().may_run()
            return self.checked

    class Attempt(attempt.Attempt):
        def steps(self) -> Generator[str, None, int]:
            yield "check"
            self._opening.may_run()
            for _ in range(60):
                yield "dawdle"
            return (yield from super().steps())


class RetryBeforeClose(Behavior):
    """The next attempt starts when the platform reports an end, and its runner checks nothing."""

    class Opening(Opening):
        def may_run(self) -> bool:
            super().may_run()
            return True

    def observed(self, caller: PartyCluster, seen: Observation) -> Observation:
        holder = self.world.holders[caller.party]()
        if holder is not None and seen.phase is Phase.ENDED and seen.exit_code != 0:
            index = int(seen.labels["kinetic.dev/index"])
            number = int(seen.labels["kinetic.dev/attempt"])
            if number == 1:
                holder.post(scheduler.ItemRead(index, wire.Item(wire.ItemState.OPEN, number + 1)))
        return seen


# --- outcomes ---


class OutcomePerItem(Behavior):
    """There is one outcome object per item instead of one per attempt."""

    def create(
        self, caller: Caller, name: str, body: bytes, metadata: Mapping[str, str] | None
    ) -> bool:
        if name.endswith(".outcome"):
            item = name[: -len("0001.outcome")]
            listed = result_of(caller.world.store.list(item))
            if any(info.name.endswith(".outcome") for info in listed):
                return False
        return super().create(caller, name, body, metadata)


class LostOverwrites(Behavior):
    """Closing an attempt overwrites an existing outcome."""

    def create(
        self, caller: Caller, name: str, body: bytes, metadata: Mapping[str, str] | None
    ) -> bool:
        if super().create(caller, name, body, metadata):
            return True
        if name.endswith(".outcome") and isinstance(caller, PartyStore):
            caller.world.oracle.replaced(caller.party, name, body)
        return False


class LostWithoutEvidence(Behavior):
    """The engine takes the end of any pod of a job for the end of the claimant."""

    def observed(self, caller: PartyCluster, seen: Observation) -> Observation:
        key = int(seen.labels[LABEL_INDEX]), int(seen.labels[LABEL_ATTEMPT])
        return replace(seen, executor=caller.world.oracle.batch.claims.get(key, ""))


class LostStaleControl(Behavior):
    """The engine closes an attempt after reading requests that are older than its claim."""

    def get(self, caller: Caller, name: str) -> Object:
        found = super().get(caller, name)
        if "/control/" in name and isinstance(caller, PartyStore) and self.is_young(caller, name):
            raise NotFound(name)
        return found

    def is_young(self, caller: Caller, name: str) -> bool:
        appended = caller.world.appended.get(name, 0.0)
        return caller.world.loop.now - appended < 6.0


class NumberNotBound(Behavior):
    """The engine applies the platform's answer to the attempt that is open when it arrives."""

    def asked(self, caller: PartyCluster, names: tuple[str, ...]) -> None:
        batch = self.world.batches[caller.party]()
        if names and batch is not None and not batch.submits:
            settling = self._settle(caller, batch.submission, names)
            self.world.loop.spawn(caller.party, settling, "settles the jobs of its query")

    async def _settle(self, caller: PartyCluster, submission: Any, names: tuple[str, ...]) -> None:
        with contextlib.suppress(KineticError):
            for seen in await caller.gate.send(
                "find", lambda: self.world.cluster.find(names, None)
            ):
                index = int(seen.labels["kinetic.dev/index"])
                number = submission.item(index).attempt
                if seen.phase is Phase.ENDED:
                    name = submission.identity.attempt_name(index, number)
                    evidence = Evidence(index, number, replace(seen, name=name))
                    await ending.settle(submission, evidence)


class OnlyTheHolderCloses(Behavior):
    """Only the lease holder closes a dead attempt, even under a stop."""

    def create(
        self, caller: Caller, name: str, body: bytes, metadata: Mapping[str, str] | None
    ) -> bool:
        lease = caller.world.oracle.batch
        holds = lease.held and lease.holder == caller.party
        if isinstance(caller, PartyStore) and "/attempts/" in name and not holds:
            return False
        return super().create(caller, name, body, metadata)


# --- lease and requests ---


class NoFence(Behavior):
    """A submitter that lost its lease doesn't notice."""

    def replace(self, caller: PartyStore, name: str, body: bytes, generation: int) -> int:
        try:
            return super().replace(caller, name, body, generation)
        except (Conflict, NotFound):
            return generation + 1


class RequestsNotReread(Behavior):
    """A new holder doesn't see requests that are older than its lease."""

    def get(self, caller: Caller, name: str) -> Object:
        hidden = caller.world.oracle.floor.get("B", 1000)
        if "/control/" in name and caller.party == "B" and int(name.rpartition("/")[2]) < hidden:
            raise NotFound(name)
        return super().get(caller, name)


class UnsignedRequestsAccepted(Behavior):
    """The engine accepts every request as if it were signed."""

    def get(self, caller: Caller, name: str) -> Object:
        found = super().get(caller, name)
        return replace(found, metadata=self._signed(caller, name)) if "/control/" in name else found

    def list(self, caller: Caller, prefix: str) -> list[ObjectInfo]:
        return [
            replace(info, metadata=self._signed(caller, info.name))
            if "/control/" in info.name
            else info
            for info in super().list(caller, prefix)
        ]

    def _signed(self, caller: Caller, name: str) -> Mapping[str, str]:
        scope = caller.world.oracle.scope
        body = result_of(caller.world.store.get(name)).body
        return {"mac": signing.sign(signing.submission_key(ROOT, scope), scope, name, body)}


class StopDeletesAnyRound(Behavior):
    """A stop deletes the jobs of all rounds, including those launched after it."""

    def selected(self, labels: Mapping[str, str] | None) -> Mapping[str, str] | None:
        return labels and {key: value for key, value in labels.items() if key != LABEL_ROUND}


# --- inputs and cleaning ---


class CleanupRemovesRequestsFirst(Behavior):
    """A cleanup deletes the requests before the inputs."""

    def delete(self, caller: Caller, names: list[str]) -> None:
        if isinstance(caller, PartyStore) and any("/inputs/" in name for name in names):
            listed = result_of(caller.world.store.list(caller.world.oracle.scope))
            super().delete(caller, [info.name for info in listed if "/control/" in info.name])
            caller.world.after(60.0, super().delete, caller, names)
            return
        super().delete(caller, names)


class CollectedUnread(Behavior):
    """The engine trusts a listing without checking whether the results were collected."""

    def list(self, caller: Caller, prefix: str) -> list[ObjectInfo]:
        listed = super().list(caller, prefix)
        return [info for info in listed if not info.name.endswith("/collected")]


class InputsAreKept(Behavior):
    """A collection removes the attempts before the inputs; every second pod is late."""

    class Late(attempt.Attempt):
        def steps(self) -> Generator[str, None, int]:
            for _ in range(1500):
                yield "dawdle"
            return (yield from super().steps())

    def runner(self, *parts: Any) -> attempt.Attempt:
        late = int(parts[2].rpartition("-")[2]) % 2 == 0
        return self.Late(*parts) if late else super().runner(*parts)

    def selected(self, labels: Mapping[str, str] | None) -> Mapping[str, str] | None:
        return {"deleted": "later"}

    def delete(self, caller: Caller, names: list[str]) -> None:
        super().delete(caller, [name for name in names if "/inputs/" not in name])


class ClosedDeleted(Behavior):
    """A collection also removes outcomes of attempts whose process may still run."""

    def delete(self, caller: Caller, names: list[str]) -> None:
        super().delete(caller, names)
        if isinstance(caller, PartyStore) and caller.world.oracle.collected:
            left = result_of(caller.world.store.list(f"{caller.world.oracle.scope}attempts/"))
            super().delete(caller, [info.name for info in left])


class EndApart(Behavior):
    """The end of the inputs is a separate object beside the slots."""

    def create(
        self, caller: Caller, name: str, body: bytes, metadata: Mapping[str, str] | None
    ) -> bool:
        if "/inputs/" in name and "first" not in (metadata or {}):
            return super().create(caller, f"{name}.end", body, metadata)
        return super().create(caller, name, body, metadata)

    def list(self, caller: Caller, prefix: str) -> list[ObjectInfo]:
        found = super().list(caller, prefix)
        return [replace(info, name=info.name.removesuffix(".end")) for info in found]

    def get(self, caller: Caller, name: str) -> Object:
        try:
            return super().get(caller, name)
        except NotFound:
            return super().get(caller, f"{name}.end")


class BlindInputs(Behavior):
    """Inputs overwrite a slot that is already taken."""

    def create(
        self, caller: Caller, name: str, body: bytes, metadata: Mapping[str, str] | None
    ) -> bool:
        if "/inputs/" in name:
            result_of(caller.world.store.delete([name]))
        return super().create(caller, name, body, metadata)


TAKEN = (Event(6.0, "outage", "A", 70.0), Event(6.0, "resume", "B"), Event(1.0, "watch", "O"))
"""The holder is cut off while its requests are on their way, and another party takes the batch."""

STOPPED = (Event(1.0, "cancel", "O"), Event(3.0, "watch", "B"))

ORPHANED = (Event(2.0, "kill", "A"), Event(3.0, "watch", "B"), Event(48.45, "force", "B"))
"""An observer notices that the submitter is gone, queries the platform, and resumes meanwhile."""

MUTATIONS: dict[str, Mutation] = {
    "no claim": Mutation(NoClaim, "I2", odds={"twice": 0.9}),
    "check before claim": Mutation(
        CheckBeforeClaim,
        "I1",
        odds={"errors": 0.5, "late": 0.3},  # jobs that didn't start are deleted late
        events=(),
        terms={"max_concurrent": 3, "fail_fast": True, "cancel_running_on_fail": False},
    ),
    "retry before close": Mutation(RetryBeforeClose, "I2", odds={"zombie": 0.7, "late": 0.05}),
    "one outcome per item": Mutation(OutcomePerItem, "I4"),
    "lost overwrites": Mutation(
        LostOverwrites, "I1", odds={"zombie": 0.9, "slow": 0.3, "errors": 0.0}
    ),
    "lost without evidence": Mutation(LostWithoutEvidence, "I4", odds={"twice": 0.9, "dies": 0.5}),
    "stale requests for lost": Mutation(
        LostStaleControl, "I1", odds={"dies": 0.9, "slow": 0.2}, events=STOPPED
    ),
    "number not bound to the query": Mutation(
        NumberNotBound,
        "I4",
        odds={"dies": 0.9, "late_answer": 0.6},
        events=ORPHANED,
        terms={"max_concurrent": 3, "retries": 2},
        lazy=False,
    ),
    "only the holder closes": Mutation(
        OnlyTheHolderCloses,
        "L1",
        odds={"dies": 0.7},
        events=(Event(1.0, "kill", "A"), Event(2.0, "cancel", "O")),
    ),
    "no fence": Mutation(
        NoFence,
        "I3",
        odds={},
        events=(Event(3.0, "pause", "A", 100.0), Event(40.0, "resume", "B")),
        terms={"max_concurrent": 1},
    ),
    "requests not read again": Mutation(
        RequestsNotReread,
        "I3",
        odds={},
        events=(
            Event(0.5, "kill", "A"),
            Event(4.0, "cancel item", "O", 1),
            Event(9.0, "force", "B"),
        ),
        terms={"max_concurrent": 1},
        lazy=False,
    ),
    "unsigned requests accepted": Mutation(
        UnsignedRequestsAccepted,
        "L1",
        odds={},
        events=(Event(0.5, "forge", "X"), Event(1.5, "forge", "X", 1)),
        terms={"max_concurrent": 1},
    ),
    "a stop deletes what was launched after it": Mutation(
        StopDeletesAnyRound,
        "I8",
        odds={"slow": 0.5},
        events=(
            Event(1.0, "cancel", "O"),
            Event(1.0, "cancel", "A"),
            Event(2.0, "retry", "B"),
            Event(4.0, "cancel", "O"),
            Event(5.0, "retry", "B"),
        ),
        terms={"max_concurrent": 3},
    ),
    "cleanup removes requests first": Mutation(
        CleanupRemovesRequestsFirst,
        "I6",
        odds={"late_launch": 0.5},
        events=(Event(0.3, "kill", "A"), Event(1.0, "cleanup", "O")),
        lazy=True,
    ),
    "collected is not checked": Mutation(
        CollectedUnread,
        "I1",
        odds={"errors": 0.0, "slow": 0.5},
        events=(
            Event(10.0, "collect", "A"),
            Event(14.0, "watch", "O"),
            Event(14.5, "cancel", "O"),
        ),
        lazy=False,
    ),
    "inputs are kept when the results are collected": Mutation(
        InputsAreKept,
        "I2",
        odds={"errors": 0.0, "twice": 0.9},
        events=(Event(1.0, "collect", "A"),),
    ),
    "closed outcomes are deleted with the others": Mutation(
        ClosedDeleted,
        "I1",
        odds={"errors": 0.0, "zombie": 0.5},
        events=(Event(1.0, "collect", "A"),),
        terms={"retries": 2},
    ),
    "end apart from slots": Mutation(EndApart, "I7", odds={"late": 0.2}, events=TAKEN, lazy=True),
    "blind inputs": Mutation(BlindInputs, "I7", odds={"late": 0.2}, events=TAKEN, lazy=True),
}
