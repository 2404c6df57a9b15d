"""Keep a job's processes together by means of the kernel: death signals, orphans, marks.

A process that forks keeps the environment it was executed with in ``/proc``.
`Mark` writes a job's id into that memory, so that every process of the job
carries it: forks by copying the memory, executed programs by inheriting the
variable.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_signal: Any = importlib.import_module("_signal")  # `signal` without the detour over its enums
STOPS = (int(signal.SIGTERM), int(signal.SIGXCPU))
"""The signals; the warm parent holds them back from a fork that cannot take them yet."""


class Stopped(BaseException):
    """The platform asked the job to end."""


class Stopping:
    """Remembers SIGTERM and raises `Stopped` where that is allowed.

    ``since`` is when it first came, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.requested = False
        self.since = 0.0
        self.out_of_time = False
        self._armed = False

    def install(self) -> None:
        """Take the signals over, also those held back so far; call it in the main thread."""
        for number in STOPS:
            _signal.signal(number, self._on_signal)
        os.register_at_fork(before=_hold_back, after_in_child=self._uninstall)
        os.register_at_fork(after_in_child=_restore, after_in_parent=_restore)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, STOPS)

    def _uninstall(self) -> None:
        """In a fork of the user's, such as a worker of a pool, the signals kill again.

        A handler in Python misses a signal that comes just before a call that blocks. Until here
        the signals are held back: Python drops those that reach a handler in a new fork.
        """
        for number in STOPS:
            if _signal.getsignal(number) == self._on_signal:
                _signal.signal(number, _signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.since = self.since or time.monotonic()
        self.requested = True
        self.out_of_time = self.out_of_time or number == signal.SIGXCPU
        if self._armed:
            self._armed = False  # once: a clean-up that was begun is not torn down
            raise Stopped

    def interruptible(self) -> Stopping:
        """For ``with``: within its block SIGTERM raises `Stopped`; at once, if it came before."""
        return self

    def __enter__(self) -> None:
        self._armed = True
        if self.requested:
            self._armed = False
            raise Stopped

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._armed = False


LINUX = sys.platform == "linux"
_libc = ctypes.PyDLL(None)  # short calls: no need to let go of the interpreter


def _signal_set(*numbers: int) -> ctypes.Array[ctypes.c_char]:
    held = ctypes.create_string_buffer(128)  # sizeof(sigset_t) on Linux, and less elsewhere
    _libc.sigemptyset(held)
    for number in numbers:
        _libc.sigaddset(held, number)
    return held


# These are calls in C, in which no handler runs: `Stopped` would be lost in a hook of a fork.
_before = _signal_set()
_hold_back = functools.partial(
    _libc.pthread_sigmask, _signal.SIG_BLOCK, _signal_set(*STOPS), _before
)
_restore = functools.partial(_libc.pthread_sigmask, _signal.SIG_SETMASK, _before, None)


MARK = "KINETIC_LOCAL_PROCESS"
"""The variable; its value is ``{state directory}:{executor}``."""

NOBODY = "00000000-0000-0000-0000-000000000000"
"""The executor in the mark of a process that belongs to no job."""

_SIGKILL = int(signal.SIGKILL)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = _libc.prctl if LINUX else None  # looked up here, once for all forks
_getppid, _memmove = os.getppid, ctypes.memmove


def become_subreaper() -> None:
    """From now on, orphans among the descendants become children of this process."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int) -> None:
    """Be killed when *parent*, which must be single-threaded, dies; at once, if it has."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if _getppid() != parent:
        os._exit(1)


def close_inherited() -> None:
    """In a fork: close every descriptor but the standard three."""
    for entry in os.listdir("/dev/fd"):
        if int(entry) > 2:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(entry))


def children(parent: int | None = None) -> list[int]:
    """The children of this process, or of *parent*; both single-threaded. Zombies included.

    Complete if nobody reaps any of them meanwhile: the kernel's list loses
    nobody while none of its members is taken out.
    """
    if not LINUX:
        return []
    pid = parent or os.getpid()
    try:
        fd = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY)
    except FileNotFoundError:
        return _children_by_search(pid) if os.path.exists(f"/proc/{pid}") else []
    parts: list[bytes] = []
    try:
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    except ProcessLookupError:
        return []  # the parent has ended meanwhile
    finally:
        os.close(fd)
    return [int(one) for one in b"".join(parts).split()]


