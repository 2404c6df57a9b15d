"""What the kernel offers to keep a job's processes together: death signals, orphans, marks.

A process that forks keeps the environment it was executed with in ``/proc``.
`Mark` writes a job's id into that memory, so that every process of the job
carries it: forks by copying the memory, executed programs by inheriting the
variable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

__all__ = [
    "LINUX",
    "MARK",
    "NOBODY",
    "Children",
    "Mark",
    "become_subreaper",
    "children",
    "close_inherited",
    "die_with",
    "mark_of",
]

MARK = "KINETIC_LOCAL_PROCESS"
"""The variable; its value is ``{state directory}:{executor}``."""

NOBODY = "00000000-0000-0000-0000-000000000000"
"""The executor in the mark of a process that belongs to no job."""

LINUX = sys.platform == "linux"
_SIGKILL = int(signal.SIGKILL)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.PyDLL(None)  # short calls: no need to let go of the interpreter
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
        """What the variable holds in the job's own environment."""
        return f"{self.directory}:{executor}"

    def write(self, executor: str) -> None:
        """Make ``/proc`` show *executor* for this process and what it forks."""
        if self._address is not None and len(executor) == len(NOBODY):
            _memmove(self._address, executor.encode(), len(NOBODY))
