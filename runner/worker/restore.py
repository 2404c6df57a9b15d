"""Restore what an item has changed in an interpreter that the next item uses, too.

`Baseline` restores what is cheap to restore. `Leftovers` reports what can't be taken back:
threads, processes, and open files.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..job import processes
from ..job_log import say

_signal: Any = importlib.import_module("_signal")  # the C module: `signal` makes enums
_NUMBERS = [
    int(number)
    for number in signal.valid_signals()
    if number not in (signal.SIGKILL, signal.SIGSTOP)
]
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class _Logger(NamedTuple):
    logger: logging.Logger
    level: int
    propagate: bool
    disabled: bool
    handlers: list[Any]
    filters: list[Any]


class Baseline:
    """The state of this process that each item begins with.

    It has the environment, the working directory, the umask, ``sys.path``, signal handlers and
    timers, warnings filters, loggers, and the standard streams. A logger that an item makes keeps
    what it has when that item ends, because a module sets up its logger only once.
    """

    def __init__(self) -> None:
        self._environ = os.environ
        self._variables = dict(_data(os.environ))
        self._folder = os.getcwd()
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._path, self._entries = sys.path, [*sys.path]
        self._handlers = [*map(_signal.getsignal, _NUMBERS)]
        self._mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
        self._wakeup = _signal.set_wakeup_fd(-1)
        _signal.set_wakeup_fd(self._wakeup)
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._filters, self._filter_list = warnings.filters, [*warnings.filters]
        self._show = warnings.showwarning
        self._disabled_level = logging.root.manager.disable
        self._known = 0
        self._loggers = [_state_of(logging.root)]
        self._note_loggers()
        self._streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
        self._outputs = [(fd, os.dup(fd), _identity(fd)) for fd in (1, 2)]

    def expect(self, variables: Mapping[str, str]) -> None:
        """Let the next item begin with these environment variables, too."""
        for name, value in variables.items():
            self._variables[os.fsencode(name)] = os.fsencode(value)

    def restore(self) -> None:
        """Restore what differs."""
        os.environ = self._environ  # noqa: B003 - it is the object that an item may have replaced
        if _data(os.environ) != self._variables:
            processes.set_environment(
                {os.fsdecode(name): os.fsdecode(value) for name, value in self._variables.items()}
            )
        try:
            if os.getcwd() != self._folder:
                os.chdir(self._folder)
        except FileNotFoundError:  # the item has removed it
            os.makedirs(self._folder, exist_ok=True)
            os.chdir(self._folder)
        os.umask(self._umask)
        sys.path = self._path
        if sys.path != self._entries:
            sys.path[:] = self._entries
        self._restore_signals()
        if resource.getrlimit(resource.RLIMIT_NOFILE) != self._files:
            with contextlib.suppress(OSError, ValueError):  # the item has lowered the hard limit
                resource.setrlimit(resource.RLIMIT_NOFILE, self._files)
        warnings.filters = self._filters
        warnings.showwarning = self._show
        if warnings.filters != self._filter_list:
            warnings.resetwarnings()  # it forgets which warnings were shown
            self._filters[:] = self._filter_list  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
        self._restore_loggers()
        self._restore_streams()

    def _restore_signals(self) -> None:
        for timer in _TIMERS:  # a timer must not fire in the next item
            _signal.setitimer(timer, 0.0)
        handlers = [*map(_signal.getsignal, _NUMBERS)]
        if handlers != self._handlers:
            for number, handler, now in zip(_NUMBERS, self._handlers, handlers, strict=True):
                if now is not handler and handler is not None:  # None: C code has set it
                    _signal.signal(number, handler)
        _signal.set_wakeup_fd(self._wakeup)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self._mask)

    def _restore_loggers(self) -> None:
        if logging.root.manager.disable != self._disabled_level:
            logging.disable(self._disabled_level)
        for logger, level, propagate, disabled, handlers, filters in self._loggers:
            if logger.level != level:
                logger.setLevel(level)
            logger.propagate, logger.disabled = propagate, disabled
            if logger.handlers != handlers:
                logger.handlers[:] = handlers
            if logger.filters != filters:
                logger.filters[:] = filters
        self._note_loggers()

    def _note_loggers(self) -> None:
        """Note the loggers that were made since."""
        named = logging.root.manager.loggerDict
        if len(named) != self._known:
            known = {id(state.logger) for state in self._loggers}
            self._known = len(named)
            self._loggers += [
                _state_of(logger)
                for logger in named.values()
                if isinstance(logger, logging.Logger) and id(logger) not in known
            ]

    def _restore_streams(self) -> None:
        for fd, saved, identity in self._outputs:
            try:
                is_same = _identity(fd) == identity
            except OSError:  # the item has closed it
                is_same = False
            if not is_same:
                os.dup2(saved, fd)
        for number, (name, stream) in enumerate(self._streams.items()):
            if stream is not None and stream.closed and number:
                stream = self._streams[name] = open(  # noqa: SIM115 - it stays open
                    number, "w", 1, "utf-8", "backslashreplace", closefd=False
                )
            setattr(sys, name, stream)


def _data(environ: Any) -> dict[bytes, bytes]:
    data: dict[bytes, bytes] = environ._data
    return data


def _state_of(logger: logging.Logger) -> _Logger:
    handlers, filters = [*logger.handlers], [*logger.filters]
    return _Logger(logger, logger.level, logger.propagate, logger.disabled, handlers, filters)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class Leftovers:
    """Report threads, child processes, and open files that an item leaves, each kind once."""

    def __init__(self) -> None:
        self._known: dict[str, set[object]] = {kind: find() for kind, find in _KINDS.items()}
        self._file_count = _count_files()

    def ignore(self) -> None:
        """Take what exists now for part of the interpreter."""
        self._known = {kind: _KINDS[kind]() for kind in self._known}
        self._file_count = _count_files()

    def look(self, job: str) -> None:
        """Report what *job* has left."""
        found = list[str]()
        for kind, known in [*self._known.items()]:
            if kind == _FILES and 0 < _count_files() == self._file_count:
                continue  # a listing takes much longer
            if new := _KINDS[kind]() - known:
                del self._known[kind]
                names = sorted(map(str, new))
                listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
                found.append(f"{kind} ({listed})")
        if found:
            say(
                f"{job} left {' and '.join(found)} in its interpreter, where they stay "
                'until it ends; with isolation="process", they end with each job'
            )


def _threads() -> set[object]:
    threading: Any = sys.modules.get("threading")
    if threading is None:
        return set()
    names = {f"{thread.name}" for thread in threading.enumerate()}
    return {name for name in names if not name.startswith("kinetic-")}


def _children() -> set[object]:
    if not processes.LINUX:
        return set()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # by far the most frequent answer, and the cheapest
    return {*processes.children()}


def _files() -> set[object]:
    try:
        next_fd = os.open("/", os.O_RDONLY)  # the listing opens one with the same number
        os.close(next_fd)
        found: set[object] = {*map(int, os.listdir("/proc/self/fd"))}
        return found - {next_fd}
    except OSError:
        return set()


def _count_files() -> int:
    """Return how many files this process has open; 0 if the kernel doesn't tell."""
    try:
        return os.stat("/proc/self/fd").st_size
    except OSError:
        return 0


_FILES = "open files"
_KINDS: dict[str, Callable[[], set[object]]] = {
    "threads": _threads,
    "child processes": _children,
    _FILES: _files,
}
