"""The table of a supervisor's jobs; it decides when a job starts, and how it ends.

The table does no I/O. Its methods return actions, which the supervisor carries out in order.
"""

from __future__ import annotations

import enum
import itertools
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kinetic._labels import INDEX, SUBMISSION, of_attempt
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import EXIT_SURPLUS
from kinetic._supervisor.protocol import JobHeader
from kinetic.job_status import Reason


@dataclass(frozen=True, slots=True)
class Need:
    """The CPUs and GPUs that a job asks for."""

    cpus: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """The CPUs and GPUs that a job has taken; `Slots.release` frees them."""

    cpus: int
    gpus: tuple[str, ...]


class Slots:
    """The free and taken slots of one machine; a slot is a CPU or a GPU."""

    def __init__(self, cpus: int, gpus: tuple[str, ...] = ()) -> None:
        self.cpus = max(1, cpus)
        self.gpus = gpus
        self._free_cpu_count = self.cpus
        self._free_gpu_ids = list(gpus)

    def fit(self, need: Need) -> Need:
        """Return *need*, limited to the slots that the machine has."""
        cpus = min(max(1, need.cpus), self.cpus)
        return Need(cpus, min(need.gpus, len(self.gpus)))

    def take(self, need: Need) -> Grant | None:
        """Take all that *need* asks for; if not all is free, take nothing and return None."""
        if need.cpus > self._free_cpu_count or need.gpus > len(self._free_gpu_ids):
            return None
        self._free_cpu_count -= need.cpus
        gpus, self._free_gpu_ids = self._free_gpu_ids[: need.gpus], self._free_gpu_ids[need.gpus :]
        return Grant(need.cpus, tuple(gpus))

    def release(self, grant: Grant) -> None:
        """Make the slots of *grant* free for other jobs."""
        self._free_cpu_count += grant.cpus
        self._free_gpu_ids = sorted([*self._free_gpu_ids, *grant.gpus], key=self.gpus.index)

    def describe_wait(self, need: Need) -> str:
        """Return a sentence that says which slots *need* waits for, and how many are busy."""
        if need.gpus > len(self._free_gpu_ids):
            unit, free_count, total = "GPU", len(self._free_gpu_ids), len(self.gpus)
            requested = need.gpus
        else:
            unit, free_count, total = "slot", self._free_cpu_count, self.cpus
            requested = need.cpus
        requested_slots = f"a {unit}" if requested == 1 else f"{requested} {unit}s"
        return f"waiting for {requested_slots}: {total - free_count} of {total} busy"

    @property
    def free_gpus(self) -> int:
        """How many GPUs are free."""
        return len(self._free_gpu_ids)


KEPT_S = 24 * 3600.0
"""How long the supervisor remembers an ended job; the log stays until the job is deleted."""

ENDED_JOBS_KEPT = 4096
"""How many ended jobs to remember; above that, the supervisor forgets the job that ended first.

This is safe. The store has the outcome of a job, and a second job of the same name finds the claim
of the first job. So the second job doesn't call the function again.
"""

QUEUED_S = 3.0
"""How many seconds a job is queued before the supervisor reports what it waits for."""

MAX_NAMES = 3
"""How many jobs and batches a message names as the users of busy slots."""

REPORTED_AT_ONCE = 100
"""How many jobs at the head of each queue get a message about what they wait for."""


class State(enum.StrEnum):
    """The state of a job; the values are those of `kinetic.aio.ports.Phase`."""

    QUEUED = "pending"
    RUNNING = "running"
    ENDED = "ended"
    GONE = "gone"


class Stop(enum.StrEnum):
    """Why the supervisor ends a job."""

    DELETED = "deleted"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"
    SURPLUS = "surplus"


_SHOWN = (
    "name", "labels", "created", "state", "executor", "leaving", "exit_code", "reason", "message",
    "log",
)  # fmt: skip


