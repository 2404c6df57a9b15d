"""Turn a seed into one course of events: a batch, faults, and the requests of several parties."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import kinetic
from kinetic import aio
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic.aio._net.retry import is_temporary
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Phase
from kinetic.errors import (
    BackendError,
    Conflict,
    JobCancelled,
    KineticError,
    NotFound,
    SubmitterLost,
)
from kinetic.job_status import JobStatus
from tests.engine.notifications import Fault, Unreliable
from tests.workers.actors import Odds as CrewOdds

from .crews import Crews, replay
from .oracle import FINAL, Oracle, Violation
from .virtual import Frozen, Runaway, VirtualLoop, virtual_clocks
from .world import Gate, Odds, PartyCluster, PartyImages, PartyStore, World, result_of

CALM_AFTER = 240.0
"""Seconds after which no more faults happen."""

PATIENCE = 4 * 3600.0
"""Seconds after which everything that can end must have ended."""

USD_PER_HOUR = 2.0
"""Price of an attempt in the tests' price file."""

STATES = {
    JobStatus.SUCCEEDED: "succeeded",
    JobStatus.FAILED: "failed",
    JobStatus.NOT_FOUND: "cancelled",
}


@dataclass(frozen=True)
class Event:
    """A fault of a party, or a request that it makes, at a time.

    The amount is a duration in seconds or the index of an item, depending on the kind.
    """

    at: float
    kind: str
    party: str
    amount: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Everything that the seed decides before the first step."""

    seed: int
    items: int
    lazy: bool
    terms: dict[str, Any]
    odds: Odds
    """The faults of the parties' connections."""
    crew: CrewOdds
    """The faults of the workers."""
    events: tuple[Event, ...]
    start_timeout: float | None = None
    limit: int | None = None
    """``max_concurrent`` of each client."""
    clustered: bool = False
    """Whether the platform is a cluster: it shows no items, and a stop deletes workers."""


@dataclass
class Report:
    """What happened in a course of events."""

    plan: Plan
    violation: BaseException | None
    trace: list[tuple[float, str, str]]
    faults: Counter[str]
    seen: Counter[str]
    turns: int
    seconds: float
    items: dict[int, tuple[str, int]] = field(default_factory=dict)

    def text(self) -> str:
        lines = [f"seed {self.plan.seed}: {self.plan}"]
        lines += [f"{at - 1000:9.3f}  {actor:14} {event}" for at, actor, event in self.trace]
        lines.append(f"{self.violation!r}")
        return "\n".join(lines)


FAULTS: dict[str, float] = {
    "slow": 0.03,
    "late": 0.01,
    "late_answer": 0.05,
    "down": 0.05,
    "lost": 0.05,
    "gave_up": 0.02,
    "shaky_watch": 0.3,
}
"""The probability of each fault of a connection."""

CREW_FAULTS: dict[str, float] = {
    "slow": 0.03,
    "failing": 0.01,
    "dies": 0.3,
    "evicted": 0.2,
    "zombie": 0.25,
    "twin": 0.2,
    "late": 0.2,
    "unopened": 0.1,
    "frozen": 0.2,
}

SCALING = {"scale": 0.3, "supervisor": 0.15, "refuse": 0.15, "refuse for good": 0.05}
"""The requests and faults about the number of workers, and the probability of one more."""


def plan_of(seed: int) -> Plan:
    """Draw the plan of a seed."""
    rng = random.Random(seed)
    items, lazy = rng.randint(2, 8), rng.random() < 0.3
    crew = _crew(rng)
    terms: dict[str, Any] = {
        "max_concurrent": rng.randint(1, 3),
        "retries": rng.randint(0, 2),
        "fail_fast": rng.random() < 0.15,
    }
    terms["cancel_running_on_fail"] = rng.random() < 0.5 and terms["fail_fast"]
    if rng.random() < 0.2:
        terms["window"] = rng.randint(1, items)
    if rng.random() < 0.1:
        terms["batch_timeout"] = rng.choice([20.0, 100.0])
    return Plan(
        seed=seed,
        items=items,
        lazy=lazy,
        terms=terms,
        odds=Odds(**_some(rng, FAULTS)),
        crew=crew,
        events=tuple(sorted(_events(rng, items, lazy=lazy), key=lambda event: event.at)),
        start_timeout=60.0 if crew.capacity == 0 or rng.random() < 0.1 else None,
        limit=rng.choice([None, None, None, 1, 2]),
    )


