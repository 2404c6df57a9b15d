"""From a seed to one course of events: what is run, what goes wrong, who asks for what."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kinetic import aio
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic.aio.platforms import Platform
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

from .oracle import FINAL, Oracle, Violation
from .virtual import Frozen, Runaway, VirtualLoop, virtual_clocks
from .world import Bend, ClusterOf, Gate, ImagesOf, Odds, StoreOf, World, now

CALM_AFTER = 240.0
"""After so many seconds nothing goes wrong any more."""

PATIENCE = 4 * 3600.0
"""By then everything that can end has ended."""

USD_PER_HOUR = 2.0
"""What an attempt costs by the file of prices that the tests name."""

STATES = {
    JobStatus.SUCCEEDED: "succeeded",
    JobStatus.FAILED: "failed",
    JobStatus.NOT_FOUND: "cancelled",
}


@dataclass(frozen=True)
class Event:
    """Something that happens to a party, or that it does, at a time."""

    at: float
    what: str
    who: str
    much: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Everything that the seed decides before the first step."""

    seed: int
    items: int
    lazy: bool
    terms: dict[str, Any]
    odds: Odds
    events: tuple[Event, ...]


@dataclass
class Report:
    """How it went."""

    plan: Plan
    violation: BaseException | None
    trace: list[tuple[float, str, str]]
    faults: Counter[str]
    seen: Counter[str]
    turns: int
    seconds: float
    items: dict[int, tuple[str, int]] = field(default_factory=dict)

    def told(self) -> str:
        lines = [f"seed {self.plan.seed}: {self.plan}"]
        lines += [f"{at - 1000:9.3f}  {who:14} {what}" for at, who, what in self.trace]
        lines.append(f"{self.violation!r}")
        return "\n".join(lines)


FAULTS = {
    "slow": 0.03,
    "late": 0.01,
    "down": 0.05,
    "lost": 0.05,
    "gave_up": 0.02,
    "twice": 0.3,
    "dies": 0.25,
    "preempted": 0.2,
    "zombie": 0.25,
    "never": 0.1,
    "removed": 0.3,
    "uncommitted": 0.02,
    "shaky_watch": 0.3,
}


