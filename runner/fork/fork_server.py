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
from collections.abc import Sequence

from ..job import processes
from . import child

COMMAND = struct.Struct("<cII")
"""A command of the supervisor: FORK (serial, length of the message that follows; see
`remote_runner.read_message`), SIGNAL (serial, number), or KILL_ORPHAN (process ID, 0). A serial is
the supervisor's number for a job."""

REPLY = struct.Struct("<cIIi")
"""A report to the supervisor: READY, REFUSED (serial, 0, errno), FORKED (serial, process ID, 0),
or EXITED (serial or 0 for an orphan, process ID, exit code or negative signal)."""

FORK, SIGNAL, KILL_ORPHAN = b"f", b"s", b"k"
READY, REFUSED, FORKED, EXITED = b"r", b"n", b"p", b"x"


class _SocketClosed(Exception):
    """The supervisor has closed the socket."""


def serve(socket_fd: int, *, fresh: bool) -> None:
    """Execute commands from the socket until the supervisor closes it; then kill all jobs.

    A *fresh* job starts a new interpreter, so this process loads no code of jobs for it.
    """
    if not fresh:
        child.preload()
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
    serials: dict[int, int] = {}
    try:
        _serve((socket_fd, wake_read, wake_write), serials)
    except (_SocketClosed, OSError):
        pass
    finally:
        _kill_all(serials)


def _serve(own_fds: tuple[int, int, int], serials: dict[int, int]) -> None:
    """Execute commands and report ended processes, until the socket is closed.

    *own_fds* are the socket, and the ends of the pipe that signals write to. *serials* maps the
    process ID of each running job to its serial.
    """
    socket_fd, wake_read, _ = own_fds
    poll = select.poll()
    poll.register(socket_fd, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    buffer, replies = bytearray(), bytearray(REPLY.pack(READY, 0, 0, 0))
    pids: dict[int, int] = {}
    while True:
        if replies and replies[0] != FORKED[0]:  # a FORKED waits for the next report
            _send(socket_fd, replies)
        for fd, _ in poll.poll():
            if fd == socket_fd:
                data = os.read(socket_fd, 65536)
                if not data:
                    raise _SocketClosed
                buffer += data
                _execute_commands(buffer, own_fds, serials, pids, replies)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                reports = _reap(serials, pids)
                if reports:
                    replies += reports
                    _send(socket_fd, replies)


def _send(socket_fd: int, replies: bytearray) -> None:
    while replies:
        del replies[: os.write(socket_fd, replies)]


def _execute_commands(
    buffer: bytearray,
    own_fds: Sequence[int],
    serials: dict[int, int],
    pids: dict[int, int],
    replies: bytearray,
) -> None:
    """Execute the complete commands in *buffer*, remove them from it, and add to *replies*."""
    while len(buffer) >= COMMAND.size:
        command, target, argument = COMMAND.unpack_from(buffer)
        end = COMMAND.size + (argument if command == FORK else 0)
        if len(buffer) < end:
            return
        message = bytes(buffer[COMMAND.size : end])
        del buffer[:end]
        if command == FORK:
            parent_pid = os.getpid()
            try:
                pid = os.fork()
            except OSError as exc:
                replies[:0] = REPLY.pack(REFUSED, target, 0, exc.errno or 0)
                continue
            if pid == 0:
                child.run_job_and_exit(message, own_fds, parent_pid)
            serials[pid], pids[target] = target, pid
            replies += REPLY.pack(FORKED, target, pid, 0)
        elif command == SIGNAL and target in pids:
            os.kill(pids[target], argument)
        elif command == KILL_ORPHAN and target not in serials:
            # If it isn't a child any more, another process may have this ID.
            with contextlib.suppress(OSError):
                os.waitid(os.P_PID, target, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.kill(target, signal.SIGKILL)


def _reap(serials: dict[int, int], pids: dict[int, int]) -> bytes:
    """Reap ended children, kill what is left of each job's process group, and return reports."""
    reports = b""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reports
        if pid == 0:
            return reports
        if pid in serials:  # the kernel doesn't reuse a process ID this soon
            _kill_group(pid)
        serial = serials.pop(pid, 0)
        pids.pop(serial, None)
        reports += REPLY.pack(EXITED, serial, pid, os.waitstatus_to_exitcode(status))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def _kill_all(serials: dict[int, int]) -> None:
    """Kill all jobs, then their orphans, until this process has no children."""
    for pid in serials:
        _kill_group(pid)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    while True:
        for pid in processes.children():
            with contextlib.suppress(OSError):  # this user may not kill a set-user-ID program
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
