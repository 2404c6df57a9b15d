"""The process from which a worker forks the processes of its items.

It holds the function, stands in the workspace, and has no client, event loop, or thread. The
worker's I/O process starts it, and replaces it if it dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from ..job import processes

_signal: Any = importlib.import_module("_signal")  # the C module: `signal` touches more memory
_ENDING = (int(signal.SIGTERM), int(signal.SIGINT), int(signal.SIGHUP))

COMMAND = struct.Struct("<I")
"""A command: the length of the message that follows."""

REPORT = struct.Struct("<cIi")
"""A report: STARTED, CALLED, or ENDED; a process ID; an exit code or negative signal.

A pipe takes a write of so few bytes as a whole, so the item's process may write one, too.
"""

STARTED, CALLED, ENDED, FAILED = b"s", b"c", b"e", b"f"


class Report(NamedTuple):
    """What happened to the process of an item."""

    kind: bytes
    pid: int
    status: int


class Interpreter:
    """The I/O process's end of an interpreter.

    After a fork, both processes copy each page of memory that they write to, which is most of the
    cost. So this process does little between two forks.

    Args:
        prepare: Called once, in the interpreter.
        run: Called in the fork, with the message of `start`, and a function which reports that the
            user's function is called. It never returns.
    """

    def __init__(
        self,
        prepare: Callable[[], None],
        run: Callable[[bytes, Callable[[], None]], NoReturn],
    ) -> None:
        self._prepare = prepare
        self._run = run
        self._pid = 0
        self._commands = -1
        self.reports = -1

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self._pid != 0

    def start(self, message: bytes) -> None:
        """Fork a process for an item; its reports follow."""
        if not self._pid:
            self._spawn()
        data = COMMAND.pack(len(message)) + message
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError:
            pass  # `receive` reports the end

    def receive(self) -> list[Report]:
        """Return the reports that have come. If the interpreter has died, the item has, too."""
        data = os.read(self.reports, REPORT.size * 64)
        if data:
            return [Report(*fields) for fields in REPORT.iter_unpack(data)]
        _, status = os.waitpid(self._pid, 0)
        self._close()
        return [Report(FAILED, 0, os.waitstatus_to_exitcode(status))]

    def end(self) -> None:
        """End the interpreter and its item."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._close()

    def _close(self) -> None:
        self._pid = 0
        os.close(self._commands)
        os.close(self.reports)

    def _spawn(self) -> None:
        command_read, self._commands = os.pipe()
        self.reports, report_write = os.pipe()
        io_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._commands)
                os.close(self.reports)
                processes.die_with(io_pid)
                self._serve(command_read, report_write)
            finally:
                os._exit(1)
        os.close(command_read)
        os.close(report_write)

    # --- in the interpreter ---

    def _serve(self, commands: int, reports: int) -> NoReturn:
        processes.become_subreaper()
        for number in _ENDING:
            _signal.signal(number, _signal.SIG_IGN)  # the I/O process decides
        self._prepare()
        gc.collect()
        gc.disable()
        gc.freeze()  # forks share what exists now
        own_pid = os.getpid()
        while True:
            message = _read(commands, COMMAND.unpack(_read(commands, COMMAND.size))[0])
            pid = os.fork()
            if pid == 0:
                _become_item(own_pid)
                os.close(commands)
                self._run(message, lambda: _report(reports, CALLED, os.getpid(), 0))
            _report(reports, STARTED, pid, 0)
            _, status = os.waitpid(pid, 0)
            _end_leftovers()
            _report(reports, ENDED, pid, os.waitstatus_to_exitcode(status))


def _become_item(interpreter: int) -> None:
    os.setsid()
    processes.die_with(interpreter)
    for number in _ENDING:
        _signal.signal(number, _signal.SIG_DFL)
    gc.enable()


def _end_leftovers() -> None:
    """Kill what an item has started, so that its memory and GPU are free for the next.

    This process adopts each process whose parent has ended, so none is left without children.
    """
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for child in processes.children():
            with contextlib.suppress(OSError):  # this user may not kill a set-user-ID program
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _report(fd: int, kind: bytes, pid: int, status: int) -> None:
    os.write(fd, REPORT.pack(kind, pid, status))


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := os.read(fd, size - len(data))):
            os._exit(0)  # the I/O process has ended
        data += more
    return data
