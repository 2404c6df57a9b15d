"""The contents of a local path at one moment: its files, their digests, and one hash of all."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kinetic._runner.protocol.manifest import Entry, Manifest, file_hash
from kinetic.errors import DataError

LARGE_FILE_BYTES = 1 << 20
"""Minimum size in bytes of a file that a worker thread hashes, and whose hash kinetic keeps."""

CHUNK_BYTES = 1 << 20
HASHING_THREADS = 4
MAX_CACHED_HASHES = 4096
SETTLED_NS = 2_000_000_000
"""Minimum age of a file's last change, in ns, for `_cache_hash` to keep the file's hash."""

Stamp = tuple[int, int, int, int, int]
"""Size, mtime, ctime (ns), inode and device: if it is the same, the file's content is unchanged."""


class Abandoned(Exception):
    """The caller no longer needs the snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A local file or tree at the time when it was hashed.

    ``name`` is the name of the manifest's object, ``size`` counts the bytes of all files. ``files``
    are the absolute paths of the manifest's entries, and ``stamps`` those files' stamps. ``links``
    are symlinked directories, which the snapshot leaves out.
    """

    path: str
    digest: str
    manifest: Manifest
    name: str
    size: int
    files: tuple[str, ...]
    stamps: tuple[Stamp, ...]
    links: tuple[str, ...] = ()


_hashes: dict[tuple[str, str, Stamp], bytes] = {}
"""Digests of large files, by file, path in the manifest, and stamp.

There is no lock, because a fork could copy the lock while it is held.
"""


def take(path: str, is_dir: bool, stop: threading.Event) -> Snapshot:
    """Walk and hash *path*, an absolute path; *is_dir* says whether `Data` found a directory there.

    Raises:
        DataError: Something in *path* can't be read, is neither a file nor a directory, or changes
            while it is hashed. Or *path* was a directory and is now a file, or the reverse.
        Abandoned: *stop* was set.
    """
    if os.path.isdir(path) != is_dir:
        raise changed_error(path, path)
    links: list[str] = []
    empty: list[str] = []
    single_file = [(os.path.basename(path), path)]
    files = list(_walk(path, links, empty, stop)) if is_dir else single_file
    entries = _hash_files(files, path, stop)
    manifest = Manifest(
        is_dir=is_dir, entries=tuple(entry for entry, _ in entries), empty=tuple(empty)
    )
    digest = manifest.content_hash()
    return Snapshot(
        path=path,
        digest=digest,
        manifest=manifest,
        name=manifest.name(digest),
        size=manifest.size,
        files=tuple(file for _, file in files),
        stamps=tuple(stamp for _, stamp in entries),
        links=tuple(links),
    )


def read(file: str, entry: Entry, root: str) -> bytes:
    """Read a small file; raise `DataError` if its digest isn't that of *entry*."""
    try:
        with open(file, "rb") as content:
            body = content.read(entry.size + 1)  # one more byte shows that the file has grown
    except OSError as exc:
        raise _unreadable_error(file, root, exc) from exc
    digest = file_hash(entry.path)
    digest.update(body)
    if digest.hexdigest() != entry.digest:
        raise changed_error(file, root)
    return body


def is_unchanged(file: str, stamp: Stamp) -> bool:
    """Return whether *file* is unchanged since it had *stamp*."""
    try:
        return _stamp(os.stat(file)) == stamp
    except OSError:
        return False


def sha256(file: str, path: str, stop: threading.Event) -> str:
    """Return the digest, in hex, of an entry at *path* whose content is in *file*."""
    with open(file, "rb", buffering=0) as content:
        return _digest(content.fileno(), path, stop).hex()


def changed_error(file: str, root: str) -> DataError:
    """Make the error about a changed file."""
    message = f"{file} changed since it was hashed; make a new Data({root!r}) after the changes"
    return DataError(message, path=root)


