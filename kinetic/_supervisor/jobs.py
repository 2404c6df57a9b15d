"""The table of a supervisor's jobs; it decides when a job starts, and how it ends.

The table does no I/O. Its methods return actions, which the supervisor carries out in order. The
line for the journal (`Record`) comes before the message to clients (`Notify`), because the next
supervisor must know every job that clients have seen.
"""

from __future__ import annotations

import enum
import itertools
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kinetic._supervisor.protocol import SUBMISSION, JobHeader
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

    def has_free_gpus(self, need: Need) -> bool:
        """Return whether the GPUs that *need* asks for are free."""
        return need.gpus <= len(self._free_gpu_ids)


KEPT_S = 24 * 3600.0
"""How long the supervisor remembers an ended job; the log stays until the job is deleted."""

ENDED_JOBS_KEPT = 4096
"""How many ended jobs to remember; above that, forget the one that ended first.

This is safe: the store has the outcome of a job, and a second job of the same name finds the
claim of the first, so it doesn't call the function again.
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


class Stop(enum.Enum):
    """Why the supervisor ends a job."""

    DELETED = "deleted"
    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"


class TimerKind(enum.Enum):
    """The limit that a timer enforces: on the wait for slots, the running time, or the grace."""

    START = "start"
    DEADLINE = "deadline"
    KILL = "kill"


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One job. ``created`` and ``ended`` are seconds since the epoch.

    ``started`` is a time of the monotonic clock. ``leaving`` says that the function has ended and
    the outcome is stored, while the process still runs and has its slots.
    """

    name: str
    labels: Mapping[str, str]
    created: float
    header: JobHeader | None = None  # None if the job has ended, or an earlier supervisor ran it
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

    def view(self) -> dict[str, Any]:
        """Return the description of the job that clients get."""
        return {
            "name": self.name,
            "phase": self.state.value,
            "labels": self.labels,
            "executor": self.executor,
            "leaving": self.leaving,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "message": self.message,
            "created": self.created,
        }

    def has_labels(self, labels: Mapping[str, str]) -> bool:
        """Return whether the job has all of *labels*."""
        return labels.items() <= self.labels.items()


