"""Run an item on a host other than the first of its set.

The first host is a worker that takes one item. It stores the item's order, and the other hosts of
the set read it. A host that fails stores the failure as the outcome of the attempt.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

from .. import remote_runner
from ..job import metrics, processes
from ..job.attempt import OUTAGE_RETRY_S, Attempt, create_patiently
from ..job.hosts import HostCall, Hosts, Watch, host_done
from ..job.opening import read_item
from ..job.processes import Stopped
from ..job_log import say
from ..pauses import pauses
from ..protocol import signing, wire
from ..protocol.outcomes import Death, End, death_of, outcome_of_death
from ..protocol.spool import Spooled
from ..protocol.workers import WorkerId
from ..stores.objects import Objects, open_store
from .environment import Pod, begin_child, make_place
from .guard import Channel, Guard, last_lines

ORDER_WAIT_S = 600.0
"""How long a host waits until the first host has taken an item, in seconds."""


def order_name(scope: str, worker: WorkerId) -> str:
    """Return the name of the object with the order of the item that a set's worker has taken."""
    return f"{scope}sets/{worker.key}"


def store_order(order: wire.Order | None, pod: Pod, objects: Objects) -> None:
    """Store the order of the item that the worker of *pod* has taken; None: it takes none."""
    scope = pod.order.scope
    name, content = order_name(scope, pod.me), b"" if order is None else order.encode().encode()
    objects.create(name, content, {"mac": signing.sign(pod.key, scope, name, content)})


def read_order(pod: Pod, objects: Objects) -> wire.Order | None:
    """Return what `store_order` has stored; None if the worker takes no item.

    Raises:
        KeyError: The worker hasn't stored it yet.
        ValueError: The object isn't the worker's.
    """
    scope = pod.order.scope
    name = order_name(scope, pod.me)
    content, metadata = objects.get(name)
    metadata = metadata or objects.stat(name).metadata
    if not signing.is_signed(metadata, pod.key, scope, name, content):
        raise ValueError(f"{name} isn't signed by the submission's key")
    return wire.Order.decode(content.decode()) if content else None


def store_output(
    output: bytes, pod: Pod, objects: Objects, index: int, attempt: int, *, host: int = 0
) -> None:
    """Store an attempt's *output* on *host*, if there is any, so that it outlives the pod."""
    if not output:
        return
    scope = pod.order.scope
    name = wire.log_key(scope, index, attempt, host)
    try:
        objects.create(name, output, {"mac": signing.sign(pod.key, scope, name, output)})
    except OSError as exc:
        say(f"cannot store the end of the job's log: {exc}")


def write_receipt(pod: Pod, index: int, attempt: int, metadata: Mapping[str, str]) -> None:
    """Copy an outcome to the file of the pod's termination message, if there is one."""
    if not pod.receipt:
        return
    receipt = wire.Receipt(index=index, attempt=attempt, metadata=metadata)
    with contextlib.suppress(OSError):  # the receipt only saves a request
        fd = os.open(pod.receipt, os.O_WRONLY | os.O_TRUNC)
        with open(fd, "wb") as file:
            file.write(receipt.to_text().encode())


def run_follower_and_exit(
    pod: Pod, hosts: Hosts, folder: str, channel: Channel, parent: int
) -> NoReturn:
    """Run the set's item in this fork of *parent*, and exit."""
    job_pid, code = os.getpid(), wire.EXIT_RETRY
    try:
        begin_child(parent)
        code = _run(pod, hosts, folder, channel)
        channel.report_exit_code(code)
    except BaseException as exc:
        with contextlib.suppress(OSError, ValueError):
            if isinstance(exc, OSError):  # the store, or the disk: no defect of the runner
                say(str(exc))
            else:
                traceback.print_exc()
    finally:
        if os.getpid() != job_pid:
            os._exit(code)  # this is a fork that the user's code made
        remote_runner.exit_process(code)


def _run(pod: Pod, hosts: Hosts, folder: str, channel: Channel) -> int:
    """Run the item that the first host takes, in the folders of this container."""
    stopping = processes.Stopping()
    stopping.install()
    objects = open_store(pod.order.store)

    def output() -> bytes:
        remote_runner.flush()
        return channel.output()

    place = make_place(folder, lambda: last_lines(output()))
    try:
        with stopping:
            order = _wait_for_order(pod, objects)
    except Stopped:
        say("the job was asked to stop before its start")
        return wire.EXIT_RETRY
    except KeyError:
        say("the first host took no item in time")
        return wire.EXIT_RETRY
    if order is None:
        return wire.EXIT_VALUE
    os.environ.update(order.variables())
    claimant = claimant_of(order, objects)
    if objects.exists(order.part_name("outcome")):
        return _exit_code_for(order, pod.key, objects)
    metadata = {"executor": pod.executor}
    if not objects.create(order.part_name(f"host-{hosts.index}"), b"", metadata):
        close_restarted(pod, order, hosts, objects)
        return _exit_code_for(order, pod.key, objects)
    call = HostCall(order, objects, place, stopping, claimant)
    call.hosts = hosts
    call.watch = Watch(
        order, objects, lambda: channel.report_exit_code(_exit_code_for(order, pod.key, objects))
    )
    attempt = _HostAttempt(order, pod.key, claimant, objects, stopping, call.run)
    attempt.pod, attempt.host, attempt.output = pod, hosts.index, output
    metrics.ignore()
    return attempt.run()


