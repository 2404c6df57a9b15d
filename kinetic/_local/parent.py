"""One warm parent as its supervisor sees it: its jobs, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kinetic._local.jobs import Job
from kinetic._local.protocol import Order, Shared
from kinetic._runner import forks
from kinetic._runner.processes import NOBODY, Children, mark_of

__all__ = ["Ended", "Key", "Parent", "Refused"]

PATIENCE_S = 5.0
"""How long a job's end may wait for killed processes that do not go (they hang in the kernel)."""

PLACES = 16
"""For how many batches a parent holds at once what the jobs of each share."""

_dumps = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Key:
    """What makes two jobs children of the same parent."""

    command: tuple[str, ...]
    runner: str
    edition: str
    fresh: bool

    @classmethod
    def of(cls, order: Order, interpreter: str) -> Key:
        """The parent that *order* wants; fresh interpreters are started by any."""
        command = (interpreter,) if order.fresh else order.command
        return cls(command, order.runner, order.edition, order.fresh)


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing of the job runs any more; ``status`` is its exit code or negative signal."""

    job: Job
    status: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No process could be made for the job."""

    job: Job
    error: str


def _joined(ours: Mapping[str, Any], theirs: bytes) -> bytes:
    """Two JSON objects as one, so that the client's is not read on its way."""
    return _dumps(ours)[:-1].encode() + b"," + theirs[1:]


@dataclass(slots=True)
class _Ending:
    job: Job
    pid: int
    status: int
    until: float


class Parent:
    """A warm parent; *directory* is what its jobs' marks begin with."""

    def __init__(self, key: Key, pid: int, sock: socket.socket, directory: str) -> None:
        sock.setblocking(False)
        self.key = key
        self.pid = pid
        self.ready = False
        self.status: int | None = None
        self.used = time.monotonic()
        self.gone_at = 0.0
        self.diary_at = 0
        self._sock = sock
        self._directory = directory
        self._out = bytearray()
        self._in = bytearray()
        self._made = 0
        self._jobs: dict[int, Job] = {}
        self._serials: dict[Job, int] = {}
        self._places: dict[Shared, int] = {}
        self._mains: dict[int, int] = {}
        self._ending: dict[int, _Ending] = {}
        self._orphans: dict[int, frozenset[str]] = {}
        self._children = Children(pid)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._sock.fileno()

    @property
    def jobs(self) -> list[Job]:
        """The jobs that have not been told to be over."""
        return [*self._jobs.values(), *(ending.job for ending in self._ending.values())]

    @property
    def settling(self) -> bool:
        """Whether a job has ended and something of it is still there."""
        return bool(self._ending)

    @property
    def unsent(self) -> int:
        """How many bytes wait for the parent to read."""
        return len(self._out)

    def start(
        self,
        job: Job,
        shared: Callable[[], Mapping[str, Any]],
        own: Mapping[str, Any],
        arguments: bytes | None,
    ) -> None:
        """Have a process made for *job*.

        *shared* and *own* are the supervisor's parts of its order, *arguments*
        what `Ahead.take` has read.
        """
        assert job.order is not None
        place = self._place(job.order.shared, shared)
        self._made += 1
        self.used = time.monotonic()
        self._jobs[self._made] = job
        self._serials[job] = self._made
        message = _joined(own, job.body)
        size = -1 if arguments is None else len(arguments)
        content = forks.JOB.pack(place, len(message), size) + message + (arguments or b"")
        self._out += forks.COMMAND.pack(forks.FORK, self._made, len(content)) + content

    def _place(self, shared: Shared, more: Callable[[], Mapping[str, Any]]) -> int:
        """Where the parent has *shared*; it is sent, if that is nowhere."""
        place = self._places.pop(shared, None)
        if place is None:
            place = len(self._places)
            if place >= PLACES:  # that of whom nobody has needed for the longest time
                place = self._places.pop(next(iter(self._places)))
            message = _joined(more(), shared.body)
            self._out += forks.COMMAND.pack(forks.SHARE, place, len(message)) + message
        self._places[shared] = place
        return place

    def signal(self, job: Job, number: int) -> None:
        """Signal the main process of *job*, if it has not ended."""
        if (serial := self._serials.get(job)) in self._jobs:
            self._out += forks.COMMAND.pack(forks.SIGNAL, serial, number)
            unwanted = all(one.stopping is not None for one in self._jobs.values())
            if number == signal.SIGKILL and not self.ready and unwanted:
                self.kill()  # it hangs, and will not hear of it

    def flush(self) -> None:
        """Send what the parent takes now.

        Raises:
            OSError: It is gone.
        """
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]

    def hear(self) -> list[Ended | Refused] | None:
        """What has happened to jobs; None when the parent is gone."""
        try:
            data = self._sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        self._in += data
        whole = len(self._in) - len(self._in) % forks.WORD.size
        told: list[Ended | Refused] = []
        for what, serial, pid, number in forks.WORD.iter_unpack(bytes(self._in[:whole])):
            if what == forks.EXITED:
                self._exited(serial, pid, number)
            elif what == forks.FORKED:
                self._mains[pid] = serial
            elif what == forks.REFUSED:
                job = self._jobs.pop(serial)
                del self._serials[job]
                told.append(Refused(job, os.strerror(number)))
            else:
                self.ready = True
        del self._in[:whole]
        told += self.settle()
        return told

    def settle(self) -> Iterator[Ended]:
        """Have killed what ended jobs left running; those that left nothing are over."""
        if not self._ending:
            return
        left = self._slay_orphans()
        for serial, ending in [*self._ending.items()]:
            if ending.job.executor not in left or time.monotonic() > ending.until:
                del self._ending[serial], self._serials[ending.job]
                yield Ended(ending.job, ending.status)

    def let_go(self) -> None:
        """Close the connection: the parent ends its jobs and itself."""
        self.gone_at = time.monotonic()
        self._sock.close()
        self._children.close()

    def kill(self) -> None:
        """End a parent that does not end by itself."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)

    def _exited(self, serial: int, pid: int, status: int) -> None:
        self._mains.pop(pid, None)
        self._orphans.pop(pid, None)
        if (job := self._jobs.pop(serial, None)) is not None:
            self._ending[serial] = _Ending(job, pid, status, time.monotonic() + PATIENCE_S)

    def _slay_orphans(self) -> set[str]:
        """The executors that had something left."""
        left: set[str] = set()
        running: set[str] | None = None
        for pid in self._children.read():
            if pid in self._mains or (owners := self._owners(pid)) is None:
                continue
            if running is None:
                running = {job.executor for job in self._jobs.values()}
            if owners.isdisjoint(running):
                left |= owners
                # Its own children become the parent's, and are next.
                self._out += forks.COMMAND.pack(forks.SLAY, pid, 0)
        return left

    def _owners(self, pid: int) -> frozenset[str] | None:
        """The jobs a process may belong to: one, unless it hides where it comes from.

        None: a fork that is about to become a job.
        """
        directory, executor = mark_of(pid)
        if directory == self._directory:
            if executor == NOBODY:
                return None
            owners = self._orphans[pid] = frozenset({executor})
            return owners
        if pid in self._orphans:  # it hides, or is ending and has no mark any more
            return self._orphans[pid]
        try:
            session = os.getsid(pid)
        except OSError:
            session = 0
        if session in self._mains:
            return frozenset({self._jobs[self._mains[session]].executor})
        for ending in self._ending.values():
            if session == ending.pid:
                return frozenset({ending.job.executor})
        # Whoever was there when it was first seen; it goes when the last of them has ended.
        owners = self._orphans[pid] = frozenset(job.executor for job in self.jobs)
        return owners
