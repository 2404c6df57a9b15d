"""A file with many small objects: the claims and outcomes of a batch on this machine.

A file for each object costs more than the object. So processes append records to one file. A lock
of the file orders the writers. A reader needs the lock only if it finds something that isn't a
whole record: a writer may be at work.

A record begins with the file's mark, which is random, and has a checksum. A process that dies while
it writes leaves half a record at the end. Readers ignore it, and the next writer cuts it off. No
process cuts off a whole record, because others may have read it. After damage elsewhere, readers
continue at the next mark.

The file is removed with its last object. A process that has it open finds that it has no name.
"""

from __future__ import annotations

import _thread
import binascii
import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..protocol.frames import MALFORMED
from ..protocol.private import MAKE_ATTEMPTS

MARK_BYTES = 8
HEAD = struct.Struct(f"<{MARK_BYTES}sIHIII")
"""A record's mark and checksum; the sizes of name, metadata, and body; the generation."""

CHECKED_FROM = MARK_BYTES + 4
"""The checksum is about the bytes of a record from here on."""

PIECE_BYTES = 1 << 17
RECORD_BYTES = 2048
"""How many bytes to read at once: of new records, and of one record."""

MOST_BYTES = 1 << 26
"""A longer record isn't kinetic's; outcomes keep large values in objects of their own."""

OPEN_FLAGS = os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)
READ_ONLY_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)

_quote = json.encoder.encode_basestring_ascii
_logs: weakref.WeakSet[Log] = weakref.WeakSet()


class Record(NamedTuple):
    """An object; ``used`` is the time of the log's last write, in seconds since 1970."""

    metadata: Mapping[str, str]
    body: bytes
    generation: int
    used: float


