"""Workers, platforms, and clients without one rule; the simulation must catch each.

A mutation changes one decision. Some also set odds, events, or terms that provoke the case which
the rule covers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.workers import Duty, Registration, WorkerId
from kinetic._runner.worker import pull
from kinetic._runner.worker.pull import Create, Delete, Fetch, Start

from .actors import Odds
from .scenario import Event, Plan
from .world import Behavior, Slow


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A behavior without one rule, the invariant that it breaks, and plans that show it.

    The seed moves the events by less than ``spread`` seconds.
    """

    breaks: str
    pull: type[pull.Pull] = pull.Pull
    flags: frozenset[str] = frozenset()
    odds: Mapping[str, Any] | None = None
    slow: tuple[Slow, ...] = ()
    events: tuple[Event, ...] | None = None
    spread: int = 17
    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def behavior(self) -> Behavior:
        return Behavior(self.pull, self.flags)

    def change(self, plan: Plan) -> Plan:
        """Return the plan of a seed with this mutation's odds, events, and terms."""
        odds = plan.odds if self.odds is None else replace(Odds(), **self.odds)
        events = plan.events if self.events is None else self.events
        if self.events is not None:  # vary the times with the seed
            shift = plan.seed % self.spread
            events = tuple(replace(event, at=event.at + shift) for event in events)
        workers = self.plan.get("workers", plan.workers)
        terms = replace(plan.terms, **{"workers": workers, "single": False, **self.terms})
        return replace(plan, odds=odds, slow=self.slow, events=events, terms=terms, **self.plan)


# --- taking an item ---


class NoClaim(pull.Pull):
    """Workers look, but claim nothing."""

    def _claim(self, index: int) -> pull.Steps:
        number = self.items.state(index).attempt
        claim = wire.Attempt(self.executor, None, None, str(self.me))
        self.items.merge({index: {number: claim}})
        yield Create(self._claim_name(index, number), b"", self._claim_metadata())
        return True


class CheckBeforeClaim(pull.Pull):
    """Requests are read before the claim, not after."""

    def _claim(self, index: int) -> pull.Steps:
        yield from super()._read_requests()
        return (yield from super()._claim(index))

    def _may_start(self, index: int, number: int) -> bool:
        return not self.terminating

    def _read_requests(self) -> pull.Steps:
        return
        yield


class StopReadOnce(pull.Pull):
    """Requests are read when the worker begins, not for each item."""

    read = False

    def _read_requests(self) -> pull.Steps:
        if not self.read:
            self.read = True
            yield from super()._read_requests()


class RetryBlind(pull.Pull):
    """Workers retry failed items without asking whether a try is left."""

    def _next_item(self) -> int | None:
        found = super()._next_item()
        if found is None:
            for index in range(self.items.stored):
                if self.items.state(index).state is wire.ItemState.FAILED:
                    return index
        return found

    def _may_take(self, index: int) -> bool:
        is_failed = self.items.state(index).state is wire.ItemState.FAILED
        return is_failed or super()._may_take(index)

    def _claim(self, index: int) -> pull.Steps:
        number = self.items.state(index).attempt
        if self.items.state(index).state is not wire.ItemState.FAILED:
            return (yield from super()._claim(index))
        return (yield Create(self._claim_name(index, number + 1), b"", self._claim_metadata()))

    def _run(self, index: int, failure: pull.OpeningFailure | None = None) -> pull.Steps:
        if self.items.state(index).state is not wire.ItemState.FAILED:
            yield from super()._run(index, failure)
        elif (yield from self._claim(index)):
            yield Start(index, self.items.state(index).attempt + 1)
            yield from self._watch(index)


class NoDoneInCheck(pull.Pull):
    """The check after a claim ignores that the round is over."""

    def _may_start(self, index: int, number: int) -> bool:
        item = self.items.state(index)
        return (item.state, item.attempt) == (wire.ItemState.OPEN, number)


class InputBeforeRequests(pull.Pull):
    """The input is read before the requests."""

    def _claim(self, index: int) -> pull.Steps:
        claimed = yield from super()._claim(index)
        self.exists = (yield Fetch(index, self.items.slot_of(index))) if claimed else False
        return claimed

    def _input_exists(self, index: int) -> pull.Steps:
        return self.exists
        yield


