"""The process in which a worker's items run, or from which their processes fork.

It holds the function, stands in the workspace, and has no client. The worker's I/O process starts
it, and replaces it if it dies. With ``isolation="process"``, it forks one process for each item,
and has no event loop or thread. With ``isolation="worker"``, it runs the items itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .. import remote_runner
from ..job import processes
from ..job_log import say

if TYPE_CHECKING:
    from .child import ItemChild

_signal: Any = importlib.import_module("_signal")  # the C module: `signal` touches more memory

COMMAND = struct.Struct("<cQ")
"""A command: RUN or IMPORT; the length of the message that follows."""

RUN, IMPORT = b"r", b"i"

READ_BYTES, PIPE_BYTES = 4096, 1 << 16
"""How many bytes of commands to read at once: most are shorter, and a pipe holds so many."""

EXIT_CANNOT_IMPORT = 3
"""The interpreter can't share the imports, and has ended."""

REPORT = struct.Struct("<ci")
"""A report: ENDED, or one of `child`; an exit code or negative signal.

A pipe takes a write of so few bytes as a whole, so the item's process may write one, too.
"""

EXIT_CHECK_S = 0.005
"""How often to check whether an interpreter has ended by itself."""

ENDED, FAILED = b"e", b"f"

FORKED = struct.Struct("<I?")
"""What the interpreter shares: the ID of the item's process while it runs, and whether it began."""


class Report(NamedTuple):
    """What happened to an item."""

    kind: bytes
    status: int


