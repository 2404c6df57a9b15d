"""Turn a seed into one course of events: a submission, faults, and the requests of clients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.worker.pull import Terms

from .actors import Odds, Process
from .clients import Client
from .oracle import Violation
from .world import Behavior, Slow, World

CALM_AFTER = 400.0
"""Seconds after which no more faults happen."""

PATIENCE = 4 * 3600.0
"""Seconds after which everything that can end must have ended."""


@dataclass(frozen=True)
class Event:
    """A request or a fault at a time; the amount depends on the kind."""

    at: float
    kind: str
    amount: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Everything that the seed decides before the first step.

    ``observed`` says that some client looks until the end. Without it, the workers and the platform
    bring every item to its end. ``pause_s`` is the longest pause of a producer.
    """

    seed: int
    items: int
    workers: int
    lazy: bool
    observed: bool
    terms: Terms
    odds: Odds
    events: tuple[Event, ...]
    pause_s: float = 30.0
    slow: tuple[Slow, ...] = ()
    once: bool = False  # the observer leaves after it has opened a round


@dataclass
class Report:
    """What happened."""

    plan: Plan
    violation: Violation | None
    trace: list[tuple[float, str, str]]
    counts: Counter[str]
    seconds: float
    states: dict[int, str] = field(default_factory=dict)

    def text(self) -> str:
        lines = [f"seed {self.plan.seed}: {self.plan}"]
        lines += [f"{at:9.3f}  {actor:10} {event}" for at, actor, event in self.trace]
        return "\n".join([*lines, repr(self.violation)])


FAULTS: dict[str, float] = {
    "slow": 0.03,
    "failing": 0.01,
    "dies": 0.3,
    "evicted": 0.2,
    "zombie": 0.25,
    "twin": 0.2,
    "late": 0.2,
    "unopened": 0.15,
    "frozen": 0.2,
}


def plan_of(seed: int) -> Plan:
    """Draw the plan of a seed."""
    rng = random.Random(seed)
    chosen = rng.sample([*FAULTS], rng.choice([0, 1, 1, 2, 3, len(FAULTS)]))
    odds = replace(
        Odds(),
        errors=rng.choice([0.0, 0.2, 0.5]),
        item_s=rng.choice([1.0, 20.0, 200.0]),
        capacity=rng.choice([1, 1000, 1000, 1000]),
        stop_s=rng.choice([1.0, 1.0, 60.0]),
        **{name: FAULTS[name] for name in chosen},
    )
    items, workers = rng.randint(1, 7), rng.randint(1, 3)
    single = rng.random() < 0.1
    lazy = not single and rng.random() < 0.25
    if single:
        items = workers = 1
    terms = Terms(
        workers=workers,
        budgets=RetryBudgets(user=rng.randint(0, 2), infrastructure=2),
        backoff_s=rng.choice([0.5, 5.0]),
        fail_fast=rng.random() < 0.1,
        cancel_running=rng.random() < 0.5,
        lifetime_s=rng.choice([None] * 9 + [100.0]),
        budget_s=rng.choice([None] * 9 + [40.0]),
        single=single,
    )
    observed = rng.random() < 0.6
    events = [Event(rng.random() * 200, *kind) for kind in _requests(rng, observed, workers, items)]
    events += [
        Event(rng.random() * 100, "sleep", rng.random() * 90) for _ in range(rng.choice([0, 1]))
    ]
    pause_s = rng.choice([5.0, 30.0, 900.0])
    if lazy and rng.random() < 0.5:
        seconds = 600 + rng.random() * 400
        events.append(Event(rng.random() * 60, "freeze producer", seconds))
    return Plan(
        seed=seed,
        items=items,
        workers=workers,
        lazy=lazy,
        observed=observed,
        terms=terms,
        odds=odds,
        events=tuple(sorted(events, key=lambda event: event.at)),
        pause_s=pause_s,
    )


def _requests(
    rng: random.Random, observed: bool, workers: int, items: int
) -> list[tuple[str, float]]:
    """Draw what clients and people do; without an observer, only what needs none."""
    found: list[tuple[str, float]] = []
    if rng.random() < 0.3:
        found.append(("retry", 0))
    if rng.random() < 0.15:
        found.append(("grow", workers + 1))
    if rng.random() < 0.2:
        found += [("leave", rank) for rank in range(rng.randint(1, workers))]
    if rng.random() < 0.1:
        found.append(("collect", 0))
    if rng.random() < 0.1:
        found.append(("suspend", 0))
    if observed:
        if rng.random() < 0.2:
            found.append(("stop", 0))
        if rng.random() < 0.2:
            found.append(("stop item", rng.randrange(items)))
        if rng.random() < 0.12:
            found.append(("cleanup", 0))
        if rng.random() < 0.15:
            found.append(("jobgone", 0))
        if rng.random() < 0.3:
            found.append(("kill client", 0))
        if rng.random() < 0.3:
            found.append(("retry", 0))
    return found