# --- closing ---


class RetryBeforeClose(pull.Pull):
    """The next attempt starts before the dead one has an outcome."""

    def _close(self, index: int) -> pull.Steps:
        number = self.items.state(index).attempt + 1
        name = self._claim_name(index, number)
        if (yield Create(name, b"", self._claim_metadata())):
            yield Start(index, number)
            ended = yield from self._watch(index)
            yield from self._commit(index, number, ended.outcome, ended.body)


class LostOverwrites(pull.Pull):
    """Closing replaces an outcome that is there."""

    def _store(self, index: int, number: int, outcome: wire.Outcome, body: bytes) -> pull.Steps:
        if outcome.kind is wire.Kind.LOST:
            yield Delete(wire.attempt_key(self._scope, index, number, "outcome"))
        yield from super()._store(index, number, outcome, body)


class CloseStaleControl(pull.Pull):
    """Closing uses requests that were read before the claim was seen."""

    stale = False

    def _close(self, index: int) -> pull.Steps:
        self.stale = True
        yield from super()._close(index)
        self.stale = False

    def _read_requests(self) -> pull.Steps:
        if not self.stale:
            yield from super()._read_requests()


class _Closes(pull.Pull):
    """A worker that closes claims without evidence."""

    def _is_dead(self, claimant: WorkerId, executor: str) -> bool:
        raise NotImplementedError

    def _duty(self, index: int) -> Duty:
        item = self.items.state(index)
        claim = self.items.attempts(index).get(item.attempt, wire.Attempt())
        claimant = WorkerId.parse(claim.worker)
        is_open = not item.state.final and claim.executor is not None
        if not is_open or claimant is None or claim.executor == self.executor:
            return super()._duty(index)
        if self._is_dead(claimant, claim.executor or ""):
            fake = claimant._replace(restarts=claimant.restarts + 1)
            self.registry.add(Registration(fake, ""))
            return Duty.DEAD
        return super()._duty(index)


class CloseOtherRank(_Closes):
    """A replacement closes the claims of other ranks."""

    def _is_dead(self, claimant: WorkerId, executor: str) -> bool:
        return self.me.restarts > 0 and claimant.rank != self.me.rank


class CloseTwin(_Closes):
    """The second process of a worker works, too, and takes the first for dead."""

    def _is_dead(self, claimant: WorkerId, executor: str) -> bool:
        return claimant.key == self.me.key

    def _register(self, failure: pull.OpeningFailure | None) -> pull.Steps:
        yield from TwinsWork._register(self, failure)  # type: ignore[arg-type]


class Heartbeat(_Closes):
    """A worker closes a claim because nothing is heard of it."""

    def _is_dead(self, claimant: WorkerId, executor: str) -> bool:
        return claimant.rank != self.me.rank


class VerdictWithoutListing(pull.Pull):
    """Under a stop, a worker takes an item for final without a listing after the stop."""

    def _store(self, index: int, number: int, outcome: wire.Outcome, body: bytes) -> pull.Steps:
        yield from super()._store(index, number, outcome, body)
        self.items.conclude([index])

    def _read_requests(self) -> pull.Steps:
        yield from super()._read_requests()
        self.items.conclude(range(self.items.stored))


# --- who is responsible ---


class TwinsWork(pull.Pull):
    """The second process of a worker works, too."""

    def _register(self, failure: pull.OpeningFailure | None) -> pull.Steps:
        name, metadata = Registration(self.me, self.executor).signed(self._key, self._scope)
        yield Create(name, b"", metadata)
        yield from self._read_registry()


class NoRegistration(pull.Pull):
    """A replacement doesn't register: only itself knows that the worker before it is dead."""

    def _register(self, failure: pull.OpeningFailure | None) -> pull.Steps:
        self.registry.add(Registration(self.me, self.executor))
        return
        yield


class OwnerSuperseded(pull.Pull):
    """An outcome written by a worker that was replaced makes its rank responsible."""

    def _duty(self, index: int) -> Duty:
        found = super()._duty(index)
        item = self.items.state(index)
        before = self.items.attempts(index).get(item.attempt - 1, wire.Attempt()).outcome
        writer = WorkerId.parse(before.writer) if before is not None else None
        if found is Duty.FREE and writer is not None and writer.place[:2] == self.me.place[:2]:
            return Duty.MINE if writer.rank == self.me.rank else Duty.OTHERS
        return found