_MAY_BE_SECOND = (wire.EXIT_FINAL, wire.EXIT_RETRY)
"""How a process exits that finds the claim of another one for its job, among others.

A client repeats a launch that an earlier supervisor didn't answer, so a job can have two processes.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One job. ``created`` and ``ended`` are seconds since the epoch.

    A worker whose predecessor has just ended is ``resting`` before it takes its place in the queue.
    A worker that has given its slots back is ``paused``: it runs, and waits for slots in the queue.
    ``asked_back`` says that it was asked to do so after its item.
    ``item`` is what a worker runs: an entry of its own, which has the ``worker`` and takes no slot.
    ``heard`` says that a client that looks for this job has received its end.
    ``log`` says where the output of an item is: the ``worker``, the first byte in its log
    (``begin``), and the ``store`` and the name of the ``outcome``. ``keeps_log`` says
    that the log of a deleted job stays.
    ``started`` is a time of the monotonic clock. ``leaving`` says that the function has ended and
    the outcome is stored, while the process still runs and has its slots.
    """

    name: str
    labels: Mapping[str, str]
    created: float
    header: JobHeader
    body: bytes = b""
    state: State = State.QUEUED
    need: Need = field(default_factory=lambda: Need(1))
    grant: Grant | None = None
    executor: str = ""
    leaving: bool = False
    stopping: Stop | None = None
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    started: float = 0.0
    ended: float = 0.0
    heard: bool = False
    resting: bool = False
    paused: bool = False
    asked_back: bool = False
    worker: Job | None = None
    item: Job | None = None
    log: Mapping[str, Any] | None = None
    keeps_log: bool = True

    def view(self) -> dict[str, Any]:
        """Return the description of the job for clients."""
        view = {name: getattr(self, name) for name in _SHOWN}
        if self.exit_code in _MAY_BE_SECOND and INDEX in self.labels:
            view["executor"] = ""  # the process that has claimed the job has ended in any case
        return view

    def has_labels(self, labels: Mapping[str, str]) -> bool:
        """Return whether the job has all of *labels*."""
        return labels.items() <= self.labels.items()


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Signal the job's main process."""

    job: Job
    signal_number: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Replace the job's timer: call `Table.handle_timer` after ``delay`` seconds. None: never."""

    job: Job
    delay: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Send the changed job to the clients that watch it."""

    job: Job


@dataclass(frozen=True, slots=True)
class RemoveLog:
    """Remove the log of a job that was removed."""

    name: str


Action = SendSignal | SetTimer | Report | RemoveLog


class Queue:
    """Jobs that wait for slots: their submissions take turns, each with its jobs in order."""

    def __init__(self) -> None:
        self._turns: dict[str, deque[Job]] = {}  # the submission whose turn is next comes first

    def append(self, job: Job) -> None:
        """Add *job* as the last one of its submission."""
        self._turns.setdefault(_submission(job), deque()).append(job)

    def first(self) -> Job | None:
        """Return the next job; drop those that don't wait any more."""
        while self._turns:
            submission, jobs = next(iter(self._turns.items()))
            while jobs and not _waits(jobs[0]):
                jobs.popleft()
            if jobs:
                return jobs[0]
            del self._turns[submission]
        return None

    def take(self, job: Job) -> None:
        """Remove the first job; the turn goes to the next submission."""
        jobs = self._turns.pop(_submission(job))
        jobs.popleft()
        if jobs:
            self._turns[_submission(job)] = jobs

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs that wait, by their submissions."""
        return (job for jobs in self._turns.values() for job in jobs if _waits(job))

    def submissions(self) -> set[str]:
        """Return the first submissions that have a waiting job, two at most."""
        waiting = (name for name, jobs in self._turns.items() if any(map(_waits, jobs)))
        return {*itertools.islice(waiting, 2)}


class Table:
    """All known jobs, and the queues for *slots*; messages name the folder *work* of all jobs."""

    def __init__(self, slots: Slots, kept_s: float = KEPT_S, work: str = "") -> None:
        self.jobs: dict[str, Job] = {}
        self.slots = slots
        self._kept_s = kept_s
        self._work = work
        self._ended_jobs: dict[str, Job] = {}  # in the order of their ends
        self._running: dict[str, Job] = {}
        self._queues = {True: Queue(), False: Queue()}  # True: needs GPUs
        self._queued_count = 0

    @property
    def busy(self) -> bool:
        """Whether a job is queued or running."""
        return bool(self._running or self._queued_count)

    @property
    def knows_unheard_end(self) -> bool:
        """Whether a job was ended by something else, and no client knows that yet."""
        return any(not job.heard for job in self._ended_jobs.values())

    @property
    def has_queued_jobs(self) -> bool:
        """Whether a job waits for its slots."""
        return self._queued_count > 0

    def add(self, job: Job, pause_s: float = 0.0) -> list[Action]:
        """Queue a new job, whose name is not in the table, after a pause."""
        job.need = self.slots.fit(Need(job.header.cpus, job.header.gpus))
        self.jobs[job.name] = job
        self._queued_count += 1
        job.resting = pause_s > 0
        if job.resting:
            return [SetTimer(job, pause_s)]
        self._queues[job.need.gpus > 0].append(job)
        return [SetTimer(job, job.header.start_timeout)]

    def take_next(self) -> Job | None:
        """Take slots for the job that starts next, and return it; None if no job can start.

        Jobs with GPUs and jobs without have separate queues, in which submissions take turns. While
        the first job with GPUs lacks a GPU, jobs without GPUs may start. While it lacks only CPUs,
        jobs without GPUs wait, so that the first job gets the next free CPUs.
        """
        for with_gpus in (True, False):
            queue = self._queues[with_gpus]
            if (job := queue.first()) is None:
                continue
            if (grant := self.slots.take(job.need)) is not None:
                queue.take(job)
                job.grant, job.paused = grant, False
                return job
            if with_gpus and job.need.gpus <= self.slots.free_gpus:
                return None
        return None

    def pause(self, job: Job) -> None:
        """Take the slots of a worker that runs no item, and queue it for new ones."""
        if job.grant is not None and job.state is State.RUNNING:
            self.slots.release(job.grant)
            job.grant, job.paused, job.asked_back = None, True, False
            self._queues[job.need.gpus > 0].append(job)

    def ask_back(self) -> list[Job]:
        """Decide which workers give their slots back after their item; return those that change.

        While a job waits, these are all workers of other submissions: any of them may be the next
        that ends an item. Workers of the submission that waits would gain it nothing.
        """
        waiting = {name for queue in self._queues.values() for name in queue.submissions()}
        changed: list[Job] = []
        for job in self._running.values():
            has_slots = bool(job.header.worker) and job.grant is not None
            asked = has_slots and bool(waiting - {_submission(job)})
            if asked != job.asked_back:
                job.asked_back = asked
                changed.append(job)
        return changed

    def report_waiting(self, now: float) -> Iterator[Action]:
        """Update the messages of queued jobs about what they wait for, after `QUEUED_S` seconds."""
        running = self._running.values()  # a paused worker runs, but holds no slot
        holders = [*dict.fromkeys(_submission(job) for job in running if job.grant is not None)]
        named = ", ".join(holders[:MAX_NAMES])
        if len(holders) > MAX_NAMES:
            named += f" and {len(holders) - MAX_NAMES} more"
        for queue in self._queues.values() if holders else ():
            for job in itertools.islice(queue, REPORTED_AT_ONCE):
                if job.state is not State.QUEUED or now - job.created < QUEUED_S:
                    continue
                message = f"{self.slots.describe_wait(job.need)} with {named}"
                if job.message != message:
                    job.message = message
                    yield Report(job)

    def start(self, job: Job, executor: str) -> list[Action]:
        """Start *job*, which has its slots, as the process *executor*."""
        self._queued_count -= 1
        job.state, job.executor, job.message = State.RUNNING, executor, ""
        self._running[executor] = job
        limit = job.header.timeout
        if limit is not None:  # it counts from the call of the function
            limit += job.header.start_allowance
        return [Report(job), SetTimer(job, limit)]

    def mark_called(self, executor: str) -> list[Action]:
        """Begin the timeout of the running job of process *executor*, whose function is called."""
        job = self._running.get(executor)
        if job is None or job.stopping is not None or job.header.timeout is None:
            return []
        return [SetTimer(job, job.header.timeout)]

    def running(self, executor: str) -> Job | None:
        """Return the running job of a process; None if it has ended."""
        return self._running.get(executor)

    def begin_item(self, worker: Job, index: int, attempt: int, start: int) -> Job:
        """Note the item that *worker* runs now, and return its entry.

        The item's output begins at byte *start* of the worker's log.
        """
        name, header = item_name(worker, index, attempt), worker.header
        outcome = wire.attempt_key(header.scope, index, attempt, "outcome")
        place = {"worker": worker.name, "begin": start, "store": header.store}
        item = Job(
            name=name,
            labels=of_attempt(worker.labels, index, attempt),
            created=worker.created,
            header=header,
            state=State.RUNNING,
            executor=worker.executor,
            worker=worker,
            log={**place, "outcome": outcome},
        )
        self.jobs[name] = worker.item = item
        return item

    def end_item(self, item: Job) -> None:
        """Forget an item, which has its outcome, or whose worker has ended."""
        item.state = State.GONE
        if item.worker is not None and item.worker.item is item:
            item.worker.item = None
        if self.jobs.get(item.name) is item:
            del self.jobs[item.name]

    def record_exit(
        self, job: Job, now: float, *, status: int, out_of_memory: bool
    ) -> list[Action]:
        """End *job*, whose process has ended with *status*: an exit code, or a negated signal."""
        job.exit_code = status
        end = _explain_exit(job, status, self._work, out_of_memory=out_of_memory)
        return self._end(job, now, *end)

    def fail(self, job: Job, now: float, reason: Reason, message: str) -> list[Action]:
        """End *job*, which has no process and no exit code."""
        if job.stopping in (Stop.DEADLINE, Stop.DELETED):  # report why the job had to end
            end = _explain_exit(job, -signal.SIGKILL, self._work, out_of_memory=False)
            return self._end(job, now, *end)
        return self._end(job, now, reason, message)

    def delete(self, job: Job, *, keep_log: bool = False) -> list[Action]:
        """Delete *job*; if it is running, ask it to end, and let `_end` remove it later."""
        job.keeps_log &= keep_log
        if job.state is State.RUNNING:
            if job.stopping is Stop.DELETED:
                return []
            already_stopping = job.stopping is not None
            job.stopping = Stop.DELETED
            # If the supervisor dies before the job has ended, no other process knows its log.
            actions = self._drop(job)
            return actions if already_stopping else [*actions, *self._ask_to_end(job)]
        if job.state is State.QUEUED:
            job.reason, job.message = Reason.CANCELLED, "deleted before it started"
        return self._remove(job)

    def dismiss(self, job: Job, now: float) -> list[Action]:
        """End a worker that has nothing to do; its log stays."""
        if job.state is State.QUEUED:
            return self._end(job, now, "", "")
        if job.state is not State.RUNNING or job.stopping is not None:
            return []
        job.stopping = Stop.SURPLUS
        return self._ask_to_end(job)

    def shut_down(self, now: float, grace: float, cause: str) -> list[Action]:
        """End queued jobs because of *cause*; ask running jobs to end within *grace* seconds."""
        actions: list[Action] = []
        for job in [*self.jobs.values()]:
            if job.state is State.QUEUED:
                actions += self._end(job, now, Reason.LOST, f"{cause}; it never started")
            elif job.state is State.RUNNING and job.worker is None:
                job.stopping = job.stopping or Stop.SHUTDOWN
                actions.append(SendSignal(job, signal.SIGTERM))
                actions.append(SetTimer(job, grace))
        return actions

    def handle_timer(self, job: Job, now: float) -> list[Action]:
        """Act on the due timer of *job*: on its wait for slots, its running time, or its grace."""
        if job.resting:
            job.resting = False
            self._queues[job.need.gpus > 0].append(job)
            return []
        if job.state is State.QUEUED:
            limit = job.header.start_timeout or 0.0
            message = f"no slot was free for {limit:g} s (start_timeout); it never started"
            return self._end(job, now, Reason.UNSCHEDULABLE, message)
        if job.state is State.RUNNING and job.stopping is None:
            job.stopping = Stop.DEADLINE
            return self._ask_to_end(job, signal.SIGXCPU)
        return [SendSignal(job, signal.SIGKILL)] if job.state is State.RUNNING else []

    def forget_expired(self, now: float) -> list[Action]:
        """Forget jobs that ended `kept_s` seconds ago, and the oldest above `ENDED_JOBS_KEPT`."""
        actions: list[Action] = []
        while self._ended_jobs:
            job = next(iter(self._ended_jobs.values()))
            is_recent = job.ended >= now - self._kept_s
            if is_recent and len(self._ended_jobs) <= ENDED_JOBS_KEPT:
                break
            job.state = State.GONE
            del self.jobs[job.name], self._ended_jobs[job.name]
            actions.append(Report(job))
        return actions

    def _ask_to_end(self, job: Job, signal_number: signal.Signals = signal.SIGTERM) -> list[Action]:
        """Signal the job, and set a timer that kills it; SIGXCPU means that its timeout is over."""
        return [SendSignal(job, signal_number), SetTimer(job, job.header.grace)]

    def _end(self, job: Job, now: float, reason: str, message: str) -> list[Action]:
        """Free the slots of *job*, and mark it as ended, or remove it if it was deleted."""
        self._release(job)
        job.state, job.ended = State.ENDED, now
        # A process that ended by itself has left an outcome; the end of a worker tells nothing.
        told = (wire.EXIT_VALUE, wire.EXIT_FINAL, EXIT_SURPLUS)
        job.heard = job.exit_code in told or INDEX not in job.labels
        job.reason, job.message, job.body = reason, message, b""
        actions: list[Action] = []
        if (item := job.item) is not None:  # it has ended with its worker, and has no outcome
            item.exit_code, item.reason, item.message = job.exit_code, reason, message
            self.end_item(item)
            actions.append(Report(item))
        if job.stopping is Stop.DELETED:
            return [*actions, *self._remove(job)]
        self._ended_jobs[job.name] = job
        return [*actions, Report(job)]

    def _remove(self, job: Job) -> list[Action]:
        """Remove *job* from the table."""
        self._release(job)
        job.state, job.body = State.GONE, b""
        del self.jobs[job.name]
        self._ended_jobs.pop(job.name, None)
        return self._drop(job)

    def _drop(self, job: Job) -> list[Action]:
        return [Report(job)] if job.keeps_log else [RemoveLog(job.name), Report(job)]

    def _release(self, job: Job) -> None:
        """Free the slots of *job*; if it is queued, subtract it from the count of queued jobs.

        `take_next` drops it from its queue.
        """
        self._queued_count -= job.state is State.QUEUED
        if job.grant is not None:
            self.slots.release(job.grant)
            job.grant = None
        job.paused = False
        self._running.pop(job.executor, None)


def _waits(job: Job) -> bool:
    return job.state is State.QUEUED or job.paused


def item_name(worker: Job, index: int, attempt: int) -> str:
    """Return the name of an attempt that *worker* runs."""
    return f"{_submission(worker)}-{index}-{attempt}"


def _submission(job: Job) -> str:
    """Return the ID of the job or batch that *job* runs for, which is what its user knows."""
    return job.labels.get(SUBMISSION, job.name)


def _explain_exit(job: Job, status: int, work: str, *, out_of_memory: bool) -> tuple[str, str]:
    """Return why the job ended, as a reason and a sentence; both empty for exit code 0."""
    if status == 0:
        return "", ""
    limit = job.header.timeout
    match job.stopping:
        case Stop.DEADLINE:
            return Reason.DEADLINE, f"ran longer than its timeout of {limit or 0:g} s"
        case Stop.DELETED:
            return Reason.CANCELLED, "deleted while it was running"
        case Stop.SHUTDOWN:
            return Reason.LOST, "its supervisor was asked to stop, and stopped the job"
        case Stop.SURPLUS:
            return "", ""
        case None:
            pass
    if status > 0:
        store, advice = job.header.store, "see its log and the free disk space"
        meanings = {
            wire.EXIT_SETUP: f": kinetic couldn't prepare the job in {work}; {advice}",
            wire.EXIT_UNCOMMITTED: f": kinetic couldn't write to the store {store}; {advice}",
            wire.EXIT_STORE_FULL: f": kinetic couldn't write to the store {store}: its disk is "
            "full; free some space there",
            wire.EXIT_FINAL: f": the store {store} has nothing to run for this job; "
            "the job was removed, or cleaned up",
        }
        reason = Reason.STORE_FULL if status == wire.EXIT_STORE_FULL else ""
        return reason, wire.exit_text(status) + meanings.get(status, "")
    if status == -signal.SIGKILL and out_of_memory:
        message = "its process was killed by the kernel, because the machine ran out of memory"
        return Reason.OUT_OF_MEMORY, message
    return Reason.LOST, wire.exit_text(status)
