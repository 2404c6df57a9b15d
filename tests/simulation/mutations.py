"""The engine with one rule left out: what the simulation must catch.

Each is a world that lies to the engine in one place, or a runner with one step
changed, so that the engine does what it would do without the rule. Some are
given odds that bring about the case the rule is for.
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
from .world import Bend, ClusterOf, ObjectsOf, Odds, StoreOf, now

Of = StoreOf | ObjectsOf


@dataclass(frozen=True)
class Mutation:
    """What is left out, what is broken by it, and the odds that show it."""

    bend: type[Bend]
    breaks: str
    odds: Mapping[str, float] | None = None
    events: tuple[Event, ...] | None = None
    terms: Mapping[str, Any] | None = None
    lazy: bool | None = None

    def change(self, plan: Plan) -> Plan:
        """The plan of a seed, with this mutation's odds."""
        odds = plan.odds if self.odds is None else replace(Odds(errors=0.2), **self.odds)
        events = plan.events if self.events is None else self.events
        if self.events is not None:  # at the seed's own times
            spread = plan.seed % 17 / 4
            events = tuple(replace(one, at=one.at + spread) for one in events)
        lazy = plan.lazy if self.lazy is None else self.lazy
        terms = plan.terms | dict(self.terms or {})
        return replace(plan, odds=odds, events=events, lazy=lazy, terms=terms)


# --- the runner ---


class NoClaim(Bend):
    """Runners look, but claim nothing."""

    class Opening(Opening):
        def claim(self) -> bool:
            return True


class CheckBeforeClaim(Bend):
    """The runner looks at requests and outcomes before its claim, not after."""

    class Opening(Opening):
        looked: bool | None = None

        def may_run(self) -> bool:
            if self.looked is None:
                self.looked = super().may_run()
            return self.looked

    class Attempt(attempt.Attempt):
        def steps(self) -> Generator[str, None, int]:
            yield "check"
            self._opening.may_run()
            for _ in range(60):
                yield "dawdle"
            return (yield from super().steps())


class RetryBeforeClose(Bend):
    """The next attempt starts on the platform's word, and its runner does not look either."""

    class Opening(Opening):
        def may_run(self) -> bool:
            super().may_run()
            return True

    def observed(self, of: ClusterOf, seen: Observation) -> Observation:
        holder = self.world.holders[of.party]()
        if holder is not None and seen.phase is Phase.ENDED and seen.exit_code != 0:
            index = int(seen.labels["kinetic.dev/index"])
            number = int(seen.labels["kinetic.dev/attempt"])
            if number == 1:
                holder.post(scheduler.ItemRead(index, wire.Item(wire.ItemState.OPEN, number + 1)))
        return seen


# --- outcomes ---


class OutcomePerItem(Bend):
    """One outcome object an item instead of one an attempt."""

    def create(self, of: Of, name: str, body: bytes, metadata: Mapping[str, str] | None) -> bool:
        if name.endswith(".outcome"):
            item = name[: -len("0001.outcome")]
            if any(one.name.endswith(".outcome") for one in now(of.world.store.list(item))):
                return False
        return super().create(of, name, body, metadata)


class LostOverwrites(Bend):
    """Closing an attempt does not mind that there is an outcome."""

    def create(self, of: Of, name: str, body: bytes, metadata: Mapping[str, str] | None) -> bool:
        if super().create(of, name, body, metadata):
            return True
        if name.endswith(".outcome") and isinstance(of, StoreOf):
            of.world.oracle.replaced(of.party, name, body)
        return False


class LostWithoutEvidence(Bend):
    """The end of any pod of a job is taken for that of the claimant."""

    def observed(self, of: ClusterOf, seen: Observation) -> Observation:
        which = int(seen.labels[LABEL_INDEX]), int(seen.labels[LABEL_ATTEMPT])
        return replace(seen, executor=of.world.oracle.batch.claims.get(which, ""))


class LostStaleControl(Bend):
    """An attempt is closed on a view of the requests that is older than its claim."""

    def get(self, of: Of, name: str) -> Object:
        found = super().get(of, name)
        if "/control/" in name and isinstance(of, StoreOf) and self.is_young(of, name):
            raise NotFound(name)
        return found

    def is_young(self, of: Of, name: str) -> bool:
        appended = of.world.appended.get(name, 0.0)
        return of.world.loop.now - appended < 6.0


class NumberNotBound(Bend):
    """What the platform answers to an observer counts for the attempt that is open by then."""

    def asked(self, of: ClusterOf, names: tuple[str, ...]) -> None:
        batch = self.world.batches[of.party]()
        if names and batch is not None and not batch.submits:
            settling = self._settle(of, batch.submission, names)
            self.world.loop.spawn(of.party, settling, "settles what it asked about")

    async def _settle(self, of: ClusterOf, submission: Any, names: tuple[str, ...]) -> None:
        with contextlib.suppress(KineticError):
            for seen in await of.gate.send("find", lambda: self.world.cluster.find(names, None)):
                index = int(seen.labels["kinetic.dev/index"])
                number = submission.item(index).attempt
                if seen.phase is Phase.ENDED:
                    name = submission.identity.attempt_name(index, number)
                    evidence = Evidence(index, number, replace(seen, name=name))
                    await ending.settle(submission, evidence)


class OnlyTheHolderCloses(Bend):
    """Under a stop, too, nobody but the holder closes a dead attempt."""

    def create(self, of: Of, name: str, body: bytes, metadata: Mapping[str, str] | None) -> bool:
        lease = of.world.oracle.batch
        holds = lease.held and lease.holder == of.party
        if isinstance(of, StoreOf) and "/attempts/" in name and not holds:
            return False
        return super().create(of, name, body, metadata)


# --- lease and requests ---


