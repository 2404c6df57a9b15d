"""Notice changes in folders with the kernel's help (inotify), which costs far less than a scan."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

from ..job.processes import blocking_libc, libc_error

_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_READ_BYTES = 1 << 16
_OVERFLOW = 0x4000
_MASK = (
    0x2  # IN_MODIFY: `truncate` opens no file
    | 0x4  # IN_ATTRIB
    | 0x8  # IN_CLOSE_WRITE: it also follows the end of a mapping in memory
    | 0x40  # IN_MOVED_FROM
    | 0x80  # IN_MOVED_TO
    | 0x100  # IN_CREATE
    | 0x200  # IN_DELETE
    | 0x400  # IN_DELETE_SELF
    | 0x800  # IN_MOVE_SELF
    | 0x01000000  # IN_ONLYDIR
    | 0x02000000  # IN_DONT_FOLLOW
)


class Watch:
    """The changes in folders below *root*, without their subfolders.

    It needs Linux.

    Raises:
        OSError: The user has too many such objects.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._folders: dict[int, str] = {}
        self._fd: int = blocking_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise libc_error("inotify_init1")

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def close(self) -> None:
        """Watch nothing any more."""
        os.close(self._fd)

    def add(self, folders: Iterable[str]) -> None:
        """Watch *folders*, paths below the root, if they exist; those that are watched stay so.

        Raises:
            OSError: The user watches too many folders.
        """
        for folder in folders:
            number = blocking_libc.inotify_add_watch(
                self._fd, os.fsencode(self._root + folder), _MASK
            )
            if number >= 0:
                self._folders[number] = folder
            elif ctypes.get_errno() not in _MISSING:
                raise libc_error(f"a watch of {self._root}{folder}")

    def changes(self) -> set[str] | None:
        """Return the paths below the root that changed since the last call; None if unknown."""
        changed, has_all = set[str](), True
        while True:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return changed if has_all else None
            offset = 0
            while offset < len(data):
                number, mask, _, size = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size + size
                name = os.fsdecode(data[offset - size : offset].rstrip(b"\0"))
                has_all = has_all and not mask & _OVERFLOW
                folder = self._folders.get(number, "")
                changed.add(f"{folder}/{name}" if name else folder)


_MISSING = (errno.ENOENT, errno.ENOTDIR)