class LeaveAllClaimed(pull.Pull):
    """A worker leaves when all items are claimed, by whomever."""

    def _duty(self, index: int) -> Duty:
        found = super()._duty(index)
        item = self.items.state(index)
        claim = self.items.attempts(index).get(item.attempt, wire.Attempt())
        return Duty.OTHERS if claim.executor is not None and not item.state.final else found


class LeaveOpenRetry(pull.Pull):
    """A worker leaves although a retry waits that it is responsible for."""

    def _is_surplus(self, duties: Mapping[int, Duty]) -> bool:
        return all(self.items.state(index).attempt > 1 for index in duties)

    def _may_take(self, index: int) -> bool:
        return super()._may_take(index) and self.items.state(index).attempt == 1


class LeaveBeforeEnd(pull.Pull):
    """A worker leaves before the end of the inputs is stored."""

    def _is_surplus(self, duties: Mapping[int, Duty]) -> bool:
        return all(it is Duty.OTHERS for it in duties.values())

    def _finish(self) -> pull.Steps:
        if self.items.total is None:
            raise pull.Leave(pull.EXIT_SURPLUS)
        yield from super()._finish()


class OwnerOtherRound(pull.Pull):
    """A rank of another round counts as responsible."""

    def _duty(self, index: int) -> Duty:
        found = super()._duty(index)
        item = self.items.state(index)
        before = self.items.attempts(index).get(item.attempt - 1, wire.Attempt()).outcome
        writer = WorkerId.parse(before.writer) if before is not None else None
        if found is Duty.FREE and writer is not None and writer.round != self.me.round:
            return Duty.OTHERS
        return found


class StayUntilFinal(pull.Pull):
    """All workers wait for the last item."""

    def _is_surplus(self, duties: Mapping[int, Duty]) -> bool:
        return False


# --- leaving ---


class SurplusExitsZero(pull.Pull):
    """A worker without work exits with 0, which ends the others."""

    def steps(self) -> Any:
        code = yield from super().steps()
        return 0 if code == pull.EXIT_SURPLUS else code


class ClosedExitsZero(pull.Pull):
    """A worker exits with 0 although another may run: the round ended without its producer."""

    def _leave_if_over(self) -> None:
        if self.requests.done and self.requests.round == self.me.round:
            raise pull.Leave(pull.EXIT_DONE)
        super()._leave_if_over()


class NoDone(pull.Pull):
    """A worker leaves when all is final, and doesn't say so in the requests."""

    def _finish(self) -> pull.Steps:
        if self.items.total is not None:
            raise pull.Leave(pull.EXIT_DONE)
        yield from super()._finish()


class DoneAnywhere(pull.Pull):
    """``done`` goes to any slot, not to the one after those that were read."""

    def _append(self, request: wire.Request) -> pull.Steps:
        if request.kind != "done":
            yield from super()._append(request)
            return
        number = self.requests.count
        while True:
            name = wire.control_key(self._scope, number)
            content, metadata = request.signed(self._key, self._scope, name)
            if (yield Create(name, content, metadata)):
                return
            number += 1


class ShrinkBlind(pull.Pull):
    """A worker that shall leave goes without looking for another."""

    def _shall_leave(self) -> bool:
        return self.me.rank in self.requests.leaving


class LeaveUnregistered(pull.Pull):
    """Ranks count that the platform has never placed."""

    def _shall_leave(self) -> bool:
        everybody = {*range(self.terms.workers)}
        return self.me.rank in self.requests.leaving and bool(everybody - self.requests.leaving)


CALM = {"errors": 0.0}
_LONG = {"item_s": 200.0}

