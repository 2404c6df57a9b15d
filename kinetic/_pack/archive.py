"""Makes the archive of a project: a zip file that depends on the tree and on nothing else.

The same files give the same bytes wherever and whenever they are packed (with
the same zlib: another implementation of deflate may choose other bytes). Times
and owners are not in it; permissions are, and so are empty directories.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from absl import logging

from kinetic import configuration
from kinetic._pack import deflate, ignore, notices
from kinetic._pack.shelf import FULL, Kept, Shelf
from kinetic._pack.tree import Tree, scan
from kinetic._pack.zipped import ZipWriter
from kinetic.errors import PackError

__all__ = ["Archive", "pack"]

FRESH_NS = 50_000_000
"""A file that changed less than 50 ms ago may change again within one tick of its clock."""

COARSE_NS = 2_000_000_000
"""The same for file systems that keep whole seconds."""


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
    shelf = Shelf(cache)
    if (kept := shelf.find(tree.fingerprint)) is not None:
        return _archive(shelf, kept, cache)
    for notice in notices.about(tree, root, environ):
        logging.warning("%s", notice)
    return _archive(shelf, _packed(tree, root, shelf, progress), cache)


def _own_places(environ: Mapping[str, str]) -> list[Path]:
    """Where kinetic itself keeps things: people put that into their project, with its keys."""
    store = environ.get("KINETIC_STORE", "")
    return [configuration.home(environ), *([] if not store or "://" in store else [Path(store)])]


def _archive(shelf: Shelf, kept: Kept, cache: Path) -> Archive:
    archive = Archive(path=kept.path, digest=kept.digest, size=kept.size, files=kept.files)
    if kept.path.parent != cache:
        weakref.finalize(archive, _discard, shelf, kept.path, os.getpid())
    return archive


def _discard(shelf: Shelf, path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process ends with a copy of this, not with the file
        shelf.discard(path)


def _packed(
    tree: Tree, root: Path, shelf: Shelf, progress: Callable[[int, int], None] | None
) -> Kept:
    draft: Path | None = None
    try:
        draft = shelf.draft()
        # Looked at before the files are read: a later change has a later time.
        tick = FRESH_NS if tree.newest_ns % 1_000_000_000 else COARSE_NS
        fresh = abs(time.time_ns() - tree.newest_ns) < tick
        written = _write(tree, draft, progress)
        if written.refused:
            logging.warning("%s", notices.listed(f"Not shipped from {root}:", written.refused))
        if written.unsteady:
            what = f"Changed in {root} while it was packed, shipped as last read:"
            logging.warning("%s", notices.listed(what, written.unsteady))
        return shelf.put(
            draft,
            digest=written.digest,
            size=written.size,
            files=written.files,
            fingerprint=tree.fingerprint if written.is_steady and not fresh else "",
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
            f"No space is left{where} for the archive of {root} ({notices.amount(tree.size)} "
            "before compression). Free some, point KINETIC_HOME to another disk, or leave files "
            "out with .kineticignore.",
            culprit=str(root),
        )
    return PackError(f"{root} cannot be archived{where}: {exc}", culprit=str(root))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    digest: str
    size: int
    files: int
    refused: tuple[str, ...]
    unsteady: tuple[str, ...]
    is_steady: bool


class _Ended(Exception):
    """The caller's progress callback raised; whatever that was, it is not an error of a disk."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


class _Hashing:
    """A file that takes a digest of what it is given."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=1024 * 1024)
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes, /) -> None:
        self.sha256.update(data)
        self._file.write(data)
        self.size += len(data)

    def close(self) -> None:
        self._file.close()


def _tell(progress: Callable[[int, int], None], done: int, total: int) -> None:
    try:
        progress(done, total)
    except BaseException as exc:
        raise _Ended(exc) from exc


def _write(tree: Tree, path: Path, progress: Callable[[int, int], None] | None) -> _Written:
    total, done, files = tree.size, 0, 0
    refused: list[str] = []
    unsteady: list[str] = []
    vanished = False
    with (
        contextlib.closing(_Hashing(path)) as sink,
        contextlib.closing(deflate.parts(tree.entries)) as parts,
    ):
        writer = ZipWriter(sink)
        for part in parts:
            before = done
            match part:
                case deflate.Whole(entry, data, method, crc, size, steady):
                    mode = entry.stamp.mode
                    writer.file(entry.name, mode, data, method=method, crc=crc, size=size)
                    files += not entry.is_directory
                    done += size
                    unsteady += [] if steady else [entry.name]
                case deflate.Begin(entry, method):
                    size = entry.stamp.size
                    writer.begin(entry.name, entry.stamp.mode, method=method, size=size)
                case deflate.Block(data, size):
                    writer.block(data)
                    done += size
                case deflate.End(entry, crc, size, steady):
                    writer.end(crc=crc, size=size)
                    files += 1
                    unsteady += [] if steady else [entry.name]
                case deflate.Refused(entry, why, steady):
                    refused.append(f"{entry.name} ({why})")
                    vanished |= not steady
            if progress is not None and done != before:
                _tell(progress, done, total)
        writer.close()
    return _Written(
        digest=sink.sha256.hexdigest(),
        size=sink.size,
        files=files,
        refused=tuple(refused),
        unsteady=tuple(unsteady),
        is_steady=not (unsteady or vanished),
    )
