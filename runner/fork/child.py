"""How a fork of the warm parent becomes a job: its own session, log, limits and environment.

Written for few touched pages: each that a fork writes to is copied, and that
is most of what a fork costs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from .. import remote_runner
from ..job import processes
from ..protocol import wire

# What is called by its own name needs no look at a module, which would touch more of the memory.
_signal: Any = importlib.import_module("_signal")  # `signal` without the detour over its enums
_set_wakeup_fd, _set_handler, _SIG_DFL = _signal.set_wakeup_fd, _signal.signal, _signal.SIG_DFL
_SIGCHLD = signal.SIGCHLD.value
_getpid, _setsid, _close = os.getpid, os.setsid, os.close
_die_with, _collect = processes.die_with, gc.enable
_ENCODING = sys.getfilesystemencoding()
_inherited: Sequence[int] = ()
_mark = processes.Mark()
_decoder: Any = json.JSONDecoder()
_scan = _decoder.scan_once  # without the detour over layers of Python
_make_terms: Callable[[Mapping[str, Any], bytes], Any] | None = None
_make_site: Callable[..., Any] | None = None
_prefer_jax: Callable[[dict[str, str]], None] | None = None
_entered: Terms | None = None
"""Whose environment this process has."""


def prepare(inherited: Sequence[int]) -> None:
    """In the parent, once: what forks shall find done. They close the descriptors *inherited*."""
    global _inherited
    _inherited = inherited
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A line that is printed can be followed; no character of it may end the job.
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    sys.modules["__main__"] = types.ModuleType("__main__")  # the parent's script is not the job's
    sys.argv[:] = [""]


def preload() -> None:
    """In the parent, once: load the jobs' own code, for all forks."""
    global _make_terms, _make_site, _prefer_jax
    remote_runner.tell_crashes()
    importlib.import_module("..job.by_value", __package__).teach_multiprocessing()
    _make_terms = importlib.import_module("..job.attempt", __package__).Terms
    workspace: Any = importlib.import_module("..job.workspace", __package__)
    _make_site, _prefer_jax = workspace.Site, workspace.prefer_jax


class Terms:
    """The shared part of a batch's jobs, read once by their parent.

    *message* is a JSON object: the client's part (``assignment``,
    ``environment``, ``key``) and the supervisor's (the rest).
    """

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._prepared = False
        self.order: dict[str, Any] = {}
        self.attempt: Any = None
        self.environment: dict[str, str] | None = None

    def read(self) -> dict[str, Any]:
        """The message.

        Raises:
            ValueError: It is garbled.
        """
        if not self.order:
            self.order = json.loads(self._message)
        return self.order

    def prepare(self, message: bytes) -> None:
        """Read now, for all the forks, what the job of *message* shares with the others.

        What cannot be read is left to each job's own process, which says so in its log.
        """
        if not self._prepared:
            self._prepared = True
            with contextlib.suppress(Exception):
                self._prepare(message)
        self._enter()

    def _prepare(self, message: bytes) -> None:
        order = self.read()
        if _make_terms is not None and _prefer_jax is not None:
            self.environment = order["environment"]
            _prefer_jax(order["environment"])
            self.attempt = _make_terms(order["assignment"], bytes.fromhex(order["key"]))
            self.attempt.prepare(_scan(message.decode(), 0)[0]["assignment"])

    def _enter(self) -> None:
        """Have the environment that the jobs share, which their forks then find."""
        global _entered
        if self.environment is not None and _entered is not self:
            _entered = None
            with contextlib.suppress(Exception):
                _replace_environment(self.environment)
                _entered = self


def become(terms: Terms, message: bytes, arguments: bytes | None, parent: int) -> NoReturn:
    """Run the job in this fork, and end with it. Never returns, whatever happens.

    *message* is what the job has beside its *terms*. With *arguments* its
    attempt is claimed.
    """
    code = wire.EXIT_SETUP
    mine = _getpid()
    try:
        _setsid()
        _die_with(parent)
        _set_wakeup_fd(-1)
        _set_handler(_SIGCHLD, _SIG_DFL)
        for fd in _inherited:
            _close(fd)
        _collect()
        threads: Any = sys.modules.get("threading")
        if threads is not None:
            threads.main_thread()._set_native_id()  # a fork keeps that of its parent
        code = _carry_out(terms, message, arguments)
    except BaseException:
        _report()
    finally:
        if _getpid() != mine:
            os._exit(code)  # a fork of the user's code: nothing here is its own
        _leave(code)


def _carry_out(terms: Terms, message: bytes, arguments: bytes | None) -> int:
    """Be the job of *message*, in a process that is nothing else any more."""
    own: dict[str, Any] = _scan(message.decode(), 0)[0]
    order = terms.read()
    executor, work, memory = own["executor"], own["work"], order["memory_bytes"]
    _mark.write(executor)
    _open_log(own["log"])
    os.chdir(work)
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    environment: dict[str, str] = own["environment"]
    environment.update(own["overrides"])
    environment[processes.MARK] = _mark.value(executor)
    if order["command"]:
        _execute(order, own)
    if _entered is not terms:
        _replace_environment(order["environment"])
    _add_to_environment(environment)
    assert _make_terms is not None and _make_site is not None
    site = _make_site(work=work, cache=order["cache"], mounts=order["mounts"], kept=order["spares"])
    attempt = terms.attempt or _make_terms(order["assignment"], bytes.fromhex(order["key"]))
    code: int = attempt.carry_out(own["assignment"], executor, site, arguments)
    return code


def _open_log(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Have exactly this one."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    _add_to_environment(environment)
    time.tzset()


def _add_to_environment(variables: Mapping[str, str]) -> None:
    """Set these; through the mapping itself it would cost three times the touched pages."""
    data: dict[bytes, bytes] = vars(os.environ)["_data"]
    for variable, text in variables.items():
        name = variable.encode(_ENCODING, "surrogateescape")
        value = text.encode(_ENCODING, "surrogateescape")
        os.putenv(name, value)
        data[name] = value
    if "TZ" in variables:
        time.tzset()


def _execute(order: Mapping[str, Any], own: Mapping[str, Any]) -> NoReturn:
    """Replace this process by a fresh interpreter; it reads its order from a private file."""
    environment: dict[str, str] = {**order["environment"], **own["environment"]}
    order = {**order, **own, "assignment": {**order["assignment"], **own["assignment"]}}
    del order["environment"]
    fd = _private_file()
    with open(fd, "wb", closefd=False) as file:
        file.write(json.dumps(order).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(fd, True)
    environment["KINETIC_ORDER_FD"] = str(fd)
    command: list[str] = order["command"]
    os.execvpe(command[0], command, environment)


def _private_file() -> int:
    """A file without a name: the key in it is for the job's process alone."""
    if processes.LINUX:
        return os.memfd_create("order")
    fd = os.open(".order", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(".order")
    return fd


def _report() -> None:
    import traceback

    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc()


def _leave(code: int) -> NoReturn:
    """Run what libraries registered for the end, flush, and end."""
    try:
        remote_runner.leave(code)
    finally:
        os._exit(code)