@dataclass(frozen=True, slots=True)
class Record:
    """Write a line to the journal: a ``vital`` one at once, others at the end of a turn."""

    line: Mapping[str, Any]
    vital: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Give the job to a warm parent."""

    job: Job


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Signal the job's main process."""

    job: Job
    signal_number: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `Table.handle_timer` after ``delay`` seconds."""

    delay: float
    kind: TimerKind
    job: Job


@dataclass(frozen=True, slots=True)
class Notify:
    """Notify watching clients that the job has changed."""

    job: Job


@dataclass(frozen=True, slots=True)
class RemoveLog:
    """Remove the log of a deleted job."""

    name: str


Action = Record | Start | SendSignal | SetTimer | Notify | RemoveLog


class Table:
    """All known jobs, and the queue for *slots*."""

    def __init__(self, slots: Slots, kept_s: float = KEPT_S) -> None:
        self.jobs: dict[str, Job] = {}
        self._slots = slots
        self._kept_s = kept_s
        self._ended_jobs: dict[str, Job] = {}  # in the order of their ends
        self._running: dict[str, Job] = {}
        self._queues: dict[bool, deque[Job]] = {True: deque(), False: deque()}  # True: needs GPUs
        self._queued_count = 0

    @property
    def busy(self) -> bool:
        """Whether a job is queued or running."""
        return bool(self._running or self._queued_count)

    @property
    def queued(self) -> bool:
        """Whether a job waits for its slots."""
        return self._queued_count > 0

    def add(self, header: JobHeader, body: bytes, now: float) -> list[Action]:
        """Queue a new job, whose name is not in the table."""
        need = self._slots.fit(Need(header.cpus, header.gpus))
        job = Job(
            name=header.name,
            labels=header.labels,
            created=now,
            header=header,
            body=body,
            need=need,
        )
        self.jobs[job.name] = job
        self._queues[need.gpus > 0].append(job)
        self._queued_count += 1
        line = {"was": "created", "name": job.name, "labels": job.labels, "at": now}
        actions: list[Action] = [Record(line, vital=True), Notify(job)]
        if header.start_timeout is not None:
            actions.append(SetTimer(header.start_timeout, TimerKind.START, job))
        return actions

    def forget_unwritten(self, job: Job) -> None:
        """Undo `add` of a job that could not be written to the journal."""
        del self.jobs[job.name]
        self._leave_queue(job)

    def take_next(self) -> Job | None:
        """Take slots for the job that starts next, and return it; None if no job can start.

        Jobs with GPUs and jobs without have separate queues, in order of arrival. While the first
        job with GPUs lacks a GPU, jobs without GPUs may start. If it lacks only CPUs, they wait.
        """
        for with_gpus in (True, False):
            queue = self._queues[with_gpus]
            while queue and queue[0].state is not State.QUEUED:
                queue.popleft()
            if not queue:
                continue
            job = queue[0]
            if (grant := self._slots.take(job.need)) is not None:
                queue.popleft()
                job.grant = grant
                return job
            if with_gpus and self._slots.has_free_gpus(job.need):
                return None
        return None

    def first_queued(self, count: int) -> Iterator[Job]:
        """Yield those of the first *count* entries of each queue that are still queued."""
        for queue in self._queues.values():
            for job in itertools.islice(queue, count):
                if job.state is State.QUEUED:
                    yield job

    def report_waiting(self, now: float) -> Iterator[Action]:
        """Update the messages of queued jobs about what they wait for, after `QUEUED_S` seconds."""
        for job in self.first_queued(REPORTED_AT_ONCE):
            if now - job.created < QUEUED_S:
                continue
            holders = [
                *dict.fromkeys(_submission(running_job) for running_job in self._running.values())
            ]
            more = f" and {len(holders) - MAX_NAMES} more" if len(holders) > MAX_NAMES else ""
            message = (
                f"{self._slots.describe_wait(job.need)} with {', '.join(holders[:MAX_NAMES])}{more}"
            )
            if holders and job.message != message:
                job.message = message
                yield Notify(job)

    def start(self, job: Job, executor: str, now: float) -> list[Action]:
        """Start *job*, which has its slots, as the process *executor*."""
        self._queued_count -= 1
        job.state, job.executor, job.message = State.RUNNING, executor, ""
        self._running[executor] = job
        line = {"was": "started", "name": job.name, "executor": executor, "at": now}
        actions: list[Action] = [Record(line, vital=True), Start(job), Notify(job)]
        if job.header is not None and job.header.timeout is not None:
            actions.append(SetTimer(job.header.timeout, TimerKind.DEADLINE, job))
        return actions

    def mark_leaving(self, executor: str) -> Job | None:
        """Note that process *executor* has stored its outcome; return its running job or None."""
        job = self._running.get(executor)
        if job is not None:
            job.leaving = True
        return job

    def may_requeue(self, job: Job) -> bool:
        """Return whether *job*, which cannot start now, may return to the queue.

        It may if nothing is stopping it, and its batch has started another item.
        """
        submission = _submission(job)
        return job.stopping is None and any(
            other is not job and other.executor and _submission(other) == submission
            for other in self.jobs.values()
        )

    def requeue(self, job: Job, message: str) -> list[Action]:
        """Put *job*, which has no process, back at the head of its queue."""
        self._queued_count += job.state is State.RUNNING
        self._release(job)
        job.state, job.executor, job.message = State.QUEUED, "", message
        self._queues[job.need.gpus > 0].appendleft(job)
        return [Notify(job)]

    def record_exit(
        self, job: Job, now: float, *, status: int, out_of_memory: bool, meaning: str = ""
    ) -> list[Action]:
        """End *job*, whose process has ended with exit code *status* (negative: a signal).

        *meaning* explains an exit code of the runner; it ends the message of a job without reason.
        """
        job.exit_code = status
        reason, message = _explain_exit(job, status, out_of_memory=out_of_memory)
        more = f": {meaning}" if meaning and not reason else ""
        return self._end(job, now, reason, message + more)

    def fail(self, job: Job, now: float, reason: Reason, message: str) -> list[Action]:
        """End *job*, which has no process and no exit code."""
        if job.stopping in (Stop.DEADLINE, Stop.DELETED):  # report the stop that was under way
            return self._end(job, now, *_explain_exit(job, -signal.SIGKILL, out_of_memory=False))
        return self._end(job, now, reason, message)

    def delete(self, job: Job) -> list[Action]:
        """Delete *job*; if it is running, ask it to end, after which `_end` removes it."""
        if job.state is State.RUNNING:
            if job.stopping is Stop.DELETED:
                return []
            already_stopping = job.stopping is not None
            job.stopping = Stop.DELETED
            actions: list[Action] = [Record({"was": "deleted", "name": job.name})]
            return actions if already_stopping else actions + self._ask_to_end(job)
        if job.state is State.QUEUED:
            job.reason, job.message = Reason.CANCELLED, "deleted before it started"
        return [Record({"was": "gone", "name": job.name}), *self._remove(job)]

    def shut_down(self, now: float, grace: float, cause: str) -> list[Action]:
        """End queued jobs because of *cause*; ask running ones to end within *grace* seconds."""
        actions: list[Action] = []
        for job in [*self.jobs.values()]:
            if job.state is State.QUEUED:
                actions += self._end(job, now, Reason.LOST, f"{cause}; it never started")
            elif job.state is State.RUNNING:
                job.stopping = job.stopping or Stop.SHUTDOWN
                actions.append(SendSignal(job, signal.SIGTERM))
                actions.append(SetTimer(grace, TimerKind.KILL, job))
        return actions

    def handle_timer(self, kind: TimerKind, job: Job, now: float) -> list[Action]:
        """Act on a due timer of *job*; ignore it if the job's state no longer fits its *kind*."""
        match kind:
            case TimerKind.START if job.state is State.QUEUED and job.header is not None:
                limit = job.header.start_timeout or 0.0
                message = f"no slot was free for {limit:g} s (start_timeout); it never started"
                return self._end(job, now, Reason.UNSCHEDULABLE, message)
            case TimerKind.DEADLINE if job.state is State.RUNNING and job.stopping is None:
                job.stopping = Stop.DEADLINE
                return self._ask_to_end(job, signal.SIGXCPU)
            case TimerKind.KILL if job.state is State.RUNNING:
                return [SendSignal(job, signal.SIGKILL)]
            case _:
                return []

    def forget_expired(self, now: float) -> list[Action]:
        """Forget the jobs that ended more than `kept_s` seconds ago."""
        actions: list[Action] = []
        for job in [*self._ended_jobs.values()]:
            if job.ended < now - self._kept_s:
                actions += self._forget(job)
        return actions

    def _ask_to_end(self, job: Job, signal_number: signal.Signals = signal.SIGTERM) -> list[Action]:
        """Signal the job, and set a timer that kills it; SIGXCPU says that its timeout is over."""
        grace = job.header.grace if job.header is not None else 0.0
        return [SendSignal(job, signal_number), SetTimer(grace, TimerKind.KILL, job)]

    def _end(self, job: Job, now: float, reason: str, message: str) -> list[Action]:
        """Free the slots of *job*, and mark it as ended, or remove it if it was deleted."""
        if job.state is State.QUEUED:
            self._leave_queue(job)
        self._release(job)
        job.state, job.ended = State.ENDED, now
        job.reason, job.message, job.body, job.header = reason, message, b"", None
        if job.stopping is Stop.DELETED:
            return [Record({"was": "gone", "name": job.name}), *self._remove(job)]
        self._ended_jobs[job.name] = job
        actions: list[Action] = [Record(ended_line(job)), Notify(job)]
        if len(self._ended_jobs) > ENDED_JOBS_KEPT:
            actions += self._forget(next(iter(self._ended_jobs.values())))
        return actions

    def _forget(self, job: Job) -> list[Action]:
        """Forget an ended job; its log stays."""
        job.state = State.GONE
        del self.jobs[job.name], self._ended_jobs[job.name]
        return [Record({"was": "forgotten", "name": job.name}), Notify(job)]

    def _remove(self, job: Job) -> list[Action]:
        """Remove *job* from the table, and its log from the disk."""
        if job.state is State.QUEUED:
            self._leave_queue(job)
        job.state, job.body = State.GONE, b""
        del self.jobs[job.name]
        self._ended_jobs.pop(job.name, None)
        return [Notify(job), RemoveLog(job.name)]

    def _leave_queue(self, job: Job) -> None:
        self._queued_count -= 1
        job.state = State.GONE  # `take_next` drops the job from its queue

    def _release(self, job: Job) -> None:
        if job.grant is not None:
            self._slots.release(job.grant)
            job.grant = None
        self._running.pop(job.executor, None)

    # --- the journal -------------------------------------------------------------------------

    def restore(self, lines: Iterable[Mapping[str, Any]], now: float) -> list[str]:
        """Add the jobs of a journal; return the names of deleted jobs, whose logs can be removed.

        A job without a line about its end is lost, because its process no longer runs.
        """
        unfinished: set[str] = set()
        deleted: set[str] = set()
        dropped: list[str] = []
        subject = "its supervisor"
        for line in lines:
            name = str(line.get("name", ""))
            match line.get("was"):
                case "supervisor":
                    subject = f"its supervisor (process {line.get('pid')})"
                case "created":
                    created = float(line.get("at", now))
                    self.jobs[name] = Job(
                        name=name, labels=line.get("labels", {}), created=created, message=subject
                    )
                    unfinished.add(name)
                    deleted.discard(name)
                case "started" if name in self.jobs:
                    self.jobs[name].executor = str(line.get("executor", ""))
                case "deleted":
                    deleted.add(name)
                case "ended" if name in self.jobs:
                    _read_end(self.jobs[name], line)
                    unfinished.discard(name)
                case "gone" if name in self.jobs:
                    del self.jobs[name]
                    unfinished.discard(name)
                    deleted.discard(name)
                    dropped.append(name)
                case "forgotten":
                    self.jobs.pop(name, None)
                case _:
                    continue
        for name in unfinished:
            job = self.jobs[name]
            moment = "while the job was running" if job.executor else "while the job was queued"
            consequence = "the job was ended with it" if job.executor else "it never started"
            job.state, job.ended, job.reason = State.ENDED, now, Reason.LOST
            job.message = f"{job.message} died {moment}; {consequence}"
        for job in sorted(self.jobs.values(), key=lambda job: job.ended):
            if job.name in deleted & unfinished:
                del self.jobs[job.name]
                dropped.append(job.name)
            elif job.ended < now - self._kept_s:
                del self.jobs[job.name]
            else:
                self._ended_jobs[job.name] = job
        return [name for name in dropped if name not in self.jobs]

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Yield the lines of a journal that contains only the current state."""
        for job in self.jobs.values():
            yield {"was": "created", "name": job.name, "labels": job.labels, "at": job.created}
            if job.executor:
                yield {"was": "started", "name": job.name, "executor": job.executor}
            if job.stopping is Stop.DELETED:
                yield {"was": "deleted", "name": job.name}
            if job.state is State.ENDED:
                yield ended_line(job)


def _submission(job: Job) -> str:
    """Return the ID of the job or batch that *job* runs for, which is what its user knows."""
    return job.labels.get(SUBMISSION, job.name)


def ended_line(job: Job) -> Mapping[str, Any]:
    """Return the journal's line about the end of *job*."""
    return {
        "was": "ended",
        "name": job.name,
        "exit_code": job.exit_code,
        "reason": job.reason,
        "message": job.message,
        "at": job.ended,
    }


