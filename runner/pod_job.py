"""The job in its pod: the process that the user's code runs in."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from typing import NoReturn

from . import hosts, processes, remote_runner, stopping, wire
from .invoke import Invocation
from .objects import Objects, opened
from .opening import Opening
from .pod_attempt import PodAttempt, close_earlier, close_restarted, code_of
from .pod_guard import Line
from .pod_order import Order
from .workspace import Site

__all__ = ["AGAIN", "become"]

AGAIN = "again"
"""What a host leaves in its place that was here before: it has run nothing now."""


def become(order: Order, place: str, line: Line, parent: int) -> NoReturn:
    """Run the job in this fork of *parent*, and end with it. Never returns, whatever happens."""
    mine, code = os.getpid(), wire.EXIT_RETRY
    try:
        processes.die_with(parent)
        remote_runner.tell_crashes()
        sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
        sys.modules["__main__"] = types.ModuleType("__main__")  # the runner's is not the job's
        sys.argv[:] = [""]
        code = _Job(order, place, line).run()
        line.tell(code)
    except BaseException:
        _report()
    finally:
        if os.getpid() != mine:
            os._exit(code)  # a fork of the user's code: nothing here is its own
        remote_runner.leave(code)
        os._exit(code)


class _Job:
    """The steps of the attempt, in the places that a container has for them."""

    def __init__(self, order: Order, place: str, line: Line) -> None:
        self._again = os.path.join(place, AGAIN)
        self._stopping = stopping.Stopping()
        self._stopping.install()
        self._order = order
        self._assignment = order.assignment
        self._line = line
        self._objects: Objects = opened(order.assignment.store)
        work = os.path.join(place, "work")
        os.mkdir(work, 0o700)
        os.chdir(work)
        self._site = Site(
            work=work,
            cache=os.path.join(place, "cache"),
            mounts=False,
            alone=True,
            log=self._last_lines,
        )

    def run(self) -> int:
        """Carry it out; what to leave with."""
        order = self._order
        if order.hosts is None:
            self._close_earlier()
            return self._lead(Invocation)
        claim = self._name("claim")
        if not order.hosts.leads:
            return self._follow(order.hosts, hosts.claimant(claim, self._objects))
        if order.group and self._objects.exists(claim):
            return self._restarted(order.hosts, order.executor)
        self._close_earlier()
        return self._lead(hosts.HostCall)

    def _close_earlier(self) -> None:
        order = self._order
        close_earlier(self._assignment, order.key, order.first, order.restarts, self._objects)

    def _lead(self, kind: type[Invocation]) -> int:
        steps = self._attempt(kind, self._order.executor).steps()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                code: int = end.value
                return code

    def _follow(self, which: hosts.Hosts, executor: str) -> int:
        """Run beside the first host, whose claim is for all."""
        if not executor:
            print("kinetic: the first host has not begun in time", file=sys.stderr)
            return wire.EXIT_RETRY
        if executor == wire.VOID or self._objects.exists(self._name("outcome")):
            return self._opening_code(executor)
        mark = {"executor": self._order.executor}
        if not self._objects.create(self._name(f"host-{which.index}"), b"", mark):
            return self._restarted(which, executor)
        done = self._name(hosts.done(which.index))
        return self._attempt(hosts.HostCall, executor).beside(done)

    def _restarted(self, which: hosts.Hosts, executor: str) -> int:
        """This host was here before; what it ran must not run twice."""
        os.mkdir(self._again)
        key = self._order.key
        return close_restarted(self._assignment, key, executor, which.name, self._objects)

    def _attempt(self, kind: type[Invocation], executor: str) -> PodAttempt:
        order = self._order
        call = kind(self._assignment, self._objects, self._site, self._stopping, executor)
        invoke = call.run
        if isinstance(call, hosts.HostCall) and order.hosts is not None:
            call.hosts = order.hosts
            call.watch = hosts.Watch(
                self._assignment,
                self._objects,
                lambda: self._line.tell(self._opening_code(executor)),
            )
            invoke = call.watched
        attempt = PodAttempt(
            self._assignment, order.key, executor, self._objects, self._stopping, invoke
        )
        attempt.receipt = order.restarts.receipt
        return attempt

    def _opening_code(self, executor: str) -> int:
        return code_of(Opening(self._assignment, self._order.key, executor, self._objects))

    def _name(self, what: str) -> str:
        order = self._assignment
        return wire.attempt_key(order.scope, order.index, order.attempt, what)

    def _last_lines(self) -> str:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # they are the user's, who may have closed them
                stream.flush()
        return self._line.last_lines()


def _stream(fd: int) -> io.TextIOWrapper:
    """What is printed goes out at once, and no character of it may end the job."""
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it lives as long as the job
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _report() -> None:
    import traceback

    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc()
