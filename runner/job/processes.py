"""Stop and find a job's processes with the kernel's help: signals, orphans, marks.

``/proc`` shows a part of a process's memory: the environment with which its program started.
`Mark` writes a job's executor (kinetic's ID of its process) into this memory.
So ``/proc`` shows the executor for every process of the job: forks copy the memory, and executed
programs inherit the variable.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Literal

STOP_SIGNALS = (int(signal.SIGTERM), int(signal.SIGXCPU))
"""The signals by which a platform asks a job to end."""


class Stopped(BaseException):
    """The platform asked the job to end."""


class StoppedInLoop(Stopped, SystemExit):
    """A `Stopped` that ends a running event loop.

    asyncio keeps other exceptions in the task or the callback that the signal interrupts, and the
    loop goes on.
    """


class Stopping:
    """Record the signals of `STOP_SIGNALS`, and raise `Stopped` in the block of a ``with``.

    An earlier signal also raises `Stopped`, at the start of the block.

    ``since`` is when the first signal came, by the monotonic clock. ``out_of_time`` says whether
    SIGXCPU came, by which the platform reports that the timeout is over.
    """

    def __init__(self) -> None:
        self.requested = False
        self.since = 0.0
        self.out_of_time = False
        self._armed = False

    def install(self) -> None:
        """Handle the signals of `STOP_SIGNALS` from now on, and those that are already pending.

        Call this in the main thread.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        os.register_at_fork(before=_block_stop_signals, after_in_child=self._uninstall)
        os.register_at_fork(after_in_child=_restore_signals, after_in_parent=_restore_signals)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def reset(self) -> None:
        """Forget the signals that have come: they were for a call that has ended."""
        self.requested, self.since, self.out_of_time = False, 0.0, False

    def _uninstall(self) -> None:
        """Restore the default action in a fork of the user's code, such as a pool's worker.

        With a Python handler, the fork would miss a signal that comes just before a blocking call.
        The signals are blocked from before the fork until the end of the hooks, because Python
        drops a signal that arrives in a child before its hooks run.
        """
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == self._on_signal:  # otherwise the program has replaced it
                signal.signal(number, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.since = self.since or time.monotonic()
        self.requested = True
        self.out_of_time = self.out_of_time or number == signal.SIGXCPU
        if self._armed:
            self._armed = False  # raise only once, so that a clean-up can finish
            get_loop = getattr(sys.modules.get("_asyncio"), "_get_running_loop", lambda: None)
            raise StoppedInLoop if get_loop() is not None else Stopped

    def __enter__(self) -> None:
        self._armed = True
        if self.requested:
            self._armed = False
            raise Stopped

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._armed = False


LINUX = sys.platform == "linux"
_libc = ctypes.PyDLL(None)  # short calls need not release the interpreter lock
blocking_libc: Any = ctypes.CDLL(None, use_errno=True)
"""The C library, for calls of which `libc_error` returns the error."""


def libc_error(operation: str) -> OSError:
    """Return the error of the last call of `blocking_libc`, which was made for *operation*."""
    number = ctypes.get_errno()
    return OSError(number, f"{operation}: {os.strerror(number)}")


def _signal_set(*numbers: int) -> ctypes.Array[ctypes.c_char]:
    signals = ctypes.create_string_buffer(128)  # sizeof(sigset_t) on Linux, and less on macOS
    _libc.sigemptyset(signals)
    for number in numbers:
        _libc.sigaddset(signals, number)
    return signals


# These hooks are C calls, so no signal handler runs in them: Python would ignore its `Stopped`.
_previous_mask = _signal_set()
_block_stop_signals = functools.partial(
    _libc.pthread_sigmask, int(signal.SIG_BLOCK), _signal_set(*STOP_SIGNALS), _previous_mask
)
_restore_signals = functools.partial(
    _libc.pthread_sigmask, int(signal.SIG_SETMASK), _previous_mask, None
)


def set_environment(variables: Mapping[str, str]) -> None:
    """Make *variables* the environment; what stays the same costs a fork no memory."""
    zone = os.environ.get("TZ")
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if os.environ.get("TZ") != zone:
        time.tzset()


MARK = "KINETIC_LOCAL_PROCESS"
"""The environment variable that marks a process; its value is ``{state directory}:{executor}``."""

NOBODY = "0" * 32
"""The executor in the mark of a warm parent, which belongs to no job."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def become_subreaper() -> None:
    """On Linux, make this process adopt each descendant whose parent ends."""
    if LINUX:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when *parent* (single-threaded) dies; exit if it is dead."""
    if LINUX:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call of `prctl`
        os._exit(1)


def ignore_signal(number: int, frame: object) -> None:
    """Do nothing: the caller reads the signal from its wake-up pipe."""


def children(parent: int | None = None) -> list[int]:
    """Return the children of this process or of *parent*, including zombies.

    The parent must be single-threaded. The kernel lists children by position: if the parent reaps
    one between two reads, the kernel skips another. Two equal readings prove that it skipped none.
    """
    if not LINUX:
        return []
    pid = parent or os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
            previous, current = b"", file.readall()
            while current and current != previous:
                file.seek(0)
                previous, current = current, file.readall()
    except FileNotFoundError:  # this kernel was built without the list
        return _children_by_search(pid) if os.path.exists(f"/proc/{pid}") else []
    except ProcessLookupError:
        return []  # the parent has ended
    return [int(child) for child in current.split()]


def end_children() -> None:
    """Kill the children of this process, and those that it adopts, until it has none.

    So their memory and GPU are free.
    """
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for child in children():
            with contextlib.suppress(OSError):  # this user may not kill a set-user-ID program
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children_by_search(parent: int) -> list[int]:
    """Return the children of *parent* on a kernel that doesn't list them in ``/proc``."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parent_pid = file.read().rpartition(b")")[2].split()[1]
            except OSError:
                continue  # the process has ended
            if int(parent_pid) == parent:
                found.append(int(entry))
    return found


def mark_of(pid: int) -> tuple[str, str]:
    """Return the state directory and the executor in the mark of process *pid*; empty if none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:
        return "", ""
    prefix = f"{MARK}=".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(prefix):
            directory, _, executor = os.fsdecode(entry[len(prefix) :]).rpartition(":")
            return directory, executor
    return "", ""


class Mark:
    """The mark of this process, into which each fork writes the executor of its job."""

    def __init__(self) -> None:
        self.directory, _, executor = os.environ.get(MARK, "").rpartition(":")
        getenv = _libc.getenv
        getenv.restype = ctypes.c_void_p
        address = getenv(MARK.encode()) if executor == NOBODY else None
        # The address of the executor in the memory that ``/proc`` shows as the environment.
        self._address: int | None = address and address + len(os.fsencode(f"{self.directory}:"))

    def value(self, executor: str) -> str:
        """Return the value of the variable `MARK` for the process *executor*."""
        return f"{self.directory}:{executor}"

    def write(self, executor: str) -> None:
        """Make ``/proc`` show *executor* for this process and its forks."""
        # The text in the environment can't become longer or shorter.
        if self._address is not None and len(executor) == len(NOBODY):
            ctypes.memmove(self._address, executor.encode(), len(NOBODY))


def tell_supervisor(event: Literal["called", "leaving"]) -> None:
    """Tell the supervisor that this job calls its function now, or has stored its outcome.

    In a pod, which has no supervisor, the function does nothing.

    Raises:
        OSError: The supervisor doesn't accept connections.
    """
    directory, _, executor = os.environ.get(MARK, "").rpartition(":")
    if not directory:
        return
    import socket  # slow to load, and few jobs need it

    from ..protocol import messages

    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.settimeout(1.0)
        messages.connect(supervisor, f"{directory}/socket")
        supervisor.sendall(messages.encode({"op": event, "executor": executor}))


def remove_if_small(folder: str, entries: int = 256) -> bool:
    """Remove *folder* if it has at most *entries* files and folders; return whether it did."""
    folders = [folder]
    files: list[str] = []
    for subfolder in folders:  # the list grows in the loop
        with os.scandir(subfolder) as scan:
            for entry in scan:
                paths = folders if entry.is_dir(follow_symlinks=False) else files
                paths.append(entry.path)
                if len(folders) + len(files) > entries:
                    return False
    for file in files:
        os.unlink(file)
    for subfolder in reversed(folders):
        os.rmdir(subfolder)
    return True


def run_in_background(task: Callable[[], object]) -> int:
    """Fork a process of low priority that runs *task* and ends; return its ID.

    Call it in a single-threaded process only.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        for entry in os.listdir("/dev/fd"):  # keep no lock and no socket of the parent
            if int(entry) > 2:
                with contextlib.suppress(OSError):  # the listing has closed its own descriptor
                    os.close(int(entry))
        os.nice(10)
        task()
    finally:
        os._exit(0)


def remove(folder: str) -> None:
    """Remove a folder or a file as far as possible, also folders that were made read-only."""
    import shutil  # it maps compression libraries, which every fork would inherit

    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # the job has made folders read-only
        for subfolder, _, _ in os.walk(folder):
            try:
                os.chmod(subfolder, 0o700)
            except OSError:
                continue
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # *folder* may be a file
            os.unlink(folder)