class Scenario:
    """Play one plan."""

    def __init__(self, plan: Plan, behavior: Behavior) -> None:
        self.plan = plan
        self.world = World(plan.seed * 7919 + 1, plan.odds, plan.terms, behavior, plan.slow)
        self._clients: list[Process] = []
        self._producer: Process | None = None

    def play(self) -> Report:
        world, plan = self.world, self.plan
        submitter = Client(world)
        if plan.lazy:
            steps = submitter.produce(plan.items, plan.workers, plan.pause_s)
            self._producer = self._start("producer", steps)
        else:
            self._start("submitter", submitter.submit(plan.items, plan.workers))
        world.after(1.0, self._schedule)
        world.at(CALM_AFTER, self._calm_down)
        world.run(PATIENCE, self._is_over)
        if plan.observed:
            auditor = self._start("auditor", self._audit())
            world.run(world.now + 3600, lambda: not auditor.alive)
        world.oracle.audit(client=plan.observed)
        world.over = True
        return Report(
            plan=plan,
            violation=world.oracle.violation,
            trace=world.trace,
            counts=world.oracle.seen + world.faults,
            seconds=world.now,
            states={i: world.oracle.state(i).value for i in range(world.oracle.stored)},
        )

    def _start(self, name: str, steps: Any) -> Process:
        process = Process(self.world, name, _patient(steps))
        self._clients.append(process)
        process.start()
        return process

    def _schedule(self) -> None:
        if not self.world.platform.jobs:  # the submission isn't complete yet
            self.world.after(1.0, self._schedule)
            return
        for event in self.plan.events:
            self.world.after(event.at, lambda event=event: self._happen(event))
        if self.plan.observed or self.plan.once:
            self._observe()

    def _observe(self) -> None:
        steps = Client(self.world).observe(self.plan.workers, once=self.plan.once)
        self._observer = self._start("observer", steps)

    def _happen(self, event: Event) -> None:
        world, workers = self.world, self.plan.workers
        client, amount = Client(world), int(event.amount)
        world.faults[event.kind] += 1
        match event.kind:
            case "retry":
                self._start("retrier", client.retry_failed(workers))
            case "grow":
                self._start("scaler", client.grow(amount))
            case "leave":
                self._start("scaler", client.leave((amount,)))
            case "collect":
                self._start("collector", client.collect())
            case "stop":
                self._start("stopper", client.stop(None))
            case "stop item":
                self._start("stopper", client.stop((amount,)))
            case "stop items":  # all of them, by their indexes: the workers stay
                self._start("stopper", client.stop(tuple(range(self.plan.items))))
            case "cleanup":
                self._start("remover", client.cleanup())
            case "jobgone":
                job = max(world.platform.jobs.items())[1]
                world.note("somebody", f"deletes the workers of round {job.round} by hand")
                world.platform.delete(job.round)
            case "suspend":
                job = max(world.platform.jobs.items())[1]
                if not job.ended:
                    world.note("queue", f"suspends round {job.round}")
                    world.platform.suspend(job)
            case "kill client":
                living = [it for it in self._clients if it.alive and it is not self._observer]
                if living:
                    victim = world.rng.choice(living)
                    world.note(victim.name, "is killed")
                    victim.kill()
            case "freeze producer" if self._producer is not None:
                self._producer.sleep(event.amount)
            case "kill observer":
                self._observer.kill()
                world.after(300.0, self._observe)
            case "sleep":
                processes = [*self._clients, *world.platform.alive]
                world.rng.choice(processes).sleep(event.amount)

    def _calm_down(self) -> None:
        self.world.calm = True
        self.world.note("", "from here on, nothing fails")
        if self.plan.observed and self._producer is not None and not self._producer.alive:
            self._start("sealer", self._seal())

    def _audit(self) -> Any:
        """Let a late client look: it sees what is true, and closes what is dead."""
        client = Client(self.world)
        yield from client.read()
        yield from client.close_dead()

    def _seal(self) -> Any:
        from kinetic._runner.protocol import wire

        client = Client(self.world)
        yield from client.read()
        while client.items.total is None and not (client.requests.removing or client.removed):
            slot = wire.Slot(total=client.items.stored)
            yield from client.store_slot(len(client.items.slots), slot)
            yield from client.read()

    def _is_over(self) -> bool:
        """Nothing is left that can act, but an observer, which looks for some time more."""
        world = self.world
        if world.now < CALM_AFTER + 60 or any(
            not job.ended for job in world.platform.jobs.values()
        ):
            finished = all(
                job.ended or all(rank.finished for rank in job.ranks)
                for job in world.platform.jobs.values()
            )
            if world.now < CALM_AFTER + 60 or not finished:
                return False
        if world.platform.alive:
            return False
        if any(it.alive for it in self._clients if it.name not in ("observer",)):
            return False
        if not self.plan.observed:
            return True
        oracle = world.oracle
        if oracle.cleaning or oracle.inputs_gone:
            return True
        open_items = [i for i in range(oracle.stored) if not oracle.state(i).final]
        return not open_items


def _patient(steps: Any) -> Any:
    """Let a client go on after a request whose result is unknown, as with a retry of its own."""
    answer: Any = None
    operation = next(steps)
    while True:
        while True:
            try:
                answer = yield operation
            except OSError:
                continue
            break
        try:
            operation = steps.send(answer)
        except StopIteration as end:
            return end.value


def play(
    seed: int,
    behavior: Behavior | None = None,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Report:
    """Play one seed to its end, after *change* has modified its plan."""
    return Scenario(change(plan_of(seed)), behavior or Behavior()).play()