def _some(rng: random.Random, faults: dict[str, float]) -> dict[str, float]:
    """Draw some of the faults, often none or one, and sometimes all."""
    chosen = rng.sample([*faults], rng.choice([0, 1, 1, 2, 3, len(faults)]))
    return {name: faults[name] for name in chosen}


def _crew(rng: random.Random) -> CrewOdds:
    return CrewOdds(
        errors=rng.choice([0.0, 0.2, 0.5]),
        item_s=rng.choice([1.0, 20.0, 100.0]),
        slow_s=20.0,
        frozen_s=100.0,
        capacity=rng.choice([0, 1, 1000, 1000, 1000, 1000]),
        stop_s=rng.choice([1.0, 1.0, 25.0]),
        **_some(rng, CREW_FAULTS),
    )


def _events(rng: random.Random, items: int, *, lazy: bool) -> list[Event]:
    events = [Event(rng.random() * 20, "watch", "O")]
    fate = rng.choice(["none", "none", "pause", "kill", "outage", "pause"])
    at = rng.random() * 40
    if fate == "pause":
        duration = rng.choice([3.0, 20.0, 60.0, 150.0])
        events.append(Event(at, rng.choice(["pause", "sleep"]), "A", duration))
    elif fate == "kill":
        events.append(Event(at, "kill", "A"))
    elif fate == "outage":
        events.append(Event(at, "outage", "A", rng.choice([10.0, 60.0, 120.0])))
    if fate == "kill" or rng.random() < 0.3:
        kind = "force" if rng.random() < 0.2 else "resume"
        events.append(Event(at + rng.random() * 60, kind, "B"))
        if rng.random() < 0.3:
            events.append(Event(at + rng.random() * 90, rng.choice(["pause", "outage"]), "B", 60.0))
    if rng.random() < 0.3:
        party = rng.choice(["A", "O"])
        kind = rng.choice(["cancel", "cancel", "cancel item"])
        events.append(Event(rng.random() * 40, kind, party, rng.randrange(items)))
    if rng.random() < 0.3:
        events.append(Event(rng.random() * 90, "retry", rng.choice(["A", "O", "O"])))
    if rng.random() < 0.12:
        events.append(Event(rng.random() * 60, "cleanup", "O"))
    if rng.random() < 0.2:
        events.append(Event(rng.random() * 60, "wall", rng.choice("ABO"), rng.uniform(-9e4, 9e4)))
    for kind, odds in SCALING.items():
        while rng.random() < odds:
            party = rng.choice("ABO") if kind == "scale" else "P"
            amount = rng.choice([5.0, 60.0]) if kind.startswith("refuse") else rng.randint(1, 4)
            events.append(Event(rng.random() * 120, kind, party, amount))
    if lazy and rng.random() < 0.8:  # so long that workers take the producer for dead
        events.append(Event(rng.random() * 1.5, "pause", "A", 700.0))
    return events


CROWD = (
    *("cancel", "cancel item", "retry", "retry", "resume", "force"),
    *("pause", "outage", "cancel item"),
)
"""The requests and faults that `crowded` adds; repeated kinds are more likely."""


def strained(plan: Plan) -> Plan:
    """Add what is rare otherwise: frozen and evicted workers, fewer workers, and other rounds."""
    rng = random.Random(plan.seed * 17 + 5)
    crew = replace(plan.crew, frozen=0.2, evicted=0.2, capacity=1000, item_s=20.0)
    if rng.random() < 0.5:  # workers are asked to leave while items run
        terms = {**plan.terms, "max_concurrent": 3}
        events = [Event(5.0 + rng.random() * 20, "scale", "A", 1)]
        return replace(plan, items=8, lazy=False, crew=crew, terms=terms, events=tuple(events))
    # They take the producer for dead, and it opens a round when it wakes up.
    pause = Event(rng.random() * 60, "pause", "A", 700.0)
    return replace(plan, items=8, lazy=True, crew=crew, events=(pause,))


