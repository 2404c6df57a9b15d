"""Make the archive of a project: a zip file that depends only on the project's files.

The same files give the same bytes wherever and whenever they are packed, with the same Python and
zlib. The archive has permissions and empty directories, but neither times nor owners.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from absl import logging

from kinetic import configuration
from kinetic._messages import format_size
from kinetic._packing import ignore
from kinetic._packing.tree import (
    Entry,
    Tree,
    credential_notices,
    format_list,
    omission_notices,
    scan,
    stamp_of,
)
from kinetic._runner.protocol.private import make_folder
from kinetic.errors import PackError

MAX_AGE_S = 14 * 24 * 3600.0
"""How long (seconds) the cache keeps an archive that no submission uses."""

MAX_BYTES = 4 * 1024**3
"""How many bytes the cache keeps; above that, it removes the least recently used archives."""

IN_USE_S = 3600.0
"""How long (seconds) after its last use an archive stays: a process may be uploading it."""

NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors of a file system without space for kinetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An archive on this machine.

    ``digest`` is the SHA-256 of the file at ``path``, ``size`` its bytes, ``files`` the number of
    files in it.
    """

    path: Path
    digest: str
    size: int
    files: int


class ArchiveCache:
    """The archives in *directory*, which is private to the user.

    An archive's file name has the fingerprint of its tree and the fields of `Archive`. A file gets
    this name by a rename when it is complete. Its modification time is the time of its last use.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, fingerprint: str) -> Archive | None:
        """Return the archive of a tree; None if the cache lacks it."""
        for path in self.directory.glob(f"{fingerprint}.*.zip"):
            with contextlib.suppress(OSError, ValueError):
                _, digest, size, files, _ = path.name.split(".")
                if path.stat().st_size != int(size):  # a power cut can truncate a file
                    continue
                with contextlib.suppress(OSError):  # a read-only disk keeps no time of use
                    os.utime(path)
                return Archive(path=path, digest=digest, size=int(size), files=int(files))
        return None

    def make_draft(self) -> Path:
        """Make an empty, private file for an archive.

        If the directory can't be written, the cache moves to a temporary directory.

        Raises:
            OSError: No file can be made anywhere.
        """
        try:
            make_folder(self.directory)
            return _create_file(self.directory)
        except OSError as exc:
            if exc.errno in NO_SPACE_ERRNOS:
                raise
            logging.warning(
                "kinetic can't write to %s (%s), so each process packs the project again.",
                self.directory,
                exc.strerror,
            )
            self.directory = Path(_create_temporary_folder(os.getpid()).name)
            return _create_file(self.directory)

    def put(self, draft: Path, digest: str, files: int, fingerprint: str) -> Archive:
        """Keep *draft* as the archive of a tree, and `prune` the cache.

        Raises:
            OSError: *draft* can't be renamed.
        """
        size = draft.stat().st_size
        path = draft.replace(self.directory / f"{fingerprint}.{digest}.{size}.{files}.zip")
        self.prune(time.time())
        return Archive(path=path, digest=digest, size=size, files=files)

    def prune(self, now: float) -> None:
        """Remove files unused for `MAX_AGE_S`, and the least recently used beyond `MAX_BYTES`."""
        files: list[tuple[float, int, Path]] = []
        for path in self.directory.iterdir():
            with contextlib.suppress(OSError):  # another process removed the file
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = 0
        for last_used, size, path in sorted(files, reverse=True):
            total += size
            if now - last_used > IN_USE_S and (now - last_used > MAX_AGE_S or total > MAX_BYTES):
                with contextlib.suppress(OSError):
                    path.unlink()


def _create_file(directory: Path) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="kinetic-", suffix=".new", dir=directory)
    os.close(descriptor)
    return Path(name)


@functools.cache
def _create_temporary_folder(process: int) -> tempfile.TemporaryDirectory[str]:
    """Make a folder for the archives of *process*; the process removes the folder when it ends."""
    return tempfile.TemporaryDirectory(prefix="kinetic-")


FRESH_NS = 50_000_000
"""A file that changed less than 50 ms ago may change again without a new time stamp."""

BLOCK_BYTES = 1024 * 1024
SAMPLE_BYTES = 16 * 1024
COMPRESSIBLE_RATIO = 0.9
"""Compress a file only if its sample shrinks below this fraction; images and weights don't shrink.
"""

COMPRESSION_LEVEL = 1
PERMISSION_BITS = 0o777  # the archive has no set-id bits
LARGE_BYTES = 1 << 31
"""If a file has this many bytes or more, the archive stores its sizes in 8 bytes each."""


def pack(
    root: Path,
    *,
    exclude: Collection[Path],
    cache: Path,
    environ: Mapping[str, str],
    progress: Callable[[int, int], None] | None = None,
) -> Archive:
    """Archive the project at *root*, or find its archive under *cache* if nothing changed.

    *exclude* has absolute paths to leave out, such as those that `Data` ships. *progress* is
    called in this thread with the bytes packed and the bytes to pack, but not if the cache has
    the archive. An exception of *progress* ends the packing. It mustn't be an `OSError`, because
    `pack` would report that as an error of the disk.

    Raises:
        PackError: The root can't be read, ``.kineticignore`` is invalid, or
            there is no space for the archive.
    """
    tree = scan(root, ignore.read_rules(root, environ), [*exclude, cache, *_own_folders(environ)])
    archives = ArchiveCache(cache)
    if (cached := archives.find(tree.fingerprint)) is not None:
        return cached
    for notice in omission_notices(tree, root, environ):
        logging.warning("%s", notice)
    draft: Path | None = None
    try:
        draft = archives.make_draft()
        # Compare the times before kinetic reads the files: a later change has a later time.
        is_fresh = abs(time.time_ns() - tree.newest_ns) < FRESH_NS
        summary = _write_archive(tree, draft, progress or (lambda done, total: None))
        _log_notices(tree, root, summary)
        with draft.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        # An archive's digest is never the fingerprint of a tree, so the next call packs again.
        fingerprint = digest if is_fresh or summary.uncertain else tree.fingerprint
        return archives.put(draft, digest, summary.files, fingerprint)
    except BaseException as exc:
        if draft is not None:
            draft.unlink(missing_ok=True)
        if isinstance(exc, OSError):
            raise _pack_error(exc, root, draft, tree) from exc
        raise


def _own_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return kinetic's own folders, which must not ship: a project may contain them, with keys."""
    store = environ.get("KINETIC_STORE", "")
    return [configuration.home(environ), *([] if not store or "://" in store else [Path(store)])]


