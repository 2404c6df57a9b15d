"""The guard: the container's first process, which watches the process of the job.

The guard copies the job's output, passes SIGTERM on to the job, enforces time limits, and reports
how the job ended.
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

MAX_UNWRITTEN_BYTES = 1 << 20
"""With this many unwritten bytes of output, the guard reads no more, and the job has to wait."""

ANSWER_TIMEOUT_S = 10.0
"""How long, in seconds, the job waits for an answer of the guard."""

EXIT_TIMEOUT_S = 30.0
"""How long, in seconds, the job's process may take to end after it has committed its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits in seconds: *timeout* of the function, *start* until its call, *grace* to stop."""

    timeout: float | None
    start: float
    grace: float

    @property
    def patience(self) -> float:
        """How many seconds the job may take to stop: the pod's grace, less at most 5 seconds."""
        return max(self.grace - 5.0, self.grace * 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How the job's process ended.

    ``reported`` is the exit code that the job reported after its commit, if it did; ``status`` is
    the process's exit code, or a negative signal. ``called`` says that the job called the function,
    ``out_of_time`` that its time limit was over, ``stopped`` that SIGTERM came, and ``killed`` that
    the guard killed the process.
    """

    reported: int | None
    status: int
    called: bool
    out_of_time: bool
    stopped: bool
    killed: bool
    log: str
    output: bytes


class Channel:
    """Carry messages between a job and its guard. Create it before the fork; both processes use it.

    ``answer_file`` is an unnamed file for long answers of the guard.
    """

    def __init__(self) -> None:
        self.guard_end, self.job_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.answer_file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the channel

    def report_exit_code(self, code: int) -> None:
        """In the job: report that the outcome is committed, with the exit code for the pod."""
        with contextlib.suppress(OSError):  # without the message, the guard looks into the store
            self.job_end.send(b"code %d" % code)

    def report_call(self) -> None:
        """In the job: report that the function is called now, which starts its timeout."""
        with contextlib.suppress(OSError):  # without the message, the limit includes the start
            self.job_end.send(b"called")

    def last_lines(self) -> str:
        """In the job: return the last lines of its output."""
        return self._request(b"log").decode(errors="replace")

    def output(self) -> bytes:
        """In the job: return the last MiB of its output, in whole lines."""
        answer = self._request(b"output")
        return os.pread(self.answer_file.fileno(), int(answer), 0) if answer else b""

    def _request(self, request: bytes) -> bytes:
        """Send *request* to the guard; return its answer, or ``b""`` if none comes."""
        try:
            self.job_end.settimeout(ANSWER_TIMEOUT_S)
            self.job_end.send(request)
            return self.job_end.recv(KEPT_BYTES * 2)
        except OSError:
            return b""


class Guard:
    """Watch the process *pid*, and copy its output.

    *streams* maps each descriptor to read output from to the descriptor to write it to.
    """

    def __init__(
        self, pid: int, streams: Mapping[int, int], channel: Channel, limits: Limits
    ) -> None:
        self._pid = pid
        self._targets = dict(streams)
        self._unwritten: dict[int, bytearray] = {target: bytearray() for target in streams.values()}
        self._channel, self._answer_file = channel.guard_end, channel.answer_file
        self._limits = limits
        self._output_tail = bytearray()
        self._reported: int | None = None
        self._called = self._stopped = self._out_of_time = self._killed = False
        self._deadline: float | None = None
        if limits.timeout is not None:
            self._deadline = time.monotonic() + limits.start + limits.timeout
        self._kill_at: float | None = None
        self._wake_read, self._wake_write = os.pipe()

    def watch(self) -> ProcessEnd:
        """Return when the process has ended, and its output is written.

        It handles the signals of this process until then. Afterwards `processes.STOP_SIGNALS` are
        blocked.
        """
        for fd in (*self._targets, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._channel.setblocking(False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (*processes.STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, _ignore_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOP_SIGNALS)
        status: int | None = None
        while status is None:
            self._wait()
            status = self._reap()
            if status is None:  # a reaped process's ID may be another process's now
                self._enforce_limits()
        self._read_outputs()
        self._flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
        with contextlib.suppress(BlockingIOError):  # no signal has arrived since the last poll
            self._stopped = self._stopped or signal.SIGTERM in os.read(self._wake_read, 4096)
        return ProcessEnd(
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
        kept = bytes(self._output_tail[-KEPT_BYTES:])
        lines = kept.splitlines(keepends=True)
        if len(self._output_tail) > KEPT_BYTES and len(lines) > 1:
            lines = lines[1:]  # the first line is cut
        return b"".join(lines[-KEPT_LINES:])

    def output(self) -> bytes:
        """Return the end of the output, in whole lines."""
        kept = bytes(self._output_tail[-wire.LOG_BYTES :])
        return kept if len(kept) == len(self._output_tail) else kept.partition(b"\n")[2] or kept

    def _wait(self) -> None:
        """Wait for signals, messages, or output until the next limit, and handle them."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._channel, select.POLLIN)
        for source, target in self._targets.items():
            if len(self._unwritten[target]) < MAX_UNWRITTEN_BYTES:
                poll.register(source, select.POLLIN)
        for target, unwritten in self._unwritten.items():
            if unwritten:
                poll.register(target, select.POLLOUT)
        for fd, _ in poll.poll(self._poll_timeout()):
            if fd == self._wake_read:
                self._on_signals(os.read(fd, 4096))
            elif fd == self._channel.fileno():
                self._on_message()
            elif fd in self._targets:
                self._read(fd)
            else:
                self._write(fd)

    def _poll_timeout(self) -> float | None:
        """Return the milliseconds until the next limit; None if there is none."""
        deadlines = [
            deadline for deadline in (self._deadline, self._kill_at) if deadline is not None
        ]
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers and not self._stopped:
            self._stopped = True
            self._ask_to_stop(signal.SIGTERM)

    def _enforce_limits(self) -> None:
        """Ask the job to end at its time limit, and kill it if it doesn't end in time."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if self._reported is None:
                self._out_of_time = True
                self._ask_to_stop(signal.SIGXCPU)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._killed = True
            os.kill(self._pid, signal.SIGKILL)

    def _ask_to_stop(self, number: int) -> None:
        """Ask the job to end by the signal *number*, and set the time at which to kill it.

        The job's process isn't reaped yet, so its ID is valid.
        """
        os.kill(self._pid, number)
        kill_at = time.monotonic() + self._limits.patience
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)

    def _on_message(self) -> None:
        """Handle one message from the job; `Channel` sends them."""
        message = self._channel.recv(64)
        if message == b"log":
            self._read_outputs()
            with contextlib.suppress(OSError):  # the job has ended
                self._channel.send(self.last_lines())
        elif message == b"output":
            self._read_outputs()
            output = self.output()
            with contextlib.suppress(OSError):
                os.pwrite(self._answer_file.fileno(), output, 0)
                self._channel.send(b"%d" % len(output))
        elif message == b"called":
            self._called = True
            if self._deadline is not None and self._limits.timeout is not None:
                self._deadline = time.monotonic() + self._limits.timeout
        elif message.startswith(b"code "):
            self._reported = int(message[5:])
            # Threads and libraries may block the job's exit.
            kill_at = time.monotonic() + EXIT_TIMEOUT_S
            self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)

    def _reap(self) -> int | None:
        """Reap ended processes; return the exit status of the job, None while it runs."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return -signal.SIGKILL  # the child was already reaped
            if pid == 0:
                return None
            if pid == self._pid:
                while self._has_message():
                    self._on_message()
                return os.waitstatus_to_exitcode(status)

    def _has_message(self) -> bool:
        return bool(select.select([self._channel], [], [], 0)[0])

    def _read_outputs(self) -> None:
        for source in list(self._targets):
            while source in self._targets and self._read(source):
                pass

    def _read(self, source: int) -> bool:
        """Read output from *source* for later writing; return whether there was any."""
        try:
            data = os.read(source, READ_BYTES)
        except BlockingIOError:
            return False
        target = self._targets[source]
        if not data:
            del self._targets[source]
            return False
        self._output_tail += data
        if len(self._output_tail) > 2 * wire.LOG_BYTES:
            del self._output_tail[
                : -wire.LOG_BYTES - 1
            ]  # the extra byte shows that output was dropped
        self._unwritten[target] += data
        return True

    def _write(self, target: int) -> None:
        unwritten = self._unwritten[target]
        try:
            del unwritten[: os.write(target, unwritten[:WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            unwritten.clear()  # the reader has closed the pipe; the job keeps running

    def _flush(self) -> None:
        """Write the rest of the output, unless a reader takes nothing for `EXIT_TIMEOUT_S`."""
        for target, unwritten in self._unwritten.items():
            while unwritten:
                if not select.select([], [target], [], EXIT_TIMEOUT_S)[1]:
                    return
                self._write(target)


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing: the guard reads the signal from the wake-up pipe."""
