"""The store and the platform of a simulation, and the unreliable connections of its parties.

There is one store, strongly consistent. A party reaches it through its own `Gate`. There, requests
may arrive late, take effect after the party gave up, lose their replies, or fail. The cluster runs
pods; each executes the steps of the real runner, one by one.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinetic._runner.job import attempt
from kinetic._runner.job.opening import Opening
from kinetic._runner.job.processes import Stopping
from kinetic._runner.protocol import outcomes, pickles, wire
from kinetic._runner.protocol.spool import Spooled
from kinetic._runner.protocol.workers import Crew
from kinetic.aio.ports import (
    Image,
    ImageRequest,
    JobSpec,
    Object,
    ObjectInfo,
    Observation,
    Phase,
)
from kinetic.errors import NotFound, Unavailable
from kinetic.job_status import Reason
from kinetic.testing import MemoryStore
from tests.workers.actors import Odds as CrewOdds

from .crews import Crews, PodStore
from .oracle import ROOT, CrewOracle, Oracle, Violation
from .virtual import PARTY, VirtualLoop, _context


@dataclass
class Odds:
    """The probability of each fault."""

    slow: float = 0.0  # a request takes seconds
    late: float = 0.0  # a request takes longer than a lease
    late_launch: float = 0.0  # a launch takes longer than a lease
    late_answer: float = 0.0  # a platform's answer arrives late and is outdated
    down: float = 0.0  # a request fails without effect
    lost: float = 0.0  # a reply is lost, and the adapter sends the request again
    gave_up: float = 0.0  # the adapter gives up, but the request takes effect later
    twice: float = 0.0  # a job starts two pods
    dies: float = 0.0  # a pod dies without writing anything
    preempted: float = 0.0
    zombie: float = 0.0  # a pod is reported gone, but keeps running
    never: float = 0.0  # a job never starts a pod
    removed: float = 0.0  # an ended job vanishes from the platform
    uncommitted: float = 0.0  # a pod's request to the store fails
    shaky_watch: float = 0.0  # events come twice, late, in another order, or again
    errors: float = 0.2  # user code raises


class World:
    """The true state of store and platform, and the trace of what happened."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        odds: Odds,
        oracle: Oracle,
        behavior: Any,
        crew: CrewOdds,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.odds = odds
        self.oracle = oracle
        self.behavior = behavior
        self.calm = False
        self.over = False
        self.store = MemoryStore()
        self.root = _context("world")
        self.trace: list[tuple[float, str, str]] = []
        self.faults: Counter[str] = Counter()
        self.violation: BaseException | None = None
        self.secrets: dict[str, bytes] = {}
        self.nonces: dict[str, str] = {}
        self.appended: dict[str, float] = {}
        self.cluster = Platform(self)
        self.crews = Crews(self, crew, oracle) if isinstance(oracle, CrewOracle) else None
        self.holders: dict[str, Callable[[], Any]] = {}
        self.batches: dict[str, Callable[[], Any]] = {}
        oracle.clock = lambda: loop.now
        behavior.world = self

    def note(self, actor: str, event: str) -> None:
        self.trace.append((self.loop.now, actor, event))

    def hits(self, fault: str) -> bool:
        """Draw whether *fault* happens now, and count it."""
        odds: float = getattr(self.odds, fault)
        if self.calm or not odds or self.rng.random() >= odds:
            return False
        self.faults[fault] += 1
        return True

    def after(self, delay: float, call: Callable[..., Any], *args: Any) -> None:
        """Call a function after *delay* seconds; an exception in it ends the run."""
        self.loop.call_at(self.loop.now + delay, self._call, call, args, context=self.root)

    def _call(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            call(*args)
        except Exception as exc:
            self.fail(exc)

    def fail(self, exc: BaseException) -> None:
        """End the run with the first violation, or with an error of the simulation itself."""
        if self.violation is None and not self.over:
            self.violation = exc
            self.note("oracle", f"{type(exc).__name__}: {exc}")

    # --- effects ---

    def create(
        self, actor: str, name: str, body: bytes, metadata: Mapping[str, str] | None
    ) -> bool:
        if not result_of(self.store.create(name, body, metadata)):
            self.note(actor, f"create {short(name)}: exists")
            return False
        self.note(actor, f"create {short(name)}{described(name, body, metadata)}")
        self.appended[name] = self.loop.now
        self.oracle.created(actor, name, body, dict(metadata or {}))
        return True

    def replace(self, actor: str, name: str, body: bytes, generation: int) -> int:
        replaced: int = result_of(self.store.replace(name, body, generation=generation))
        self.note(actor, f"replace {short(name)}{described(name, body, None)}")
        self.oracle.replaced(actor, name, body)
        return replaced

    def delete(self, actor: str, names: Collection[str]) -> None:
        existing = {info.name for info in result_of(self.store.list(""))}
        for name in names:
            if name in existing:
                self.note(actor, f"delete {short(name)}")
                result_of(self.store.delete([name]))
                self.oracle.deleted(actor, name)


def result_of(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


def short(name: str) -> str:
    return name.split("/", 2)[-1] if name.startswith("batches/") else name


def described(name: str, body: bytes, metadata: Mapping[str, str] | None) -> str:
    if name.endswith("claim"):
        return f" by {(metadata or {})['executor']}"
    if name.endswith("outcome"):
        outcome = wire.Outcome.parse((metadata or {})["header"])
        return f" = {outcome.kind} ({outcome.reason or outcome.phase}) of {outcome.executor}"
    if "/control/" in name or name.endswith("/lease"):
        return f" {body.decode()}"
    return f" {dict(metadata)}" if "/inputs/" in name and metadata else ""


# --- the connections of a party ---------------------------------------------------------


class Gate:
    """The connection of one party to the store and the platform."""

    def __init__(self, world: World, party: str) -> None:
        self.world = world
        self.party = party
        self.cut = False
        self._nonce = 0

    async def send(self, request: str, effect: Callable[[], Any], *, again: bool = True) -> Any:
        """Make a request; with *again*, repeat it if the reply is lost."""
        world, loop, rng = self.world, self.world.loop, self.world.rng
        if world.over:
            raise Unavailable("the simulation is over")
        future: asyncio.Future[Any] = loop.create_future()
        delay = rng.random() * 0.02
        if world.hits("slow"):
            delay += rng.random() * 5
        elif world.hits("late"):
            delay += rng.random() * 90
        elif request.startswith("launch") and world.hits("late_launch"):
            delay += 30 + rng.random() * 60
        if self.cut or world.hits("down"):
            if self.cut and rng.random() < 0.3:
                world.after(delay, self._arrive, request, effect, None)
            world.note(self.party, f"{request}: no answer")
            world.after(delay + (5.0 if self.cut else 0.0), _fail, future, request)
        elif world.hits("gave_up"):
            world.after(delay + rng.random() * 30, self._arrive, request, effect, None)
            world.note(self.party, f"{request}: given up")
            world.after(delay + 1.0, _fail, future, request)
        elif again and world.hits("lost"):
            world.note(self.party, f"{request}: reply lost, sent again")
            world.after(delay, self._arrive, request, effect, None)
            world.after(delay + 1.0 + rng.random() * 3, self._arrive, request, effect, future)
        else:
            world.after(delay, self._arrive, request, effect, future)
        return await future

    def _arrive(
        self, request: str, effect: Callable[[], Any], future: asyncio.Future[Any] | None
    ) -> None:
        outcome: Any = None
        error: Exception | None = None
        try:
            outcome = effect()
        except Violation:
            raise
        except Exception as exc:
            error = exc
        if future is not None:
            delay = self.world.rng.random() * 0.02
            if request.startswith("find") and self.world.hits("late_answer"):
                delay += self.world.rng.random() * 4
            self.world.after(delay, _reply, future, outcome, error)

    def nonce(self) -> str:
        self._nonce += 1
        return f"{self.party}-{self._nonce}"


def _fail(future: asyncio.Future[Any], request: str) -> None:
    if not future.done():
        future.set_exception(Unavailable(f"{request}: 503"))


def _reply(future: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)


class PartyStore:
    """`kinetic.aio.ports.Store`, as one party reaches it."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.world = gate.world
        self.party = gate.party

    @property
    def url(self) -> str:
        return "memory:"

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
    ) -> bool:
        content = body if isinstance(body, bytes) else body.read_bytes()
        nonces, nonce = self.world.nonces, self.gate.nonce()

        def effect() -> bool:
            if self.world.behavior.create(self, name, content, metadata):
                nonces[name] = nonce
                return True
            return nonces.get(name) == nonce  # the repeated request finds its own object

        return bool(await self.gate.send(f"create {short(name)}", effect))

    async def begin(self, name: str, body: bytes) -> int | None:
        return 1 if await self.create(name, body) else None

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        def effect() -> int:
            return int(self.world.behavior.replace(self, name, body, generation))

        return int(await self.gate.send(f"replace {short(name)}", effect, again=False))

    async def get(self, name: str, **where: Any) -> Object:
        found: Object = await self.gate.send(
            f"get {short(name)}", lambda: self.world.behavior.get(self, name)
        )
        if "/control/" in name:
            self.world.oracle.was_read(self.party, int(name.rpartition("/")[2]))
        return found

    async def fetch(self, name: str, path: Path) -> None:
        found = await self.get(name)
        path.write_bytes(found.body)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return await self.gate.send(
            f"list {short(prefix)}", lambda: self.world.behavior.list(self, prefix)
        )

    async def look(self, name: str) -> ObjectInfo | None:
        if name.startswith(("code/", "functions/")):  # not part of the protocol
            return ObjectInfo(name=name, size=0, metadata={}, generation=1, used=time.time())
        return next((info for info in await self.list(name) if info.name == name), None)

    async def renew(self, names: Collection[str]) -> set[str]:
        return set()

    async def delete(self, names: Collection[str]) -> None:
        # A collection deletes one by one, because others may see it half done, or it may crash.
        chunks = [[name] for name in names] if self.world.oracle.collected else [[*names]]
        for chunk in chunks:
            effect = functools.partial(self.world.behavior.delete, self, chunk)
            await self.gate.send(f"delete {len(chunk)} objects", effect)

    async def aclose(self) -> None: ...


class PartyImages:
    """`kinetic.aio.ports.Images` whose images always exist."""

    async def resolve(self, request: ImageRequest) -> Image:
        return Image(uri="", command=())

    async def aclose(self) -> None: ...


class PartyCluster:
    """`kinetic.aio.ports.Cluster` and `Workers`, as one party reaches them."""

    shows_items = True
    replaces = True

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.world = gate.world
        self.party = gate.party

    async def launch(self, job: JobSpec) -> None:
        world, order = self.world, job.order
        world.note(self.party, f"asks for {order.index}.{order.attempt}")
        try:
            world.oracle.decided(self.party, order.index, order.attempt)
        except Violation as exc:
            world.fail(exc)
        await self.gate.send(
            f"launch {order.index}.{order.attempt}",
            lambda: world.cluster.launch(self.party, job),
        )

    async def delete(
        self, *, names: Collection[str] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        fixed_names, selected = tuple(names), self.world.behavior.selected(labels)
        await self.gate.send(
            "delete jobs", lambda: self.world.cluster.delete(self.party, fixed_names, selected)
        )

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        fixed_names = tuple(names)
        self.world.behavior.asked(self, fixed_names)
        found: list[Observation] = await self.gate.send(
            "find jobs", lambda: self.world.cluster.find(fixed_names, labels)
        )
        return [self.world.behavior.observed(self, seen) for seen in found]

    async def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        platform = self.world.cluster
        watch = Watch(dict(labels))
        known: set[str] = set()
        while True:
            listed: list[Observation] = await self.gate.send(
                "watch", lambda: platform.subscribe(watch)
            )
            try:
                for gone in sorted(known - {seen.name for seen in listed}):
                    yield Observation(name=gone, phase=Phase.GONE, labels=watch.labels_of[gone])
                known = set()
                for seen in listed:
                    known.add(seen.name)
                    watch.labels_of[seen.name] = seen.labels
                    yield self.world.behavior.observed(self, seen)
                while not self.gate.cut:
                    change = await watch.queue.get()
                    if change is None:
                        break  # the connection broke: list and watch again
                    known -= {f"{change.name}-{index}-{number}" for index, number in change.ended}
                    if change.ended:
                        yield self.world.behavior.observed(self, change)
                        continue
                    known.add(change.name)
                    watch.labels_of[change.name] = change.labels
                    if change.phase is Phase.GONE:
                        known.discard(change.name)
                    yield self.world.behavior.observed(self, change)
            finally:
                platform.watches.pop(watch, None)

    def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        return self._logs(name)

    async def _logs(self, name: str) -> AsyncIterator[str]:
        for line in ():
            yield line

    async def scale(self, job: JobSpec, crew: Crew, *, number: int, ranks: range) -> int:
        return await self._ask_crews(
            f"scale round {number}",
            lambda crews: crews.scale(self.party, job, crew, number, ranks.stop),
        )

    async def grow(self, name: str, workers: int) -> int:
        return await self._ask_crews(
            f"grow {name}", lambda crews: crews.grow(self.party, name, workers)
        )

    async def extend(self, name: str, seconds: float) -> None:
        """Do nothing: only the workers themselves limit their time."""

    async def tell(self, labels: Mapping[str, str]) -> None:
        await self._ask_crews("tell", lambda crews: crews.tell(labels))

    async def _ask_crews(self, request: str, effect: Callable[[Crews], Any]) -> Any:
        crews = self.world.crews
        assert crews is not None
        return await self.gate.send(request, lambda: effect(crews))

    def worker_log(
        self, worker: str, start: int, stop: int, *, tail: int | None = None
    ) -> AsyncIterator[str]:
        return self._logs(worker)

    def item_log(self, worker: str, marks: tuple[str, str], **_: Any) -> AsyncIterator[str]:
        return self._logs(worker)

    async def root_key(self) -> bytes:
        return ROOT

    async def keep_secret(self, name: str, content: bytes) -> None:
        await self.gate.send("keep secret", lambda: self.world.secrets.__setitem__(name, content))

    async def secret(self, name: str) -> bytes:
        def effect() -> bytes:
            if name not in self.world.secrets:
                raise NotFound(f"there is no secret {name}")
            return self.world.secrets[name]

        return await self.gate.send("secret", effect)

    async def drop_secret(self, names: Collection[str]) -> None:
        fixed_names = [*names]
        await self.gate.send(
            "drop secret", lambda: [self.world.secrets.pop(name, None) for name in fixed_names]
        )

    async def finish(self, name: str, fence: int) -> None:
        await self.gate.send("finish", lambda: None)

    async def aclose(self) -> None: ...


class Watch:
    """The notifications that one party gets; they may come in another order or repeatedly."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self.labels_of: dict[str, Mapping[str, str]] = {}
        self.queue: asyncio.Queue[Observation | None] = asyncio.Queue()


# --- the platform --------------------------------------------------------------------------


TTL_S = 3600.0
"""Seconds after which the platform removes a job that took the name of an earlier one."""


@dataclass(eq=False)
class Job:
    """One job of the platform, as the platform sees it."""

    spec: JobSpec
    pods: list[Pod] = field(default_factory=list)
    expected: int = 1  # pods that the platform has yet to create
    ended: Observation | None = None
    deleting: bool = False
    again: bool = False  # an earlier job had the same name

    @property
    def order(self) -> wire.Order:
        return self.spec.order

    @property
    def key(self) -> tuple[int, int]:
        return self.order.index, self.order.attempt


class Platform:
    """The jobs by name, their pods, and the watches."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.jobs: dict[str, Job] = {}
        self.names = set[str]()
        self.watches: dict[Watch, None] = {}
        self.pods_created = 0

    def launch(self, party: str, spec: JobSpec) -> None:
        world = self.world
        if spec.name in self.jobs:
            world.note("platform", f"job {spec.name} exists")
            return
        job = self.jobs[spec.name] = Job(spec, again=spec.name in self.names)
        self.names.add(spec.name)
        world.note("platform", f"job {job.key} made for {party}")
        world.oracle.launched(party, *job.key)
        self.report(job)
        if world.hits("never"):
            world.after(world.rng.random() * 20, self._fail_unstarted, job)
            return
        world.after(world.rng.random() * 2, self._start_pod, job)
        if world.hits("twice"):
            job.expected = 2
            world.after(world.rng.random() * 6, self._start_pod, job)

    def _fail_unstarted(self, job: Job) -> None:
        if self.jobs.get(job.spec.name) is job and job.ended is None:
            job.expected = 0
            self._end(job, reason=Reason.IMAGE_PULL, message="there is no such image")

    def _start_pod(self, job: Job) -> None:
        job.expected -= 1
        if self.jobs.get(job.spec.name) is not job or job.deleting or job.ended is not None:
            return
        self.pods_created += 1
        pod = Pod(self.world, job, f"pod-{job.key[0]}.{job.key[1]}-{self.pods_created}")
        job.pods.append(pod)
        self.report(job)
        pod.step()
        world = self.world
        if world.hits("dies"):
            world.after(world.rng.random() * 8, self.die, pod)
        elif world.hits("zombie"):
            world.after(world.rng.random() * 8, self.cut_off, pod)
        elif world.hits("preempted"):
            world.after(world.rng.random() * 8, self.preempt, pod)

    def die(self, pod: Pod) -> None:
        if pod.alive:
            self.world.note(pod.executor, "dies")
            pod.alive = False
            self.world.after(self.world.rng.random() * 3, self.pod_over, pod, -9, Reason.LOST)

    def cut_off(self, pod: Pod) -> None:
        """Disconnect its node: the platform reports the pod gone, but it keeps running."""
        if pod.alive and not pod.reported:
            self.world.note(pod.executor, "is cut off, but keeps running")
            self.pod_over(pod, None, Reason.NODE_LOST)

    def preempt(self, pod: Pod) -> None:
        if pod.alive and not pod.reported:
            self.world.note(pod.executor, "is preempted")
            pod.reason = Reason.PREEMPTED
            pod.terminate(self.world.rng.random() * 10)

    def pod_over(self, pod: Pod, code: int | None, reason: Reason | None) -> None:
        """Report that a pod has ended, whether or not this is true."""
        if pod.reported:
            return
        pod.reported, pod.code = True, code
        pod.reason = pod.reason or reason
        job = pod.job
        self.world.oracle.reported.add(job.key)
        if self.jobs.get(job.spec.name) is not job:
            return
        if job.expected > 0 or not all(other.reported for other in job.pods):
            self.emit(self._observation(job, Phase.ENDED, pod))  # for this pod alone
            return
        if job.deleting:
            self._remove(job)
            return
        only = pod if len(job.pods) == 1 else None
        self._end(job, pod=only, code=code, reason=pod.reason if code != 0 else None)

    def _end(
        self,
        job: Job,
        *,
        pod: Pod | None = None,
        code: int | None = None,
        reason: Reason | None = None,
        message: str = "",
    ) -> None:
        job.ended = self._observation(job, Phase.ENDED, pod, code, reason, message)
        self.world.note("platform", f"job {job.key} has ended ({code}, {reason})")
        self.world.oracle.ended(*job.key)
        self.report(job)
        if self.world.hits("removed"):
            self.world.after(self.world.rng.random() * 20, self._expire, job)
        elif job.again:  # only its removal, not its end, proves that the claimant has ended
            self.world.after(TTL_S, self._expire, job)

    def _expire(self, job: Job) -> None:
        if self.jobs.get(job.spec.name) is job:
            self.world.note("platform", f"job {job.key} expires")
            self._remove(job)

    def _remove(self, job: Job) -> None:
        del self.jobs[job.spec.name]
        self.world.oracle.ended(*job.key)
        self.emit(self._observation(job, Phase.GONE, None))

    def _observation(
        self,
        job: Job,
        phase: Phase,
        pod: Pod | None,
        code: int | None = None,
        reason: Reason | None = None,
        message: str = "",
    ) -> Observation:
        return Observation(
            name=job.spec.name,
            phase=phase,
            labels=job.spec.labels,
            executor=pod.executor if pod is not None else "",
            exit_code=pod.code if pod is not None and code is None else code,
            reason=pod.reason if pod is not None and reason is None else reason,
            message=message,
        )

    def observe(self, job: Job) -> Observation:
        """Return what the platform reports about a job now."""
        if job.ended is not None:
            return job.ended
        alive = [pod for pod in job.pods if not pod.reported]
        if alive:
            return self._observation(job, Phase.RUNNING, alive[0])
        return self._observation(job, Phase.PENDING, None)

    def _matching(self, names: Collection[str], labels: Mapping[str, str] | None) -> list[Job]:
        return [
            job
            for name, job in self.jobs.items()
            if name in names or (labels is not None and labels.items() <= job.spec.labels.items())
        ]

    def find(self, names: Collection[str], labels: Mapping[str, str] | None) -> list[Observation]:
        crews = self.world.crews
        found = [] if crews is None else crews.matching(names, labels)
        return found + [self.observe(job) for job in self._matching(names, labels)]

    def delete(self, party: str, names: Collection[str], labels: Mapping[str, str] | None) -> None:
        if self.world.crews is not None:
            self.world.crews.delete(party, names, labels)
        for job in self._matching(names, labels):
            if job.deleting:
                continue
            job.deleting = True
            job.expected = 0
            self.world.note("platform", f"job {job.key} is deleted for {party}")
            self.world.oracle.job_deleted(party, *job.key)
            self.world.oracle.ended(*job.key)
            running = [pod for pod in job.pods if not pod.reported]
            if not running:
                self._remove(job)
            for pod in running:
                pod.reason = pod.reason or Reason.CANCELLED
                pod.terminate(self.world.rng.random() * 25)

    # --- watching ---

    def subscribe(self, watch: Watch) -> list[Observation]:
        self.watches[watch] = None
        while not watch.queue.empty():
            watch.queue.get_nowait()
        return self.find((), watch.labels)

    def report(self, job: Job) -> None:
        self.emit(self.observe(job))

    def emit(self, seen: Observation) -> None:
        """Send what the platform shows of a job to those who watch it."""
        world = self.world
        for watch in tuple(self.watches):
            if not watch.labels.items() <= seen.labels.items():
                continue
            delay = 0.0
            if world.hits("shaky_watch"):
                delay = world.rng.random() * 10
                if world.rng.random() < 0.3:
                    world.after(delay + 1, watch.queue.put_nowait, seen)  # twice
                if world.rng.random() < 0.2:
                    world.after(delay, watch.queue.put_nowait, None)  # the connection breaks
                    continue
            world.after(delay, watch.queue.put_nowait, seen)


class Pod:
    """One process of a job: it executes the runner's steps, with pauses between them."""

    def __init__(self, world: World, job: Job, executor: str) -> None:
        self.world = world
        self.job = job
        self.executor = executor
        self.alive = True
        self.reported = False  # whether the platform has reported its end
        self.code: int | None = None
        self.reason: Reason | None = None
        self.label = ""
        self.waited = 0.0
        self._stopping = Stopping()
        self.order = job.order
        self.objects = PodObjects(self)
        self.value: Any = None
        runner = world.behavior.runner(
            self.order, job.spec.key, executor, self.objects, self._stopping, self._call_function
        )
        self._steps = runner.steps()

    def step(self) -> None:
        """Execute the next step, and schedule the one after it."""
        if not self.alive or self.world.over:
            return
        try:
            self.label = next(self._steps)
        except StopIteration as end:
            self._exit(end.value)
            return
        except (OSError, KeyError) as exc:
            self.world.note(self.executor, f"crashes: {exc!r}")
            self._exit(1)
            return
        self._wait()

    def _wait(self) -> None:
        world, rng = self.world, self.world.rng
        if self.label == "wait":  # another pod has the attempt
            name = wire.attempt_key(
                self.order.scope, self.order.index, self.order.attempt, "outcome"
            )
            if self._stopping.requested or self.objects.exists(name):
                world.after(0.1, self.step)
            elif self.waited >= attempt.OUTCOME_WAIT_S:
                self._exit(wire.EXIT_FINAL)
            else:
                self.waited += 10.0
                world.after(10.0, self._keep_waiting)
            return
        if self.label == "run":
            self._start()
            duration = rng.random() * 90 if rng.random() < 0.05 else rng.random() * 4
            world.after(duration, self.step)
            return
        pause = rng.random() * 60 if not world.calm and rng.random() < 0.02 else 0.0
        world.after(rng.random() * 0.05 + pause, self.step)

    def _keep_waiting(self) -> None:
        if self.alive:
            self._wait()

    def _start(self) -> None:
        order = self.order
        content, _ = self.objects.get(
            order.arguments.name, order.arguments.start, order.arguments.stop
        )
        args, _ = pickles.load(content)
        self.value = args[0]
        self.world.note(self.executor, f"runs {order.index}.{order.attempt} with {self.value!r}")
        self.world.oracle.started(
            self.executor, order.index, order.attempt, self.value, self.objects.checked
        )

    def _call_function(self, arguments: bytes) -> tuple[wire.Outcome, Spooled]:
        """Return the outcome of the user's code; the seed decides how it ends."""
        if self._stopping.requested:
            text = outcomes.ErrorText(qualname="kinetic.Stopped", message="stopped", traceback="")
            return self._outcome(wire.Kind.ERROR, "preempted"), outcomes.encode_error(text, None)
        if self.world.rng.random() < self.world.odds.errors:
            text = outcomes.ErrorText(qualname="ValueError", message="no", traceback="")
            return self._outcome(wire.Kind.ERROR, "user error"), outcomes.encode_error(text, None)
        value = {"input": self.value, "by": self.executor}
        return self._outcome(wire.Kind.VALUE, ""), outcomes.encode_value(value, Path("unused"))

    def _outcome(self, kind: wire.Kind, reason: str) -> wire.Outcome:
        return wire.Outcome(
            kind=kind,
            reason=reason,
            executor=self.executor,
            fence=self.order.fence,
            phase="execute",
            started=0.0,
            ended=3600.0,
        )

    def terminate(self, grace: float) -> None:
        """Send SIGTERM now, and SIGKILL after *grace* seconds."""
        self._stopping.requested = True
        if self.label in ("run", "wait") and self.world.rng.random() < 0.8:
            self.world.after(0.05, self._interrupt, self.label)
        self.world.after(grace, self._kill)

    def _interrupt(self, label: str) -> None:
        if self.alive and self.label == label:
            self.step()

    def _kill(self) -> None:
        if self.alive:
            self.world.note(self.executor, "is killed")
            self.alive = False
            self.world.cluster.pod_over(self, -9, self.reason)

    def _exit(self, code: int) -> None:
        self.alive = False
        self.world.note(self.executor, f"exits with {code}")
        self.world.after(
            self.world.rng.random() * 0.2, self.world.cluster.pod_over, self, code, None
        )


class PodObjects:
    """The store as a pod reaches it: the methods of `DirectoryObjects`, without delays."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.world = pod.world
        self.checked: tuple[int, str] = (0, "the runner hasn't checked the store")
        """The number of requests that the runner read, and why the attempt must not run then."""

    def create(
        self,
        name: str,
        body: bytes,
        metadata: Mapping[str, str] | None = None,
        *,
        consume: bool = False,
    ) -> bool:
        pod = self.pod
        lost = self.world.hits("uncommitted")
        if lost and self.world.rng.random() < 0.5:
            raise OSError(5, "the store doesn't answer")
        created = bool(self.world.behavior.create(self, name, body, metadata))
        if not created and name.endswith("outcome") and not self._is_own(name):
            self.world.oracle.refused(
                pod.executor, pod.order.index, pod.order.attempt, zombie=pod.reported
            )
        if lost:
            raise OSError(5, "the store doesn't answer any more")
        return created

    def _is_own(self, name: str) -> bool:
        """Tell whether this pod committed the outcome before, and the reply was lost."""
        try:
            header = result_of(self.world.store.get(name)).metadata["header"]
        except NotFound:
            return False
        outcome = wire.Outcome.parse(header)
        return outcome.executor == self.pod.executor and outcome.phase != "lost"

    @property
    def party(self) -> str:
        return self.pod.executor

    def exists(self, name: str) -> bool:
        return name in {info.name for info in self.list(name)}

    def stat(self, name: str) -> ObjectInfo:
        for info in self.list(name):
            if info.name == name:
                return info
        raise KeyError(name)

    def list(self, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = self.world.behavior.list(self, prefix)
        if "/control/" in prefix:
            order = self.pod.order
            self.checked = len(found), self.world.oracle.objection(order.index, order.attempt)
        return found

    def look_up(self, names: Collection[str]) -> list[ObjectInfo]:
        return [info for name in names for info in self.list(name) if info.name == name]

    def get(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        try:
            found = self.world.behavior.get(self, name)
        except NotFound:
            raise KeyError(name) from None
        return found.body[start:stop], found.metadata

    def delete(self, names: Collection[str]) -> None:
        self.world.behavior.delete(self, [*names])


Caller = PartyStore | PodObjects | PodStore


class Behavior:
    """How the world answers: truthfully. A mutation overrides some answers."""

    world: World
    Attempt = attempt.Attempt
    Opening = Opening

    def runner(self, *parts: Any) -> attempt.Attempt:
        runner = self.Attempt(*parts)
        runner._opening = self.Opening(*parts[:4])
        return runner

    def create(
        self,
        caller: Caller,
        name: str,
        body: bytes,
        metadata: Mapping[str, str] | None,
    ) -> bool:
        return caller.world.create(caller.party, name, body, metadata)

    def replace(self, caller: PartyStore, name: str, body: bytes, generation: int) -> int:
        return caller.world.replace(caller.party, name, body, generation)

    def get(self, caller: Caller, name: str) -> Object:
        return result_of(caller.world.store.get(name))

    def list(self, caller: Caller, prefix: str) -> list[ObjectInfo]:
        return result_of(caller.world.store.list(prefix))

    def delete(self, caller: Caller, names: list[str]) -> None:
        caller.world.delete(caller.party, names)

    def observed(self, caller: PartyCluster, seen: Observation) -> Observation:
        return seen

    def selected(self, labels: Mapping[str, str] | None) -> Mapping[str, str] | None:
        """Return the labels that select the jobs which a party deletes."""
        return labels

    def asked(self, caller: PartyCluster, names: tuple[str, ...]) -> None:
        """Do something when a party asks the platform about these jobs."""


__all__ = [
    "PARTY",
    "Behavior",
    "Gate",
    "Odds",
    "PartyCluster",
    "PartyImages",
    "PartyStore",
    "World",
]