def _pack_error(exc: OSError, root: Path, draft: Path | None, tree: Tree) -> PackError:
    location = "" if draft is None else f" in {draft.parent}"
    if exc.errno in NO_SPACE_ERRNOS:
        return PackError(
            f"No space is left{location} for the archive of {root} ({format_size(tree.size)} "
            "before compression). Free some, point KINETIC_HOME to another disk, or leave files "
            "out with .kineticignore.",
            culprit=str(root),
        )
    return PackError(f"{root} cannot be archived{location}: {exc}", culprit=str(root))


@dataclass(slots=True)
class _PackSummary:
    """The files that an archive has or lacks; if *uncertain*, the next archive may differ."""

    files: int = 0
    private: set[str] = field(default_factory=set[str])
    unreadable: list[str] = field(default_factory=list[str])
    changed: list[str] = field(default_factory=list[str])
    uncertain: bool = False


def _log_notices(tree: Tree, root: Path, summary: _PackSummary) -> None:
    """Warn about files that are left out, have changed, or look like credentials."""
    shipped = [entry.name for entry in tree.entries if entry.name not in summary.private]
    for notice in credential_notices(shipped, sorted({*tree.private, *summary.private}), root):
        logging.warning("%s", notice)
    for prefix, names in (
        (f"Not shipped from {root}:", summary.unreadable),
        (f"Changed in {root} while it was packed, shipped as last read:", summary.changed),
    ):
        if names:
            logging.warning("%s", format_list(prefix, names))


def _write_archive(tree: Tree, path: Path, progress: Callable[[int, int], None]) -> _PackSummary:
    """Write the archive of *tree* to *path*; report the bytes done and in total to *progress*."""
    summary, done, total = _PackSummary(), 0, tree.size
    with zipfile.ZipFile(
        path, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION_LEVEL
    ) as archive:
        for entry in tree.entries:
            if entry.is_directory:
                archive.writestr(_set_permissions(zipfile.ZipInfo(entry.name), entry), b"")
                continue
            try:
                file = open(entry.path, "rb")  # noqa: SIM115 - closed by the next block
            except OSError as exc:
                summary.unreadable.append(f"{entry.name} ({exc.strerror or exc})")
                # If the permission changes, so does the file's ctime, which the scan checks.
                summary.uncertain |= not isinstance(exc, PermissionError)
                continue
            with file:
                first_block = file.read(min(BLOCK_BYTES, entry.stamp.size))
                if not entry.is_included and ignore.has_key(
                    entry.name, first_block[: ignore.HEAD_BYTES]
                ):
                    summary.private.add(entry.name)
                    continue
                for count in _add_file(archive, entry, first_block, file):
                    done += count
                    progress(done, total)
                if stamp_of(os.fstat(file.fileno())) != entry.stamp:
                    summary.changed.append(entry.name)
                    summary.uncertain = True
            summary.files += 1
    return summary


def _add_file(
    archive: zipfile.ZipFile, entry: Entry, first_block: bytes, file: BinaryIO
) -> Iterator[int]:
    """Add *first_block* and the rest of *file*, and yield how many bytes each step added.

    If the file grows meanwhile, read only as many bytes as it had in the scan.
    """
    sample = first_block[:SAMPLE_BYTES]
    is_compressible = len(zlib.compress(sample, COMPRESSION_LEVEL)) < COMPRESSIBLE_RATIO * len(
        sample
    )
    # `zipfile` compresses a file that is added by name, but not a file that is added by `ZipInfo`.
    name_or_info = entry.name if is_compressible else zipfile.ZipInfo(entry.name)
    remaining, block = entry.stamp.size, first_block
    with archive.open(name_or_info, "w", force_zip64=remaining >= LARGE_BYTES) as member:
        while block:
            member.write(block)
            yield len(block)
            remaining -= len(block)
            block = file.read(min(BLOCK_BYTES, remaining))
    _set_permissions(archive.getinfo(entry.name), entry)


def _set_permissions(info: zipfile.ZipInfo, entry: Entry) -> zipfile.ZipInfo:
    """Add the permissions to *info*; `zipfile` writes them with the table of contents."""
    kind = stat.S_IFDIR if entry.is_directory else stat.S_IFREG
    info.external_attr = (kind | entry.stamp.mode & PERMISSION_BITS) << 16
    return info
