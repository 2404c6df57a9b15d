"""Run a worker in a pod, which is one index of a round's Job, or the first host of a set.

The worker's I/O process is the child of the container's first process, the guard. The guard copies
what the items write, and keeps the end of it for the item that runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from .. import remote_runner
from ..job import processes, temporary
from ..job.hosts import Hosts
from ..job.kernel_kills import KernelKills
from ..job.workspace import JobPlace
from ..protocol import signing, wire
from ..protocol.marks import Event, mark
from ..protocol.workers import EXIT_DONE, EXIT_REPLACE, EXIT_SURPLUS, Crew, WorkerId
from ..stores.objects import Objects, open_store
from ..worker import pull
from ..worker.interpreter import Report
from ..worker.main import Submission, Worker
from .attempt import write_receipt
from .environment import Pod, open_stream
from .follower import close_restarted, read_order, store_order
from .guard import Channel, last_lines

VARIABLES = ("KINETIC_CREW", "KINETIC_ROUND", "KINETIC_JOB_UID", "KINETIC_RANK")
"""Variables of a worker, which its items don't get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which worker a pod is, and how it runs items.

    With ``hosts``, the pod is one host of a set, and the first host is the worker. ``group`` is the
    name of the set if it is a LeaderWorkerSet, which restarts its hosts; else empty.
    """

    me: WorkerId
    crew: Crew
    hosts: Hosts | None = None
    group: str = ""

    @property
    def follows(self) -> bool:
        """Whether the pod is a host that runs what the first host has taken."""
        return self.hosts is not None and not self.hosts.is_first


def read_place(environ: Mapping[str, str]) -> Place:
    """Read the environment of a pod.

    Raises:
        ValueError: The environment is incomplete.
    """
    crew = environ.get("KINETIC_CREW")
    if crew is None:
        raise ValueError("KINETIC_CREW is not set, so this pod is no worker")
    job = environ.get("KINETIC_JOB_UID", "")
    # In a set, the index in a Job is the number of the host.
    rank = environ.get("KINETIC_RANK") or environ.get("JOB_COMPLETION_INDEX", "")
    if not rank or not job:
        raise ValueError("JOB_COMPLETION_INDEX or KINETIC_JOB_UID is not set")
    failures = int(environ.get("KINETIC_FAILURES") or 0)
    disruptions = int(environ.get("KINETIC_DISRUPTIONS") or 0)
    number = int(environ.get("KINETIC_ROUND") or 0)
    me = WorkerId(number, job, int(rank), failures + disruptions, disruptions)
    return Place(
        me=me,
        crew=Crew.decode(crew),
        hosts=Hosts.of(environ),
        group=environ.get("KINETIC_LWS", ""),
    )


def job_grace(grace: float) -> float:
    """Return how long an item may take to end, so that its outcome can follow in time.

    When the whole *grace* is over, the platform kills the pod.
    """
    return max(grace - 5.0, grace * 0.75)


def exit_code(status: int) -> int:
    """Return the pod's exit code for the *status* of the worker's process."""
    return status if status in (EXIT_DONE, EXIT_SURPLUS) else EXIT_REPLACE


def run_worker_and_exit(
    pod: Pod, place: Place, folder: str, channel: Channel, parent: int
) -> NoReturn:
    """Run the worker in this fork of *parent*, and exit; the kernel kills it if *parent* dies."""
    code = EXIT_REPLACE
    try:
        processes.die_with(parent)
        remote_runner.enable_crash_tracebacks()
        sys.stdout = sys.__stdout__ = open_stream(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = open_stream(2)  # type: ignore[misc]
        sys.argv[:] = [""]
        objects = open_store(pod.order.store)
        if place.hosts is not None and (order := _order_before_restart(pod, place, objects)):
            os.mkdir(os.path.join(folder, RESTARTED_MARK))
            claimant = objects.stat(order.part_name("claim")).metadata.get("executor", "")
            close_restarted(pod, order, place.hosts, claimant, objects)
            code = EXIT_SURPLUS
        else:
            code = _make_worker(pod, place, folder, channel, objects).run()
    except BaseException:
        import traceback

        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    finally:
        remote_runner.flush()
        os._exit(code)


RESTARTED_MARK = "again"
"""A restarted host creates this folder when it closes the attempt that its earlier pod began."""


def _order_before_restart(pod: Pod, place: Place, objects: Objects) -> wire.Order | None:
    """Return the order of the item that an earlier process of this worker has begun, if any."""
    with contextlib.suppress(KeyError):
        return read_order(pod, place.me, objects)
    return None


def _make_worker(
    pod: Pod, place: Place, folder: str, channel: Channel, objects: Objects
) -> PodWorker:
    work = os.path.join(folder, "work")
    os.mkdir(work, 0o700)
    os.chdir(work)
    variables = temporary.make(work, pod.executor, {wire.SHARED_TMPDIR: folder})
    os.environ[temporary.VARIABLE] = variables[temporary.VARIABLE]
    tempfile.tempdir = None  # the guard has found another folder
    order = replace(pod.order, grace=job_grace(pod.order.grace))
    submission = Submission.of(order, pod.key, place.crew, place.hosts)
    job_place = JobPlace(
        work=work,
        cache=os.path.join(folder, "cache"),
        mounts=False,
        exclusive=True,
        log=lambda: last_lines(channel.output()),
    )
    return PodWorker(pod, place.me, submission, job_place, channel, objects)


class PodWorker(Worker):
    """A worker that stores the end of each item's output, before the item's outcome.

    So the output outlives the pod. The last outcome is also the pod's termination message. If the
    pod may run several items, its log has two lines that no item can forge around the output of
    each; see `mark`.
    """

    def __init__(
        self,
        pod: Pod,
        me: WorkerId,
        submission: Submission,
        place: JobPlace,
        channel: Channel,
        objects: Objects,
    ) -> None:
        super().__init__(me, pod.executor, objects, submission, place)
        self._pod = pod
        self._me = me
        self._has_one_item = submission.terms.single or submission.hosts is not None
        self._guard_channel = channel
        self._claimed: tuple[int, int] | None = None  # item and attempt
        self._is_kept = self._has_one_item  # whether the output is that of the claimed item
        self._kills = KernelKills(channel.kills)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOP_SIGNALS)

    def run(self) -> int:
        """Work until nothing is left; the other hosts of a set then end, too."""
        try:
            return super().run()
        finally:
            if self._submission.hosts is not None:  # no effect if this worker has taken an item
                store_order(None, self._pod, self._me, self._objects)

    def _start(self, operation: pull.Start) -> None:
        assert self._input is not None
        # The pod mounts only what is common to all items.
        own_data = tuple(replace(ref, fuse=False) for ref in self._input.data)
        self._input = self._input._replace(data=own_data)
        self._await_end()  # the output of the last item ends before this one's begins
        if not self._has_one_item:
            self._write_mark("begins")
            self._guard_channel.forget_output()
            self._is_kept = True
        super()._start(operation)
        if self._submission.hosts is not None and self._guard is not None:
            order = replace(self._guard.order, arguments=self._input.part)
            store_order(order, self._pod, self._me, self._objects)

    def _ended(self, report: Report) -> pull.Ended:
        return super()._ended(report)._replace(log=None)  # it is an object of its own

    def _last_lines(self) -> str:
        return last_lines(self._guard_channel.output())

    def _create(self, operation: pull.Create) -> bool:
        name = operation.name
        if self._claimed is None or name != self._outcome_name(*self._claimed):
            created = super()._create(operation)
            is_own = operation.metadata.get("executor") == self._executor
            if created and is_own and name.endswith(".claim"):
                self._claimed = wire.parse_attempt_key(name)
            return created
        index, attempt = self._claimed
        if self._is_kept:
            self._store_output(index, attempt)
        created = super()._create(operation)
        if self._is_kept and not self._has_one_item:
            self._write_mark("has ended")
            self._is_kept = False
        self._claimed = None
        if created:
            metadata, body = operation.metadata, operation.body
            receipt = wire.Receipt(index=index, attempt=attempt, metadata=metadata, body=body)
            write_receipt(self._pod.receipt, receipt)
        return created

    def _outcome_name(self, index: int, attempt: int) -> str:
        return wire.attempt_key(self._pod.order.scope, index, attempt, "outcome")

    def _store_output(self, index: int, attempt: int) -> None:
        if not (output := self._guard_channel.output()):
            return
        scope = self._pod.order.scope
        name = wire.log_key(scope, index, attempt, 0)
        mac = signing.sign(self._pod.key, scope, name, output)
        try:
            self._objects.create(name, output, {"mac": mac})
        except OSError as exc:
            print(f"kinetic: cannot store the end of the job's log: {exc}", file=sys.stderr)

    def _write_mark(self, event: Event) -> None:
        assert self._claimed is not None
        index, attempt = self._claimed
        job, scope = self._submission.job_id(index), self._pod.order.scope
        self._guard_channel.write_line(mark(self._pod.key, scope, job, attempt, event))