def crowded(plan: Plan) -> Plan:
    """Add requests and faults of several parties at any time."""
    rng = random.Random(plan.seed * 31 + 7)
    more: list[Event] = []
    for _ in range(rng.randint(2, 6)):
        kind = rng.choice(CROWD)
        party = rng.choice("BO" if kind in ("resume", "force") else "ABO")
        lasts = kind in ("pause", "outage")
        amount = rng.choice([5.0, 40.0, 70.0]) if lasts else rng.randrange(plan.items)
        more.append(Event(rng.random() * 120, kind, party, amount))
    return replace(plan, events=tuple(sorted((*plan.events, *more), key=lambda event: event.at)))


def collecting(plan: Plan) -> Plan:
    """Let most items succeed and several parties collect; add other requests and a fault."""
    rng = random.Random(plan.seed * 31 + 17)
    more = [Event(rng.random() * 120, "collect", rng.choice("ABO")) for _ in range(3)]
    if rng.random() < 0.5:
        kind = rng.choice(["kill", "pause"])
        more.append(Event(rng.random() * 120, kind, rng.choice("ABO"), 60.0))
    for _ in range(rng.randint(0, 3)):
        kind = rng.choice(("retry", "resume", "force", "cancel item", "cancel", "cleanup"))
        at, item = 20 + rng.random() * 120, rng.randrange(plan.items)
        more.append(Event(at, kind, rng.choice("BO"), item))
    events = sorted((*plan.events, *more), key=lambda event: event.at)
    crew = replace(plan.crew, errors=rng.choice([0.0, 0.0, 0.1]))
    return replace(plan, crew=crew, events=tuple(events))


def forged(plan: Plan) -> Plan:
    """Add requests that a forger without the key writes at any time."""
    rng = random.Random(plan.seed * 31 + 11)
    more = [Event(rng.random() * 60, "forge", "X", rng.randrange(4)) for _ in range(4)]
    return replace(plan, events=tuple(sorted((*plan.events, *more), key=lambda event: event.at)))


def clustered(plan: Plan) -> Plan:
    """Let the platform be a cluster, where a user deletes Jobs instead of a supervisor's death."""
    return replace(plan, clustered=True)


def budgeted(plan: Plan) -> Plan:
    """Add a budget for some attempts; every attempt that ends counts as one hour."""
    rng = random.Random(plan.seed * 31 + 13)
    hours = rng.randint(1, plan.items)
    return replace(plan, terms={**plan.terms, "budget": hours * USD_PER_HOUR})


def _call(start_timeout: float | None) -> Callable[..., Any]:
    """Return a function without a source file, so that kinetic packs no project."""
    code = compile("def job(x):\n    return x\n", "<simulation>", "exec")
    namespace: dict[str, Any] = {"__name__": "simulated"}
    exec(code, namespace)
    call: Callable[..., Any] = namespace["job"]
    return call if start_timeout is None else kinetic.run(start_timeout=start_timeout)(call)