class Children:
    """The same, of one process that is looked at again and again: its list is held open."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._path = f"/proc/{parent}/task/{parent}/children"
        self._fd = -1

    def read(self) -> list[int]:
        """The children there are now; all of them, even while the parent reaps some.

        The kernel goes through them by position, and passes one over for each that was told
        and is gone by the next step. Two looks that tell the same have not met that.
        """
        if self._fd < 0 and LINUX:
            with contextlib.suppress(OSError):
                self._fd = os.open(self._path, os.O_RDONLY)
        if self._fd < 0:
            return children(self._parent)
        try:
            before, now = None, self._look()
            while now != before and now:
                before, now = now, self._look()
        except ProcessLookupError:
            return []  # the parent has ended meanwhile
        return [int(one) for one in now.split()]

    def _look(self) -> bytes:
        content = part = os.pread(self._fd, 1 << 16, 0)
        while part:
            part = os.pread(self._fd, 1 << 16, len(content))
            content += part
        return content

    def close(self) -> None:
        """Let go of the list."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _children_by_search(parent: int) -> list[int]:
    """For kernels without the list of children."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    its_parent = file.read().rpartition(b")")[2].split()[1]
            except OSError:
                continue  # it ended meanwhile
            if int(its_parent) == parent:
                found.append(int(entry))
    return found


def mark_of(pid: int) -> tuple[str, str]:
    """State directory and executor in the mark of a process; empty where it has none."""
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
    """The mark of this process, for its forks to write their own executor into."""

    def __init__(self) -> None:
        self.directory, _, executor = os.environ.get(MARK, "").rpartition(":")
        getenv = _libc.getenv
        getenv.restype = ctypes.c_void_p
        address = getenv(MARK.encode()) if executor == NOBODY else None
        self._address: int | None = address and address + len(os.fsencode(f"{self.directory}:"))

    def value(self, executor: str) -> str:
        """Return the variable's value in the job's own environment."""
        return f"{self.directory}:{executor}"

    def write(self, executor: str) -> None:
        """Make ``/proc`` show *executor* for this process and what it forks."""
        if self._address is not None and len(executor) == len(NOBODY):
            _memmove(self._address, executor.encode(), len(NOBODY))


TELLING_S = 1.0
"""How long the supervisor may take to listen."""


def tell_leaving() -> None:
    """Tell the supervisor that this job has stored its outcome, and its process only has to end.

    The message is framed as `kinetic._supervisor.protocol` says. In a pod, no message is sent.

    Raises:
        OSError: There is no supervisor, or it does not listen.
    """
    import socket  # slow to load, and few jobs need it

    directory, _, executor = os.environ.get(MARK, "").rpartition(":")
    if not directory:
        return
    header = f'{{"op":"leaving","executor":"{executor}"}}'.encode()
    folder = os.open(directory, os.O_RDONLY)
    try:
        # The path of a socket is at most about 100 bytes, and that of a home may be longer.
        short = f"/proc/self/fd/{folder}" if LINUX else directory
        with socket.socket(socket.AF_UNIX) as supervisor:
            supervisor.settimeout(TELLING_S)
            supervisor.connect(f"{short}/socket")
            supervisor.sendall(struct.pack("<II", len(header), 0) + header)
    finally:
        os.close(folder)


def remove_if_small(folder: str, entries: int = 256) -> bool:
    """Remove *folder* if it has at most *entries* files and folders; whether it is gone."""
    folders = [folder]
    files: list[str] = []
    for each in folders:  # grows while it is walked
        with os.scandir(each) as found:
            for entry in found:
                inside = folders if entry.is_dir(follow_symlinks=False) else files
                inside.append(entry.path)
                if len(folders) + len(files) > entries:
                    return False
    for file in files:
        os.unlink(file)
    for each in reversed(folders):
        os.rmdir(each)
    return True


def remove_aside(folders: Sequence[str]) -> int:
    """Fork a process that removes *folders* and ends; its id. See `aside`."""

    def remove() -> None:
        for folder in folders:
            _remove(folder)

    return aside(remove)


def aside(work: Callable[[], object]) -> int:
    """Fork a process that does *work* in nobody's way, and ends; its id.

    Call it in a single-threaded process only.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        close_inherited()  # no lock and no socket of the parent's
        os.nice(10)
        work()
    finally:
        os._exit(0)


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # folders that were made read-only
        for each, _, _ in os.walk(folder):
            try:
                os.chmod(each, 0o700)
            except OSError:
                continue
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file
            os.unlink(folder)
