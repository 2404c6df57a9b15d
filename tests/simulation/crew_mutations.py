"""Small edits of the client, each of which leaves out a rule that must be caught.

A mutation replaces a piece of the source of one function while a course of events is played. So it
fails if that piece changes: then look whether the rule moved, and move the mutation.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kinetic.aio import _lease
from kinetic.aio._engine import batch, coordinator, ending, input_pump, recovery, workers
from kinetic.aio._engine.launcher import Launcher
from kinetic.aio._submissions import item_states
from tests.workers.actors import Odds as CrewOdds

from .scenario import Event, Plan
from .world import Odds


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A function with another piece of source, and plans that show what the rule is for."""

    function: Callable[..., Any]
    old: str
    new: str
    breaks: str
    crew: Mapping[str, Any] = field(default_factory=dict[str, Any])
    odds: Mapping[str, float] = field(default_factory=dict[str, float])
    events: tuple[Event, ...] | None = None
    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Change the function for a while."""
        function: Any = inspect.unwrap(self.function)
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise AssertionError(f"{function.__qualname__} doesn't have once: {self.old}")
        edited: dict[str, Any] = {}
        code = compile(source.replace(self.old, self.new), function.__code__.co_filename, "exec")
        exec(code, function.__globals__, edited)
        original, function.__code__ = function.__code__, edited[function.__name__].__code__
        try:
            yield
        finally:
            function.__code__ = original

    def change(self, plan: Plan) -> Plan:
        """Return the plan of a seed with this mutation's odds, events, and terms."""
        events = plan.events
        if self.events is not None:  # vary the times with the seed
            shift = plan.seed % 17 / 2
            events = tuple(replace(event, at=event.at + shift) for event in self.events)
        calm = {"errors": 0.2, "item_s": 20.0, "capacity": 1000, "stop_s": 1.0}
        crew = CrewOdds(**(calm | dict(self.crew)))
        terms = {name: plan.terms[name] for name in ("max_concurrent", "retries")}
        plain: dict[str, Any] = {"lazy": False, "start_timeout": None, "limit": None}
        return replace(
            plan,
            crew=crew,
            odds=replace(Odds(), **self.odds),
            events=events,
            terms=terms | dict(self.terms),
            **(plain | dict(self.plan)),
        )


WATCH = Event(1.0, "watch", "O")

EDITS: dict[str, Edit] = {
    "no fence": Edit(
        function=_lease.HeldLease._write,
        old="stored is None or stored[0].nonce != lease.nonce",
        new="stored is None",
        breaks="I3",
        crew={"item_s": 100.0},
        events=(Event(3.0, "pause", "A", 100.0), Event(40.0, "resume", "B")),
        plan={"items": 8},
    ),
    "collected is not checked": Edit(
        function=item_states.ItemStates.read_collected,
        old="if self.collected is None and self.identity.leased:",
        new="if False:",
        breaks="I1",
        crew={"errors": 0.0},
        odds={"slow": 0.5},
        events=(
            Event(10.0, "collect", "A"),
            Event(14.0, "watch", "O"),
            Event(14.5, "cancel", "O"),
        ),
    ),
    "the end of the inputs is stored unseen": Edit(
        function=input_pump.InputPump.end,
        old="if not await create_object(self._store, name, body, metadata):",
        new="if not (await create_object(self._store, name, body, metadata) or True):",
        breaks="L2",
        odds={"late": 0.2},
        events=(Event(3.0, "force", "B"), WATCH),
        plan={"lazy": True, "items": 8},
    ),
    "resume before close": Edit(
        function=Launcher._close_dead,
        old="lambda: ending.reconcile_items(submission, state.unfinished())",
        new="lambda: asyncio.sleep(0, submission.unfinished(state.unfinished()))",
        breaks="L1",
        crew={"item_s": 100.0},
        odds={"shaky_watch": 0.9, "slow": 0.3},
        events=(Event(20.0, "supervisor", "P"), Event(22.0, "kill", "A")),
        plan={"items": 4},
    ),
    "no round after the last": Edit(
        function=Launcher._start_workers,
        old="if not await self._open_round(number):\n                return",
        new="return",
        breaks="L1",
        events=(Event(0.5, "pause", "A", 700.0),),
        plan={"lazy": True, "items": 8},
    ),
    "items without input go on": Edit(
        function=Launcher.offer_again,
        old="index >= self._context.inputs.count",
        new="False",
        breaks="L1",
        crew={"item_s": 100.0},
        terms={"window": 1, "max_concurrent": 1},
        events=(Event(10.0, "cancel", "O"), Event(60.0, "retry", "A")),
        plan={"items": 4},
    ),
    "claims without a shown item are dead": Edit(
        function=ending._find_items,
        old="claim.executor in workers",
        new="False",
        breaks="I4",
        crew={"slow": 0.3, "item_s": 20.0},
        odds={"late_answer": 0.5},
        events=(Event(5.0, "kill", "A"), WATCH, Event(60.0, "resume", "B")),
    ),
    "scale counts those that leave": Edit(
        function=workers.Roster.size_for,
        old="self.size + max(0, workers - len(self.active))",
        new="max(self.size, workers)",
        breaks="L1",
        crew={"item_s": 100.0},
        terms={"max_concurrent": 3},
        events=(Event(10.0, "scale", "O", 1), Event(40.0, "scale", "O", 3)),
        plan={"items": 8},
    ),
    "results() deletes the workers of failed items": Edit(
        function=batch.Batch.delete_jobs,
        old="if not keep_logs:",
        new="if True:",
        breaks="I8",
        crew={"errors": 0.6, "item_s": 20.0},
        terms={"retries": 0},
        events=(WATCH, Event(60.0, "retry", "O"), Event(66.0, "collect", "A")),
    ),
    "an outage ends the sealing": Edit(
        function=coordinator.BatchCoordinator._act,
        old="retry_forever(lambda: requests.append(sealing), name)",
        new="requests.append(sealing)",
        breaks="L1",
        odds={"down": 0.2},
        plan={"lazy": True},
    ),
    "refused for a while is refused for good": Edit(
        function=Launcher._start_workers,
        old="exc.passing and self._has_started()",
        new="False",
        breaks="I4",
        crew={"item_s": 100.0},
        events=(Event(5.0, "refuse", "P", 1000.0), Event(8.0, "supervisor", "P")),
    ),
    "a refusal ends first attempts only": Edit(
        function=Launcher._start_workers,
        old="item.attempt if item is not None else 1",
        new="1",
        breaks="L1",
        crew={"errors": 0.5},
        events=(Event(12.0, "refuse for good", "P", 1e6), Event(20.0, "supervisor", "P")),
        plan={"items": 6},
        terms={"retries": 2},
    ),
    "start_timeout counts while workers run": Edit(
        function=Launcher._all_wait,
        old="== {Phase.PENDING}",
        new="!= set()",
        breaks="I4",
        crew={"item_s": 100.0},
        plan={"start_timeout": 60.0, "items": 8},
    ),
    "more workers than wanted": Edit(
        function=Launcher._scale,
        old="roster.size_for(self.allowed)",
        new="roster.size_for(self.allowed + 1)",
        breaks="I5",
        crew={"item_s": 100.0},
    ),
    "nobody goes on": Edit(
        function=recovery.until_abandoned,
        old="elif stuck and is_sealed:",
        new="elif False:",
        breaks="L1",
        crew={"item_s": 100.0},
        events=(Event(10.0, "kill", "A"), Event(15.0, "supervisor", "P"), WATCH),
    ),
}
