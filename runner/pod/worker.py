"""Run a worker in a pod, which is one index of a round's Job, or the first host of a set.

The worker's I/O process is the child of the container's first process, the guard. The guard copies
what the items write, and keeps the end of it for the item that runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import traceback
from dataclasses import replace
from typing import NoReturn

from .. import remote_runner
from ..job import processes, temporary
from ..job.kernel_kills import KernelKills
from ..job.workspace import JobPlace
from ..protocol import wire
from ..protocol.marks import Event, mark
from ..protocol.workers import EXIT_DONE, EXIT_REPLACE, EXIT_SURPLUS
from ..stores.objects import Objects, open_store
from ..worker import pull
from ..worker.interpreter import Report
from ..worker.main import Worker
from .environment import Pod, begin_child, make_place
from .follower import close_restarted, read_order, store_order, store_output, write_receipt
from .guard import Channel, job_grace, last_lines


def exit_code(status: int) -> int:
    """Return the pod's exit code for the *status* of the worker's process."""
    return status if status in (EXIT_DONE, EXIT_SURPLUS) else EXIT_REPLACE


def run_worker_and_exit(pod: Pod, folder: str, channel: Channel, parent: int) -> NoReturn:
    """Run the worker in this fork of *parent*, and exit."""
    code = EXIT_REPLACE
    try:
        begin_child(parent)
        objects = open_store(pod.order.store)
        order: wire.Order | None = None
        if pod.hosts is not None:
            with contextlib.suppress(KeyError):  # no earlier process has begun an item
                order = read_order(pod, objects)
        if pod.hosts is not None and order is not None:
            os.mkdir(os.path.join(folder, RESTARTED_MARK))
            close_restarted(pod, order, pod.hosts, objects)
            code = EXIT_SURPLUS
        else:
            place = make_place(folder, lambda: last_lines(channel.output()))
            variables = temporary.make(str(place.work), pod.executor, {wire.SHARED_TMPDIR: folder})
            os.environ[temporary.VARIABLE] = variables[temporary.VARIABLE]
            tempfile.tempdir = None  # the guard has found another folder
            code = PodWorker(pod, place, channel, objects).run()
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    finally:
        remote_runner.flush()
        os._exit(code)


RESTARTED_MARK = "again"
"""A restarted host creates this folder when it closes the attempt that its earlier pod began."""


class PodWorker(Worker):
    """A worker that stores the end of each item's output, before the item's outcome.

    So the output outlives the pod. The last outcome is also the pod's termination message. If the
    pod may run several items, its log has two lines that no item can forge around the output of
    each; see `mark`.
    """

    def __init__(self, pod: Pod, place: JobPlace, channel: Channel, objects: Objects) -> None:
        order = replace(pod.order, grace=job_grace(pod.order.grace))
        worker = pod.me, pod.executor, objects, order, pod.key, pod.crew, place
        super().__init__(*worker, hosts=pod.hosts)
        self._pod = pod
        self._has_one_item = pod.crew.terms.single or pod.hosts is not None
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
            if self._hosts is not None:  # no effect if this worker has taken an item
                store_order(None, self._pod, self._objects)

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
        if self._hosts is not None and self._guard is not None:
            order = replace(self._guard.order, arguments=self._input.part)
            store_order(order, self._pod, self._objects)

    def _ended(self, report: Report) -> pull.Ended:
        return super()._ended(report)._replace(log=None)  # it is an object of its own

    def _last_lines(self) -> str:
        return last_lines(self._guard_channel.output())

    def _create(self, operation: pull.Create) -> bool:
        name, scope = operation.name, self._pod.order.scope
        if self._claimed is None or name != wire.attempt_key(scope, *self._claimed, "outcome"):
            created = super()._create(operation)
            is_own = operation.metadata.get("executor") == self._executor
            if created and is_own and name.endswith(".claim"):
                self._claimed = wire.parse_attempt_key(name)
            return created
        index, attempt = self._claimed
        if self._is_kept:
            output = self._guard_channel.output()
            store_output(output, self._pod, self._objects, index, attempt)
        created = super()._create(operation)
        if self._is_kept and not self._has_one_item:
            self._write_mark("has ended")
            self._is_kept = False
        self._claimed = None
        if created:
            write_receipt(self._pod, index, attempt, operation.metadata)
        return created

    def _write_mark(self, event: Event) -> None:
        assert self._claimed is not None
        index, attempt = self._claimed
        job, scope = self._job_id(index), self._pod.order.scope
        self._guard_channel.write_line(mark(self._pod.key, scope, job, attempt, event))
