"""A file with many small objects: the claims and outcomes of a batch on this machine.

A file for each object costs more than the object. So processes append records to one file. A lock
of the file orders the writers, and readers need none.

A record begins with the file's mark, which is random, and has a checksum. A process that dies while
it writes leaves half a record at the end. Readers ignore it, and the next writer cuts it off. After
damage elsewhere, readers go on with the next mark.

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
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import NamedTuple

from ..protocol.frames import MALFORMED
from ..protocol.private import MAKE_ATTEMPTS

MARK_BYTES = 8
HEAD = struct.Struct(f"<{MARK_BYTES}sIHIII")
"""A record's mark and checksum; the sizes of name, metadata, and body; the generation."""

CHECKED_FROM = MARK_BYTES + 4
"""The checksum is about the bytes of a record from here on."""

PIECE_BYTES = 1 << 20
RECORD_BYTES = 2048
"""How many bytes to read at once: of new records, and of one record."""

OPEN_FLAGS = os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_FILE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)
READ_ONLY_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)

_quote = json.encoder.encode_basestring_ascii
_open_logs: set[weakref.ref[Log]] = set()


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
        self._own_reference: weakref.ref[Log] = weakref.ref(self)
        self._epoch = 0
        self._forget()

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
            _open_logs.discard(self._own_reference)
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
        except MALFORMED:
            fields = {}
        return Record(fields, data[start + metadata : size], generation, self._used)

    def _refresh(self) -> int:
        """Read what was appended; return the file's size, 0 without a file."""
        size = 0
        if self._fd >= 0:
            status = os.fstat(self._fd)
            size, self._used = status.st_size, status.st_mtime
            if not status.st_nlink:
                os.close(self._fd)
                self._fd = -1
                self._reset()
        if self._fd < 0 and not (size := self._open()):
            return 0
        while self._end < size:
            piece = os.pread(self._fd, PIECE_BYTES, self._end)
            if not self._mark:
                if len(piece) < MARK_BYTES:
                    break
                self._mark, self._end = piece[:MARK_BYTES], MARK_BYTES
                continue
            read, wanted = self._parse(piece, size - self._end)
            if not read and len(piece) < wanted <= size - self._end:
                piece = os.pread(self._fd, wanted, self._end)
                read, _ = self._parse(piece, size - self._end)
            if not read:
                break  # a record that is being written, or whose writer has died
            self._piece, self._piece_start = piece, self._end
            self._end += read
        return size

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
        _open_logs.add(self._own_reference)
        return status.st_size

    def _parse(self, data: bytes, rest: int) -> tuple[int, int]:
        """Note the records in *data*, the next bytes of the *rest* of the file.

        Return how many bytes were read, and how many bytes the record after them has.
        """
        position = 0
        while len(data) - position >= HEAD.size:
            mark, check, name, metadata, body, generation = HEAD.unpack_from(data, position)
            start = position + HEAD.size
            end = start + name + metadata + body
            is_whole = mark == self._mark and end <= len(data)
            if is_whole and binascii.crc32(data[position + CHECKED_FROM : end]) == check:
                self._note(data[start : start + name].decode(), self._end + position, generation)
                position = end
            elif mark == self._mark and len(data) < end <= rest:
                return position, end - position
            elif (following := data.find(self._mark, position + 1)) >= 0:
                position = following
            else:
                return position, end - position
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
            with self._locked() as is_there:
                if is_there:
                    offset = self._offset(name)
                    if offset is not None or generation:
                        known = 0 if offset is None else self._read(offset).generation
                        if known != generation:
                            return False
                    record = _record(self._mark, name, body, metadata, generation + 1)
                    self._append([record])
                    self._note(name, self._end, generation + 1)
                    self._end += len(record)
                    return True
            if generation:
                return False
            mark = os.urandom(MARK_BYTES)
            if self._make(mark + _record(mark, name, body, metadata, 1)):
                return True
        raise OSError(errno.EEXIST, "something else than a log of kinetic is there", self.path)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; the last one takes the file with it."""
        with self._locked() as is_there:
            if not is_there:
                return
            found = [name for name in dict.fromkeys(names) if self._offset(name) is not None]
            if len(found) == self.count:
                os.unlink(self.path)
            elif found:
                records = [_record(self._mark, name, b"", {}, 0) for name in found]
                self._append(records)
                for name in found:
                    self._note(name, 0, 0)
                self._end += sum(map(len, records))

    @contextlib.contextmanager
    def _locked(self) -> Generator[bool]:
        """Be the only writer, and know all objects; the value is False if there is no file."""
        with self._lock:
            while True:
                self._refresh()
                if self._fd < 0:
                    yield False
                    return
                epoch = self._epoch
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                try:
                    size = self._refresh()
                    if epoch != self._epoch:  # another process has just removed the file
                        continue
                    if not self._mark:
                        raise OSError(errno.EIO, "the log has no beginning", self.path)
                    if size > self._end:  # a process has died while it wrote
                        os.ftruncate(self._fd, self._end)
                    yield True
                    return
                finally:
                    if epoch == self._epoch:
                        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _append(self, records: Iterable[bytes]) -> None:
        content = memoryview(b"".join(records))
        try:
            while content:
                content = content[os.write(self._fd, content) :]
        except OSError as exc:
            with contextlib.suppress(OSError):  # otherwise the next writer does it
                os.ftruncate(self._fd, self._end)
            exc.filename = exc.filename or self.path
            raise


def _join(folder: str, file: str) -> str:
    return f"{folder}/{file}" if folder else file


def _record(
    mark: bytes, name: str, body: bytes, metadata: Mapping[str, str], generation: int
) -> bytes:
    """Return a record; the generation 0 deletes the object."""
    # An encoder of JSON would take three times as long.
    entries = ", ".join(f"{_quote(name)}: {_quote(value)}" for name, value in metadata.items())
    own_name, fields = name.encode(), f"{{{entries}}}".encode()
    sizes = len(own_name), len(fields), len(body)
    record = HEAD.pack(mark, 0, *sizes, generation) + own_name + fields + body
    check = binascii.crc32(record[CHECKED_FROM:])
    return record[:MARK_BYTES] + check.to_bytes(4, "little") + record[CHECKED_FROM:]


def _close_all() -> None:
    """Close the files in a new process: it shares their locks with its parent."""
    while _open_logs:
        if (log := _open_logs.pop()()) is not None:
            log.close()


os.register_at_fork(after_in_child=_close_all)
