"""A store, and a platform that keeps ranks running, in virtual time, with faults by a seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kinetic._runner.protocol import signing, wire
from kinetic._runner.protocol.workers import EXIT_DONE, EXIT_SURPLUS, WorkerId
from kinetic._runner.worker import pull

from .actors import Disturber, Odds, Pod, Process
from .oracle import Oracle

SCOPE = "batches/b/"
KEY = signing.submission_key(b"root", SCOPE)

BACKOFF_S = 10.0
"""How long the platform waits before it replaces a worker; it doubles up to 160 s."""


@dataclass(frozen=True)
class Slow:
    """Requests of one kind that take up to some seconds until they take effect.

    The actor is "pod", or the name of a client. The request is the beginning of its text, such as
    "create control/".
    """

    actor: str
    request: str
    seconds: float
    chance: float = 1.0

    def fits(self, process: Process, text: str) -> bool:
        actor = "pod" if isinstance(process, Pod) else process.name
        return actor == self.actor and text.startswith(self.request)


class Call(NamedTuple):
    """A request of a client to the platform, or a step of its own that takes effect at once."""

    label: str
    effect: Callable[[], Any]


class Rank:
    """A rank of a Job, as the platform counts it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.restarts = 0
        self.disruptions = 0
        self.finished = False
        self.not_before = 0.0
        self.pods: list[Pod] = []

    @property
    def placed(self) -> list[Pod]:
        """The pods that the platform takes for alive."""
        return [pod for pod in self.pods if pod.counted]


class Job:
    """The workers of one round."""

    def __init__(self, round: int, uid: str, workers: int) -> None:
        self.round = round
        self.uid = uid
        self.ranks = [Rank(number) for number in range(workers)]
        self.ended = ""  # "complete" or "deleted"

    @property
    def pods(self) -> list[Pod]:
        """The pods that the platform takes for alive."""
        return [pod for rank in self.ranks for pod in rank.placed]


