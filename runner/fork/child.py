"""Turn a fork of the warm parent into a job, with its own session, log, limits, and environment.

The warm parent is a process that has already imported what jobs need; see `fork_server`. A new
interpreter may run the job instead of the fork.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from .. import remote_runner
from ..job import attempt, processes, temporary
from ..job.workspace import JobPlace
from ..protocol import wire

_mark = processes.Mark()


def run_job_and_exit(message: bytes, inherited: Sequence[int], parent: int) -> NoReturn:
    """Run the job in this fork of *parent*, and exit. Never returns.

    See `read_message`. The job has no use for the descriptors *inherited*.
    """
    code = wire.EXIT_SETUP
    job_pid = os.getpid()
    try:
        os.setsid()
        processes.die_with(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in inherited:
            os.close(fd)
        gc.enable()
        threads: Any = sys.modules.get("threading")
        if threads is not None:  # a fork inherits the parent's ID
            threads._main_thread._native_id = _thread.get_native_id()
        code = _run_job(message)
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    finally:
        if os.getpid() != job_pid:
            os._exit(code)  # a fork of the job must not run the job's exit callbacks
        remote_runner.exit_process(code)


def read_message(message: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Split the message that tells a local process which job to run.

    It has lines of JSON. The supervisor writes the first line: where the job runs. The client
    writes the second line (the job's key and environment), and the rest: the order, and for a
    worker its crew (see `wire.Order.encode` and `workers.Crew.encode`).
    """
    local, secrets, order = message.split(b"\n", 2)
    return json.loads(local), json.loads(secrets), order


def _run_job(message: bytes) -> int:
    """Run the job that the message describes; return its exit code."""
    local, secrets, order = read_message(message)
    memory, executor = local["memory_bytes"], local["executor"]
    environment: dict[str, str] = secrets["environment"]
    _mark.write(executor)
    log = os.open(local["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(local["work"])
    if memory is not None and not local["worker"]:  # a worker limits the memory of its items
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    variables = {
        **environment,
        **local["variables"],
        **temporary.make(local["work"], executor, environment),
        processes.MARK: _mark.value(executor),
    }
    if local["command"]:
        _execute(local["command"], variables, message)
    processes.set_environment(variables)
    return run_here(local, secrets, order)


def run_here(local: dict[str, Any], secrets: dict[str, Any], order_lines: bytes) -> int:
    """Run a job in this process, which has its environment; return the exit code."""
    if "KERAS_BACKEND" not in os.environ and has_jax():
        os.environ["KERAS_BACKEND"] = "jax"
    key, executor = bytes.fromhex(secrets["key"]), local["executor"]
    place = JobPlace(
        work=local["work"], cache=local["cache"], mounts=processes.LINUX, reusable=local["spares"]
    )
    if name := local.get("worker"):
        from ..worker import local as local_worker  # most jobs are no workers

        memory = local["memory_bytes"]
        return local_worker.main(name, key, executor, order_lines, place, memory)
    order = wire.Order.decode(order_lines.decode())
    os.environ.update(order.variables())
    return attempt.main(order, key, executor, place)


def _execute(command: list[str], environment: Mapping[str, str], message: bytes) -> NoReturn:
    """Replace this process with a fresh interpreter, which reads *message* from a private file."""
    # Only this process can read the key in a file without a name.
    if processes.LINUX:
        fd = os.memfd_create("order")
    else:
        fd = os.open(".order", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(".order")
    with open(fd, "wb", closefd=False) as file:
        file.write(message)
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(fd, True)
    os.execvpe(command[0], command, {**environment, "KINETIC_ORDER_FD": str(fd)})


@functools.cache
def has_jax() -> bool:
    """Return whether this interpreter has JAX, which Keras then uses."""
    return PathFinder.find_spec("jax") is not None
