"""A fake cluster for tests: each job, and each item of a batch, is a task of the event loop.

The test supplies the coroutine that each of them runs.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import traceback
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio

from kinetic._runner.protocol import outcomes
from kinetic._runner.protocol.workers import EXIT_DONE, EXIT_SURPLUS, WorkerId
from kinetic.aio.ports import ItemOutput, JobSpec, Observation, Phase, Store
from kinetic.errors import LaunchError, NotFound, Unavailable
from kinetic.job_status import Reason
from kinetic.testing.workers import Items, MemoryWorker

if TYPE_CHECKING:
    from anyio.abc import ByteStream


EXIT_SOFTWARE = 70
"""The exit code of a job whose coroutine raised an exception; the local platform has the same."""

REPLACED_S = 0.1
"""How long after the end of a worker its replacement starts, in seconds."""

MOST_WORKERS = 100
"""How many workers a round has at most: each of them looks at the store every few seconds."""

EXIT_TERMINATED = -15
"""The exit code of a job that ends when it is asked to."""


class Run:
    """One job, for the coroutine that carries it out.

    ``executor`` is the run's ID in claims, outcomes, and observations. ``worker`` is the worker
    that runs the item, as in outcomes; empty for a single job. ``cause`` is why the cluster asked
    the job to end; None if it didn't ask.
    """

    def __init__(self, spec: JobSpec, store: Store, executor: str, worker: str = "") -> None:
        self.spec = spec
        self.store = store
        self.executor = executor
        self.worker = worker
        self.cause: Reason | None = None
        self._lines: list[str] = []
        self._wakeup = asyncio.Event()

    def print(self, text: str) -> None:
        """Add *text* to the job's log: one line, or several."""
        self._lines += text.split("\n")
        self._wakeup.set()

    async def lines(self, tail: int | None, ended: Callable[[], bool]) -> AsyncGenerator[str]:
        """Yield the last *tail* lines of the log (None: all), then new lines until *ended*."""
        position = 0 if tail is None else max(0, len(self._lines) - tail)
        while True:
            while position < len(self._lines):
                position += 1
                yield self._lines[position - 1]
            if ended():
                return
            self._wakeup.clear()
            await self._wakeup.wait()

    def wake(self) -> None:
        """Wake the readers of the log, which then see that the job has ended."""
        self._wakeup.set()


Work = Callable[[Run], Coroutine[Any, Any, int | None]]


@dataclass
class _Round:
    """A round of workers; ``over`` once one has said that every item is final."""

    spec: JobSpec
    number: int
    job: str
    size: int = 0
    over: bool = False


