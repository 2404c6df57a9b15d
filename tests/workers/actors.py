"""Processes in virtual time, which a simulated world answers: clients, and pods with a worker.

Processes are generators of operations. An operation takes effect some time after it was sent, and
its answer arrives some time later. A process that dies between has still sent it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import EXIT_REPLACE, Terms, WorkerId
from kinetic._runner.worker import pull


@dataclass(frozen=True)
class Odds:
    """Probabilities: of a request, of a pod, or of an item, as each name says."""

    slow: float = 0.0  # a request is slow
    slow_s: float = 60.0
    failing: float = 0.0  # the result of a request is unknown to its sender
    errors: float = 0.2  # an item raises
    item_s: float = 20.0  # the longest run of an item
    dies: float = 0.0  # a pod dies without a word
    evicted: float = 0.0
    zombie: float = 0.0  # a pod is reported gone, and runs on
    twin: float = 0.0
    late: float = 0.0  # a pod starts minutes late
    unopened: float = 0.0  # a pod can't open the submission
    frozen: float = 0.0  # the first pod of a rank freezes, is reported gone, and goes on later
    frozen_s: float = 200.0
    stop_s: float = 1.0  # the longest time that a child takes to end after it was asked
    unplaced: int = 0  # this many ranks, the last ones, are never placed
    capacity: int = 1000


class Host(Protocol):
    """What a process needs of its world."""

    rng: random.Random
    odds: Odds
    faults: Counter[str]
    oracle: Any
    behavior: Any
    platform: Any

    @property
    def now(self) -> float: ...

    @property
    def calm(self) -> bool: ...

    @property
    def over(self) -> bool: ...

    def at(self, time: float, effect: Callable[[], None]) -> object: ...

    def after(self, seconds: float, effect: Callable[[], None]) -> object: ...

    def delay(self) -> float: ...

    def slowness(self, process: Any, operation: Any) -> float: ...

    def apply(self, process: Any, operation: Any) -> Any: ...

    def chance(self, fault: str) -> bool: ...

    def note(self, actor: str, text: str) -> None: ...

    def opening_failure(self, pod: Any) -> pull.OpeningFailure | None: ...


class Process:
    """A generator of operations that the world answers."""

    def __init__(self, world: Host, name: str, steps: Generator[Any, Any, Any]) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.result: Any = None
        self.late = False  # its last request took effect after the inputs were removed
        self._steps = steps
        self._asleep_until = 0.0
        self._turn = 0

    def start(self) -> None:
        self._resume(lambda: next(self._steps), self._turn)

    def sleep(self, seconds: float) -> None:
        """Stop this process for some time; its requests under way continue."""
        self._asleep_until = max(self._asleep_until, self.world.now + seconds)

    @property
    def is_asleep(self) -> bool:
        """Whether this process does nothing for some time."""
        return self.world.now < self._asleep_until

    def kill(self) -> None:
        self.alive = False

    def answer(self, value: Any, turn: int | None = None) -> None:
        """Continue with an answer, unless the process continued meanwhile."""
        turn = self._turn if turn is None else turn
        self._resume(lambda: self._steps.send(value), turn)

    def _fail(self, error: Exception, turn: int) -> None:
        self._resume(lambda: self._steps.throw(error), turn)

    def _resume(self, step: Callable[[], Any], turn: int) -> None:
        world = self.world
        if not self.alive or turn != self._turn or world.over:
            return
        if self.is_asleep:
            world.at(self._asleep_until, lambda: self._resume(step, turn))
            return
        self._turn += 1
        try:
            operation = step()
        except StopIteration as end:
            self.alive, self.result = False, end.value
            self.over(end.value)
        except OSError:
            self.alive = False
            self.over(EXIT_REPLACE)
        else:
            self.perform(operation, self._turn)

    def over(self, result: Any) -> None:
        """The process has ended by itself."""

    def perform(self, operation: Any, turn: int) -> None:
        world = self.world
        if isinstance(operation, pull.Wait):
            world.after(operation.seconds, lambda: self.answer(pull.News.TIME, turn))
            return
        delay = world.delay() + world.slowness(self, operation)
        world.after(delay, lambda: self._take_effect(operation, turn))

    def _take_effect(self, operation: Any, turn: int) -> None:
        world = self.world
        answer = world.apply(self, operation)
        if world.rng.random() < world.odds.failing and not world.calm:
            world.faults["failing"] += 1
            world.after(world.delay(), lambda: self._fail(OSError("unknown result"), turn))
        else:
            world.after(world.delay(), lambda: self.answer(answer, turn))


class Pod(Process):
    """A worker's process, and its child."""

    def __init__(
        self,
        world: Host,
        worker: WorkerId,
        executor: str,
        terms: Terms,
        *,
        key: bytes,
        scope: str,
        job: Any,
        rank: Any,
        age_s: float = 0.0,
    ) -> None:
        self.executor = executor
        self.worker = worker
        self.job = job
        self.rank = rank
        self.counted = True  # the platform takes it for alive
        self.running: tuple[int, int] | None = None
        self._ended: pull.Ended | None = None
        self._told = False
        self._waiting: int | None = None
        self.pull = world.behavior.pull(
            worker, executor, key, scope, terms, lambda: world.now, age_s
        )
        super().__init__(
            world, f"{worker.round}.{worker.rank}.{worker.restarts}", self.pull.steps()
        )

    def tell(self) -> None:
        """Tell the worker that the store has changed; one that is busy looks by itself."""
        if self._waiting is not None and not self.is_asleep:
            self.answer(pull.News.CHANGE, self._waiting)

    def terminate(self) -> None:
        """Send SIGTERM, and kill after a grace period."""
        if self._waiting is not None and not self.is_asleep:
            self.answer(pull.News.TERMINATE, self._waiting)
        else:
            self._told = True
        self.world.after(30.0, self.kill)

    def kill(self) -> None:
        if self.alive:
            super().kill()
            self.running = None
            self.world.platform.ended(self, 137)

    def over(self, result: Any) -> None:
        self.running = None
        self.world.note(self.name, f"exits {result}")
        self.world.platform.ended(self, result)

    def perform(self, operation: Any, turn: int) -> None:
        self._waiting = None
        world = self.world
        match operation:
            case pull.Wait():
                if self._ended is not None:
                    ended, self._ended = self._ended, None
                    world.after(0.0, lambda: self.answer(ended, turn))
                elif self._told:
                    self._told = False
                    world.after(0.0, lambda: self.answer(pull.News.TERMINATE, turn))
                else:
                    self._waiting = turn
                    super().perform(operation, turn)
            case pull.Open():
                failure = world.opening_failure(self)
                world.after(world.rng.random() * 3, lambda: self.answer(failure, turn))
            case pull.Start():
                world.oracle.started(self, operation.item, operation.attempt)
                self.running = (operation.item, operation.attempt)
                seconds = world.rng.random() ** 2 * world.odds.item_s
                world.after(seconds, lambda: self._end(operation, stopped=False))
                world.after(0.0, lambda: self.answer(None, turn))
            case pull.Ready():
                world.after(0.0, lambda: self.answer(None, turn))
            case pull.Stop():
                running = self.running
                if running is not None:
                    start = pull.Start(*running)
                    seconds = world.rng.random() * world.odds.stop_s
                    world.after(seconds, lambda: self._end(start, stopped=True))
                world.after(0.0, lambda: self.answer(None, turn))
            case _:
                super().perform(operation, turn)

    def _end(self, start: pull.Start, *, stopped: bool) -> None:
        if not self.alive or self.running != (start.item, start.attempt) or self._ended is not None:
            return
        self._ended = self.outcome_of(start, stopped=stopped)
        self.running = None
        if self._waiting is not None and not self.is_asleep:
            done, self._ended = self._ended, None
            self.answer(done, self._waiting)

    def outcome_of(self, start: pull.Start, *, stopped: bool) -> pull.Ended:
        """Return how the child has ended; the seed decides."""
        world, ended = self.world, self.world.now
        if stopped:
            outcome = wire.Outcome(wire.Kind.ERROR, "preempted", started=ended - 1, ended=ended)
        elif world.rng.random() < world.odds.errors:
            outcome = wire.Outcome(wire.Kind.ERROR, "error", started=ended - 10, ended=ended)
        else:
            outcome = wire.Outcome(wire.Kind.VALUE, started=ended - 10, ended=ended)
        return pull.Ended(outcome, f"{start.item}.{start.attempt}".encode())


