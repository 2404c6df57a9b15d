"""Makes the archive of a project: a zip file that depends on the tree and on nothing else.

The same files give the same bytes wherever and whenever they are packed (with
the same Python and zlib: others may choose other bytes). Times and owners are
not in it; permissions are, and so are empty directories.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import weakref
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
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
"""Seconds after which an archive that nobody used goes."""

MAX_BYTES = 4 * 1024**3
"""Together the archives have at most so many bytes; the least recently used goes first."""

IN_USE = 3600.0
"""Seconds after its last use in which an archive is left alone: somebody may be uploading it."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a file system says when there is no space left for us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An archive on the shelf."""

    path: Path
    digest: str
    size: int
    files: int


class ArchiveCache:
    """The archives under *directory*, which is private to the user."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock

    def find(self, fingerprint: str) -> Kept | None:
        """The archive of a tree, if it is there and whole."""
        note = self._note(fingerprint)
        try:
            facts = json.loads(note.read_bytes())
            digest, size, files = str(facts["digest"]), int(facts["size"]), int(facts["files"])
            path = self._directory / f"{digest}.zip"
            if not _is_sealed(path, digest, size):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        with contextlib.suppress(OSError):  # on a read-only disk it cannot be marked as used
            os.utime(note)
        return Kept(path=path, digest=digest, size=size, files=files)

    def draft(self) -> Path:
        """A new, empty, private file for an archive; here, or where temporary files go.

        Raises:
            OSError: No file can be made anywhere.
        """
        try:
            make_folder(self._directory)
            return _new_file(self._directory)
        except OSError as exc:
            if exc.errno in FULL:
                raise
            logging.warning(
                "Archives are not kept, every submission packs again: %s cannot be written (%s).",
                self._directory,
                exc.strerror,
            )
            return _new_file(Path(tempfile.mkdtemp(prefix="kinetic-pack-")))

    def put(self, draft: Path, *, digest: str, size: int, files: int, fingerprint: str) -> Kept:
        """Keep a finished draft, as the archive of *fingerprint* unless that is empty.

        Raises:
            OSError: It cannot be moved.
        """
        if draft.parent != self._directory:
            return Kept(path=draft, digest=digest, size=size, files=files)
        seal = _seal(digest)
        os.utime(draft, ns=(seal, seal))
        path = self._directory / f"{digest}.zip"
        draft.replace(path)
        if fingerprint:
            self._write_note(fingerprint, {"digest": digest, "size": size, "files": files})
        self._prune(keep=path)
        return Kept(path=path, digest=digest, size=size, files=files)

    def discard(self, draft: Path) -> None:
        """Remove a draft, or an archive that is not kept; never raises."""
        with contextlib.suppress(OSError):
            draft.unlink()
        if draft.parent != self._directory:
            shutil.rmtree(draft.parent, ignore_errors=True)

    def _write_note(self, fingerprint: str, facts: dict[str, str | int]) -> None:
        with contextlib.suppress(OSError):  # without it, the next one packs again
            note = _new_file(self._directory)
            try:
                note.write_text(json.dumps(facts))
                note.replace(self._note(fingerprint))
            except OSError:
                note.unlink()

    def _note(self, fingerprint: str) -> Path:
        return self._directory / f"{fingerprint}.tree"

    def _prune(self, keep: Path) -> None:
        now = self._clock()
        used: dict[Path, float] = {}
        for note in self._listed("*.tree"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                last = note.stat().st_mtime
                archive = self._directory / f"{json.loads(note.read_bytes())['digest']}.zip"
                if now - last > MAX_AGE or not archive.exists():
                    note.unlink()
                    continue
                used[archive] = max(last, used.get(archive, 0.0))
        for leftover in self._listed("*.new"):
            with contextlib.suppress(OSError):
                # Not the time of modification: a sealed one is about to get its name.
                if now - leftover.stat().st_ctime > 24 * IN_USE:
                    leftover.unlink()
        self._drop(used, now, keep)

    def _drop(self, used: dict[Path, float], now: float, keep: Path) -> None:
        """Remove archives that are old, or too many; *used* is when each was used last."""
        total = 0
        aged: list[tuple[float, Path, int]] = []
        for archive in self._listed("*.zip"):
            with contextlib.suppress(OSError):
                status = archive.stat()
                # When it was put here; without a note nothing else is known.
                aged.append((used.get(archive, status.st_ctime), archive, status.st_size))
                total += status.st_size
        for last, archive, size in sorted(aged):
            unused = now - last
            if archive == keep or unused < IN_USE or (unused < MAX_AGE and total <= MAX_BYTES):
                continue
            with contextlib.suppress(OSError):
                archive.unlink()
                total -= size

    def _listed(self, pattern: str) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from sorted(self._directory.glob(pattern))


def _new_file(directory: Path) -> Path:
    descriptor, name = tempfile.mkstemp(suffix=".new", dir=directory)
    os.close(descriptor)
    return Path(name)


def _seal(digest: str) -> int:
    """A time in 2001 that follows from the content; nothing written today has it by chance."""
    return (1_000_000_000 + int(digest[:6], 16)) * 1_000_000_000


def _is_sealed(path: Path, digest: str, size: int) -> bool:
    status = path.stat()
    return status.st_size == size and status.st_mtime_ns == _seal(digest)


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


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Archive:
    """An archive on this machine.

    ``digest`` is the SHA-256 of the file at ``path``, ``size`` its bytes,
    ``files`` the number of files in it. When nothing can be kept, the file
    lives as long as this object does.
    """

    path: Path
    digest: str
    size: int
    files: int


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
        return _archive(shelf, kept, cache)
    for notice in about(tree, root, environ):
        logging.warning("%s", notice)
    return _archive(shelf, _packed(tree, root, shelf, progress), cache)


def _own_places(environ: Mapping[str, str]) -> list[Path]:
    """Where kinetic itself keeps things: people put that into their project, with its keys."""
    store = environ.get("KINETIC_STORE", "")
    return [configuration.home(environ), *([] if not store or "://" in store else [Path(store)])]


def _archive(shelf: ArchiveCache, kept: Kept, cache: Path) -> Archive:
    archive = Archive(path=kept.path, digest=kept.digest, size=kept.size, files=kept.files)
    if kept.path.parent != cache:
        weakref.finalize(archive, _discard, shelf, kept.path, os.getpid())
    return archive


def _discard(shelf: ArchiveCache, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process ends with a copy of this, not with the file
        shelf.discard(path)


def _packed(
    tree: Tree, root: Path, shelf: ArchiveCache, progress: Callable[[int, int], None] | None
) -> Kept:
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
        return shelf.put(
            draft,
            digest=digest,
            size=size,
            files=written.files,
            fingerprint="" if written.unsteady or written.vanished or fresh else tree.fingerprint,
        )
    except BaseException as exc:
        if draft is not None:
            shelf.discard(draft)
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
