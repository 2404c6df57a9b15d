"""A store in a directory: one file for each object, created atomically.

An object without metadata is a file with exactly its content. If an object has metadata, or was
overwritten, its file begins with a header: the metadata, and the generation, a number that grows
with each overwrite. One atomic step creates header and content, because they are in one file.

A local store (``file://``) syncs nothing to the disk: its objects survive every process, but not a
power cut. A shared store (``shared://``) is on a volume that several machines mount. It syncs each
object and its folder before a write returns.

In a local store, the claims and outcomes of a batch share one file, which only grows (see `log`).

A file may be damaged, and another user may have put it into the store. A file with an invalid
header has no metadata. A link, a pipe, or a device counts as an empty object: kinetic neither
follows nor reads it. The signature of such an object is never valid. A directory isn't an object.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import stat
import struct
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from ..protocol import directory_urls
from ..protocol.frames import MALFORMED
from ..protocol.private import make_folder

if TYPE_CHECKING:
    from .log import Log, Record

MAGIC = b"\x89KNO\r\n\x1a\n"
HEAD = struct.Struct("<8sI")
TEMPORARY = ".tmp"
"""The folder of lock files, and of files that are still being written."""

SAFE_CHARACTERS = "".join(chr(c) for c in range(32, 127) if chr(c) not in '%/\\:*?"<>|')
PLAIN_BYTES = bytes(c for c in range(128) if chr(c).isalnum() or chr(c) in "_-./")
MAX_FILE_NAME_BYTES = 240  # bytes of one file name; most file systems stop at 255
# With O_NONBLOCK, opening a pipe doesn't wait for its writer.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_FILE_ERRNOS = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP)
"""Errors of opening a link, a socket, or a device."""

ABSENT_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)
"""Errors of a deletion whose object or folder is missing, or whose folder isn't empty."""

NO_LINK_ERRNOS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP)
"""Errors of a hard link that the file system doesn't allow."""

HEADER_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a header."""

BATCHES, LOGGED, LOG_FILE = "batches/", "/attempts/", "attempts%"
"""The folder of batches; a folder of each batch, whose objects are in a log; the file of this log.

