"""Beside the job in its pod: passes its output on, keeps the last lines, and holds it to its time.

The process that the container starts does nothing else, so that it can do this
whatever the user's code is doing. One thread, and no library that would want more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from . import stopping

__all__ = ["Ended", "Guard", "Limits", "Line"]

KEPT_BYTES = 8192
KEPT_LINES = 20
READ_BYTES = 65536
WRITE_BYTES = 4096
"""So much goes into a pipe that is ready, at once: it never keeps us waiting."""

HELD_BYTES = 1 << 20
"""Output that nobody takes; then the job has to wait."""

ASKING_S = 10.0
LEAVING_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds: the job's running time by the clock of `stopping.running_seconds`, and its grace.

    The grace ends for the job some seconds before it ends for its pod.
    """

    timeout: float | None
    grace: float

    @property
    def patience(self) -> float:
        """How long the job has after it was asked to end."""
        return max(self.grace - 5.0, self.grace * 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the job's process ended: the code it told us to leave with, or what became of it.

    ``status`` is its exit code, or a negative signal.
    """

    told: int | None
    status: int
    out_of_time: bool
    stopped: bool
    killed: bool
    log: str


class Line:
    """What the job tells its guard, and asks it; made before the fork, used on both sides."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def tell(self, code: int) -> None:
        """In the job: its outcome is there, and this is what to leave with."""
        with contextlib.suppress(OSError):  # then the guard looks for itself
            self.far.send(b"code %d" % code)

    def last_lines(self) -> str:
        """In the job: the last lines of its output so far."""
        try:
            self.far.settimeout(ASKING_S)
            self.far.send(b"log")
            return self.far.recv(KEPT_BYTES * 2).decode(errors="replace")
        except OSError:
            return ""


class Guard:
    """Looks after the process *pid*; *streams* says where what comes from where goes to."""

    def __init__(self, pid: int, streams: Mapping[int, int], line: Line, limits: Limits) -> None:
        self._pid = pid
        self._targets = dict(streams)
        self._waiting: dict[int, bytearray] = {out: bytearray() for out in streams.values()}
        self._line = line.near
        self._limits = limits
        self._kept = bytearray()
        self._told: int | None = None
        self._stopped = self._out_of_time = self._killed = False
        began = time.monotonic() - stopping.running_seconds()
        self._deadline = None if limits.timeout is None else began + limits.timeout
        self._end: float | None = None
        self._wake, self._woken = os.pipe()

    def watch(self) -> Ended:
        """Return when it has ended, and its output is passed on.

        Takes the signals over, and leaves those that are to stop us held back.
        """
        for fd in (*self._targets, self._wake, self._woken):
            os.set_blocking(fd, False)
        self._line.setblocking(False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (*stopping.STOPS, signal.SIGCHLD):
            signal.signal(number, _noted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping.STOPS)
        status: int | None = None
        while status is None:
            self._wait()
            status = self._reaped()
            if status is None:  # once it is reaped, its number may be anybody's
                self._watch_the_time()
        self._read_all()
        self._flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, stopping.STOPS)
        with contextlib.suppress(BlockingIOError):  # one that came since then counts, too
            self._stopped = self._stopped or signal.SIGTERM in os.read(self._wake, 4096)
        return Ended(
            told=self._told,
            status=status,
            out_of_time=self._out_of_time,
            stopped=self._stopped,
            killed=self._killed,
            log=self.last_lines().decode(errors="replace"),
        )

    def last_lines(self) -> bytes:
        """The last lines of the output, in at most 8 KiB."""
        kept = bytes(self._kept[-KEPT_BYTES:])
        lines = kept.splitlines(keepends=True)
        if len(self._kept) > KEPT_BYTES and len(lines) > 1:
            lines = lines[1:]  # of the first there is only a part
        return b"".join(lines[-KEPT_LINES:])

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._line, select.POLLIN)
        for source, out in self._targets.items():
            if len(self._waiting[out]) < HELD_BYTES:
                poll.register(source, select.POLLIN)
        for out, waiting in self._waiting.items():
            if waiting:
                poll.register(out, select.POLLOUT)
        for fd, _ in poll.poll(self._pause()):
            if fd == self._wake:
                self._on_signals(os.read(fd, 4096))
            elif fd == self._line.fileno():
                self._on_word()
            elif fd in self._targets:
                self._read(fd)
            else:
                self._write(fd)

    def _pause(self) -> float | None:
        """Milliseconds until the time is over that ends next."""
        ends = [end for end in (self._deadline, self._end) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) * 1000 + 1 if ends else None

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers and not self._stopped:
            self._stopped = True
            self._ask(signal.SIGTERM)

    def _watch_the_time(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if self._told is None:
                self._out_of_time = True
                self._ask(signal.SIGXCPU)
        if self._end is not None and now >= self._end:
            self._end = None
            self._killed = True
            os.kill(self._pid, signal.SIGKILL)

    def _ask(self, number: int) -> None:
        """Ask it to end; it is not reaped yet, so that the number is its own."""
        os.kill(self._pid, number)
        end = time.monotonic() + self._limits.patience
        self._end = end if self._end is None else min(end, self._end)

    def _on_word(self) -> None:
        word = self._line.recv(64)
        if word == b"log":
            self._read_all()
            with contextlib.suppress(OSError):  # it has gone meanwhile
                self._line.send(self.last_lines())
        elif word.startswith(b"code "):
            self._told = int(word[5:])
            end = time.monotonic() + LEAVING_S  # threads and libraries may never let it go
            self._end = end if self._end is None else min(end, self._end)

    def _reaped(self) -> int | None:
        """The job's status once it has ended; orphans are collected by the way."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return -signal.SIGKILL  # somebody else has collected it
            if pid == 0:
                return None
            if pid == self._pid:
                while self._has_word():
                    self._on_word()
                return os.waitstatus_to_exitcode(status)

    def _has_word(self) -> bool:
        return bool(select.select([self._line], [], [], 0)[0])

    def _read_all(self) -> None:
        for source in list(self._targets):
            while source in self._targets and self._read(source):
                pass

    def _read(self, source: int) -> bool:
        """Whether there was something to read."""
        try:
            data = os.read(source, READ_BYTES)
        except BlockingIOError:
            return False
        out = self._targets[source]
        if not data:
            del self._targets[source]
            return False
        self._kept += data
        if len(self._kept) > 8 * KEPT_BYTES:
            del self._kept[: -2 * KEPT_BYTES]
        self._waiting[out] += data
        return True

    def _write(self, out: int) -> None:
        waiting = self._waiting[out]
        try:
            del waiting[: os.write(out, waiting[:WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            waiting.clear()  # nobody reads it any more; the job goes on

    def _flush(self) -> None:
        for out, waiting in self._waiting.items():
            while waiting:
                if not select.select([], [out], [], LEAVING_S)[1]:
                    return
                self._write(out)


def _noted(number: int, frame: object) -> None:
    """Nothing: the signal is read from the wake-up pipe."""