def plan_of(seed: int) -> Plan:
    """What the seed stands for."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, 1, 2, 3, 5, len(FAULTS)])
    chosen = rng.sample([*FAULTS], count)
    odds = replace(
        Odds(), errors=rng.choice([0.0, 0.2, 0.5]), **{name: FAULTS[name] for name in chosen}
    )
    items = rng.randint(2, 8)
    terms = {
        "max_concurrent": rng.randint(1, 3),
        "retries": rng.randint(0, 2),
        "fail_fast": rng.random() < 0.15,
        "cancel_running_on_fail": rng.random() < 0.5,
    }
    events: list[Event] = [Event(rng.random() * 20, "watch", "O")]
    fate = rng.choice(["none", "none", "pause", "kill", "outage", "pause"])
    at = rng.random() * 40
    if fate == "pause":
        long = rng.choice([3.0, 20.0, 60.0, 150.0])
        events.append(Event(at, rng.choice(["pause", "sleep"]), "A", long))
    elif fate == "kill":
        events.append(Event(at, "kill", "A"))
    elif fate == "outage":
        events.append(Event(at, "outage", "A", rng.choice([10.0, 60.0, 120.0])))
    if fate == "kill" or rng.random() < 0.3:
        how = "force" if rng.random() < 0.2 else "resume"
        events.append(Event(at + rng.random() * 60, how, "B"))
        if rng.random() < 0.3:
            events.append(Event(at + rng.random() * 90, rng.choice(["pause", "outage"]), "B", 60.0))
    if rng.random() < 0.3:
        who = rng.choice(["A", "O"])
        what = rng.choice(["cancel", "cancel", "cancel item"])
        events.append(Event(rng.random() * 40, what, who, rng.randrange(items)))
    if rng.random() < 0.3:
        events.append(Event(rng.random() * 90, "retry", rng.choice(["A", "O", "O"])))
    if rng.random() < 0.12:
        events.append(Event(rng.random() * 60, "cleanup", "O"))
    if rng.random() < 0.2:
        events.append(Event(rng.random() * 60, "wall", rng.choice("ABO"), rng.uniform(-9e4, 9e4)))
    return Plan(
        seed=seed,
        items=items,
        lazy=rng.random() < 0.3,
        terms=terms,
        odds=odds,
        events=tuple(sorted(events, key=lambda one: one.at)),
    )


ASKED = (
    *("cancel", "cancel item", "retry", "retry", "resume", "force"),
    *("pause", "outage", "cancel item"),
)
"""What is asked for, and what is in its way, where there is a lot of both."""


def crowded(plan: Plan) -> Plan:
    """The same with more going on: several ask for this and that, at any time."""
    rng = random.Random(plan.seed * 31 + 7)
    more: list[Event] = []
    for _ in range(rng.randint(2, 6)):
        what = rng.choice(ASKED)
        who = rng.choice("BO" if what in ("resume", "force") else "ABO")
        long = what in ("pause", "outage")
        much = rng.choice([5.0, 40.0, 70.0]) if long else rng.randrange(plan.items)
        more.append(Event(rng.random() * 120, what, who, much))
    return replace(plan, events=tuple(sorted((*plan.events, *more), key=lambda one: one.at)))


def collecting(plan: Plan) -> Plan:
    """The same where most goes well, and several collect, while others ask for this and that."""
    rng = random.Random(plan.seed * 31 + 17)
    more = [Event(rng.random() * 120, "collect", rng.choice("ABO")) for _ in range(3)]
    if rng.random() < 0.5:
        what = rng.choice(["kill", "pause"])
        more.append(Event(rng.random() * 120, what, rng.choice("ABO"), 60.0))
    for _ in range(rng.randint(0, 3)):
        what = rng.choice(("retry", "resume", "force", "cancel item", "cancel", "cleanup"))
        at, item = 20 + rng.random() * 120, rng.randrange(plan.items)
        more.append(Event(at, what, rng.choice("BO"), item))
    events = sorted((*plan.events, *more), key=lambda one: one.at)
    odds = replace(plan.odds, errors=rng.choice([0.0, 0.0, 0.1]))
    return replace(plan, odds=odds, events=tuple(events))


def forged(plan: Plan) -> Plan:
    """The same, and somebody without a key asks for this and that as well, at any time."""
    rng = random.Random(plan.seed * 31 + 11)
    more = [Event(rng.random() * 60, "forge", "X", rng.randrange(4)) for _ in range(4)]
    return replace(plan, events=tuple(sorted((*plan.events, *more), key=lambda one: one.at)))


def budgeted(plan: Plan) -> Plan:
    """The same with a budget for some attempts; each that tells how long it took, took an hour."""
    rng = random.Random(plan.seed * 31 + 13)
    hours = rng.randint(1, plan.items)
    return replace(plan, terms={**plan.terms, "budget": hours * USD_PER_HOUR})


def _call() -> Callable[..., Any]:
    """A function without a file: nothing is searched for or archived."""
    code = compile("def job(x):\n    return x\n", "<simulation>", "exec")
    space: dict[str, Any] = {"__name__": "simulated"}
    exec(code, space)
    return space["job"]


class Inputs:
    """As many as it says; asynchronous, for what is not needs a thread of its own."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self._count = count
        self._rng = rng

    def __len__(self) -> int:
        return self._count

    async def __aiter__(self) -> AsyncIterator[int]:
        for index in range(self._count):
            await asyncio.sleep(self._rng.choice([0.0, 0.01, 3.0]))
            yield 100 + index


