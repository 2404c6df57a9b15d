"""The guard: the container's first process, which watches the process of the job.

The guard copies the job's output, passes SIGTERM on to the job, ends it after its grace period, and
reports how it ended. It also ends a process shortly before the kernel would kill the container.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import select
import signal
import socket
import tempfile
import time
from pathlib import Path

from ..job import processes
from ..job.kernel_kills import KernelKills, kills_in_container
from ..job_log import say
from ..protocol import wire
from .memory import MemoryLimit, kill_largest

STANDARD_OUTPUT = 1
KEPT_BYTES = 8192
KEPT_LINES = 20
"""Maximum bytes and lines from the end of the output that an outcome contains."""

READ_BYTES = 65536
MESSAGE_BYTES = 1024
"""A message of the job is shorter."""

MAX_UNWRITTEN_BYTES = 1 << 20
"""With this many unwritten bytes of output, the guard reads no more, and the job has to wait."""

AFTER_KILL_S = 0.5
"""How long, in seconds, the memory of a killed process may take to become free."""

LONGEST_POLL_S = 86400.0
"""How long to wait at once, in seconds; the kernel takes no number above 24 days."""

EXIT_TIMEOUT_S = 30.0
"""How long, in seconds, the job's process may take to end after it has committed its outcome."""


class Channel:
    """Carry messages between a job and its guard. Create it before the fork; both processes use it.

    ``answer_file`` is an unnamed file for long answers of the guard.
    """

    def __init__(self) -> None:
        self.guard_end, self.job_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.answer_file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the channel
        self._memory_kills = mmap.mmap(-1, 1)  # how often the guard has killed a process for memory

    def kills(self) -> int:
        """Return how many processes of this container the kernel or the guard killed for memory."""
        return (kills_in_container() or 0) + self._memory_kills[0]

    def count_kill(self) -> None:
        """In the guard: count a process that it kills now, because memory runs out."""
        self._memory_kills[0] = (self._memory_kills[0] + 1) % 256

    def report_exit_code(self, code: int) -> None:
        """In the job: report that the outcome is committed, with the exit code for the pod."""
        with contextlib.suppress(OSError):  # without the message, the guard looks into the store
            self.job_end.send(b"code %d" % code)

    def output(self) -> bytes:
        """In the job: return the last MiB of its output, in whole lines."""
        try:
            return os.pread(self.answer_file.fileno(), self._ask(b"output"), 0)
        except (OSError, ValueError):  # without an answer, there is no output
            return b""

    def forget_output(self) -> None:
        """In a worker: let `output` return only what is written from now on."""
        with contextlib.suppress(OSError, ValueError):
            self._ask(b"forget")

    def write_line(self, line: str) -> None:
        """In a worker: write *line* after all output so far, also if that lacks a final newline."""
        with contextlib.suppress(OSError, ValueError):
            self._ask(b"line", line.encode())

    def _ask(self, question: bytes, text: bytes = b"") -> int:
        """Return the guard's answer; skip answers to a process that has died."""
        number = b"%d" % time.monotonic_ns()
        self.job_end.settimeout(10.0)
        self.job_end.send(b"%b %b %b" % (question, number, text))
        while True:
            asked, answer = self.job_end.recv(64).split()
            if asked == number:
                return int(answer)


_OWN_FRAME = re.compile(
    rb'  File "%b/[^"]*", line \d+ in ' % re.escape(os.fsencode(Path(__file__).parents[1]))
)
"""The line of a function of the runner in what `faulthandler` prints after a crash."""


def last_lines(output: bytes) -> str:
    """Return the last lines of *output*, in at most `KEPT_BYTES`, without calls of the runner."""
    lines = output[-KEPT_BYTES:].splitlines(keepends=True)
    if len(output) > KEPT_BYTES and len(lines) > 1:
        lines = lines[1:]  # the first line is cut
    lines = [line for line in lines if not _OWN_FRAME.match(line)]
    return b"".join(lines[-KEPT_LINES:]).decode(errors="replace")


def job_grace(grace: float) -> float:
    """Return how long a job may take to end, so that its outcome can follow in time.

    When the whole *grace* is over, the platform kills the pod.
    """
    return max(grace - 5.0, grace * 0.75)


