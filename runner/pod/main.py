"""A pod: the container's first process, which supervises a worker, or a host that follows one.

The first process stays small and does what must not depend on the user's code; see `guard.Guard`.
The child commits outcomes. If a host that follows dies before that, the first process commits a
failure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import pwd
import signal
import tempfile
import time

from ..job import processes
from ..job_log import say
from ..protocol import wire
from .environment import RUNNER_VARIABLES, Pod, read_pod
from .follower import close_dead, run_follower_and_exit
from .guard import Channel, Guard
from .memory import MemoryLimit
from .own_pod import OwnPod, delete_worker_set
from .worker import RESTARTED_MARK, exit_code, run_worker_and_exit


def main() -> int:
    """Run the job that the environment describes, and return the exit code."""
    try:
        pod = read_pod(os.environ)
    except (ValueError, OSError) as exc:
        say(f"this job cannot be run: {exc}")
        return wire.EXIT_FINAL
    if pod.order.store.startswith("gs://") and not _has_module("google.cloud.storage"):
        problem = "the image lacks google-cloud-storage; install it in the image"
        say(f"this job cannot be run: {problem}")
        return wire.EXIT_FINAL
    for name in RUNNER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.setdefault("KINETIC_POD_BEGAN", repr(time.monotonic()))  # see stores.gcs
    folder = tempfile.mkdtemp(prefix="kinetic-run-")
    _provide_user(folder)
    guard, own_pod = _run_in_child(pod, folder)
    code = guard.reported
    if pod.hosts is None or not pod.follows:
        code = exit_code(guard.status)
    elif code is None:
        code = close_dead(pod, pod.hosts, guard)
    was_restarted = os.path.exists(os.path.join(folder, RESTARTED_MARK))
    with contextlib.suppress(OSError):  # the container's end removes large folders
        processes.remove_if_small(folder)
    if pod.group and not guard.stopped:
        if not pod.follows and not delete_worker_set(pod.group) and not was_restarted:
            return code  # nothing deletes the set: the container's end has the client look
        signal.sigwait([signal.SIGTERM])  # the set restarts a host that ends before SIGTERM
    own_pod.remove(whole=code == wire.EXIT_VALUE)
    return code


def _provide_user(folder: str) -> None:
    """Set ``HOME`` and ``USER`` if the image lacks them for this user: libraries need a home."""
    if not os.access(os.path.expanduser("~"), os.W_OK):
        os.environ["HOME"] = os.path.join(folder, "home")
        os.mkdir(os.environ["HOME"], 0o700)
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", "kinetic")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # the parent package is missing
        return False


def _run_in_child(pod: Pod, folder: str) -> tuple[Guard, OwnPod]:
    """Run the worker, or the host, in a child process; return its guard when it has ended."""
    channel, guard_pid = Channel(), os.getpid()
    # Each process unblocks the signals after it has installed its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOP_SIGNALS)
    source, sink = os.pipe()  # one pipe for both outputs keeps their order
    pid = os.fork()
    if pid == 0:
        os.close(source)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.close(sink)
        channel.guard_end.close()
        if pod.hosts is not None and pod.follows:
            run_follower_and_exit(pod, pod.hosts, folder, channel, guard_pid)
        run_worker_and_exit(pod, folder, channel, guard_pid)
    os.close(sink)
    channel.job_end.close()
    own_pod = OwnPod(pod.executor, pod.name)  # its thread, like any other, inherits blocked signals
    # A worker itself limits the time of its items: on several hosts, also that of the others.
    grace, levels = pod.order.grace, 0
    if not pod.follows:
        # The I/O process has the interpreter as its child, which forks for each item, or runs it.
        grace, levels = math.inf, 2 if pod.crew.isolation == "process" else 1
    guard = Guard(pid, source, channel, grace=grace, memory=MemoryLimit.find(), levels=levels)
    guard.watch()
    return guard, own_pod