class Log:
    """The objects in the file *path*, by their names below the folder that it stands for.

    Any number of threads and processes may use it at once. *make* creates the file with its first
    content, in one step, and returns False if the file exists. ``count`` is how many objects were
    found.
    """

    path: str
    count: int
    _mark: bytes
    _end: int  # what lies before it was read
    _used: float
    _folders: dict[str, dict[str, int]]  # folder → file → offset of its record
    _piece: bytes  # what was read last
    _piece_start: int

    def __init__(self, path: str, make: Callable[[bytes], bool]) -> None:
        self.path = path
        self._make = make
        self._epoch = 0
        self._forget()
        _logs.add(self)

    def _forget(self) -> None:
        self._lock = _thread.allocate_lock()
        self._fd = -1
        self._reset()

    def _reset(self) -> None:
        self._epoch += 1
        self._mark, self._end, self._used = b"", 0, 0.0
        self._folders = {}
        self._piece, self._piece_start = b"", 0
        self.count = 0

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._forget()

    # --- reading ---

    def get(self, name: str) -> Record | None:
        """Return an object; None if there is none."""
        with self._lock:
            self._refresh()
            offset = self._offset(name)
            return None if offset is None else self._read(offset)

    def exists(self, name: str) -> bool:
        """Return whether the object exists."""
        with self._lock:
            self._refresh()
            return self._offset(name) is not None

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin with *prefix*."""
        within, _, start = prefix.rpartition("/")
        with self._lock:
            self._refresh()
            found = [
                _join(within, file)
                for file in self._folders.get(within, ())
                if file.startswith(start)
            ]
            for folder, files in self._folders.items():
                if folder != within and folder.startswith(prefix):
                    found += [_join(folder, file) for file in files]
        return found

    def _offset(self, name: str) -> int | None:
        folder, _, file = name.rpartition("/")
        files = self._folders.get(folder)
        return None if files is None else files.get(file)

    def _read(self, offset: int) -> Record:
        start = offset - self._piece_start
        data = self._piece[start : start + RECORD_BYTES] if start >= 0 else b""
        size = HEAD.size
        if len(data) < size:
            data = os.pread(self._fd, RECORD_BYTES, offset)
        _, _, name, metadata, body, generation = HEAD.unpack_from(data)
        start = size + name
        size = start + metadata + body
        if len(data) < size:
            data = os.pread(self._fd, size, offset)
        try:
            fields = json.loads(data[start : start + metadata])
            if not {str}.issuperset(map(type, fields.values())):
                fields = {}
        except MALFORMED:
            fields = {}
        return Record(fields, data[start + metadata : size], generation, self._used)

    def _refresh(self) -> None:
        """Read what was appended."""
        if (size := self._size()) > self._end and not self._read_new(size, skips=False):
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            try:
                self._read_new(os.fstat(self._fd).st_size, skips=True)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _size(self) -> int:
        """Return the size of the file, which this opens if need be; 0 without a file."""
        if self._fd < 0:
            return self._open()
        status = os.fstat(self._fd)
        self._used = status.st_mtime
        if status.st_nlink:
            if status.st_size < self._end:  # not by kinetic: what was read isn't there
                self._reset()
            return status.st_size
        self._leave()
        return self._open()

    def _leave(self) -> None:
        """Close the file, which has no name any more."""
        os.close(self._fd)
        self._fd = -1
        self._reset()

    def _read_new(self, size: int, *, skips: bool) -> bool:
        """Read records up to *size*, the file's size; return whether all were whole.

        If *skips*, no writer is at work, so this continues after damage with the next mark.
        """
        while self._end < size:
            piece = os.pread(self._fd, PIECE_BYTES, self._end)
            if not self._mark:
                if len(piece) < MARK_BYTES:
                    return False
                self._mark, self._end = piece[:MARK_BYTES], MARK_BYTES
                continue
            read, wanted = self._parse(piece, size - self._end, skips=skips)
            if not read and len(piece) < wanted <= size - self._end:
                piece = os.pread(self._fd, wanted, self._end)
                read, _ = self._parse(piece, size - self._end, skips=skips)
            if not read:
                return False
            self._piece, self._piece_start = piece[:read], self._end
            self._end += read
        return True

    def _open(self) -> int:
        """Open the file; return its size, 0 if there is none."""
        try:
            try:
                fd = os.open(self.path, os.O_RDWR | OPEN_FLAGS)
            except OSError as exc:
                if exc.errno not in READ_ONLY_ERRNOS:
                    raise
                fd = os.open(self.path, os.O_RDONLY | OPEN_FLAGS)
        except OSError as exc:
            if exc.errno not in NO_FILE_ERRNOS:
                raise
            return 0
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            return 0
        self._fd, self._used = fd, status.st_mtime
        return status.st_size

    def _parse(self, data: bytes, rest: int, *, skips: bool) -> tuple[int, int]:
        """Note the records in *data*, the next bytes of the *rest* of the file.

        Return how many bytes were read, and how many bytes the record after them has.
        """
        position = 0
        while len(data) - position >= HEAD.size:
            mark, check, name, metadata, body, generation = HEAD.unpack_from(data, position)
            start = position + HEAD.size
            end = start + name + metadata + body
            is_ours = mark == self._mark and end - position <= MOST_BYTES
            if is_ours and len(data) < end <= rest:
                return position, end - position
            if (
                is_ours
                and end <= len(data)
                and binascii.crc32(data[position + CHECKED_FROM : end]) == check
            ):
                own_name = data[start : start + name].decode(errors="surrogateescape")
                self._note(own_name, self._end + position, generation)
                position = end
            elif skips and (following := data.find(self._mark, position + 1)) >= 0:
                position = following
            elif skips and len(data) < rest:  # the next mark may lie across the end of *data*
                return max(position, len(data) - MARK_BYTES + 1), HEAD.size
            else:
                return position, 0
        return position, HEAD.size

    def _note(self, name: str, offset: int, generation: int) -> None:
        folder, _, file = name.rpartition("/")
        files = self._folders.setdefault(folder, {})
        self.count += (generation > 0) - (file in files)
        if generation:
            files[file] = offset
        else:
            files.pop(file, None)

    # --- writing ---

    def put(self, name: str, body: bytes, metadata: Mapping[str, str], generation: int = 0) -> bool:
        """Write an object that has this *generation*; return False if it has another.

        An object that doesn't exist has the generation 0.

        Raises:
            OSError: Nothing was written.
        """
        for _ in range(MAKE_ATTEMPTS):
            with self._lock:
                try:
                    if self._begin_writing():
                        return self._put(name, body, metadata, generation)
                finally:
                    self._end_writing()
            if generation:
                return False
            mark = os.urandom(MARK_BYTES)
            if self._make(mark + _record(mark, name, body, metadata, 1)):
                return True
        raise OSError(errno.EEXIST, "something else than a log of kinetic is there", self.path)

    def _put(self, name: str, body: bytes, metadata: Mapping[str, str], generation: int) -> bool:
        offset = self._offset(name)
        if offset is not None or generation:
            known = 0 if offset is None else self._read(offset).generation
            if known != generation:
                return False
        record = _record(self._mark, name, body, metadata, generation + 1)
        if len(record) > MOST_BYTES:
            raise OSError(errno.EFBIG, f"{name} is too large for the log", self.path)
        self._append(record)
        self._note(name, self._end, generation + 1)
        self._end += len(record)
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; the last one takes the file with it."""
        with self._lock:
            try:
                if self._begin_writing():
                    self._delete(names)
            finally:
                self._end_writing()

    def _delete(self, names: Iterable[str]) -> None:
        found = [name for name in dict.fromkeys(names) if self._offset(name) is not None]
        if len(found) == self.count:
            os.unlink(self.path)
            self._leave()
        elif found:
            records = b"".join([_record(self._mark, name, b"", {}, 0) for name in found])
            self._append(records)
            for name in found:
                self._note(name, 0, 0)
            self._end += len(records)

    def _begin_writing(self) -> bool:
        """Be the only writer, and know all objects; return False if there is no file.

        Call `_end_writing` afterwards, also after an error.
        """
        while self._fd >= 0 or self._open():
            epoch = self._epoch
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            size = self._size()
            if epoch != self._epoch:  # another process has removed the file, and may have made one
                continue
            if not size:
                break
            self._read_whole(size)
            if not self._mark:
                raise OSError(errno.EIO, "the log has no beginning", self.path)
            return True
        return False

    def _end_writing(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _read_whole(self, size: int) -> None:
        """Read all whole records, and cut off the half of one: its writer has died or failed."""
        if not self._read_new(size, skips=True) and self._mark:
            os.ftruncate(self._fd, self._end)

    def _append(self, records: bytes) -> None:
        content = memoryview(records)
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as exc:
            with contextlib.suppress(OSError):  # otherwise the next writer does it
                self._read_whole(os.fstat(self._fd).st_size)
            exc.filename = exc.filename or self.path
            raise


def _join(folder: str, file: str) -> str:
    return f"{folder}/{file}" if folder else file


def _record(
    mark: bytes, name: str, body: bytes, metadata: Mapping[str, str], generation: int
) -> bytes:
    """Return a record; the generation 0 deletes the object."""
    # An encoder of JSON would take three times as long.
    entries = ", ".join([f"{_quote(name)}: {_quote(value)}" for name, value in metadata.items()])
    own_name, fields = name.encode(errors="surrogateescape"), f"{{{entries}}}".encode()
    sizes = len(own_name), len(fields), len(body)
    record = HEAD.pack(mark, 0, *sizes, generation) + own_name + fields + body
    check = binascii.crc32(record[CHECKED_FROM:])
    return record[:MARK_BYTES] + check.to_bytes(4, "little") + record[CHECKED_FROM:]


def _close_all() -> None:
    """Close the files in a new process: it shares their locks with its parent."""
    for log in tuple(_logs):
        log.close()


os.register_at_fork(after_in_child=_close_all)