class Interpreter:
    """The I/O process's end of an interpreter.

    After a fork, both processes copy each page of memory that they write to, which is most of the
    cost. So this process does little between two forks.

    Args:
        items: What the interpreter does with items.
        own_files: Returns descriptors of the I/O process that the interpreter must not have.
    """

    def __init__(self, items: ItemChild, own_files: Callable[[], Sequence[int]]) -> None:
        self._items = items
        self._own_files = own_files
        self._pid = 0
        self._forked = mmap.mmap(-1, FORKED.size)  # a report would wake the I/O process
        self._commands = -1
        self.reports = -1
        self.started = 0
        """How many items this interpreter has got."""

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self._pid != 0

    @property
    def item_pid(self) -> int:
        """The ID of the process in which the item runs; 0 before it exists, and after its end."""
        if self._items.stay:
            return self._pid
        pid: int = FORKED.unpack_from(self._forked)[0]
        return pid

    @property
    def item_began(self) -> bool:
        """Whether the process of the item has existed."""
        began: bool = FORKED.unpack_from(self._forked)[1]
        return began

    def start(self, message: bytes, imports: bytes = b"") -> None:
        """Run an item, after *imports* that all later items use, too; reports follow."""
        if not self._pid:
            self._spawn()
        self.started += 1
        FORKED.pack_into(self._forked, 0, 0, False)
        data = COMMAND.pack(IMPORT, len(imports)) + imports if imports else b""
        data += COMMAND.pack(RUN, len(message)) + message
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError:
            pass  # `receive` reports the end

    def receive(self, *, reap: bool) -> list[Report]:
        """Return the reports that have come. If the interpreter has died, the item has, too.

        Call this when `reports` is readable, and to *reap* after each SIGCHLD: processes that the
        item has started may keep the pipe open.
        """
        status = self._reap() if reap else None  # before the last reports are read
        try:
            data = os.read(self.reports, REPORT.size * 64)
        except BlockingIOError:  # only a SIGCHLD has come
            data = b""
        found = [Report(*fields) for fields in REPORT.iter_unpack(data)]
        if status is not None:
            found.append(Report(FAILED, os.waitstatus_to_exitcode(status)))
            self._close()
        return found

    def _reap(self) -> int | None:
        """Return the status of the interpreter if it has ended; reap the orphans of its items."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid in (0, self._pid):  # 0: no process has ended
                return status if pid else None

    def end(self, grace: float = 0.0) -> None:
        """End the interpreter, and all that its items have started.

        If items stay in it, it may clean up for *grace* seconds.
        """
        if not self._pid:
            return
        os.close(self._commands)
        self._commands = -1
        deadline = time.monotonic() + (grace if self._items.stay else 0.0)
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            if time.monotonic() >= deadline:
                if self._items.stay:
                    say(
                        f"killed the interpreter of these jobs: it didn't end in {grace:.3g} s, so "
                        "what init= cleans up may be incomplete"
                    )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(EXIT_CHECK_S)
        self._close()

    def _close(self) -> None:
        processes.end_children()  # this process has adopted what the items have left
        self._pid = self.started = 0
        if self._commands >= 0:
            os.close(self._commands)
        os.close(self.reports)

    def _spawn(self) -> None:
        command_read, self._commands = os.pipe()
        self.reports, report_write = os.pipe()
        os.set_blocking(self.reports, False)
        io_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _signal.set_wakeup_fd(-1)
                for fd in (self._commands, self.reports, *self._own_files()):
                    os.close(fd)
                processes.die_with(io_pid)
                self._serve(command_read, report_write)
            finally:
                os._exit(1)
        os.close(command_read)
        os.close(report_write)

    # --- in the interpreter ---

    def _serve(self, commands: int, reports: int) -> NoReturn:
        os.setsid()  # signals of a terminal are for the I/O process
        _signal.pthread_sigmask(_signal.SIG_BLOCK, processes.STOP_SIGNALS)
        for number in (*processes.STOP_SIGNALS, signal.SIGCHLD):
            _signal.signal(number, _signal.SIG_DFL)
        self._items.prepare()
        if self._items.stay:
            self._run_items(commands, reports)
        else:
            self._fork_items(commands, reports)

    def _run_items(self, commands: int, reports: int) -> NoReturn:
        """Run the items in this process until the I/O process closes the pipe."""
        messages = _Messages(commands)
        while (command := messages.next()) is not None:
            self._items.take(command[1], lambda kind: _report(reports, kind, 0))
            code = self._items.run()
            _report(reports, ENDED, code)
            self._items.restore()
        self._items.close()
        remote_runner.exit_process(0)

    def _fork_items(self, commands: int, reports: int) -> NoReturn:
        """Fork a process for each item until the I/O process closes the pipe."""
        processes.become_subreaper()
        gc.disable()
        gc.freeze()  # forks share what exists now; a collection would leave holes that they fill
        own_pid = os.getpid()

        def report(kind: bytes) -> None:
            _report(reports, kind, 0)

        messages = _Messages(commands)
        while (command := messages.next()) is not None:
            kind, message = command
            if kind == IMPORT:
                self._share_imports(message)
                continue
            self._items.take(message, report)
            FORKED.pack_into(self._forked, 0, 0, True)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                processes.die_with(own_pid)
                os.close(commands)
                self._items.run_and_exit()
            FORKED.pack_into(self._forked, 0, pid, True)
            if processes.LINUX:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                FORKED.pack_into(self._forked, 0, 0, True)  # before another process has the ID
            _, status = os.waitpid(pid, 0)
            processes.end_children()
            _report(reports, ENDED, os.waitstatus_to_exitcode(status))
        os._exit(0)

    def _share_imports(self, message: bytes) -> None:
        if not self._items.share_imports(message):
            os._exit(EXIT_CANNOT_IMPORT)
        gc.freeze()


def _report(fd: int, kind: bytes, status: int) -> None:
    os.write(fd, REPORT.pack(kind, status))


class _Messages:
    """The commands in a pipe, with their messages; most take one read."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = bytearray()

    def next(self) -> tuple[bytes, bytes] | None:
        """Return the next command and its message; None if the I/O process has closed the pipe."""
        data, end = self._rest, COMMAND.size
        while True:
            if len(data) >= COMMAND.size:
                kind, size = COMMAND.unpack_from(data)
                end = COMMAND.size + size
                if len(data) >= end:
                    with memoryview(data) as view:
                        message = bytes(view[COMMAND.size : end])
                    del data[:end]
                    return kind, message
            wanted = min(max(READ_BYTES, end - len(data)), PIPE_BYTES)
            if not (more := os.read(self._fd, wanted)):
                return None
            data += more