MUTATIONS: dict[str, Mutation] = {
    "no claim": Mutation(breaks="I2", pull=NoClaim, plan={"workers": 3}),
    "check before claim": Mutation(
        breaks="I3", pull=CheckBeforeClaim, events=(Event(2, "stop"),), plan={"observed": True}
    ),
    "stop read once": Mutation(
        breaks="I3", pull=StopReadOnce, events=(Event(4, "stop"),), plan={"observed": True}
    ),
    "retry before close": Mutation(
        breaks="I2",
        pull=RetryBeforeClose,
        odds={"zombie": 0.5, "dies": 0.3, "item_s": 100.0},
        plan={"workers": 2},
    ),
    "retry blind": Mutation(breaks="I9", pull=RetryBlind, odds={"errors": 0.5}),
    "lost overwrites": Mutation(
        breaks="I1",
        pull=LostOverwrites,
        odds={"zombie": 0.5, "slow": 0.1, "item_s": 60.0},
        plan={"workers": 2},
    ),
    "close stale control": Mutation(
        breaks="I1",
        pull=CloseStaleControl,
        odds={"dies": 0.8, "item_s": 5.0},
        slow=(Slow("pod", "create attempts", 60.0), Slow("pod", "list attempts", 40.0)),
        events=(Event(1, "leave", 1), Event(15, "stop items")),
        spread=60,
        plan={"observed": False, "lazy": False, "workers": 2, "items": 3},
    ),
    "close other rank": Mutation(
        breaks="I4", pull=CloseOtherRank, odds={"dies": 0.5, "item_s": 200.0}, plan={"workers": 3}
    ),
    "close twin": Mutation(
        breaks="I4", pull=CloseTwin, odds={"twin": 0.7, **_LONG}, plan={"workers": 2}
    ),
    "heartbeat": Mutation(breaks="I4", pull=Heartbeat, odds=_LONG, plan={"workers": 2}),
    "verdict without listing": Mutation(
        breaks="I4",
        pull=VerdictWithoutListing,
        odds={"errors": 0.3, "item_s": 200.0},
        terms={"fail_fast": True, "cancel_running": False, "budgets": RetryBudgets(user=0)},
        plan={"workers": 3, "items": 7, "lazy": False},
    ),
    "twins work": Mutation(
        breaks="I5",
        pull=TwinsWork,
        odds={"twin": 0.5, "item_s": 60.0},
        plan={"workers": 2, "observed": False},
        events=(),
    ),
    "no registration": Mutation(
        breaks="L1",
        pull=NoRegistration,
        odds={"frozen": 0.5, "errors": 1.0, "item_s": 200.0},
        terms={"backoff_s": 25.0, "budgets": RetryBudgets(user=4)},
        plan={"workers": 2, "observed": False, "items": 1, "lazy": False},
        events=(),
    ),
    "stay until final": Mutation(
        breaks="L1",
        pull=StayUntilFinal,
        odds={"capacity": 1, "dies": 0.7, "item_s": 100.0},
        plan={"workers": 2, "observed": False, "lazy": False},
        events=(),
    ),
    "owner superseded": Mutation(
        breaks="L1",
        pull=OwnerSuperseded,
        odds={"frozen": 0.5, "errors": 1.0, "item_s": 1.0},
        terms={"backoff_s": 60.0, "budgets": RetryBudgets(user=4)},
        plan={"workers": 2, "observed": False, "items": 1, "lazy": False},
        events=(),
    ),
    "leave all claimed": Mutation(
        breaks="L1",
        pull=LeaveAllClaimed,
        odds={"dies": 0.6, "item_s": 100.0},
        plan={"workers": 2, "observed": False},
        events=(),
    ),
    "leave open retry": Mutation(
        breaks="L1",
        pull=LeaveOpenRetry,
        odds={"errors": 0.6},
        plan={"observed": False},
        events=(),
    ),
    "leave before end": Mutation(
        breaks="L1",
        pull=LeaveBeforeEnd,
        odds=CALM,
        plan={"observed": False, "lazy": True, "pause_s": 30.0},
        events=(),
    ),
    "closed exits zero": Mutation(
        breaks="I4",
        pull=ClosedExitsZero,
        odds={"item_s": 200.0},
        slow=(Slow("pod", "create control", 60.0),),
        plan={"lazy": True, "pause_s": 60.0, "items": 5, "workers": 2, "observed": False},
        events=(Event(5, "freeze producer", 640.0),),
    ),
    "owner other round": Mutation(
        breaks="L1",
        pull=OwnerOtherRound,
        odds={"errors": 0.8, "item_s": 20.0},
        terms={"backoff_s": 60.0},
        events=(Event(20, "jobgone"),),
        plan={"observed": False, "once": True, "lazy": False},
    ),
    "surplus exits zero": Mutation(
        breaks="I4", pull=SurplusExitsZero, odds=_LONG, plan={"workers": 2}
    ),
    "no done": Mutation(
        breaks="L1",
        pull=NoDone,
        odds={"errors": 0.8, "item_s": 5.0},
        terms={"budgets": RetryBudgets(user=0)},
        slow=(Slow("pod", "list attempts", 30.0, 0.5),),
        plan={"observed": False, "lazy": False},
        events=(Event(5, "retry"), Event(25, "retry"), Event(45, "retry")),
    ),
    "done anywhere": Mutation(
        breaks="L1",
        pull=DoneAnywhere,
        odds={"errors": 0.6, "slow": 0.1, "item_s": 1.0},
        plan={"observed": False},
        events=(Event(2, "retry"), Event(5, "retry"), Event(8, "retry")),
    ),
    "stop deletes all": Mutation(
        breaks="I8",
        flags=frozenset({"stop_deletes_all"}),
        odds={"item_s": 1.0, "errors": 0.6},
        terms={"budgets": RetryBudgets(user=0)},
        slow=(Slow("stopper", "call deletes", 200.0),),
        events=(Event(3, "stop"), Event(60, "retry"), Event(100, "retry")),
        plan={"items": 7, "workers": 2, "lazy": False},
    ),
    "retry in place": Mutation(
        breaks="L1",
        flags=frozenset({"retry_in_place"}),
        odds={"errors": 0.6, "item_s": 1.0},
        terms={"budgets": RetryBudgets(user=0)},
        plan={"observed": False, "lazy": False},
        events=(Event(60, "retry"),),
    ),
    "open while live": Mutation(
        breaks="I5",
        flags=frozenset({"open_while_live"}),
        odds={"stop_s": 60.0, "item_s": 200.0},
        events=(Event(20, "jobgone"),),
        plan={"observed": True, "items": 7, "workers": 2},
    ),
    "resume before close": Mutation(
        breaks="L1",
        flags=frozenset({"resume_before_close"}),
        odds={"stop_s": 100.0, "item_s": 200.0},
        events=(Event(20, "jobgone"),),
        plan={"observed": False, "once": True, "lazy": False},
    ),
    "no input check": Mutation(
        breaks="I6",
        flags=frozenset({"no_input_check"}),
        odds={"frozen": 0.5, "frozen_s": 100.0, "item_s": 1.0, "errors": 0.0},
        slow=(Slow("pod", "create control", 100.0), Slow("pod", "list", 10.0)),
        events=tuple(Event(10 * number, "collect") for number in range(1, 6)),
        plan={"lazy": False, "workers": 3, "items": 4},
    ),
    "input before requests": Mutation(
        breaks="I6",
        pull=InputBeforeRequests,
        odds={"zombie": 0.8, "item_s": 1.0},
        slow=(Slow("pod", "read control", 90.0, 0.5),),
        events=(Event(10, "cleanup"),),
        plan={"observed": True, "lazy": False, "workers": 3, "items": 7},
    ),
    "cleanup control first": Mutation(
        breaks="I3",
        flags=frozenset({"cleanup_control_first"}),
        odds={"zombie": 0.8, "item_s": 1.0},
        slow=(Slow("pod", "create attempts", 90.0, 0.5), Slow("remover", "delete inputs", 30.0)),
        events=(Event(10, "cleanup"),),
        plan={"observed": True, "lazy": False, "workers": 3, "items": 7},
    ),
    "shrink by patch": Mutation(
        breaks="L1",
        flags=frozenset({"shrink_by_patch"}),
        odds=_LONG,
        plan={"observed": False, "workers": 2},
        events=(Event(10, "leave", 1),),
    ),
    "shrink blind": Mutation(
        breaks="L1",
        pull=ShrinkBlind,
        odds=_LONG,
        plan={"observed": False, "workers": 2, "items": 7},
        events=(Event(5, "leave", 0), Event(6, "leave", 1)),
    ),
    "leave unregistered": Mutation(
        breaks="L1",
        pull=LeaveUnregistered,
        odds={"unplaced": 1, "item_s": 60.0},
        plan={"observed": False, "workers": 2, "items": 7},
        events=(Event(5, "leave", 0),),
    ),
}