class Inputs:
    """Inputs of known length; asynchronous, because the engine reads others in a thread."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self._count = count
        self._rng = rng

    def __len__(self) -> int:
        return self._count

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(self._count):
            await asyncio.sleep(self._rng.choice([0.0, 0.01, 3.0]))
            yield 100 + index


class Process:
    """The process of one party: its gate, its client, and its handle of the batch."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        self.scenario = scenario
        self.name = name
        self.gate = Gate(scenario.world, name)
        cluster: Any = PartyCluster(self.gate)
        platform = Platform(
            store=PartyStore(self.gate),
            images=PartyImages(),
            cluster=cluster if scenario.fault is None else Unreliable(cluster, scenario.fault),
            id_marker="local-",
        )
        limit = scenario.plan.limit
        self.client = aio.Client(backend="local", platform=platform, max_concurrent=limit)
        self.handle: Any = None
        self.receiving: asyncio.Task[None] | None = None
        self.trouble: BaseException | None = None
        self.submitting = False

    def start(self, work: Callable[[], Awaitable[Any]], label: str) -> asyncio.Task[Any]:
        """Start a task in this process."""
        return self.scenario.loop.spawn(self.name, self._run(work, label), label)

    async def _run(self, work: Callable[[], Awaitable[Any]], label: str) -> Any:
        world = self.scenario.world
        world.note(self.name, label)
        try:
            result = await work()
        except asyncio.CancelledError:
            raise
        except KineticError as exc:
            world.note(self.name, f"{label}: {type(exc).__name__}: {exc}")
            return exc
        except Exception as exc:
            world.fail(exc)
            raise
        world.note(self.name, f"{label}: done {result if result is not None else ''}")
        return result

    async def attached(self) -> Any:
        """Return the handle, attaching to the batch if necessary; retry while the store fails."""
        while self.handle is None:
            try:
                handle = await self.client.attach_batch(self.scenario.group_id)
                self.handle = self.handle or handle
            except BackendError as exc:
                if self.scenario.oracle.cleaning >= 0:
                    raise
                self.scenario.world.note(self.name, f"attach: {exc}")
                await asyncio.sleep(2)
        return self.handle

    def receive(self) -> None:
        """Receive every item's outcome, as a consumer does."""
        if self.receiving is None or self.receiving.done():
            self.receiving = self.start(self._receive, "follows")

    async def _receive(self) -> None:
        handle = await self.attached()
        try:
            async for job in handle.as_completed():
                await self._receive_one(job)
        except KineticError as exc:
            self.trouble = exc
            raise

    async def _receive_one(self, job: Any) -> None:
        index = job.group_index
        for _ in range(50):
            try:
                value = await job.result(cleanup=False)
            except JobCancelled:
                state = "cancelled"
            except BackendError as exc:
                oracle = self.scenario.oracle
                if oracle.cleaning >= 0 or (oracle.collected and isinstance(exc, NotFound)):
                    return
                await asyncio.sleep(1)
                continue
            except SubmitterLost:
                return
            except Exception:
                state = "failed"
            else:
                state = "succeeded"
                self.scenario.check_value(index, value)
            self.scenario.received(self.name, index, state)
            return


