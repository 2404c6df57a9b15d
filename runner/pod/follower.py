"""Run an item on a host other than the first of its set.

The first host is a worker that takes one item. It stores the item's order, and the other hosts of
the set read it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from .. import remote_runner
from ..job import metrics, processes
from ..job.hosts import HostCall, Hosts, Watch, host_done
from ..job.opening import Opening
from ..job.processes import Stopped
from ..job.workspace import JobPlace
from ..pauses import pauses
from ..protocol import signing, wire
from ..protocol.outcomes import Death
from ..protocol.workers import WorkerId
from ..stores.objects import Objects, open_store
from .attempt import PodAttempt, close_attempt, exit_code_for
from .environment import Pod, open_stream, print_error
from .guard import Channel, last_lines

ORDER_WAIT_S = 600.0
"""How long a host waits until the first host has taken an item, in seconds."""


def order_name(scope: str, worker: WorkerId) -> str:
    """Return the name of the object with the order of the item that a set's worker has taken."""
    return f"{scope}sets/{worker.key}"


def store_order(order: wire.Order | None, pod: Pod, worker: WorkerId, objects: Objects) -> None:
    """Store the order of the item that *worker* has taken; None: it takes none."""
    scope = pod.order.scope
    name, content = order_name(scope, worker), b"" if order is None else order.encode().encode()
    objects.create(name, content, {"mac": signing.sign(pod.key, scope, name, content)})


def read_order(pod: Pod, worker: WorkerId, objects: Objects) -> wire.Order | None:
    """Return what `store_order` has stored; None if the worker takes no item.

    Raises:
        KeyError: The worker hasn't stored it yet.
        ValueError: The object isn't the worker's.
    """
    scope = pod.order.scope
    name = order_name(scope, worker)
    content, metadata = objects.get(name)
    metadata = metadata or objects.stat(name).metadata
    if not signing.is_signed(metadata, pod.key, scope, name, content):
        raise ValueError(f"{name} isn't signed by the submission's key")
    return wire.Order.decode(content.decode()) if content else None


def run_follower_and_exit(
    pod: Pod, hosts: Hosts, worker: WorkerId, folder: str, channel: Channel, parent: int
) -> NoReturn:
    """Run the set's item in this fork of *parent*, and exit."""
    job_pid, code = os.getpid(), wire.EXIT_RETRY
    try:
        processes.die_with(parent)
        remote_runner.enable_crash_tracebacks()
        sys.stdout = sys.__stdout__ = open_stream(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = open_stream(2)  # type: ignore[misc]
        sys.argv[:] = [""]
        code = _Follower(pod, hosts, worker, folder, channel).run()
        channel.report_exit_code(code)
    except BaseException:
        print_error()
    finally:
        if os.getpid() != job_pid:
            os._exit(code)  # this is a fork that the user's code made
        remote_runner.exit_process(code)


class _Follower:
    """Carry out the attempt in the folders of its container."""

    def __init__(
        self, pod: Pod, hosts: Hosts, worker: WorkerId, folder: str, channel: Channel
    ) -> None:
        self._stopping = processes.Stopping()
        self._stopping.install()
        self._pod, self._hosts, self._worker = pod, hosts, worker
        self._channel = channel
        self._objects = open_store(pod.order.store)
        work = os.path.join(folder, "work")
        os.mkdir(work, 0o700)
        os.chdir(work)
        self._place = JobPlace(
            work=work,
            cache=os.path.join(folder, "cache"),
            mounts=False,
            exclusive=True,
            log=lambda: last_lines(self._output()),
            on_call=channel.report_call,
        )

    def run(self) -> int:
        """Wait until the first host has taken an item, and run it; return the exit code."""
        try:
            with self._stopping:
                for pause in pauses(0.1, 2.0, ORDER_WAIT_S):
                    try:
                        order = read_order(self._pod, self._worker, self._objects)
                        break
                    except KeyError:
                        time.sleep(pause)
                else:
                    print("kinetic: the first host took no item in time", file=sys.stderr)
                    return wire.EXIT_RETRY
        except Stopped:
            print("kinetic: the job was asked to stop before its start", file=sys.stderr)
            return wire.EXIT_RETRY
        return wire.EXIT_VALUE if order is None else self._run(order)

    def _run(self, order: wire.Order) -> int:
        os.environ.update(order.variables())
        claimant = self._objects.stat(order.part_name("claim")).metadata.get("executor", "")
        opening = Opening(order, self._pod.key, claimant, self._objects)
        if self._objects.exists(order.part_name("outcome")):
            return exit_code_for(opening)
        part, metadata = f"host-{self._hosts.index}", {"executor": self._pod.executor}
        if not self._objects.create(order.part_name(part), b"", metadata):
            close_restarted(self._pod, order, self._hosts, claimant, self._objects)
            return exit_code_for(opening)
        call = HostCall(order, self._objects, self._place, self._stopping, claimant)
        call.hosts = self._hosts
        call.watch = Watch(
            order, self._objects, lambda: self._channel.report_exit_code(exit_code_for(opening))
        )
        attempt = PodAttempt(
            order, self._pod.key, claimant, self._objects, self._stopping, call.run
        )
        attempt.receipt, attempt.host = self._pod.receipt, self._hosts.index
        attempt.output = self._output
        metrics.ignore()
        return attempt.run_on_other_host(order.part_name(host_done(self._hosts.index)))

    def _output(self) -> bytes:
        remote_runner.flush()
        return self._channel.output()


def close_restarted(
    pod: Pod, order: wire.Order, hosts: Hosts, claimant: str, objects: Objects
) -> None:
    """Close the attempt of a host that restarted: the function must not run twice."""
    problem = f"{hosts.name} ended without an outcome and restarted"
    death = Death(message=f"{problem}; kinetic doesn't run the function twice", reason="lost")
    close_attempt(order, pod.key, order.attempt, claimant, death, objects)
