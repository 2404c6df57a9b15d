"""Makes the archive of a project: a zip file that depends on the tree and on nothing else.

The same files give the same bytes wherever and whenever they are packed (with
the same Python and zlib: others may choose other bytes). Times and owners are
not in it; permissions are, and so are empty directories.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
import time
import weakref
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from absl import logging

from kinetic import configuration
from kinetic._packing import ignore
from kinetic._packing.tree import (
    Entry,
    Stamp,
    Tree,
    about,
    about_credentials,
    amount,
    listed,
    scan,
    stamp_of,
)
from kinetic._runner.protocol.private import make_folder
from kinetic.errors import PackError

MAX_AGE = 14 * 24 * 3600.0
"""How long (seconds) the cache keeps an archive that no submission uses."""

MAX_BYTES = 4 * 1024**3
"""How many bytes the cache keeps; above that, the least recently used archives go."""

IN_USE = 3600.0
"""How long (seconds) after its last use an archive stays: a process may be uploading it."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors of a file system without space for us."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Archive:
    """An archive on this machine.

    ``digest`` is the SHA-256 of the file at ``path``, ``size`` its bytes,
    ``files`` the number of files in it. An archive that is not kept in the
    cache lives as long as this object.
    """

    path: Path
    digest: str
    size: int
    files: int