def _read_end(job: Job, line: Mapping[str, Any]) -> None:
    job.state = State.ENDED
    job.exit_code = line.get("exit_code")
    job.reason, job.message = str(line.get("reason", "")), str(line.get("message", ""))
    job.ended = float(line.get("at", 0.0))


def _explain_exit(job: Job, status: int, *, out_of_memory: bool) -> tuple[str, str]:
    """Return why the job ended, as a reason and a sentence; both empty for exit code 0."""
    if status == 0:
        return "", ""
    limit = job.header.timeout if job.header is not None else None
    match job.stopping:
        case Stop.DEADLINE:
            return Reason.DEADLINE, f"ran longer than its timeout of {limit or 0:g} s"
        case Stop.DELETED:
            return Reason.CANCELLED, "deleted while it was running"
        case Stop.SHUTDOWN:
            return Reason.LOST, "its supervisor was asked to stop, and stopped the job"
        case None:
            pass
    if status > 0:
        return "", f"ended with exit code {status}"
    if status == -signal.SIGKILL and out_of_memory:
        return Reason.OUT_OF_MEMORY, "killed by the kernel: the machine ran out of memory"
    if status == -signal.SIGKILL:
        sender = "by the kernel when memory ran out, or by a user"
        return Reason.LOST, f"killed by SIGKILL ({sender})"
    is_known = -status in signal.valid_signals()
    return (
        Reason.LOST,
        f"killed by {signal.Signals(-status).name if is_known else f'signal {-status}'}",
    )
