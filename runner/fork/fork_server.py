"""The warm parent (fork server): forks one process per job, and does little else.

The supervisor keeps the facts about jobs. This process has only three other tasks. It reaps its
children itself, so that it never signals a process that has reused a child's ID. It adopts the
orphans of its jobs. When the supervisor closes the socket, it kills its jobs and their orphans, and
exits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import struct
import sys
from collections.abc import Callable
from typing import NoReturn

from .. import remote_runner
from ..job import processes

COMMAND = struct.Struct("<cII")
"""A command of the supervisor: FORK (serial, length of the message that follows; see
`child.read_message`), SIGNAL (serial, number), or KILL_ORPHAN (process ID, 0). A serial is
the supervisor's number for a job."""

REPLY = struct.Struct("<cIIi")
"""A report to the supervisor: READY, REFUSED (serial, 0, errno), FORKED (serial, process ID, 0),
or EXITED (serial or 0 for an orphan, process ID, exit code or negative signal)."""

FORK, SIGNAL, KILL_ORPHAN = b"f", b"s", b"k"
READY, REFUSED, FORKED, EXITED = b"r", b"n", b"p", b"x"


def serve(socket_fd: int) -> None:
    """Execute commands from the socket until the supervisor closes it; then kill all jobs."""
    # The supervisor imports this module, too, and nothing that needs cloudpickle.
    from . import child

    remote_runner.enable_crash_tracebacks()
    remote_runner.prepare_streams()
    child.has_jax()  # once for all forks
    sys.argv[:] = [""]
    os.chdir("/")
    processes.become_subreaper()
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, processes.ignore_signal)
    gc.collect()
    gc.disable()
    gc.freeze()  # all forks share the objects that exist now; the collector never touches these
    server = _ForkServer(socket_fd, wake_read, wake_write, child.run_job_and_exit)
    try:
        with contextlib.suppress(EOFError, OSError):  # the supervisor has closed the socket
            server.run()
    finally:
        server.kill_all()


class _ForkServer:
    """The jobs of this process, which are its children."""

    def __init__(
        self, socket_fd: int, wake_read: int, wake_write: int, run_job: Callable[..., NoReturn]
    ) -> None:
        self._socket, self._wake = socket_fd, wake_read
        self._run_job = run_job
        self._own_fds = (socket_fd, wake_read, wake_write)
        self._serials: dict[int, int] = {}  # by the process ID of each running job
        self._pids: dict[int, int] = {}  # by the serial
        self._buffer, self._replies = bytearray(), bytearray(REPLY.pack(READY, 0, 0, 0))

    def run(self) -> None:
        """Execute commands and report ended processes, until the socket is closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            if self._replies and self._replies[0] != FORKED[0]:  # a FORKED waits for the next
                self._send()
            for fd, _ in poll.poll():
                if fd == self._socket:
                    if not (data := os.read(fd, 65536)):  # the supervisor has closed the socket
                        raise EOFError
                    self._buffer += data
                    self._execute_commands()
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(fd, 4096)
                    if self._reap():
                        self._send()

    def _send(self) -> None:
        while self._replies:
            del self._replies[: os.write(self._socket, self._replies)]

    def _execute_commands(self) -> None:
        """Execute the complete commands in the buffer, and remove them from it."""
        while len(self._buffer) >= COMMAND.size:
            command, target, argument = COMMAND.unpack_from(self._buffer)
            end = COMMAND.size + (argument if command == FORK else 0)
            if len(self._buffer) < end:
                return
            message = bytes(self._buffer[COMMAND.size : end])
            del self._buffer[:end]
            if command == FORK:
                self._fork(target, message)
            elif command == SIGNAL and target in self._pids:  # otherwise the job has ended
                os.kill(self._pids[target], argument)
            elif command == KILL_ORPHAN and target not in self._serials:
                # If it isn't a child any more, another process may have this ID.
                with contextlib.suppress(OSError):
                    os.waitid(os.P_PID, target, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    os.kill(target, signal.SIGKILL)

    def _fork(self, serial: int, message: bytes) -> None:
        own_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as exc:
            self._replies[:0] = REPLY.pack(REFUSED, serial, 0, exc.errno or 0)
            return
        if pid == 0:
            self._run_job(message, self._own_fds, own_pid)
        self._serials[pid], self._pids[serial] = serial, pid
        self._replies += REPLY.pack(FORKED, serial, pid, 0)

    def _reap(self) -> bool:
        """Reap ended children, and kill their process groups; return whether there were any."""
        found = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            found = True
            if pid in self._serials:  # the kernel doesn't reuse a process ID this soon
                _kill_group(pid)
            serial = self._serials.pop(pid, 0)
            self._pids.pop(serial, None)
            self._replies += REPLY.pack(EXITED, serial, pid, os.waitstatus_to_exitcode(status))

    def kill_all(self) -> None:
        """Kill all jobs, then their orphans."""
        for pid in self._serials:
            _kill_group(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        processes.end_children()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