class ArchiveCache:
    """The archives in *directory*, which is private to the user.

    A file's name says which tree it is of, and what `Archive` says of it. It gets that name
    by a rename when it is whole. Its time of modification is that of its last use.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, fingerprint: str) -> Archive | None:
        """Return the archive of a tree; None if it is not here."""
        for path in self.directory.glob(f"{fingerprint}.*.zip"):
            with contextlib.suppress(OSError, ValueError):
                _, digest, size, files, _ = path.name.split(".")
                if path.stat().st_size != int(size):  # a power cut can cut a file
                    continue
                with contextlib.suppress(OSError):  # a read-only disk keeps no time of use
                    os.utime(path)
                return Archive(path=path, digest=digest, size=int(size), files=int(files))
        return None

    def draft(self) -> Path:
        """Make an empty, private file for an archive, in the cache if it can be written.

        Raises:
            OSError: No file can be made anywhere.
        """
        try:
            make_folder(self.directory)
            return _new_file(self.directory)
        except OSError as exc:
            if exc.errno in FULL:
                raise
            logging.warning(
                "Archives are not kept, every submission packs again: %s cannot be written (%s).",
                self.directory,
                exc.strerror,
            )
            return _new_file(None)

    def put(self, draft: Archive, fingerprint: str) -> Archive:
        """Keep *draft* as the archive of a tree; remove archives that nobody uses.

        Raises:
            OSError: It cannot be renamed.
        """
        name = f"{fingerprint}.{draft.digest}.{draft.size}.{draft.files}.zip"
        kept = replace(draft, path=self.directory / name)
        draft.path.replace(kept.path)
        self.prune(time.time())
        return kept

    def prune(self, now: float) -> None:
        """Remove what was not used for long, then the least recently used; drafts too."""
        known: list[tuple[float, int, Path]] = []
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):  # another process removed it
                status = path.stat()
                known.append((status.st_mtime, status.st_size, path))
        total = 0
        for used, size, path in sorted(known, reverse=True):
            total += size
            if now - used > IN_USE and (now - used > MAX_AGE or total > MAX_BYTES):
                with contextlib.suppress(OSError):
                    path.unlink()


def _new_file(directory: Path | None) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="kinetic-", suffix=".new", dir=directory)
    os.close(descriptor)
    return Path(name)


FRESH_NS = 50_000_000
"""A file that changed less than 50 ms ago may change again within one tick of its clock."""

COARSE_NS = 2_000_000_000
"""The same for file systems that keep whole seconds."""

BLOCK_BYTES = 1024 * 1024
SAMPLE_BYTES = 8 * 1024
WORTH = 0.9
"""Deflate what shrinks to this part of itself at most: pictures and weights do not."""

LEVEL = 1
PERMISSIONS = 0o777  # set-id bits do not travel
READS = 3
LARGE_BYTES = 1 << 31
"""From here on the sizes that follow a file in the archive take 8 bytes each."""


def pack(
    root: Path,
    *,
    exclude: Collection[Path],
    cache: Path,
    environ: Mapping[str, str],
    progress: Callable[[int, int], None] | None = None,
) -> Archive:
    """Archive the project at *root*, or find its archive under *cache* when nothing changed.

    *exclude* are absolute paths that stay here: what `Data` ships by itself.
    *progress* is called from this thread with the bytes packed and the bytes
    to pack, never when nothing is packed; an exception from it ends the
    packing. A cache that cannot be written costs only time.

    Raises:
        PackError: The root cannot be read, ``.kineticignore`` is invalid, or
            there is no space for the archive.
    """
    own = [cache, *_own_places(environ)]
    tree = scan(root, ignore.read_rules(root, environ), [*exclude, *own])
    shelf = ArchiveCache(cache)
    if (kept := shelf.find(tree.fingerprint)) is not None:
        return kept
    for notice in about(tree, root, environ):
        logging.warning("%s", notice)
    return _packed(tree, root, shelf, progress)


def _own_places(environ: Mapping[str, str]) -> list[Path]:
    """Where kinetic itself keeps things: people put that into their project, with its keys."""
    store = environ.get("KINETIC_STORE", "")
    return [configuration.home(environ), *([] if not store or "://" in store else [Path(store)])]


def _discard(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process ends with a copy of this, not with the file
        path.unlink(missing_ok=True)


def _packed(
    tree: Tree, root: Path, shelf: ArchiveCache, progress: Callable[[int, int], None] | None
) -> Archive:
    draft: Path | None = None
    try:
        draft = shelf.draft()
        # Looked at before the files are read: a later change has a later time.
        tick = FRESH_NS if tree.newest_ns % 1_000_000_000 else COARSE_NS
        fresh = abs(time.time_ns() - tree.newest_ns) < tick
        written, digest, size = _write(tree, draft, progress)
        shipped = [one.name for one in tree.entries if one.name not in written.private]
        private = sorted({*tree.private, *written.private})
        for notice in about_credentials(shipped, private, root):
            logging.warning("%s", notice)
        if written.refused:
            logging.warning("%s", listed(f"Not shipped from {root}:", written.refused))
        if written.unsteady:
            what = f"Changed in {root} while it was packed, shipped as last read:"
            logging.warning("%s", listed(what, written.unsteady))
        made = Archive(path=draft, digest=digest, size=size, files=written.files)
        is_sure = not (written.unsteady or written.vanished or fresh)
        if is_sure and draft.parent == shelf.directory:
            return shelf.put(made, tree.fingerprint)
        weakref.finalize(made, _discard, draft, os.getpid())
        return made
    except BaseException as exc:
        if draft is not None:
            draft.unlink(missing_ok=True)
        if isinstance(exc, _Ended):
            raise exc.cause from None
        if isinstance(exc, OSError):
            raise _refusal(exc, root, draft, tree) from exc
        raise


def _refusal(exc: OSError, root: Path, draft: Path | None, tree: Tree) -> PackError:
    where = "" if draft is None else f" in {draft.parent}"
    if exc.errno in FULL:
        return PackError(
            f"No space is left{where} for the archive of {root} ({amount(tree.size)} "
            "before compression). Free some, point KINETIC_HOME to another disk, or leave files "
            "out with .kineticignore.",
            culprit=str(root),
        )
    return PackError(f"{root} cannot be archived{where}: {exc}", culprit=str(root))


@dataclass(slots=True)
class _Written:
    """What has become of the files: those with a key, unreadable ones, and those that changed."""

    files: int = 0
    private: set[str] = field(default_factory=set[str])
    refused: list[str] = field(default_factory=list[str])
    unsteady: list[str] = field(default_factory=list[str])
    vanished: bool = False

    def refuse(self, entry: Entry, exc: OSError) -> None:
        self.refused.append(f"{entry.name} ({exc.strerror or exc})")
        # A right to read it would come with another time of change, which the scan sees.
        self.vanished |= not isinstance(exc, PermissionError)


class _Ended(Exception):
    """The caller's progress callback raised; whatever that was, it is not an error of a disk."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


