"""The guard: the container's first process, which watches the process of the job.

The guard forwards the job's output and the signals to it, enforces time limits, and reports how
the job ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..job import processes
from ..protocol import wire

KEPT_BYTES = 8192
KEPT_LINES = 20
"""Maximum bytes and lines from the end of the output that an outcome contains."""

READ_BYTES = 65536
WRITE_BYTES = 4096
"""Bytes that a ready pipe takes without blocking."""

HELD_BYTES = 1 << 20
"""Maximum bytes of unread output; beyond it the job waits."""

ASKING_S = 10.0
"""How long, in seconds, the job waits for an answer of the guard."""

LEAVING_S = 30.0
"""How long, in seconds, the process may take to end after its outcome is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """In seconds: *timeout* for the function, *start* until its call, and *grace* to stop."""

    timeout: float | None
    start: float
    grace: float

    @property
    def patience(self) -> float:
        """How many seconds the job may take to stop: the pod's grace, less at most 5 seconds."""
        return max(self.grace - 5.0, self.grace * 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the job's process ended.

    ``reported`` is the exit code that the job reported after its commit, if it did; ``status`` is
    the process's exit code, or a negative signal.
    """

    reported: int | None
    status: int
    called: bool
    out_of_time: bool
    stopped: bool
    killed: bool
    log: str
    output: bytes


class Line:
    """Carry messages between a job and its guard. Make it before the fork; both sides use it.

    ``sheet`` is an unnamed file for long answers of the guard.
    """

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sheet = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the line

    def tell(self, code: int) -> None:
        """In the job: report that the outcome is committed, with the exit code for the pod."""
        with contextlib.suppress(OSError):  # then the guard reads the store
            self.far.send(b"code %d" % code)

    def tell_called(self) -> None:
        """In the job: report that the function is called now, which starts its timeout."""
        with contextlib.suppress(OSError):  # without the message, the timeout is longer
            self.far.send(b"called")

    def last_lines(self) -> str:
        """In the job: return the last lines of its output."""
        return self._asked(b"log").decode(errors="replace")

    def output(self) -> bytes:
        """In the job: return the last MiB of its output, in whole lines."""
        answer = self._asked(b"output")
        return os.pread(self.sheet.fileno(), int(answer), 0) if answer else b""

    def _asked(self, word: bytes) -> bytes:
        try:
            self.far.settimeout(ASKING_S)
            self.far.send(word)
            return self.far.recv(KEPT_BYTES * 2)
        except OSError:
            return b""


class Guard:
    """Watch the process *pid*, and copy its output.

    *streams* maps each descriptor to read output from to the descriptor to write it to.
    """

    def __init__(self, pid: int, streams: Mapping[int, int], line: Line, limits: Limits) -> None:
        self._pid = pid
        self._targets = dict(streams)
        self._waiting: dict[int, bytearray] = {out: bytearray() for out in streams.values()}
        self._line, self._sheet = line.near, line.sheet
        self._limits = limits
        self._kept = bytearray()
        self._reported: int | None = None
        self._called = self._stopped = self._out_of_time = self._killed = False
        self._deadline: float | None = None
        if limits.timeout is not None:
            self._deadline = time.monotonic() + limits.start + limits.timeout
        self._end: float | None = None
        self._wake, self._woken = os.pipe()

    def watch(self) -> Ended:
        """Return when the process has ended, and its output is written.

        Handles the signals of this process meanwhile. Afterwards the signals of `processes.STOPS`
        are blocked.
        """
        for fd in (*self._targets, self._wake, self._woken):
            os.set_blocking(fd, False)
        self._line.setblocking(False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (*processes.STOPS, signal.SIGCHLD):
            signal.signal(number, _noted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOPS)
        status: int | None = None
        while status is None:
            self._wait()
            status = self._reaped()
            if status is None:  # a reaped process's ID may be another process's now
                self._watch_the_time()
        self._read_all()
        self._flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOPS)
        with contextlib.suppress(BlockingIOError):  # a signal may have arrived meanwhile
            self._stopped = self._stopped or signal.SIGTERM in os.read(self._wake, 4096)
        return Ended(
            reported=self._reported,
            status=status,
            called=self._called,
            out_of_time=self._out_of_time,
            stopped=self._stopped,
            killed=self._killed,
            log=self.last_lines().decode(errors="replace"),
            output=self.output(),
        )

    def last_lines(self) -> bytes:
        """Return the last lines of the output, in at most `KEPT_BYTES`."""
        kept = bytes(self._kept[-KEPT_BYTES:])
        lines = kept.splitlines(keepends=True)
        if len(self._kept) > KEPT_BYTES and len(lines) > 1:
            lines = lines[1:]  # the first line is cut
        return b"".join(lines[-KEPT_LINES:])

    def output(self) -> bytes:
        """Return the end of the output, in whole lines."""
        kept = bytes(self._kept[-wire.LOG_BYTES :])
        return kept if len(kept) == len(self._kept) else kept.partition(b"\n")[2] or kept

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
        """Return the milliseconds until the next limit; None if there is none."""
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
            if self._reported is None:
                self._out_of_time = True
                self._ask(signal.SIGXCPU)
        if self._end is not None and now >= self._end:
            self._end = None
            self._killed = True
            os.kill(self._pid, signal.SIGKILL)

    def _ask(self, number: int) -> None:
        """Ask the job to end by the signal *number*, and set the time at which to kill it.

        The job's process isn't reaped yet, so its ID is valid.
        """
        os.kill(self._pid, number)
        end = time.monotonic() + self._limits.patience
        self._end = end if self._end is None else min(end, self._end)

    def _on_word(self) -> None:
        word = self._line.recv(64)
        if word == b"log":
            self._read_all()
            with contextlib.suppress(OSError):  # the job has ended
                self._line.send(self.last_lines())
        elif word == b"output":
            self._read_all()
            output = self.output()
            with contextlib.suppress(OSError):
                os.pwrite(self._sheet.fileno(), output, 0)
                self._line.send(b"%d" % len(output))
        elif word == b"called":
            self._called = True
            if self._deadline is not None and self._limits.timeout is not None:
                self._deadline = time.monotonic() + self._limits.timeout
        elif word.startswith(b"code "):
            self._reported = int(word[5:])
            end = time.monotonic() + LEAVING_S  # threads and libraries may block the job's exit
            self._end = end if self._end is None else min(end, self._end)

    def _reaped(self) -> int | None:
        """Return the job's status if it has ended; reap orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return -signal.SIGKILL  # the child was already reaped
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
        """Return whether there was something to read."""
        try:
            data = os.read(source, READ_BYTES)
        except BlockingIOError:
            return False
        out = self._targets[source]
        if not data:
            del self._targets[source]
            return False
        self._kept += data
        if len(self._kept) > 2 * wire.LOG_BYTES:
            del self._kept[: -wire.LOG_BYTES - 1]  # the extra byte shows that output was dropped
        self._waiting[out] += data
        return True

    def _write(self, out: int) -> None:
        waiting = self._waiting[out]
        try:
            del waiting[: os.write(out, waiting[:WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            waiting.clear()  # the reader has closed the pipe; the job keeps running

    def _flush(self) -> None:
        for out, waiting in self._waiting.items():
            while waiting:
                if not select.select([], [out], [], LEAVING_S)[1]:
                    return
                self._write(out)


def _noted(number: int, frame: object) -> None:
    """Do nothing: the guard reads the signal from the wake-up pipe."""