class Disturber:
    """Lets pods begin, die, and freeze; a platform takes the pods for gone."""

    def __init__(self, world: Host) -> None:
        self._host = world

    def report_gone(self, pod: Pod) -> None:
        """Take a pod for ended although it runs on."""
        raise NotImplementedError

    def lateness(self) -> float:
        """Return how much later than usual a pod begins."""
        if not self._host.chance("late"):
            return 0.0
        self._host.faults["late"] += 1
        return float(60 + self._host.rng.random() * 240)

    def disturb(self, pod: Pod, late: float) -> None:
        """Draw the faults of a pod that begins *late* seconds later than usual."""
        world = self._host
        if world.chance("dies"):
            world.after(world.rng.random() * 60, lambda: self._die(pod))
        if world.chance("evicted"):
            world.after(world.rng.random() * 60, lambda: self.evict(pod))
        if world.chance("zombie"):
            world.after(world.rng.random() * 60, lambda: self._make_zombie(pod))
        if pod.worker.restarts == 0 and world.chance("frozen"):
            world.after(late + world.rng.random() * 20, lambda: self._freeze(pod))

    def evict(self, pod: Pod) -> None:
        """End a pod, and count a disruption."""
        raise NotImplementedError

    def begin(self, pod: Pod) -> None:
        """Let a pod begin."""
        if pod.alive:
            self._host.note(pod.name, f"begins as {pod.executor}")
            pod.start()

    def _die(self, pod: Pod) -> None:
        if pod.alive and not self._host.calm:
            self._host.faults["dies"] += 1
            self._host.note(pod.name, "dies")
            pod.kill()

    def _make_zombie(self, pod: Pod) -> None:
        if pod.alive and pod.counted and not self._host.calm:
            self._host.faults["zombie"] += 1
            self._host.note(pod.name, "is reported gone, and runs on")
            self.report_gone(pod)

    def _freeze(self, pod: Pod) -> None:
        if pod.alive and pod.counted and not self._host.calm:
            self._host.faults["frozen"] += 1
            self._host.note(pod.name, "freezes, and is reported gone")
            seconds = self._host.rng.random() * self._host.odds.frozen_s
            pod.sleep(seconds)
            self.report_gone(pod)
            if self._host.rng.random() < 0.5:
                self._host.after(seconds + self._host.rng.random() * 60, pod.kill)
