"""A job in a pod: the container's first process, which looks after the job's own.

It stays small and does what must not depend on the user's code: see
`pod_guard`. The job is its child, and commits by itself; of a child that died
without a word this one says what became of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import tempfile
from dataclasses import replace

from . import hosts, pod_group, pod_job, removal, stopping, wire
from .objects import opened
from .pod_attempt import close_dead, death_of, oom_kills
from .pod_guard import Ended, Guard, Limits, Line
from .pod_order import OWN, Order, read_order

__all__ = ["main"]

CLAIM_S = 60.0


def main() -> int:
    """Carry out what the environment says, and return what to leave with."""
    try:
        order = read_order(os.environ)
    except (ValueError, OSError) as exc:
        print(f"kinetic: this job cannot be run: {exc}", file=sys.stderr)
        return wire.EXIT_FINAL
    if lacking := _lacking(order.assignment.store):
        words = f"its image lacks {lacking}; install google-cloud-storage into it"
        print(f"kinetic: this job cannot be run: {words}", file=sys.stderr)
        return wire.EXIT_FINAL
    for name in OWN:
        os.environ.pop(name, None)
    os.environ["KINETIC_ATTEMPT"] = str(order.assignment.attempt)
    place = tempfile.mkdtemp(prefix="kinetic-run-")
    killed_before = oom_kills()
    ended = _in_a_child(order, place)
    code = ended.told
    if code is None:
        code = _closed(order, ended, memory=oom_kills() > killed_before)
    again = os.path.exists(os.path.join(place, pod_job.AGAIN))
    with contextlib.suppress(OSError):  # what is much goes with the container
        removal.remove_if_small(place)
    if order.group and not ended.stopped:
        leads = order.hosts is None or order.hosts.leads
        if leads and not pod_group.delete(order.group) and not again:
            return code  # the end of this container tells that there is an outcome
        pod_group.rest()
    return code


def _lacking(store: str) -> str:
    """The library that is not there, and that the store needs: this is told once, and is final."""
    for name in ("requests", "google.auth", "google_crc32c") if store.startswith("gs://") else ():
        try:
            found = importlib.util.find_spec(name)
        except ImportError:  # what it is in is not there either
            found = None
        if found is None:
            return name
    return ""


def _closed(order: Order, ended: Ended, *, memory: bool) -> int:
    """Say what became of a job that has said nothing itself."""
    assignment, executor = order.assignment, order.executor
    death = death_of(ended, assignment, memory=memory)
    if order.hosts is not None:
        death = replace(death, message=f"on {order.hosts.name}: {death.message}")
    print(f"kinetic: {death.message}", file=sys.stderr)
    try:
        objects = opened(assignment.store)
        if order.hosts is not None and not order.hosts.leads:
            place = (assignment.scope, assignment.index, assignment.attempt)
            claim = wire.attempt_key(*place, "claim")
            executor = hosts.claimant(claim, objects, CLAIM_S) or executor
    except (OSError, ValueError) as exc:
        print(f"kinetic: the outcome could not be written: {exc}", file=sys.stderr)
        return wire.EXIT_RETRY
    return close_dead(
        assignment, order.key, executor, death, ended.log, order.restarts.receipt, objects
    )


def _in_a_child(order: Order, place: str) -> Ended:
    line, mine = Line(), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping.STOPS)  # until each side is ready for them
    together = _same(1, 2)
    outer = (1,) if together else (1, 2)
    pipes = {out: os.pipe() for out in outer}
    pid = os.fork()
    if pid == 0:
        for out, (source, sink) in pipes.items():
            os.close(source)
            os.dup2(sink, out)
            os.close(sink)
        if together:
            os.dup2(1, 2)
        line.near.close()
        pod_job.become(order, place, line, mine)
    for _, sink in pipes.values():
        os.close(sink)
    line.far.close()
    limits = Limits(timeout=order.assignment.timeout, grace=order.assignment.grace)
    streams = {source: out for out, (source, _) in pipes.items()}
    return Guard(pid, streams, line, limits).watch()


def _same(one: int, other: int) -> bool:
    """Whether two descriptors are of the same file: then what goes there keeps its order."""
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False