No object has a file of this name, because two digits follow each percent sign.
"""

MAX_LOGS, MAX_LOGGED_NAMES = 64, 500_000
"""How many logs to keep open, and how many names of their objects to keep in memory."""


class Stored(NamedTuple):
    """An object in a listing.

    ``size`` is the size of its content in bytes; ``used`` is the time of its last write or renewal,
    in seconds since 1970.
    """

    name: str
    size: int
    metadata: Mapping[str, str]
    generation: int
    used: float | None = None


Listing = list[Stored]
Entries = list[tuple[str, bool]]


class DirectoryObjects:
    """Objects under *root*. Safe for any number of threads and processes at once.

    With *shared*, other machines also mount *root*, and this class syncs each write. The file
    system needs hard links and locks.

    A missing object raises ``KeyError`` with its name; any other failure raises the ``OSError`` of
    the file system.
    """

    def __init__(self, root: str | Path, *, shared: bool = False) -> None:
        self._root = os.fspath(root)
        self._shared = shared
        self._logs: dict[str, Log] = {}  # by the prefix of a batch

    @property
    def root(self) -> Path:
        """The directory of the store."""
        return Path(self._root)

    @property
    def url(self) -> str:
        """The URL of this store for other processes."""
        return directory_urls.url_of(self._root, shared=self._shared)

    @classmethod
    def from_url(cls, url: str) -> DirectoryObjects:
        """Open the store of a ``file://`` or ``shared://`` URL."""
        directory = directory_urls.directory_of(url)
        if directory is None:
            raise ValueError(f"{url!r} names no directory")
        return cls(directory, shared=url.startswith(directory_urls.SHARED))

    def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        consume: bool = False,
        check: Callable[[], object] | None = None,
    ) -> bool:
        """Create *name* if it is absent; return False if it exists.

        With *consume*, the file *body* may become the object's file. *check* is for shared content:
        if it raises when all of *body* was read, the object isn't created.
        """
        if name.startswith(BATCHES) and (logged := self._log(name, create=True)):
            content = body if isinstance(body, bytes) else body.read_bytes()
            return logged[0].put(logged[1], content, metadata or {})
        target = self._file_path(name)
        if consume and isinstance(body, Path) and not metadata:
            try:
                if self._shared:
                    _sync(os.fspath(body))
                return self._link(os.fspath(body), target)
            except OSError as exc:
                if exc.errno not in NO_LINK_ERRNOS:
                    raise
        return self._create_file(body, metadata or {}, target, check)

    def replace(self, name: str, body: bytes, generation: int) -> int | None:
        """Overwrite an object that has this *generation*; return its new generation, else None."""
        if (logged := self._log(name)) is not None:
            if not logged[0].exists(logged[1]):
                raise KeyError(name)
            return generation + 1 if logged[0].put(logged[1], body, {}, generation) else None
        target = self._file_path(name)
        with self._lock("replace", fcntl.LOCK_EX):
            if self.stat(name).generation != generation:
                return None
            os.replace(self._write(body, {}, generation=generation + 1), target)
            if self._shared:
                _sync(os.path.dirname(target))
        return generation + 1

    def get(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the content, or its bytes from *start* to *stop*, and the metadata."""
        if name.startswith(BATCHES) and (record := self._record(name)) is not None:
            return record.body[start or 0 : stop], record.metadata
        with self._open(name) as file:
            metadata, _, offset = _read_header(file)
            file.seek(offset + (start or 0))
            if stop is None:
                return file.read(), metadata
            content = file.read(size := stop - (start or 0))
            while len(content) < size and (more := file.read(size - len(content))):
                content += more  # the kernel reads at most 2 GiB at once
            return content, metadata

    def read(self, name: str, limit: int) -> tuple[Stored, bytes | None]:
        """Return an object and its content; the content is None above *limit* bytes."""
        if name.startswith(BATCHES) and (record := self._record(name)) is not None:
            return _stored(name, record), record.body if len(record.body) <= limit else None
        with self._open(name) as file:
            stored, offset = _describe(name, file)
            if stored.size > limit:
                return stored, None
            file.seek(offset)
            return stored, file.read(stored.size)  # `limit` would be allocated first

    def path(self, name: str) -> Path | None:
        """Return the file that has exactly the content; None if there is no such file."""
        if name.startswith(BATCHES) and self._record(name) is not None:
            return None
        with self._open(name) as file:
            whole = not isinstance(file, io.BytesIO) and _read_header(file)[2] == 0
            return Path(self._file_path(name)) if whole else None

    def fetch(self, name: str, path: Path, size: int = 0) -> None:
        """Copy the content, of *size* bytes if that is known, to a new file."""
        if name.startswith(BATCHES) and (record := self._record(name)) is not None:
            with open(path, "xb") as copy:
                copy.write(record.body)
            return
        with self._open(name) as file, open(path, "xb") as copy:
            file.seek(_read_header(file)[2])
            _copy(file, copy)

    def stat(self, name: str) -> Stored:
        """Return the entry of one object, as a listing has it."""
        if name.startswith(BATCHES) and (record := self._record(name)) is not None:
            return _stored(name, record)
        with self._open(name) as file:
            return _describe(name, file)[0]

    def exists(self, name: str) -> bool:
        """Return whether the object exists."""
        if name.startswith(BATCHES) and (logged := self._log(name)) is not None:
            return logged[0].exists(logged[1])
        try:
            return not stat.S_ISDIR(os.lstat(self._file_path(name)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def list(self, prefix: str) -> Listing:
        """Return all objects whose names start with *prefix*, sorted by name."""
        folder, _, start = prefix.rpartition("/")
        names = [*self._names(folder, start)]
        if prefix.startswith(BATCHES):
            names += self._logged_names(prefix)
        return self.look_up(sorted(names))

    def look_up(self, names: Iterable[str]) -> Listing:
        """Return the objects among *names* that exist, which is cheaper than a listing.

        If this user may not read an object, its entry has no metadata.
        """
        found: list[Stored] = []
        for name in names:
            try:
                found.append(self.stat(name))
            except PermissionError:
                status = os.lstat(self._file_path(name))  # raises if the folder is unreadable
                found.append(Stored(name, status.st_size, {}, 1, status.st_mtime))
            except KeyError:
                continue
        return found

    def renew(self, names: Iterable[str]) -> set[str]:
        """Mark the objects *names* as used now; return the names that do not exist.

        No other submission uses claims and outcomes, so those in a log keep their time.
        """
        absent: set[str] = set()
        with self._lock("collect", fcntl.LOCK_SH):
            for name in names:
                if (logged := self._log(name)) is not None:
                    absent |= set() if logged[0].exists(logged[1]) else {name}
                    continue
                try:
                    os.utime(self._file_path(name), follow_symlinks=False)
                except (FileNotFoundError, NotADirectoryError):
                    absent.add(name)
        return absent

    def collect(self, used: Mapping[str, float | None]) -> bool:
        """Delete the objects named in *used*, in order; if one was renewed, return False instead.

        *used* maps each name to the time of use that a listing has returned. If an object has
        another time now, a process has renewed it. A lock makes `renew` wait until the deletion.
        """
        with self._lock("collect", fcntl.LOCK_EX):
            if any(entry.used != used[entry.name] for entry in self.look_up(used)):
                return False
            self.delete(used)
            return True

    @contextlib.contextmanager
    def _lock(self, name: str, operation: int) -> Generator[None]:
        """Hold a shared or an exclusive lock of all processes during the block."""
        make_folder(os.path.join(self._root, TEMPORARY))
        lock_path = os.path.join(self._root, TEMPORARY, f"{name}.lock")
        # NFS refuses a shared lock on a file that isn't open for reading.
        with open(os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as lock:
            fcntl.flock(lock, operation)
            yield

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, and folders that become empty.

        If this is interrupted, at most the folders of one object stay empty.
        """
        folder, log = self._root, None
        own_names: list[str] = []
        try:
            for name in names:
                logged = self._log(name)
                path = self._file_path(name) if logged is None else logged[0].path
                next_log = None if logged is None else logged[0]
                if (parent := path.rpartition("/")[0]) != folder or next_log is not log:
                    self._finish_deletion(folder, log, own_names)
                    folder, log, own_names = parent, next_log, []
                if logged is not None:
                    own_names.append(logged[1])
                    continue
                with _absence_ignored():
                    os.unlink(path)
        finally:
            self._finish_deletion(folder, log, own_names)

    def _finish_deletion(self, folder: str, log: Log | None, names: Iterable[str]) -> None:
        if log is not None:
            log.delete(names)
        with _absence_ignored():
            while folder != self._root:
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def sweep(self, age: float) -> None:
        """Remove unfinished files that killed writers left more than *age* seconds ago."""
        folder, now = os.path.join(self._root, TEMPORARY), time.time()
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            try:
                if not name.endswith(".lock") and os.stat(path).st_mtime < now - age:
                    os.unlink(path)
            except OSError:
                continue  # another process has removed it

    # --- objects in a log ---

    def _log(self, name: str, *, create: bool = False) -> tuple[Log, str] | None:
        """Return the log of an object, and its name there; None if it has a file of its own."""
        if self._shared or not name.startswith(BATCHES):
            return None
        end = name.find("/", len(BATCHES))
        if end < 0 or not name.startswith(LOGGED, end):
            return None
        scope = name[:end]
        if (log := self._logs.get(scope)) is None:
            path = f"{self._file_path(scope)}/{LOG_FILE}"
            # A log exists once it has an object, or if *create* says that it will.
            if not (create or os.path.lexists(path)):
                return None
            from .log import Log  # single jobs have no log

            log = Log(path, lambda content: self._create_file(content, {}, path))
            known = [*self._logs]
            names = sum(it.count for it in (*self._logs.values(),))
            while known and (len(known) >= MAX_LOGS or names > MAX_LOGGED_NAMES):
                evicted = self._logs.pop(known.pop(0), None)  # another thread may be faster
                names -= 0 if evicted is None else evicted.count
            self._logs[scope] = log
        return log, name[end + len(LOGGED) :]

    def _record(self, name: str) -> Record | None:
        """Return an object in a log; None if it has a file of its own."""
        if (logged := self._log(name)) is None:
            return None
        if (record := logged[0].get(logged[1])) is None:
            raise KeyError(name)
        return record

    def _logged_names(self, prefix: str) -> Iterator[str]:
        """Yield the names of objects in a log that begin with *prefix*."""
        if (logged := self._log(prefix)) is not None:
            log, start = logged
            base = prefix.removesuffix(start)
            yield from (base + name for name in log.names(start))

    def _create_file(
        self,
        body: bytes | Path,
        metadata: Mapping[str, str],
        path: str,
        check: Callable[[], object] | None = None,
    ) -> bool:
        temporary = self._write(body, metadata, generation=1)
        try:
            if check is not None:
                check()
            return self._link(temporary, path)
        finally:
            os.unlink(temporary)

    # --- objects with a file ---

    def _names(self, folder: str, start: str = "") -> Iterator[str]:
        """Yield the names of objects in *folder* whose next segment begins with *start*."""
        quoted = start and urllib.parse.quote(start, safe=SAFE_CHARACTERS, errors="surrogateescape")
        for entry, is_folder in self._entries(folder):
            if not entry.startswith((quoted, "%")) or (entry == TEMPORARY and not folder):
                continue
            if entry == LOG_FILE:
                yield from self._logged_names(f"{folder}{LOGGED}")
                continue
            segment = "" if entry == "%" else urllib.parse.unquote(entry, errors="surrogateescape")
            if not segment.startswith(start):
                continue
            name = f"{folder}/{segment}" if folder else segment
            if is_folder:
                yield from self._names(name)
            else:
                yield name

    def _entries(self, folder: str) -> Entries:
        """Return the entries of *folder*, and whether each is a folder.

        Return nothing if the path of *folder* contains a symbolic link.
        """
        path = self._file_path(folder) if folder else self._root
        entries: Entries = []
        try:
            with os.scandir(path) as scan:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError:
            if not self._is_linked(path):
                raise
        return [] if self._is_linked(path) else entries

    def _is_linked(self, path: str) -> bool:
        """Return whether *path* or one of its folders in the store is a symbolic link."""
        while len(path) > len(self._root):
            if os.path.islink(path):
                return True
            path = os.path.dirname(path)
        return False

    def _file_path(self, name: str) -> str:
        if _is_plain(name):  # as all names of kinetic's own objects are
            return f"{self._root}/{name}"
        return os.path.join(self._root, *map(_file_name, name.split("/")))

    def _open(self, name: str) -> BinaryIO:
        """Open the object's file; a link or a device counts as an empty file."""
        try:
            fd = os.open(self._file_path(name), READ_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(name) from None
        except OSError as exc:
            if exc.errno not in NO_FILE_ERRNOS:
                raise
            return io.BytesIO()
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return io.FileIO(fd)
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise KeyError(name)
        return io.BytesIO()

    def _write(self, body: bytes | Path, metadata: Mapping[str, str], generation: int) -> str:
        """Write header and body to a new file in the folder `TEMPORARY`; return its path."""
        temporary = f"{self._root}/{TEMPORARY}/{os.getpid()}-{os.urandom(8).hex()}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:  # the first write makes the folder
            make_folder(os.path.dirname(temporary))
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if isinstance(body, bytes):
                content = memoryview(_header(body, metadata, generation) + body)
                while content:
                    content = content[os.write(fd, content) :]
            else:
                with open(body, "rb") as source, open(fd, "wb", closefd=False) as file:
                    start = source.read(len(MAGIC))
                    file.write(_header(start, metadata, generation) + start)
                    _copy(source, file)
            if self._shared:
                os.fsync(fd)
        except BaseException as exc:
            os.unlink(temporary)
            if isinstance(exc, OSError) and exc.filename is None:
                exc.filename = self._root  # errors of write() have no filename
            raise
        finally:
            os.close(fd)
        return temporary

    def _link(self, temporary: str, target: str) -> bool:
        """Make the finished file *temporary* the object's file; return False if *target* exists."""
        created_folder = False
        for _ in range(100):  # another process may delete the empty folder again
            try:
                os.link(temporary, target)
            except FileExistsError:
                # If NFS loses the reply, its client retries, and finds the link already made.
                if not self._shared or not _is_same(temporary, target):
                    return False
            except FileNotFoundError:
                make_folder(os.path.dirname(target))
                created_folder = True
                continue
            if self._shared:
                folder = os.path.dirname(target)
                _sync(folder)
                while created_folder and len(folder) > len(self._root):
                    folder = os.path.dirname(folder)
                    _sync(folder)
            return True
        raise OSError(f"another process removes the folder of {target} whenever kinetic creates it")


@contextlib.contextmanager
def _absence_ignored() -> Generator[None]:
    """Ignore the error of a deletion whose object or folder is missing, or isn't empty."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in ABSENT_ERRNOS:
            raise


def _is_same(first: str, second: str) -> bool:
    try:
        return os.path.samestat(os.lstat(first), os.lstat(second))
    except FileNotFoundError:
        return False


def _sync(path: str) -> None:
    """Write a file or a folder to the disk; some file systems can't sync a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _is_plain(name: str) -> bool:
    """Return whether the name is a valid path; the check is fast because every access needs it."""
    if (
        not name.isascii()
        or name.encode().translate(None, PLAIN_BYTES)
        or len(name) > MAX_FILE_NAME_BYTES
    ):
        return False
    return not (name.startswith((".", "/")) or name.endswith("/") or "/." in name or "//" in name)


def _file_name(segment: str) -> str:
    """Return a valid file name for one part of an object's name."""
    quoted = urllib.parse.quote(segment, safe=SAFE_CHARACTERS, errors="surrogateescape")
    if quoted in ("", ".", "..") or quoted.startswith(TEMPORARY):
        quoted = "%" + (f"{ord(quoted[0]):02X}{quoted[1:]}" if quoted else "")
    if len(quoted) > MAX_FILE_NAME_BYTES:
        raise OSError(f"the name {segment[:40]!r}… is too long for a file of this store")
    return quoted


def _header(start: bytes, metadata: Mapping[str, str], generation: int) -> bytes:
    """Return the header for content that begins with *start*; empty if the file needs none."""
    if not metadata and generation == 1 and not start.startswith(MAGIC):
        return b""
    content = json.dumps({"m": dict(metadata), "g": generation}).encode()
    return HEAD.pack(MAGIC, len(content)) + content


def _stored(name: str, record: Record) -> Stored:
    """Return the listing's entry of an object in a log."""
    return Stored(name, len(record.body), record.metadata, record.generation, record.used)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    while chunk := source.read(1 << 20):
        target.write(chunk)


def _describe(name: str, file: BinaryIO) -> tuple[Stored, int]:
    """Return the listing's entry of the object in *file*, and the offset of its content."""
    if isinstance(file, io.BytesIO):
        return Stored(name, 0, {}, 1, 0.0), 0
    metadata, generation, offset = _read_header(file)
    status = os.fstat(file.fileno())
    return Stored(name, status.st_size - offset, metadata, generation, status.st_mtime), offset


def _read_header(file: BinaryIO) -> tuple[Mapping[str, str], int, int]:
    """Return the metadata, the generation, and the offset of the content."""
    start = file.read(HEAD.size)
    if len(start) < HEAD.size or not start.startswith(MAGIC):
        return {}, 1, 0
    length = HEAD.unpack(start)[1]
    try:
        content = json.loads(file.read(length) if length < HEADER_BYTES else b"")
        metadata, generation = content["m"], content["g"]
        if type(generation) is int and {str}.issuperset(map(type, metadata.values())):
            return metadata, generation, HEAD.size + length
    except MALFORMED:
        pass
    return {}, 1, 0
