"""Turn a fork of the warm parent into a job, with its own session, log, limits, and environment.

The warm parent is a process that has already imported what jobs need; see `fork_server`. This code
writes to as little memory as possible. The kernel copies each memory page that a fork writes to,
and these copies are most of a fork's cost.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from .. import remote_runner
from ..job import processes, temporary
from ..job.environment import add_to_environment
from ..protocol import wire

# Module-level names: a look-up in another module would touch more pages.
_signal: Any = importlib.import_module("_signal")  # the C module: `signal` is slower
_set_wakeup_fd, _set_handler, _SIG_DFL = _signal.set_wakeup_fd, _signal.signal, _signal.SIG_DFL
_SIGCHLD = signal.SIGCHLD.value
_getpid, _setsid, _close = os.getpid, os.setsid, os.close
_get_native_id = _thread.get_native_id
_die_with, _enable_gc = processes.die_with, gc.enable
_inherited: Sequence[int] = ()
_mark = processes.Mark()

_attempt_main: Callable[..., int] | None = None
_make_place: Callable[..., Any] | None = None
_prefer_jax: Callable[..., Any] | None = None


def prepare(inherited: Sequence[int]) -> None:
    """Set up the warm parent, once; each fork closes the descriptors *inherited*."""
    global _inherited
    _inherited = inherited
    remote_runner.prepare_streams()
    sys.argv[:] = [""]


def preload() -> None:
    """Import the runner's modules that all jobs need, once, in the warm parent."""
    global _attempt_main, _make_place, _prefer_jax
    remote_runner.enable_crash_tracebacks()
    _attempt_main = importlib.import_module("..job.attempt", __package__).main
    workspace: Any = importlib.import_module("..job.workspace", __package__)
    _make_place, _prefer_jax = workspace.JobPlace.of, workspace.prefer_jax


def run_job_and_exit(local: bytes, secrets: bytes, order: bytes, parent: int) -> NoReturn:
    """Run the job in this fork of *parent*, and exit. Never returns.

    The first three arguments are the lines of the job's message; see `remote_runner.read_order`.
    """
    code = wire.EXIT_SETUP
    job_pid = _getpid()
    try:
        _setsid()
        _die_with(parent)
        _set_wakeup_fd(-1)
        _set_handler(_SIGCHLD, _SIG_DFL)
        for fd in _inherited:
            _close(fd)
        _enable_gc()
        threads: Any = sys.modules.get("threading")
        if threads is not None:
            threads._main_thread._native_id = _get_native_id()  # a fork inherits the parent's ID
        code = _run_job(local, secrets, order)
    except BaseException:
        _print_error()
    finally:
        if _getpid() != job_pid:
            os._exit(code)  # a fork of the job must not run the job's exit callbacks
        remote_runner.exit_process(code)


def _run_job(local_line: bytes, secrets_line: bytes, order_line: bytes) -> int:
    """Run the job that the three lines of its message describe; return its exit code."""
    local: dict[str, Any] = json.loads(local_line)
    secrets: dict[str, Any] = json.loads(secrets_line)
    memory = local["memory_bytes"]
    _mark.write(local["executor"])
    _open_log(local["log"])
    os.chdir(local["work"])
    if memory is not None and not local.get("worker"):  # a worker limits the memory of its items
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    variables = {
        **local["variables"],
        **temporary.make(local["work"], local["executor"], secrets["environment"]),
        processes.MARK: _mark.value(local["executor"]),
    }
    if local["command"]:
        message = b"\n".join((local_line, secrets_line, order_line))
        _execute(local["command"], {**secrets["environment"], **variables}, message)
    _replace_environment(secrets["environment"])
    assert _attempt_main is not None and _make_place is not None
    key, executor = bytes.fromhex(secrets["key"]), local["executor"]
    if worker := local.get("worker"):
        add_to_environment(variables)
        worker_main: Callable[..., int] = importlib.import_module(
            "..worker.local", __package__
        ).main
        return worker_main(worker, key, executor, order_line, _make_place(local), memory)
    order = wire.Order.decode(order_line.decode())
    add_to_environment({**variables, **order.variables()})
    return _attempt_main(order, key, executor, _make_place(local))


def _open_log(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process with *environment*."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    add_to_environment(environment)
    if _prefer_jax is not None:
        _prefer_jax(os.environ)
    time.tzset()


def _execute(command: list[str], environment: dict[str, str], message: bytes) -> NoReturn:
    """Replace this process with a fresh interpreter, which reads *message* from a private file."""
    fd = _open_private_file()
    with open(fd, "wb", closefd=False) as file:
        file.write(message)
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(fd, True)
    environment["KINETIC_ORDER_FD"] = str(fd)
    os.execvpe(command[0], command, environment)


def _open_private_file() -> int:
    """Open a file without a name, so that only the job's process can read the key in it."""
    if processes.LINUX:
        return os.memfd_create("order")
    fd = os.open(".order", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(".order")
    return fd


def _print_error() -> None:
    import traceback

    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc()