class Side:
    """One process: its gate, its client, and the handle it has of the batch."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        self.scenario = scenario
        self.name = name
        self.gate = Gate(scenario.world, name)
        cluster: Any = ClusterOf(self.gate)
        platform = Platform(
            store=StoreOf(self.gate),
            images=ImagesOf(),
            cluster=cluster if scenario.fault is None else Unreliable(cluster, scenario.fault),
            id_marker="local-",
        )
        self.client = aio.Client(backend="local", platform=platform)
        self.handle: Any = None
        self.following: asyncio.Task[None] | None = None
        self.trouble: BaseException | None = None
        self.submitting = False

    def do(self, work: Callable[[], Awaitable[Any]], what: str) -> asyncio.Task[Any]:
        """Start something in this process."""
        return self.scenario.loop.spawn(self.name, self._done(work, what), what)

    async def _done(self, work: Callable[[], Awaitable[Any]], what: str) -> Any:
        world = self.scenario.world
        world.note(self.name, what)
        try:
            result = await work()
        except asyncio.CancelledError:
            raise
        except KineticError as exc:
            world.note(self.name, f"{what}: {type(exc).__name__}: {exc}")
            return exc
        except Exception as exc:
            world.broken(exc)
            raise
        world.note(self.name, f"{what}: done {result if result is not None else ''}")
        return result

    async def attached(self) -> Any:
        """The handle, attached once; the store may have to be asked again."""
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

    def follow(self) -> None:
        """Hear of every item, as a consumer does."""
        if self.following is None or self.following.done():
            self.following = self.do(self._follow, "follows")

    async def _follow(self) -> None:
        handle = await self.attached()
        try:
            async for job in handle.as_completed():
                await self._hear(job)
        except KineticError as exc:
            self.trouble = exc
            raise

    async def _hear(self, job: Any) -> None:
        index = job.group_index
        for _ in range(50):
            try:
                value = await job.result(cleanup=False)
            except JobCancelled:
                said = "cancelled"
            except BackendError as exc:
                oracle = self.scenario.oracle
                if oracle.cleaning >= 0 or (oracle.collected and isinstance(exc, NotFound)):
                    return
                await asyncio.sleep(1)
                continue
            except SubmitterLost:
                return
            except Exception:
                said = "failed"
            else:
                said = "succeeded"
                self.scenario.check_value(index, value)
            self.scenario.hears(self.name, index, said)
            return


class Scenario:
    """One seed, played."""

    def __init__(self, plan: Plan, bend: Bend, fault: Fault | None = None) -> None:
        self.plan = plan
        self.fault = fault
        self.rng = random.Random(plan.seed * 7919 + 1)
        self.loop = VirtualLoop(random.Random(plan.seed * 7919 + 2))
        budgets = RetryBudgets(user=plan.terms["retries"])
        self.oracle = Oracle(budgets, plan.terms["max_concurrent"])
        self.world = World(self.loop, self.rng, plan.odds, self.oracle, bend)
        self.sides: dict[str, Side] = {}
        self.group_id = ""

    def side(self, name: str) -> Side:
        if name not in self.sides:
            side = self.sides[name] = Side(self, name)
            self.world.holders[name] = lambda: side.handle and side.handle._batch.coordinator
            self.world.batches[name] = lambda: side.handle and side.handle._batch
        return self.sides[name]

    def check_value(self, index: int, value: Any) -> None:
        if value["input"] != 100 + index:
            self.world.broken(Violation("I7", f"item {index} has the value {value}"))

    def hears(self, party: str, index: int, said: str) -> None:
        self.world.note(party, f"hears that item {index} has {said}")
        try:
            self.oracle.hears(party, index, said)
        except Violation as exc:
            self.world.broken(exc)

    # --- the course of events ---

    def play(self) -> Report:
        entropy = random.Random(self.plan.seed * 7919 + 3)
        here, shared = os.getcwd(), random.getstate()
        random.seed(self.plan.seed)
        os.chdir(tempfile.gettempdir())  # no project: nothing is archived
        try:
            with virtual_clocks(self.loop, entropy):
                try:
                    self.loop.run(self._main())
                except (Frozen, Runaway) as exc:
                    self.world.broken(Violation("L1", f"{type(exc).__name__}: {exc}"))
                seconds = self.loop.now - 1000
                self.world.over = self.oracle.over = True
                self.loop.bury()
        finally:
            os.chdir(here)
            random.setstate(shared)
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
        submitter = self.side("A")
        begun = submitter.do(lambda: self._begin(submitter), "starts the batch")
        await self._until(begun.done, 600)
        if not self.group_id:
            if not begun.done():
                self.world.broken(Violation("L1", "the batch is never begun"))
            return
        for event in self.plan.events:
            self.world.after(event.at, self._happens, event)
        self.world.after(CALM_AFTER, self._calm_down)
        settled = await self._until(self._settled, PATIENCE)
        if self.world.violation is None and not settled:
            waiting = [task.get_name() for task in self._waiting()]
            waiting += filter(self._submits, self.sides)
            self.world.broken(Violation("L1", f"somebody waits for ever: {waiting}"))
        if self.world.violation is None:
            await self._audit()

    async def _begin(self, side: Side) -> None:
        count = self.plan.items
        inputs: Any = Inputs(count, random.Random(self.plan.seed))
        if self.plan.lazy:
            inputs = aiter(inputs)
        side.handle = await side.client.run_async_map(_call(), inputs, **self.plan.terms)
        side.submitting = True
        self._seeded(side)
        self.group_id = side.handle.group_id
        side.follow()

    def _seeded(self, side: Side) -> None:
        """The delays before retries come from the seed."""
        holder = side.handle._batch.coordinator
        if holder is not None:
            holder.state.random.seed(self.plan.seed)

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
        return name in self.sides and not self.loop.party(name).dead

    def _settled(self) -> bool:
        """Nothing is left to come: every event is over, and everybody who waits has heard."""
        if not self.world.calm or self.loop.now < 1000 + CALM_AFTER:
            return False
        return not (self._waiting() or any(map(self._submits, self.sides)))

    def _submits(self, name: str) -> bool:
        """Whether a party goes on with the batch now: who has asked for a retry does so, too."""
        handle = self.sides[name].handle
        return self._alive(name) and handle is not None and bool(handle._batch.submits)

    def _waiting(self) -> list[asyncio.Task[Any]]:
        """Whoever lives and has not heard the end of what it asked."""
        found: list[asyncio.Task[Any]] = []
        for name, party in self.loop.parties.items():
            following = self.sides[name].following if name in self.sides else None
            found += [
                task
                for task in (() if party.dead else party.tasks)
                if task is following or task.get_name().startswith("asks")
            ]
        return found

    def _happens(self, event: Event) -> None:
        world, loop = self.world, self.loop
        world.faults[event.what] += 1
        if event.what == "forge":
            self._forge(event.who, int(event.much))
            return
        side = self.side(event.who)
        party = loop.party(event.who)
        world.note("world", f"{event.what} {event.who} {event.much:.0f}")
        if event.what in ("pause", "sleep"):
            loop.pause(event.who)
            slept = event.much if event.what == "sleep" else 0.0
            world.after(event.much, lambda: loop.wake(event.who, slept=slept))
        elif event.what == "kill":
            loop.kill(event.who)
            side.gate.cut = True
        elif event.what == "outage":
            side.gate.cut = True
            world.after(event.much, setattr, side.gate, "cut", False)
        elif event.what == "wall":
            party.wall += event.much
        elif not party.dead:
            self._asks(event, side)

    def _forge(self, who: str, what: int) -> None:
        """Take the next slot of control: by a request unsigned, signed by another, or moved."""
        control, scope = self.oracle.batch.control, self.oracle.scope
        if self.oracle.cleaning >= 0:
            return
        slot = len(control)
        request = wire.Request(kind="stop", cause=wire.CLEANUP if what == 1 else "")
        if what == 2:
            request = wire.Request(kind="retry", bases=dict.fromkeys(range(self.plan.items), 1))
        body, metadata = request.to_bytes(), {}
        if what == 3 and slot:
            there = now(self.world.store.get(wire.control_key(scope, slot - 1)))
            body, metadata = there.body, dict(there.metadata)
        elif what:
            metadata = request.signed(b"x" * 32, scope, wire.control_key(scope, slot))[1]
        self.world.create(who, wire.control_key(scope, slot), body, metadata)

    def _asks(self, event: Event, side: Side) -> None:
        what = event.what
        if what == "watch":
            side.follow()
        elif what == "cancel":
            side.do(lambda: self._again(side, lambda handle: handle.cancel()), "asks to cancel")
        elif what == "cancel item":

            async def one(handle: Any) -> None:
                await (await handle.job(int(event.much))).cancel()

            side.do(lambda: self._again(side, one), f"asks to cancel item {event.much:.0f}")
        elif what == "cleanup":
            side.do(lambda: self._again(side, lambda handle: handle.cleanup()), "asks to clean up")
        elif what == "collect":
            side.do(lambda: self._again(side, self._collect), "asks to collect")
        elif what == "retry" and hasattr(aio.BatchHandle, "retry_failed"):
            side.do(
                lambda: self._again(side, lambda handle: handle.retry_failed()), "asks to retry"
            )
        elif what in ("resume", "force") and hasattr(aio.BatchHandle, "resume"):
            side.do(lambda: self._resume(side, force=what == "force"), "asks to resume")

    async def _collect(self, handle: Any) -> None:
        """Collect all results, unless somebody else does."""
        try:
            results = await handle.results(return_exceptions=True)
        except NotFound:
            if not self.oracle.collected:
                raise
            return
        for index, value in enumerate(results):
            if not isinstance(value, Exception):
                self.check_value(index, value)

    async def _again(self, side: Side, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Ask until the answer is no matter of a broken connection, nor of a moment."""
        handle = await side.attached()
        refused: BackendError | None = None
        for _ in range(20):
            try:
                answer = await ask(handle)
                self._seeded(side)
                return answer
            except BackendError as exc:
                self.world.note(side.name, f"asks again: {exc}")
                if self.oracle.inputs_gone or self.oracle.gone:
                    return None
                if refused is None or isinstance(exc, (Conflict, NotFound)):
                    refused = exc
                await asyncio.sleep(3)
        if isinstance(refused, (Conflict, NotFound)):
            raise refused
        raise AssertionError("the store does not answer for a minute")

    async def _resume(self, side: Side, *, force: bool) -> None:
        self.oracle.forced = self.oracle.forced or force
        seal = self.plan.lazy and self.oracle.end is None and self.plan.seed % 3 > 0
        await self._again(side, lambda handle: handle.resume(force=force, seal=seal))
        side.submitting = True
        side.follow()

    # --- the end ---

    async def _audit(self) -> None:
        oracle = self.oracle
        oracle.check_inputs()
        if (budget := self.plan.terms.get("budget")) is not None:
            oracle.check_budget(budget / USD_PER_HOUR, self.plan.terms["max_concurrent"])
        if oracle.cleaning >= 0:
            return
        auditor = self.side("C")
        task = auditor.do(lambda: self._look_at_all(auditor), "audits")
        if not await self._until(task.done, 600):
            self.world.broken(Violation("L1", "an observer who comes at the end never hears"))

    async def _look_at_all(self, side: Side) -> None:
        oracle = self.oracle
        handle = await side.attached()
        statuses = dict(await handle.statuses())
        held = [
            name
            for name, one in self.sides.items()
            if one.submitting
            and self._alive(name)
            and one.trouble is None
            and name == oracle.batch.holder
        ]
        for index in range(self.oracle.stored):
            state = oracle.state(index)[0]
            said = STATES.get(statuses.get(index, JobStatus.PENDING), "open")
            if state in FINAL and said != state:
                raise Violation(
                    "I1", f"the auditor hears {said} of item {index}, it is {state}: {statuses}"
                )
            if state not in FINAL and held and not oracle.claimed_too_late(index):
                raise Violation("L1", f"{held} hold the batch and item {index} is {state}")
        stopped = any(one.kind == "stop" and one.items is None for one in self.oracle.batch.control)
        alive = [name for name in self.sides if self._alive(name) and name != side.name]
        for index in range(self.oracle.stored) if stopped and alive else ():
            state = oracle.state(index)[0]
            if state == "cancelling" and not oracle.claimed_too_late(index):
                raise Violation("L1", f"nobody of {alive} closes item {index}, which is stopped")
        if (
            held
            and self.oracle.end is None
            and not any(one.kind == "stop" for one in self.oracle.batch.control)
        ):
            raise Violation("L2", "the end is not stored")


def play(
    seed: int,
    bend: Bend | None = None,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    fault: Fault | None = None,
) -> Report:
    """Play one seed to its end, with the plan changed if need be; watches have the *fault*."""
    return Scenario(change(plan_of(seed)), bend or Bend(), fault).play()