class Platform(Disturber):
    """It keeps each rank of a Job running, and counts why ranks ended."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.world = world
        self.jobs: dict[int, Job] = {}

    @property
    def alive(self) -> list[Pod]:
        """The pods that count as alive."""
        ranks = (rank for job in self.jobs.values() for rank in job.ranks)
        return [pod for rank in ranks for pod in rank.placed]

    def create(self, round: int, workers: int) -> None:
        """Create the Job of a round; nothing happens if it exists."""
        if round not in self.jobs:
            uid = f"j{next(self.world.numbers)}"
            self.jobs[round] = Job(round, uid, workers)
            self.world.oracle.job_created(round, self.alive)
            self.reconcile()

    def delete(self, round: int) -> None:
        """Delete a Job, and end its pods."""
        job = self.jobs.get(round)
        if job is None:
            return
        if not job.ended:
            job.ended = "deleted"
        self._end_pods(job)

    def grow(self, round: int, workers: int) -> None:
        """Raise the number of ranks."""
        job = self.jobs.get(round)
        if job is not None and not job.ended:
            job.ranks += [Rank(number) for number in range(len(job.ranks), workers)]
            self.reconcile()

    def suspend(self, job: Job) -> None:
        """End all pods, and start others that carry the same numbers."""
        for rank in job.ranks:
            for pod in rank.placed:
                pod.counted = False
                Process.kill(pod)
                rank.not_before = self.world.now + 5.0
        self.world.after(5.0, self.reconcile)

    def _end_pods(self, job: Job) -> None:
        for rank in job.ranks:
            rank.finished = True
            for pod in rank.placed:
                self.world.after(self.world.rng.random() * 2, pod.terminate)

    def ended(self, pod: Pod, code: int) -> None:
        """Note the end of a process."""
        if not pod.counted:
            return  # a zombie
        pod.counted = False
        job, rank = pod.job, pod.rank
        if job.ended or rank.finished:
            return
        if code == EXIT_DONE:
            job.ended = "complete"
            self.world.oracle.completed(self.alive, job)
            self._end_pods(job)
        elif code == EXIT_SURPLUS:
            rank.finished = True
        elif not rank.placed:
            self._replace(rank)

    def _replace(self, rank: Rank, *, disrupted: bool = False) -> None:
        pause = BACKOFF_S * 2 ** min(rank.restarts, 4)
        rank.restarts += 1
        rank.disruptions += disrupted
        rank.not_before = self.world.now + pause
        self.world.after(pause, self.reconcile)

    def report_gone(self, pod: Pod) -> None:
        """Take a pod for ended although it runs on."""
        if pod.counted and not pod.job.ended and not pod.rank.finished:
            pod.counted = False
            if not pod.rank.placed:
                self._replace(pod.rank)

    def evict(self, pod: Pod) -> None:
        """End a pod, and count a disruption."""
        if pod.counted and pod.alive and not pod.job.ended and not pod.rank.finished:
            self.world.faults["evicted"] += 1
            pod.rank.disruptions += 1
            pod.terminate()

    def reconcile(self) -> None:
        """Start the pods that are missing."""
        world = self.world
        for job in self.jobs.values():
            for rank in job.ranks:
                if job.ended or rank.finished or rank.placed or world.over:
                    continue
                if rank.number >= len(job.ranks) - world.odds.unplaced:
                    continue
                if world.now < rank.not_before or len(self.alive) >= world.odds.capacity:
                    world.after(5.0, self._again)
                    continue
                self._start(job, rank)

    def _again(self) -> None:
        if not self.world.reconciling:
            self.world.reconciling = True
            self.world.after(1.0, self._reconcile_once)

    def _reconcile_once(self) -> None:
        self.world.reconciling = False
        self.reconcile()

    def _start(self, job: Job, rank: Rank, *, twin: bool = False) -> None:
        world = self.world
        worker = WorkerId(job.round, job.uid, rank.number, rank.restarts, rank.disruptions)
        pod = Pod(
            world,
            worker,
            f"pod{next(world.numbers)}",
            world.terms,
            key=KEY,
            scope=SCOPE,
            job=job,
            rank=rank,
        )
        rank.pods.append(pod)
        late = self.lateness()
        world.after(world.rng.random() * 3 + late, lambda: self.begin(pod))
        if world.chance("twin") and not twin:
            world.faults["twin"] += 1
            self._start(job, rank, twin=True)
            # One of the two is deleted later; its index goes on with the other.
            world.after(world.rng.random() * 60, lambda: self._end_one(rank))
        self.disturb(pod, late)

    def _end_one(self, rank: Rank) -> None:
        if len(rank.placed) > 1:
            self.world.rng.choice(rank.placed).kill()


@dataclass
class Behavior:
    """What a mutation changes."""

    pull: type[pull.Pull] = pull.Pull
    flags: frozenset[str] = frozenset()


class World:
    """The store, the platform, and the clock."""

    def __init__(
        self,
        seed: int,
        odds: Odds,
        terms: pull.Terms,
        behavior: Behavior,
        slow: tuple[Slow, ...] = (),
    ) -> None:
        self.rng = random.Random(seed)
        self.odds = odds
        self.terms = terms
        self.behavior = behavior
        self.slow = slow
        self.now = 0.0
        self.calm = False  # no more faults
        self.over = False
        self.reconciling = False
        self.numbers = itertools.count()
        self.objects: dict[str, tuple[bytes, Mapping[str, str]]] = {}
        self.trace: list[tuple[float, str, str]] = []
        self.faults: Counter[str] = Counter()
        self.oracle = Oracle(self, terms.budgets)
        self.platform = Platform(self)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    # --- time ---

    def at(self, time: float, effect: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self.numbers), effect))

    def after(self, seconds: float, effect: Callable[[], None]) -> None:
        self.at(self.now + seconds, effect)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Let events happen, one after the other."""
        while self._queue and self._queue[0][0] <= until and self.oracle.violation is None:
            self.now, _, effect = heapq.heappop(self._queue)
            effect()
            if done():
                return
        self.now = max(self.now, until) if self.oracle.violation is None else self.now

    def delay(self) -> float:
        """Return how long a request or its answer is under way."""
        if self.chance("slow"):
            self.faults["slow"] += 1
            return self.rng.random() * self.odds.slow_s
        return self.rng.expovariate(20.0)

    def slowness(self, process: Process, operation: Any) -> float:
        """Return how much longer a request takes because the plan says so."""
        if not self.slow:
            return 0.0
        text = operation[0] if operation and isinstance(operation[0], str) else ""
        text = f"{type(operation).__name__.lower()} {text.removeprefix(SCOPE)}"
        rules = [rule for rule in self.slow if rule.fits(process, text)]
        return sum(
            self.rng.random() * rule.seconds for rule in rules if self.rng.random() < rule.chance
        )

    def chance(self, fault: str) -> bool:
        return not self.calm and self.rng.random() < getattr(self.odds, fault)

    def note(self, actor: str, text: str) -> None:
        self.trace.append((self.now, actor, text))

    # --- the store ---

    def apply(self, process: Process, operation: Any) -> Any:
        """Let an operation take effect."""
        process.late = self.oracle.inputs_gone
        match operation:
            case pull.Create(name, body, metadata):
                created = name not in self.objects
                if created:
                    self.objects[name] = (body, metadata)
                self.note(process.name, f"{'creates' if created else 'is refused'} {name[10:]}")
                self.oracle.created(process, name, metadata, created=created)
                return created
            case pull.Read(name):
                return self.objects.get(name)
            case pull.List(prefix):
                names = sorted(name for name in self.objects if name.startswith(prefix))
                return [(name, self.objects[name][1]) for name in names]
            case pull.Delete(name):
                if self.objects.pop(name, None) is not None:
                    self.note(process.name, f"deletes {name[10:]}")
                    self.oracle.deleted(name)
                return None
            case pull.Fetch(item, slot):
                found = self.objects.get(wire.input_key(SCOPE, slot))
                known = found is not None
                if found is not None:
                    self.oracle.fetched(process, item, found[1])
                return known or "no_input_check" in self.behavior.flags
            case Call(label, effect):
                if label:
                    self.note(process.name, label)
                return effect()
            case _:
                raise TypeError(operation)

    def replace(self, name: str, body: bytes) -> None:
        """Overwrite the lease."""
        self.objects[name] = (body, {})

    def opening_failure(self, pod: Pod) -> pull.OpeningFailure | None:
        if not self.chance("unopened"):
            return None
        self.faults["unopened"] += 1
        outcome = wire.Outcome(wire.Kind.ERROR, "error", phase="setup")
        return pull.OpeningFailure(outcome, b"", "no module named x", self.rng.random() < 0.3)