class _Hashing:
    """A file that takes a digest of what it is given; without `tell`, so `zipfile` only appends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1024 * 1024)
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes, /) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _write(
    tree: Tree, path: Path, progress: Callable[[int, int], None] | None
) -> tuple[_Written, str, int]:
    """Write the archive to *path*: what became of the files, its digest and its bytes."""
    written, done = _Written(), 0

    def tell(packed: int) -> None:
        nonlocal done
        done += packed
        if progress is not None and packed:
            try:
                progress(done, tree.size)
            except BaseException as exc:
                raise _Ended(exc) from exc

    with contextlib.closing(_Hashing(path)) as sink:
        with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
            for entry in tree.entries:
                if entry.is_directory:
                    archive.writestr(_described(zipfile.ZipInfo(entry.name), entry), b"")
                    continue
                try:
                    content = _Content(entry)
                except OSError as exc:
                    written.refuse(entry, exc)
                    continue
                with contextlib.closing(content):
                    if not entry.wanted and ignore.has_key(entry.name, content.head):
                        written.private.add(entry.name)
                        continue
                    _add(archive, entry, content, tell)
                    written.unsteady += [] if content.is_steady() else [entry.name]
                written.files += 1
        return written, sink.sha256.hexdigest(), sink.size


def _add(
    archive: zipfile.ZipFile, entry: Entry, content: _Content, tell: Callable[[int], None]
) -> None:
    # By its name alone it gets the archive's own method, which is deflate.
    place = entry.name if content.is_worth_deflating() else zipfile.ZipInfo(entry.name)
    with archive.open(place, "w", force_zip64=content.size >= LARGE_BYTES) as part:
        for block in content.blocks():
            part.write(block)
            tell(len(block))
    _described(archive.getinfo(entry.name), entry)


def _described(info: zipfile.ZipInfo, entry: Entry) -> zipfile.ZipInfo:
    """*info* with the permissions; they are written with the table of contents, at the end."""
    kind = stat.S_IFDIR if entry.is_directory else stat.S_IFREG
    info.external_attr = (kind | entry.stamp.mode & PERMISSIONS) << 16
    if entry.is_directory:
        info.external_attr |= 0x10  # what other systems call a directory
    return info


class _Content:
    """What is in a file, read block by block; a small one again while it changes.

    Raises:
        OSError: It is gone, cannot be read, or is no file any more.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._open()
        for _ in range(READS - 1):
            if self._left or self._is_as_it_was():
                break
            self.close()
            self._open()

    def _open(self) -> None:
        self._descriptor, self._before = _opened(self._entry.path)
        self.size = self._left = self._before.size
        try:
            self._first = self._next()
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> bytes:
        """Its first bytes."""
        return self._first[: ignore.HEAD_BYTES]

    def _next(self) -> bytes:
        block = _up_to(self._descriptor, min(self._left, BLOCK_BYTES))
        self._left -= len(block)
        return block

    def _is_as_it_was(self) -> bool:
        return not self._left and stamp_of(os.fstat(self._descriptor)) == self._before

    def is_worth_deflating(self) -> bool:
        """Whether samples of it shrink."""
        places = (0, self.size // 2, max(0, self.size - SAMPLE_BYTES))
        sample = b"".join(os.pread(self._descriptor, SAMPLE_BYTES, one) for one in places)
        return len(zlib.compress(sample, LEVEL)) < WORTH * len(sample)

    def blocks(self) -> Iterator[bytes]:
        """The bytes; of a file that grows for ever, as many as there were."""
        block = self._first
        while block:
            yield block
            block = self._next()

    def is_steady(self) -> bool:
        """Whether it was all there, and what the scan saw."""
        return self._is_as_it_was() and self._before == self._entry.stamp

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


def _opened(path: str) -> tuple[int, Stamp]:
    # Whatever has taken the file's place since: no link is followed, no pipe waited for.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no longer a file")
    return descriptor, stamp_of(status)


def _up_to(descriptor: int, size: int) -> bytes:
    """At most *size* bytes: a file that grows for ever is read only as far as it was."""
    pieces: list[bytes] = []
    while size and (piece := os.read(descriptor, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