class Scenario:
    """Play one plan."""

    def __init__(self, plan: Plan, fault: Fault | None = None) -> None:
        self.plan = plan
        self.fault = fault
        self.rng = random.Random(plan.seed * 7919 + 1)
        self.loop = VirtualLoop(random.Random(plan.seed * 7919 + 2))
        budgets = RetryBudgets(user=plan.terms["retries"])
        self.oracle = Oracle(budgets, plan.terms["max_concurrent"])
        self.oracle.stop_patience = 45.0 + plan.crew.stop_s + 3 * plan.crew.slow_s
        self.oracle.may_time_out = plan.start_timeout is not None
        self.oracle.budget_hours = plan.terms.get("budget", math.inf) / USD_PER_HOUR
        self.world = World(self.loop, self.rng, plan.odds, self.oracle, plan.crew)
        self.world.crews.clustered = plan.clustered
        self.processes: dict[str, Process] = {}
        self.group_id = ""

    def process(self, name: str) -> Process:
        if name not in self.processes:
            self.processes[name] = Process(self, name)
        return self.processes[name]

    def check_value(self, index: int, value: Any) -> None:
        if value["input"] != 100 + index:
            self.world.fail(Violation("I7", f"item {index} has the value {value}"))

    def received(self, party: str, index: int, state: str) -> None:
        self.world.note(party, f"receives item {index}: {state}")
        try:
            self.oracle.received(party, index, state)
        except Violation as exc:
            self.world.fail(exc)

    # --- the course of events ---

    def play(self) -> Report:
        entropy = random.Random(self.plan.seed * 7919 + 3)
        folder, random_state = os.getcwd(), random.getstate()
        random.seed(self.plan.seed)
        os.chdir(tempfile.gettempdir())  # no project, so that kinetic packs nothing
        try:
            with virtual_clocks(self.loop, entropy):
                try:
                    self.loop.run(self._main())
                except (Frozen, Runaway) as exc:
                    self.world.fail(Violation("L1", f"{type(exc).__name__}: {exc}"))
                seconds = self.loop.now - 1000
                self.world.over = self.oracle.over = True
                self.loop.bury()
        finally:
            os.chdir(folder)
            random.setstate(random_state)
            self.loop.close()
        if self.loop.failures and self.world.violation is None:
            self.world.violation = Violation("loop", self.loop.failures[0])
        return Report(
            plan=self.plan,
            violation=self.world.violation,
            trace=self.world.trace,
            faults=self.world.faults,
            seen=self.oracle.seen,
            turns=self.loop.turns,
            seconds=seconds,
            items={i: self.oracle.state(i) for i in range(self.oracle.stored)},
        )

    async def _main(self) -> None:
        await asyncio.sleep(0)
        self.loop.adopt_threads()
        submitter = self.process("A")
        starting = submitter.start(lambda: self._submit(submitter), "starts the batch")
        await self._until(starting.done, 600)
        if not self.group_id:
            if not starting.done():
                self.world.fail(Violation("L1", "the batch never starts"))
            return
        for event in self.plan.events:
            self.world.after(event.at, self._happen, event)
        self.world.after(CALM_AFTER, self._calm_down)
        settled = await self._until(self._settled, PATIENCE)
        if self.world.violation is None and not settled:
            waiting = [task.get_name() for task in self._waiting()]
            waiting += filter(self._submits, self.processes)
            self.world.fail(Violation("L1", f"these wait forever: {waiting}"))
        if self.world.violation is None:
            await self._audit_crews(self.world.crews)
        if self.world.violation is None:
            await self._audit()

    async def _submit(self, process: Process) -> None:
        count = self.plan.items
        inputs: Any = Inputs(count, random.Random(self.plan.seed))
        if self.plan.lazy:
            inputs = aiter(inputs)
        process.handle = await process.client.run_async_map(
            _call(self.plan.start_timeout), inputs, **self.plan.terms
        )
        process.submitting = True
        self.group_id = process.handle.group_id
        process.receive()

    async def _until(self, done: Callable[[], bool], patience: float) -> bool:
        deadline = self.loop.now + patience
        pause = 1.0
        while not done() and self.world.violation is None and self.loop.now < deadline:
            await asyncio.sleep(pause)
            pause = min(10.0, pause * 1.2)
        return done()

    def _calm_down(self) -> None:
        self.world.note("world", "is calm from here on")
        self.world.calm = True

    def _alive(self, name: str) -> bool:
        return name in self.processes and not self.loop.party(name).dead

    def _settled(self) -> bool:
        """Tell whether all events are over and no live party waits or submits any more."""
        if not self.world.calm or self.loop.now < 1000 + CALM_AFTER:
            return False
        return not (self._waiting() or any(map(self._submits, self.processes)))

    def _submits(self, name: str) -> bool:
        """Tell whether a live party submits the batch now; a party that asked for a retry does."""
        handle = self.processes[name].handle
        return self._alive(name) and handle is not None and bool(handle._batch.submits)

    def _waiting(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of live parties that still receive outcomes or wait for an answer."""
        waiting: list[asyncio.Task[Any]] = []
        for name, party in self.loop.parties.items():
            receiving = self.processes[name].receiving if name in self.processes else None
            waiting += [
                task
                for task in (() if party.dead else party.tasks)
                if task is receiving or task.get_name().startswith("asks")
            ]
        return waiting

    def _happen(self, event: Event) -> None:
        world, loop = self.world, self.loop
        world.faults[event.kind] += 1
        if event.kind == "forge":
            self._forge(event.party, int(event.amount))
            return
        if event.party == "P":
            self._disturb_platform(event)
            return
        process = self.process(event.party)
        party = loop.party(event.party)
        world.note("world", f"{event.kind} {event.party} {event.amount:.0f}")
        if event.kind in ("pause", "sleep"):
            loop.pause(event.party)
            slept = event.amount if event.kind == "sleep" else 0.0
            world.after(event.amount, lambda: loop.wake(event.party, slept=slept))
        elif event.kind == "kill":
            loop.kill(event.party)
            process.gate.cut = True
        elif event.kind == "outage":
            process.gate.cut = True
            world.after(event.amount, setattr, process.gate, "cut", False)
        elif event.kind == "wall":
            party.wall += event.amount
        elif not party.dead:
            self._act(event, process)

    def _forge(self, party: str, variant: int) -> None:
        """Fill the next slot of control with an unsigned, wrongly signed, or moved request."""
        control, scope = self.oracle.batch.control, self.oracle.scope
        if self.oracle.cleaning >= 0:
            return
        slot = len(control)
        request = wire.Request(kind="stop", cause=wire.CLEANUP if variant == 1 else "")
        if variant == 2:
            request = wire.Request(kind="retry", bases=dict.fromkeys(range(self.plan.items), 1))
        body, metadata = request.to_bytes(), {}
        if variant == 3 and slot:
            previous = result_of(self.world.store.get(wire.control_key(scope, slot - 1)))
            body, metadata = previous.body, dict(previous.metadata)
        elif variant:
            metadata = request.signed(b"x" * 32, scope, wire.control_key(scope, slot))[1]
        self.world.create(party, wire.control_key(scope, slot), body, metadata)

    def _disturb_platform(self, event: Event) -> None:
        crews = self.world.crews
        if event.kind == "supervisor":
            if self.plan.clustered:
                crews.delete_by_hand()
            else:
                crews.die()
        else:
            crews.refuse(event.amount, passing=event.kind == "refuse")

    def _act(self, event: Event, process: Process) -> None:
        kind, item = event.kind, int(event.amount)

        async def cancel_item(handle: Any) -> None:
            await (await handle.job(item)).cancel()

        requests: dict[str, tuple[str, Callable[[Any], Awaitable[Any]]]] = {
            "cancel": ("cancel", lambda handle: handle.cancel()),
            "cancel item": (f"cancel item {item}", cancel_item),
            "cleanup": ("clean up", lambda handle: handle.cleanup()),
            "collect": ("collect", self._collect),
            "retry": ("retry", lambda handle: handle.retry_failed()),
            "scale": (f"have {item} workers", lambda handle: self._scale(handle, item)),
        }
        if kind == "watch":
            process.receive()
        elif kind in ("resume", "force"):
            process.start(lambda: self._resume(process, force=kind == "force"), "asks to resume")
        else:
            name, ask = requests[kind]
            process.start(lambda: self._ask(process, ask), f"asks to {name}")

    async def _scale(self, handle: Any, count: int) -> None:
        """Scale, and check how many workers take items then, if nothing else has changed it."""
        before = len(self.oracle.batch.control)
        await handle.scale(count)
        crews, control = self.world.crews, self.oracle.batch.control
        others = [it.kind for it in control[before:] if it.kind not in ("scale", "leave")]
        last = [it.cause for it in control if it.kind == "scale"][-1:]
        if others or last != [str(count)] or self.plan.limit or self.oracle.cleaning >= 0:
            return
        requests = replay(control)
        active = crews.ranks(requests.round) - requests.leaving
        total = self.oracle.end if self.plan.lazy else self.plan.items
        wanted = count if total is None else min(count, total)
        # Without a living worker, the process with the lease starts them later.
        serves = crews.is_busy and crews.ranks(requests.round) and not requests.done
        if serves and len(active) < wanted and self._open_items():
            self.world.fail(Violation("L1", f"{active} are to take items, {wanted} are wanted"))

    async def _collect(self, handle: Any) -> None:
        """Collect all results, unless another party did."""
        try:
            results = await handle.results(return_exceptions=True)
        except NotFound:
            if not self.oracle.collected:
                raise
            return
        for index, value in enumerate(results):
            if not isinstance(value, Exception):
                self.check_value(index, value)

    async def _ask(self, process: Process, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Repeat a request until it succeeds or keeps failing for a minute."""
        handle = await process.attached()
        refused: BackendError | None = None
        for _ in range(20):
            try:
                return await ask(handle)
            except BackendError as exc:
                self.world.note(process.name, f"asks again: {exc}")
                if self.oracle.inputs_gone or self.oracle.gone:
                    return None
                if refused is None or isinstance(exc, (Conflict, NotFound)):
                    refused = exc
                await asyncio.sleep(3)
        if isinstance(refused, (Conflict, NotFound)):
            raise refused
        raise AssertionError("the store doesn't answer for a minute")

    async def _resume(self, process: Process, *, force: bool) -> None:
        seal = self.plan.lazy and self.oracle.end is None and self.plan.seed % 3 > 0
        await self._ask(process, lambda handle: handle.resume(force=force, seal=seal))
        process.submitting = True
        process.receive()

    # --- the end ---

    async def _audit_crews(self, crews: Crews) -> None:
        """Check that workers need no client, that one late client ends the rest, and that all go.

        If the workers were lost, or the end of the inputs is missing, one client is needed.
        """
        oracle, crew = self.oracle, crews.odds
        is_quiet = await self._until(lambda: not crews.is_busy, PATIENCE)
        may_be_late = (
            crew.slow or crew.zombie or crew.frozen or crew.twin
        )  # a claim of a dead worker
        if not (is_quiet or may_be_late) and (open_items := self._open_items()):
            self.world.fail(Violation("L1", f"workers wait for a client to close {open_items}"))
            return
        if oracle.cleaning < 0 and not oracle.collected:
            auditor = self.process("D")
            auditor.receive()
            assert auditor.receiving is not None
            if not await self._until(auditor.receiving.done, PATIENCE):
                open_items = self._open_items()
                self.world.fail(Violation("L1", f"a late client waits forever for {open_items}"))
                return
            if (open_items := self._open_items()) and oracle.end is not None:
                self.world.fail(Violation("L1", f"{open_items} stay open for a late client"))
                return
        if not await self._until(lambda: not crews.is_busy, PATIENCE):
            left = [
                it.seen.name for it in crews.entries.values() if it.seen.phase is not Phase.ENDED
            ]
            self.world.fail(Violation("L3", f"nothing will happen any more, and {left} are left"))

    def _open_items(self) -> dict[int, str]:
        states = {index: self.oracle.state(index)[0] for index in range(self.oracle.stored)}
        return {index: state for index, state in states.items() if state not in FINAL}

    async def _audit(self) -> None:
        oracle = self.oracle
        oracle.check_inputs()
        for name, process in self.processes.items():
            holder = process.handle and process.handle._batch.coordinator
            if self._alive(name) and holder and is_temporary(error := holder.error):
                self.world.fail(Violation("L1", f"{name} stops submitting because of {error!r}"))
                return
        if oracle.cleaning >= 0:
            return
        auditor = self.process("C")
        task = auditor.start(lambda: self._look_at_all(auditor), "audits")
        if not await self._until(task.done, 600):
            self.world.fail(Violation("L1", "a late observer never gets the outcomes"))

    async def _look_at_all(self, process: Process) -> None:
        oracle = self.oracle
        handle = await process.attached()
        statuses = dict(await handle.statuses())
        holders = [
            name
            for name, other in self.processes.items()
            if other.submitting
            and self._alive(name)
            and other.trouble is None
            and name == oracle.batch.holder
        ]
        for index in range(oracle.stored):
            state = oracle.state(index)[0]
            reported = STATES.get(statuses.get(index, JobStatus.PENDING), "open")
            if state in FINAL and reported != state:
                raise Violation(
                    "I1", f"the auditor sees item {index} {reported}, it is {state}: {statuses}"
                )
            if state not in FINAL and holders and not oracle.claimed_too_late(index):
                raise Violation("L1", f"{holders} hold the batch and item {index} is {state}")
        stops = [request for request in oracle.batch.control if request.kind == "stop"]
        stopped = any(request.items is None for request in stops)
        alive = [name for name in self.processes if self._alive(name) and name != process.name]
        for index in range(oracle.stored) if stopped and alive else ():
            state = oracle.state(index)[0]
            if state == "cancelling" and not oracle.claimed_too_late(index):
                raise Violation("L1", f"none of {alive} closes item {index}, which is stopped")
        if holders and oracle.end is None and not stops:
            raise Violation("L2", "the end of the inputs is not stored")


def chained(*changes: Callable[[Plan], Plan]) -> Callable[[Plan], Plan]:
    """Return the change that makes these changes, one after the other."""
    return lambda plan: functools.reduce(lambda changed, change: change(changed), changes, plan)


def play(
    seed: int,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    fault: Fault | None = None,
) -> Report:
    """Play one seed to its end, after *change* has modified its plan; watches have the *fault*."""
    return Scenario(change(plan_of(seed)), fault).play()