def _walk(
    root: str, links: list[str], empty: list[str], stop: threading.Event
) -> Iterator[tuple[str, str]]:
    """Yield the relative and absolute path of each file; a folder's own files come first.

    Append the full path of each symlinked directory to *links*, and the relative path of each empty
    directory to *empty*.
    """
    pending = [""]
    while pending:
        _check_stop(stop)
        prefix = pending.pop()
        files: list[str] = []
        folders: list[str] = []
        folder = os.path.join(root, prefix) if prefix else root
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        is_dir = entry.is_dir()
                    except OSError:  # a circular link: opening it as a file raises the error
                        is_dir = False
                    if not is_dir:
                        files.append(entry.name)
                    elif entry.is_symlink():
                        links.append(entry.path)
                    else:
                        folders.append(entry.name)
        except OSError as exc:
            raise _unreadable_error(folder, root, exc) from exc
        if prefix and not files and not folders:
            empty.append(prefix.rstrip("/"))
        for name in sorted(files):
            yield prefix + name, os.path.join(folder, name)
        pending += [f"{prefix}{name}/" for name in sorted(folders, reverse=True)]


def _hash_files(
    files: list[tuple[str, str]], root: str, stop: threading.Event
) -> list[tuple[Entry, Stamp]]:
    """Return the entry and the stamp of each file, in order; threads hash large files."""
    # Python can't load this module in a thread that outlives the main thread.
    from concurrent.futures import Future, ThreadPoolExecutor

    hashed: list[Future[tuple[Entry, Stamp]] | tuple[Entry, Stamp]] = []
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        for path, file in files:
            _check_stop(stop)
            try:
                is_large = os.stat(file).st_size >= LARGE_FILE_BYTES
            except OSError as exc:
                raise _unreadable_error(file, root, exc) from exc
            if is_large:
                hashed.append(pool.submit(_hash_entry, path, file, root, stop))
            else:
                hashed.append(_hash_entry(path, file, root, stop))
        return [entry.result() if isinstance(entry, Future) else entry for entry in hashed]


def _hash_entry(path: str, file: str, root: str, stop: threading.Event) -> tuple[Entry, Stamp]:
    """Return the entry and the stamp of a file; hash it unless its digest is known."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise _unreadable_error(file, root, exc) from exc
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            message = f"{file} is neither a file nor a directory, so Data can't ship it; remove it"
            raise DataError(message, path=root)
        stamp = _stamp(status)
        digest = _hashes.get((file, path, stamp))
        if digest is None:
            digest = _digest(fd, path, stop)
            after = os.fstat(fd)
            if _stamp(after) != stamp:
                raise changed_error(file, root)
            if status.st_size >= LARGE_FILE_BYTES:
                _cache_hash(file, path, stamp, digest)
        executable = bool(status.st_mode & stat.S_IXUSR)
        return Entry(path, status.st_size, executable, digest.hex()), stamp
    except OSError as exc:
        raise _unreadable_error(file, root, exc) from exc
    finally:
        os.close(fd)


def _digest(fd: int, path: str, stop: threading.Event) -> bytes:
    digest = file_hash(path)
    while chunk := os.read(fd, CHUNK_BYTES):
        digest.update(chunk)
        _check_stop(stop)
    return bytes(digest.digest())


def _stamp(status: os.stat_result) -> Stamp:
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_size, *times, status.st_ino, status.st_dev)


def _cache_hash(file: str, path: str, stamp: Stamp, digest: bytes) -> None:
    # Times are coarse: a file that was just written can change again and keep its stamp.
    if time.time_ns() - max(stamp[1], stamp[2]) < SETTLED_NS:
        return
    if len(_hashes) >= MAX_CACHED_HASHES:
        for oldest in list(_hashes)[: MAX_CACHED_HASHES // 2]:
            _hashes.pop(oldest, None)
    _hashes[file, path, stamp] = digest


def _check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise Abandoned


def _unreadable_error(file: str, root: str, exc: OSError) -> DataError:
    if isinstance(exc, FileNotFoundError) and os.path.islink(file):
        message = f"{file} links to a missing file, so Data({root!r}) can't be shipped; remove it"
    else:
        message = f"{file} cannot be read: {exc.strerror or exc}; Data({root!r}) can't be shipped"
    return DataError(message, path=root)
