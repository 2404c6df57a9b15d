"""The warm parent (fork server): forks one process per job, and does little else.

After a fork, the kernel copies each memory page that this process writes to. So the process keeps
little state: the supervisor keeps the facts about jobs. The process has only three other tasks. It
reaps its children itself, so that it never signals a process that has reused a child's ID. It
adopts the orphans of its jobs. When the supervisor closes the socket, it kills its jobs and their
orphans, and exits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import struct

from ..job import processes
from . import child

COMMAND = struct.Struct("<cII")
"""A command of the supervisor: FORK (serial, length of the message that follows; see
`child.become`), SIGNAL (serial, number), or SLAY (process ID, 0), which kills an orphan. A serial
is the supervisor's number for a job."""

REPLY = struct.Struct("<cIIi")
"""A report to the supervisor: READY, REFUSED (serial, 0, errno), FORKED (serial, process ID, 0),
or EXITED (serial or 0 for an orphan, process ID, exit code or negative signal)."""

FORK, SIGNAL, SLAY = b"f", b"s", b"k"
READY, REFUSED, FORKED, EXITED = b"r", b"n", b"p", b"x"


_SIGKILL = signal.SIGKILL.value


class _Gone(Exception):
    """The supervisor has closed the socket."""


def serve(talk: int) -> None:
    """Execute commands from the socket *talk* until the supervisor closes it; then end all jobs."""
    processes.become_subreaper()
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _noted)
    child.prepare((talk, wake, woken))
    gc.collect()
    gc.disable()
    gc.freeze()  # all forks share the objects that exist now, and the collector leaves them alone
    serials: dict[int, int] = {}
    try:
        _serve(talk, wake, serials)
    except (_Gone, OSError):
        pass
    finally:
        _end_all(serials)


def _serve(talk: int, wake: int, serials: dict[int, int]) -> None:
    poll = select.poll()
    poll.register(talk, select.POLLIN)
    poll.register(wake, select.POLLIN)
    buffer, replies = bytearray(), bytearray(REPLY.pack(READY, 0, 0, 0))
    pids: dict[int, int] = {}
    while True:
        if replies and replies[0] != FORKED[0]:  # FORKED alone can wait for the next report
            _send(talk, replies)
        for fd, _ in poll.poll():
            if fd == talk:
                data = os.read(talk, 65536)
                if not data:
                    raise _Gone
                buffer += data
                _execute_commands(buffer, serials, pids, replies)
            else:
                try:  # noqa: SIM105 - `suppress` would touch more of the memory
                    os.read(wake, 4096)
                except BlockingIOError:
                    pass
                reports = _reap(serials, pids)
                if reports:
                    replies += reports
                    _send(talk, replies)


def _send(talk: int, replies: bytearray) -> None:
    while replies:
        del replies[: os.write(talk, replies)]


def _execute_commands(
    buffer: bytearray,
    serials: dict[int, int],
    pids: dict[int, int],
    replies: bytearray,
) -> None:
    """Execute the complete commands in *buffer*."""
    while len(buffer) >= COMMAND.size:
        what, one, two = COMMAND.unpack_from(buffer)
        end = COMMAND.size + (two if what == FORK else 0)
        if len(buffer) < end:
            return
        message = bytes(buffer[COMMAND.size : end])
        del buffer[:end]
        if what == FORK:
            parent_pid = os.getpid()
            local, secrets, order = message.split(b"\n", 2)
            child.adopt(secrets)
            try:
                pid = os.fork()
            except OSError as exc:
                replies[:0] = REPLY.pack(REFUSED, one, 0, exc.errno or 0)
                continue
            if pid == 0:
                child.become(local, secrets, order, parent_pid)
            serials[pid], pids[one] = one, pid
            replies += REPLY.pack(FORKED, one, pid, 0)
        elif what == SIGNAL and one in pids:
            os.kill(pids[one], two)
        elif what == SLAY and one not in serials:
            _slay(one)


def _reap(serials: dict[int, int], pids: dict[int, int]) -> bytes:
    """Reap ended children; return the reports about them."""
    reports = b""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reports
        if pid == 0:
            return reports
        if pid in serials:  # the kernel doesn't reuse a process ID this soon
            _end_group(pid)
        serial = serials.pop(pid, 0)
        pids.pop(serial, None)
        reports += REPLY.pack(EXITED, serial, pid, os.waitstatus_to_exitcode(status))


def _slay(pid: int) -> None:
    """Kill orphan *pid* if it is still a child; otherwise another process may have this ID."""
    with contextlib.suppress(OSError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(pid, signal.SIGKILL)


def _end_group(pid: int) -> None:
    try:  # noqa: SIM105 - `suppress` would touch more of the memory
        os.killpg(pid, _SIGKILL)
    except OSError:
        pass


def _end_all(serials: dict[int, int]) -> None:
    for pid in serials:
        _end_group(pid)
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


def _noted(signum: int, frame: object) -> None:
    """Do nothing: the wake-up pipe reports the signal."""