class NoFence(Bend):
    """A submitter that lost its lease does not find out."""

    def replace(self, of: StoreOf, name: str, body: bytes, generation: int) -> int:
        try:
            return super().replace(of, name, body, generation)
        except (Conflict, NotFound):
            return generation + 1


class RequestsNotReread(Bend):
    """A new holder does not see the requests that were there before it."""

    def get(self, of: Of, name: str) -> Object:
        hidden = of.world.oracle.floor.get("B", 1000)
        if "/control/" in name and of.party == "B" and int(name.rpartition("/")[2]) < hidden:
            raise NotFound(name)
        return super().get(of, name)


class UnsignedRequestsHeeded(Bend):
    """Whoever wrote a request, it is taken as if who may ask had signed it."""

    def get(self, of: Of, name: str) -> Object:
        found = super().get(of, name)
        return replace(found, metadata=self._signed(of, name)) if "/control/" in name else found

    def list(self, of: Of, prefix: str) -> list[ObjectInfo]:
        return [
            replace(one, metadata=self._signed(of, one.name)) if "/control/" in one.name else one
            for one in super().list(of, prefix)
        ]

    def _signed(self, of: Of, name: str) -> Mapping[str, str]:
        scope = of.world.oracle.scope
        body = now(of.world.store.get(name)).body
        return {"mac": signing.sign(signing.submission_key(ROOT, scope), scope, name, body)}


class StopDeletesAnyRound(Bend):
    """What a stop deletes is whatever the batch has when that arrives."""

    def selected(self, labels: Mapping[str, str] | None) -> Mapping[str, str] | None:
        return labels and {key: one for key, one in labels.items() if key != LABEL_ROUND}


# --- inputs and cleaning ---


class CleanupRemovesRequestsFirst(Bend):
    """Cleaning up deletes the requests before the inputs."""

    def delete(self, of: Of, names: list[str]) -> None:
        if isinstance(of, StoreOf) and any("/inputs/" in name for name in names):
            control = [one.name for one in now(of.world.store.list(of.world.oracle.scope))]
            super().delete(of, [name for name in control if "/control/" in name])
            of.world.after(60.0, super().delete, of, names)
            return
        super().delete(of, names)


class CollectedUnread(Bend):
    """A listing is believed without a look whether somebody has collected the results."""

    def list(self, of: Of, prefix: str) -> list[ObjectInfo]:
        return [one for one in super().list(of, prefix) if not one.name.endswith("/collected")]


class InputsAreKept(Bend):
    """Who collects the results removes the attempts before the inputs; every second pod is late."""

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

    def delete(self, of: Of, names: list[str]) -> None:
        super().delete(of, [name for name in names if "/inputs/" not in name])


class ClosedGoToo(Bend):
    """Who collects the results removes the outcomes of attempts whose process may live as well."""

    def delete(self, of: Of, names: list[str]) -> None:
        super().delete(of, names)
        if isinstance(of, StoreOf) and of.world.oracle.collected:
            left = now(of.world.store.list(f"{of.world.oracle.scope}attempts/"))
            super().delete(of, [one.name for one in left])


class EndApart(Bend):
    """The end of the inputs is an object beside the slots."""

    def create(self, of: Of, name: str, body: bytes, metadata: Mapping[str, str] | None) -> bool:
        if "/inputs/" in name and "first" not in (metadata or {}):
            return super().create(of, f"{name}.end", body, metadata)
        return super().create(of, name, body, metadata)

    def list(self, of: Of, prefix: str) -> list[ObjectInfo]:
        found = super().list(of, prefix)
        return [replace(one, name=one.name.removesuffix(".end")) for one in found]

    def get(self, of: Of, name: str) -> Object:
        try:
            return super().get(of, name)
        except NotFound:
            return super().get(of, f"{name}.end")


class BlindInputs(Bend):
    """Inputs are written whether or not their slot is taken."""

    def create(self, of: Of, name: str, body: bytes, metadata: Mapping[str, str] | None) -> bool:
        if "/inputs/" in name:
            now(of.world.store.delete([name]))
        return super().create(of, name, body, metadata)


TAKEN = (Event(6.0, "outage", "A", 70.0), Event(6.0, "resume", "B"), Event(1.0, "watch", "O"))
"""The holder is cut off, what it has sent is on its way, and another takes the batch."""

STOPPED = (Event(1.0, "cancel", "O"), Event(3.0, "watch", "B"))

MOURNED = (Event(2.0, "kill", "A"), Event(3.0, "watch", "B"), Event(48.45, "force", "B"))
"""An observer hears that the submitter is gone, looks around, and is told to go on meanwhile."""

MUTATIONS: dict[str, Mutation] = {
    "no claim": Mutation(NoClaim, "I2", odds={"twice": 0.9}),
    "check before claim": Mutation(
        CheckBeforeClaim,
        "I1",
        odds={"errors": 0.5, "late": 0.3},  # what was not begun is taken off the platform late
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
    "number not bound to the question": Mutation(
        NumberNotBound,
        "I4",
        odds={"dies": 0.9, "late_answer": 0.6},
        events=MOURNED,
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
    "unsigned requests heeded": Mutation(
        UnsignedRequestsHeeded,
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
    "collected is not looked for": Mutation(
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
    "closed outcomes go with the others": Mutation(
        ClosedGoToo,
        "I1",
        odds={"errors": 0.0, "zombie": 0.5},
        events=(Event(1.0, "collect", "A"),),
        terms={"retries": 2},
    ),
    "end apart from slots": Mutation(EndApart, "I7", odds={"late": 0.2}, events=TAKEN, lazy=True),
    "blind inputs": Mutation(BlindInputs, "I7", odds={"late": 0.2}, events=TAKEN, lazy=True),
}