class Guard:
    """Watch the process *pid*, and copy its output from the pipe *source* to standard output.

    A process that was asked to stop has *grace* seconds, less the time that its outcome takes. If
    the container nears its *memory* limit, the guard kills the process, or for a worker the largest
    one so many *levels* below.

    The attributes say how the process ended. ``reported`` is the exit code that the job reported
    after its commit, if it did. ``status`` is the process's exit code, or a negative signal.
    ``stopped`` says that SIGTERM came, ``killed`` that the guard killed the process to end it, and
    ``out_of_memory`` that the kernel or the guard killed one to free memory.
    """

    def __init__(
        self,
        pid: int,
        source: int,
        channel: Channel,
        *,
        grace: float,
        memory: MemoryLimit | None = None,
        levels: int = 0,
    ) -> None:
        self.reported: int | None = None
        self.status = 0
        self.stopped = self.killed = False
        self._pid = pid
        self._source = source
        self._source_ended = False
        self._unwritten = bytearray()
        self._at_line_start = True
        self._channel, self._answer_file = channel.guard_end, channel.answer_file
        self._memory, self._levels, self._count_kill = memory, levels, channel.count_kill
        self._kills = KernelKills(channel.kills)
        self._look_at = math.inf if memory is None else 0.0
        self._output_tail = bytearray()
        self._job_grace = job_grace(grace)
        self._kill_at = math.inf
        self._wake_read, self._wake_write = os.pipe()

    def watch(self) -> None:
        """Return when the process has ended, and its output is written.

        Until then, this method handles the signals of this process. Afterwards,
        `processes.STOP_SIGNALS` are blocked.
        """
        for fd in (self._source, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._channel.setblocking(False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (*processes.STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, processes.ignore_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOP_SIGNALS)
        self._wait()
        while (status := self._reap()) is None:
            self._enforce_grace()  # after the reaping, the ID may belong to another process
            self._wait()
        self.status = status
        self._read_output()
        # A reader may take nothing for a long time.
        while self._unwritten and select.select([], [STANDARD_OUTPUT], [], EXIT_TIMEOUT_S)[1]:
            self._write()
        signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
        with contextlib.suppress(BlockingIOError):  # no signal has arrived since the last poll
            self.stopped = self.stopped or signal.SIGTERM in os.read(self._wake_read, 4096)

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel or the guard has killed a process to free memory."""
        return self._kills.has_increased()

    def output(self) -> bytes:
        """Return the end of the output, in whole lines."""
        kept = bytes(self._output_tail[-wire.LOG_BYTES :])
        return kept if len(kept) == len(self._output_tail) else kept.partition(b"\n")[2] or kept

    def _wait(self) -> None:
        """Wait for signals, messages, or output until the next limit, and handle them."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._channel, select.POLLIN)
        if not self._source_ended and len(self._unwritten) < MAX_UNWRITTEN_BYTES:
            poll.register(self._source, select.POLLIN)
        if self._unwritten:
            poll.register(STANDARD_OUTPUT, select.POLLOUT)
        left_s = min(self._kill_at, self._look_at) - time.monotonic()
        for fd, _ in poll.poll(min(max(0.0, left_s), LONGEST_POLL_S) * 1000 + 1):
            if fd == self._wake_read:
                if signal.SIGTERM in os.read(fd, 4096) and not self.stopped:
                    self.stopped = True
                    os.kill(self._pid, signal.SIGTERM)  # it isn't reaped yet, so its ID is valid
                    self._kill_in(self._job_grace)
            elif fd == self._channel.fileno():
                self._on_message()
            elif fd == self._source:
                self._read()
            else:
                self._write()

    def _enforce_grace(self) -> None:
        """Kill the job if it hasn't ended in time, and free memory if need be."""
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_at = math.inf
            self.killed = True
            os.kill(self._pid, signal.SIGKILL)
        if self._memory is not None and now >= self._look_at:
            pause = self._memory.pause()
            if not pause:
                self._count_kill()  # before the kill, because the worker reads the count at its end
                if kill_largest([self._pid], self._levels):
                    text = (
                        f"{self._memory.limit >> 20} MiB, at which the kernel would kill all of it"
                    )
                    say(f"killed a process: the container nears {text}")
                pause = AFTER_KILL_S
            self._look_at = now + pause

    def _kill_in(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _on_message(self) -> None:
        """Handle one message from the job; `Channel` sends them."""
        message = self._channel.recv(MESSAGE_BYTES)
        if message.startswith((b"output ", b"forget ", b"line ")):
            question, number, text = message.split(b" ", 2)
            self._read_output()
            if question == b"forget":
                self._output_tail.clear()
            if question == b"line":
                self._unwritten += (b"" if self._at_line_start else b"\n") + text + b"\n"
                self._at_line_start = True
            output = self.output()
            with contextlib.suppress(OSError):  # the job has ended
                os.pwrite(self._answer_file.fileno(), output, 0)
                self._channel.send(b"%b %d" % (number, len(output)))
        elif message.startswith(b"code "):
            self.reported = int(message[5:])
            self._kill_in(EXIT_TIMEOUT_S)  # threads and libraries may block the job's exit

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
                while select.select([self._channel], [], [], 0)[0]:
                    self._on_message()
                return os.waitstatus_to_exitcode(status)

    def _read_output(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        """Read output for later writing; return whether there was any."""
        try:
            data = os.read(self._source, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._source_ended = True
            return False
        self._output_tail += data
        if len(self._output_tail) > 2 * wire.LOG_BYTES:
            # The extra byte shows that output was dropped.
            del self._output_tail[: -wire.LOG_BYTES - 1]
        self._unwritten += data
        self._at_line_start = data.endswith(b"\n")
        return True

    def _write(self) -> None:
        try:
            ready = self._unwritten[:4096]  # a ready pipe takes this much without blocking
            del self._unwritten[: os.write(STANDARD_OUTPUT, ready)]
        except BlockingIOError:
            pass
        except OSError:
            self._unwritten.clear()  # the reader has closed the pipe; the job keeps running