def _wait_for_order(pod: Pod, objects: Objects) -> wire.Order | None:
    for pause in pauses(0.1, 2.0, ORDER_WAIT_S):
        try:
            return read_order(pod, objects)
        except KeyError:
            time.sleep(pause)
    raise KeyError(order_name(pod.order.scope, pod.me))


class _HostAttempt(Attempt):
    """The attempt on a host that follows: the first host has claimed it, and commits a value.

    ``output`` returns the end of the job's output. It is stored before the outcome, so that a
    cleanup after the outcome finds all objects.
    """

    pod: Pod
    host: int
    output: Callable[[], bytes]

    def run(self) -> int:
        """Make the call, and note its success or commit its failure; return the exit code."""
        outcome, body = self._invoke()
        if outcome.kind is not wire.Kind.VALUE:
            return self._commit(self._outcome_under_stop(outcome), body)
        self._store_output()
        name = self._order.part_name(host_done(self.host))
        create_patiently(
            self._objects,
            name,
            b"",
            {},
            gives_up=lambda _: self._stopping.requested,
            outage_s=OUTAGE_RETRY_S,
        )
        return wire.EXIT_VALUE

    def _store_output(self) -> None:
        order = self._order
        args = self.output(), self.pod, self._objects, order.index, order.attempt
        store_output(*args, host=self.host)

    def _commit(self, outcome: wire.Outcome, body: Spooled) -> int:
        self._store_output()
        return super()._commit(outcome, body)

    def _exit_code(self, outcome: wire.Outcome, metadata: Mapping[str, str] | None) -> int:
        """Write the receipt of an outcome that this process committed; return the exit code."""
        order = self._order
        if metadata is not None:
            write_receipt(self.pod, order.index, order.attempt, metadata)
        return _exit_code_for(order, self._key, self._objects)


def _exit_code_for(order: wire.Order, key: bytes, objects: Objects) -> int:
    """Read the item's objects, and return the exit code for the item's state."""
    try:
        item = read_item(order, key, objects)
    except (OSError, ValueError) as exc:
        say(f"cannot read the item's attempts: {exc}")
        return wire.EXIT_RETRY
    if item.state is wire.ItemState.SUCCEEDED:
        return wire.EXIT_VALUE
    return wire.EXIT_RETRY if item.state is wire.ItemState.OPEN else wire.EXIT_FINAL


def claimant_of(order: wire.Order, objects: Objects) -> str:
    """Return the process that has claimed the attempt, which is that of the first host."""
    return objects.stat(order.part_name("claim")).metadata.get("executor", "")


def close_restarted(pod: Pod, order: wire.Order, hosts: Hosts, objects: Objects) -> None:
    """Close the attempt of a host that restarted: the function must not run twice."""
    problem = f"{hosts.name} ended without an outcome and restarted"
    death = Death(message=f"{problem}; kinetic doesn't run the function twice", reason="lost")
    _close(pod, order, death, objects)


def close_dead(pod: Pod, hosts: Hosts, guard: Guard) -> int:
    """Store a failure as the outcome if a host that follows has died; return the exit code."""
    try:
        objects = open_store(pod.order.store)
        if (order := read_order(pod, objects)) is None:
            return wire.EXIT_VALUE
        end = End(
            guard.status,
            stopped=guard.stopped,
            killed=guard.killed,
            out_of_memory=guard.out_of_memory,
        )
        death = death_of(order, end)
        death = replace(death, message=f"on {hosts.name}: {death.message}")
        say(death.message)
        if not objects.exists(order.arguments.name):  # a cleanup has removed the inputs
            objects.delete([order.part_name("claim")])
            return wire.EXIT_FINAL
        output, index, attempt = guard.output(), order.index, order.attempt
        store_output(output, pod, objects, index, attempt, host=hosts.index)
        metadata = _close(pod, order, death, objects, last_lines(output))
        if metadata is not None:
            write_receipt(pod, index, attempt, metadata)
    except KeyError:
        return wire.EXIT_RETRY  # the first host hasn't taken an item yet
    except (OSError, ValueError) as exc:
        say(f"can't write the outcome: {exc}")
        return wire.EXIT_RETRY
    return _exit_code_for(order, pod.key, objects)


def _close(
    pod: Pod, order: wire.Order, death: Death, objects: Objects, log: str = ""
) -> Mapping[str, str] | None:
    """Store *death*, or a cancellation, as the outcome; return its metadata.

    They are None if the attempt already had an outcome.
    """
    claimant = claimant_of(order, objects)
    # Read the item after the claim, so that a stop request from before the claim counts.
    item = read_item(order, pod.key, objects)
    outcome, body = outcome_of_death(death, item, claimant, log)
    content, metadata = outcome.stored(pod.key, order.scope, order.index, order.attempt, body)
    created = objects.create(order.part_name("outcome"), content, metadata)
    return metadata if created else None