class _Job:
    """A job of the cluster: its state, its task, and its timers.

    A *worker* works for the *round*. An item has *death*, which says how its task has ended.
    """

    def __init__(self, observation: Observation, run: Run) -> None:
        self.observation = observation
        self.run = run
        self.round: _Round | None = None
        self.worker: MemoryWorker | None = None
        self.death: asyncio.Future[outcomes.Death] | None = None
        self.task: asyncio.Task[int | None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.deleted = False
        self.gone = asyncio.Event()

    def has_labels(self, labels: Mapping[str, str]) -> bool:
        return labels.items() <= self.observation.labels.items()

    @property
    def ended(self) -> bool:
        return self.observation.phase in (Phase.ENDED, Phase.GONE)


class MemoryCluster:
    """A fake `kinetic.aio.ports.Cluster` with workers, in one event loop.

    ``requests`` counts calls by method.

    Jobs are coroutines, not processes: they share this interpreter, ``os.environ``, and the
    working directory. They live as long as the loop; `aclose` doesn't end them. A deletion or a
    timeout cancels the job's task, and cancels it again after the grace period.

    Args:
        store: Where jobs find their objects.
        work: The coroutine of every job, and of every item of a batch: it gets a `Run` and returns
            the exit code, None for 0.
        slots: How many jobs and workers run at once; further ones wait in order. Default: any
            number.
        key: The root key. Clusters that share a store need the same key. Default: a random key.
        replaces: Whether the cluster replaces workers that died. Otherwise each worker takes one
            item at most, like a set of hosts.

    Example::

        cluster = MemoryCluster(MemoryStore(), carry_out, slots=2)
    """

    shows_items = True

    def __init__(
        self,
        store: Store,
        work: Work,
        *,
        slots: int | None = None,
        key: bytes = b"",
        replaces: bool = True,
    ) -> None:
        self.replaces = replaces
        self.requests: Counter[str] = Counter()
        self._store = store
        self._work = work
        self._slots = slots
        self._jobs: dict[str, _Job] = {}
        self._rounds: dict[str, _Round] = {}
        self._queue: deque[_Job] = deque()
        self._running = 0
        self._watches: dict[asyncio.Queue[Observation], Mapping[str, str]] = {}
        self._numbers = itertools.count(1)
        self._secrets: dict[str, bytes] = {}
        self._key = key or os.urandom(32)

    # --- the port ---

    async def launch(self, job: JobSpec) -> None:
        """Implement `Cluster.launch`; wait if a job of this name is being deleted."""
        self.requests["launch"] += 1
        if not job.name:
            raise LaunchError("a job's name can't be empty", reason="order")
        if (present := self._jobs.get(job.name)) is not None:
            if not present.deleted:
                return
            await present.gone.wait()
            if job.name in self._jobs:
                return  # another caller waited for the same name
        self._begin(job)

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        """Implement `Workers.scale`."""
        self.requests["scale"] += 1
        if job.name not in self._rounds:
            self._rounds[job.name] = _Round(job, number, f"m{next(self._numbers)}")
        if self.replaces:
            return await self.grow(job.name, ranks.stop)
        for rank in ranks:
            life = replace(self._rounds[job.name], job=f"m{next(self._numbers)}")
            self._begin_worker(life, rank, 0)
        return ranks.stop

    async def grow(self, name: str, workers: int) -> int:
        """Implement `Workers.grow`."""
        self.requests["grow"] += 1
        found = self._rounds.get(name)
        if found is None or found.over or not self.replaces:
            return 0
        first, found.size = found.size, max(found.size, min(workers, MOST_WORKERS))
        for rank in range(first, found.size):
            self._begin_worker(found, rank, 0)
        return found.size

    async def extend(self, name: str, seconds: float) -> None:
        """Implement `Workers.extend`: a round has no deadline."""

    async def tell(self, labels: Mapping[str, str]) -> None:
        """Implement `Workers.tell`."""
        self.requests["tell"] += 1
        for job in self._select((), labels):
            if job.worker is not None:
                job.worker.tell()

    async def item_log(self, place: ItemOutput, **options: object) -> AsyncGenerator[str]:
        """Implement `Workers.item_log`: `logs` has the lines of each item."""
        if place.worker:
            raise NotFound(f"{place.worker} has no log of its own")
        yield ""

    async def delete(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        keep_logs: bool = False,
    ) -> None:
        """Implement `Cluster.delete`; a log ends with its job."""
        self.requests["delete"] += 1
        for job in self._select(names, labels):
            if job.task is None or job.ended:
                self._forget(job)
            elif not job.deleted:
                job.deleted = True
                if job.death is None:
                    self._request_end(job, Reason.CANCELLED)
                else:  # its worker finds the request that stops it
                    self._tell_worker(job.run.executor)

    async def find(
        self,
        *,
        names: Collection[str] = (),
        labels: Mapping[str, str] | None = None,
        explained: bool = False,
    ) -> list[Observation]:
        """Implement `Cluster.find`; without *names* and *labels*, return all jobs."""
        self.requests["find"] += 1
        everything = not names and labels is None
        return [job.observation for job in self._select(names, {} if everything else labels)]

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Implement `Cluster.watch`."""
        self.requests["watch"] += 1
        changes: asyncio.Queue[Observation] = asyncio.Queue()
        for job in self._select((), labels):
            changes.put_nowait(job.observation)
        self._watches[changes] = labels
        try:
            while True:
                yield await changes.get()
        finally:
            del self._watches[changes]

    async def logs(
        self, name: str, *, follow: bool = False, tail: int | None = None
    ) -> AsyncGenerator[str]:
        """Implement `Cluster.logs`; the lines are those of `Run.print`."""
        self.requests["logs"] += 1
        job = self._jobs.get(name)
        if job is None:
            raise NotFound(f"there is no job {name!r} in this cluster, or it was deleted")
        async for line in job.run.lines(tail, lambda: job.ended or not follow):
            yield line

    async def dial(self, name: str, port: int, *, host: int = 0) -> ByteStream:
        """Implement `Cluster.dial`; jobs listen on the loopback of this machine."""
        self.requests["dial"] += 1
        job = self._jobs.get(name)
        if host or job is None or job.observation.phase is not Phase.RUNNING:
            raise NotFound(f"no job {name!r} (host {host}) is running in this cluster")
        try:
            return await anyio.connect_tcp("127.0.0.1", port)
        except OSError as exc:
            raise Unavailable(f"{name} does not listen on port {port} ({exc})") from exc

    async def root_key(self) -> bytes:
        """Implement `Cluster.root_key`."""
        self.requests["root_key"] += 1
        return self._key

    async def keep_secret(self, name: str, content: bytes) -> None:
        """Implement `Cluster.keep_secret`."""
        self.requests["keep_secret"] += 1
        self._secrets[name] = content

    async def secret(self, name: str) -> bytes:
        """Implement `Cluster.secret`."""
        self.requests["secret"] += 1
        if name not in self._secrets:
            raise NotFound(f"there is no secret {name!r} in this cluster")
        return self._secrets[name]

    async def drop_secret(self, names: Collection[str]) -> None:
        """Implement `Cluster.drop_secret`."""
        self.requests["drop_secret"] += 1
        for name in names:
            self._secrets.pop(name, None)

    async def finish(self, name: str, fence: int) -> None:
        """Implement `Cluster.finish`; this cluster keeps nothing for a batch's processes."""
        self.requests["finish"] += 1

    async def aclose(self) -> None:
        """Do nothing; jobs keep running."""

    # --- for tests ---

    def end(
        self,
        name: str,
        *,
        exit_code: int | None = -9,
        reason: Reason | None = Reason.LOST,
        message: str = "killed by SIGKILL",
    ) -> None:
        """End a job immediately, like a platform that loses it, and cancel the job's task.

        A worker ends with its item, and is replaced. The end of an item doesn't end its worker.

        The task can still commit an outcome while it is cancelled, as `carry_out` does.

        Args:
            name: The job.
            exit_code: The exit code that the platform reports. Default: that of SIGKILL.
            reason: The reason that the platform reports. Default: lost.
            message: The message that the platform reports.

        Raises:
            KeyError: The job doesn't exist, or has ended.
        """
        job = self._jobs[name]
        if job.ended:
            raise KeyError(name)
        if job.death is None:
            self._mark_ended(job, exit_code=exit_code, reason=reason, message=message)
        elif not job.death.done():
            job.death.set_result(outcomes.Death(reason=str(reason or "lost"), message=message))
            assert job.task is not None
            job.task.cancel()

    # --- a job's life ---

    def _begin(self, spec: JobSpec) -> None:
        """Add a new job; start it if a slot is free, else start the timer of its start timeout."""
        executor = f"memory-{spec.name}-{next(self._numbers)}"
        job = self._add(Run(spec, self._store, executor), phase=Phase.PENDING)
        self._queue.append(job)
        self._start_waiting()
        if job.task is None:
            self._notify(job)
            if spec.start_timeout is not None:
                message = f"waited longer than its start_timeout of {spec.start_timeout:g} s"
                end = functools.partial(
                    self._mark_ended, job, exit_code=None, reason=Reason.UNSCHEDULABLE
                )
                self._start_timer(job, spec.start_timeout, functools.partial(end, message=message))

    def _add(self, run: Run, **fields: Any) -> _Job:
        created, spec = datetime.now(UTC).isoformat(timespec="seconds"), run.spec
        observation = Observation(
            name=spec.name, labels=dict(spec.labels), created_at=created, **fields
        )
        job = self._jobs[spec.name] = _Job(observation, run)
        return job

    def _start_waiting(self) -> None:
        while self._queue and (self._slots is None or self._running < self._slots):
            job = self._queue.popleft()
            if job.ended:
                continue
            self._stop_timer(job)
            self._running += 1
            self._update(job, phase=Phase.RUNNING, executor=job.run.executor)
            coroutine = self._work(job.run) if job.worker is None else job.worker.run()
            job.task = asyncio.get_running_loop().create_task(
                coroutine, name=f"job {job.observation.name}"
            )
            job.task.add_done_callback(functools.partial(self._on_task_done, job))
            if job.worker is None and (limit := job.run.spec.timeout) is not None:
                self._start_timer(job, limit, self._request_end, job, Reason.DEADLINE)

    # --- workers and their items ---

    def _begin_worker(self, its_round: _Round, rank: int, restarts: int) -> None:
        me = WorkerId(its_round.number, its_round.job, rank, restarts)
        name = f"{its_round.spec.name}.{its_round.job}.{rank}.{restarts}"
        run = Run(replace(its_round.spec, name=name), self._store, f"memory-{name}")
        job = self._add(run, phase=Phase.PENDING)
        job.round = its_round
        items = Items(self._begin_item, self._stop_item, self._end_item)
        job.worker = MemoryWorker(
            me, run.executor, its_round.spec, self._store, items, once=not self.replaces
        )
        self._queue.append(job)
        self._start_waiting()
        if job.task is None:
            self._notify(job)

    def _replace_worker(self, its_round: _Round, rank: int, restarts: int) -> None:
        if not its_round.over:
            self._begin_worker(its_round, rank, restarts)

    def _begin_item(
        self, spec: JobSpec, executor: str, worker: str
    ) -> asyncio.Future[outcomes.Death]:
        loop, run = asyncio.get_running_loop(), Run(spec, self._store, executor, worker)
        job = self._add(run, phase=Phase.RUNNING, executor=executor)
        job.death = death = loop.create_future()
        job.task = loop.create_task(self._work(run), name=f"item {spec.name}")
        job.task.add_done_callback(functools.partial(self._on_item_done, job))
        if spec.timeout is not None:
            self._start_timer(job, spec.timeout, self._request_end, job, Reason.DEADLINE)
        self._notify(job)
        return death

    def _on_item_done(self, job: _Job, task: asyncio.Task[int | None]) -> None:
        """Say how the item's task has ended; the worker then stores an outcome if there is none."""
        assert job.death is not None
        self._stop_timer(job)
        code = self._exit_code(job, task)
        job.observation = replace(job.observation, exit_code=code)
        if not job.death.done():
            reason = "deadline" if job.run.cause is Reason.DEADLINE else "lost"
            job.death.set_result(
                outcomes.Death(reason=reason, message=f"ended with exit code {code}")
            )

    def _tell_worker(self, executor: str) -> None:
        for job in self._jobs.values():
            if job.worker is not None and job.run.executor == executor:
                job.worker.tell()

    def _stop_item(self, name: str) -> None:
        job = self._jobs.get(name)
        if job is not None and not job.ended:
            self._request_end(job, Reason.CANCELLED)

    def _end_item(self, name: str) -> None:
        if (job := self._jobs.get(name)) is not None and not job.ended:
            code = job.observation.exit_code
            self._mark_ended(job, exit_code=code, reason=None, message=f"exit code {code}")

    def _end_worker(self, job: _Job) -> None:
        """End the items of a worker that has ended, and replace it unless it has left."""
        for other in [*self._jobs.values()]:
            is_own = other.death is not None and other.run.executor == job.run.executor
            if is_own and not other.ended:
                seen = job.observation
                self._mark_ended(
                    other, exit_code=seen.exit_code, reason=seen.reason, message=seen.message
                )
        assert job.round is not None
        if job.observation.exit_code == EXIT_DONE:
            job.round.over = True
        elif job.observation.exit_code != EXIT_SURPLUS and not job.deleted and self.replaces:
            *_, rank, restarts = job.run.spec.name.split(".")
            asyncio.get_running_loop().call_later(
                REPLACED_S, self._replace_worker, job.round, int(rank), int(restarts) + 1
            )

    def _exit_code(self, job: _Job, task: asyncio.Task[int | None]) -> int:
        if task.cancelled():
            return EXIT_TERMINATED
        if (error := task.exception()) is not None:
            job.run.print("".join(traceback.format_exception(error)).rstrip())
            return EXIT_SOFTWARE
        return task.result() or 0

    def _on_task_done(self, job: _Job, task: asyncio.Task[int | None]) -> None:
        """Mark the job as ended, with the exit code or the error of its task."""
        code = self._exit_code(job, task)
        if job.ended:
            return
        timed_out = job.run.cause is Reason.DEADLINE
        message = "ran longer than its timeout" if timed_out else f"ended with exit code {code}"
        self._mark_ended(
            job, exit_code=code, reason=Reason.DEADLINE if timed_out else None, message=message
        )

    def _request_end(self, job: _Job, cause: Reason) -> None:
        """Ask a running job to end within its grace."""
        job.run.cause = job.run.cause or cause
        assert job.task is not None
        if job.worker is not None:
            job.worker.terminate()
        else:
            job.task.cancel()
        kill = functools.partial(self._mark_ended, job, exit_code=-9, reason=job.run.cause)
        message = "killed after its grace"
        grace = job.run.spec.order.grace
        self._start_timer(job, grace, functools.partial(kill, message=message))

    def _mark_ended(
        self, job: _Job, *, exit_code: int | None, reason: Reason | None, message: str
    ) -> None:
        """Record the end of a job, cancel its task, and start the next waiting job."""
        self._stop_timer(job)
        self._update(job, phase=Phase.ENDED, exit_code=exit_code, reason=reason, message=message)
        if job.task is not None:
            self._running -= job.death is None  # an item runs in its worker's slot
            job.task.cancel()
        if job.worker is not None:
            self._end_worker(job)
        if job.deleted:
            self._forget(job)
        self._start_waiting()

    def _forget(self, job: _Job) -> None:
        self._stop_timer(job)
        del self._jobs[job.observation.name]
        self._update(job, phase=Phase.GONE)
        job.gone.set()

    def _update(self, job: _Job, **fields: object) -> None:
        job.observation = replace(job.observation, **fields)  # type: ignore[arg-type]
        self._notify(job)

    def _notify(self, job: _Job) -> None:
        """Tell watchers about the job's new state, and readers of its log about its end."""
        for changes, labels in self._watches.items():
            if job.has_labels(labels):
                changes.put_nowait(job.observation)
        if job.ended:
            job.run.wake()

    def _start_timer(
        self, job: _Job, delay: float, callback: Callable[..., None], *args: object
    ) -> None:
        self._stop_timer(job)
        job.timer = asyncio.get_running_loop().call_later(delay, callback, *args)

    def _stop_timer(self, job: _Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None

    def _select(self, names: Collection[str], labels: Mapping[str, str] | None) -> list[_Job]:
        found = {name: self._jobs[name] for name in names if name in self._jobs}
        if labels is not None:
            found |= {name: job for name, job in self._jobs.items() if job.has_labels(labels)}
        return [*found.values()]
