"""Make the archive of a project: a zip file that depends only on the project's files.

The same files give the same bytes wherever and whenever they are packed, with the same Python and
zlib. The archive has permissions and empty directories, but neither times nor owners.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import stat
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from absl import logging

from kinetic import configuration
from kinetic._messages import format_size
from kinetic._packing import discover, ignore
from kinetic._packing.tree import (
    BY_GIT,
    CREDENTIAL,
    MEGABYTE,
    Entry,
    LeftOut,
    Tree,
    credential_notices,
    format_list,
    scan,
    size_notices,
    stamp_of,
)
from kinetic._runner.protocol.private import make_folder
from kinetic._runner.protocol.spool import NO_SPACE_ERRNOS, Spooled
from kinetic.errors import PackError, StoreFull

if TYPE_CHECKING:
    from kinetic._runner.protocol.overlay import Change


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
        """Keep *draft* as the archive of a tree.

        Raises:
            OSError: *draft* can't be renamed.
        """
        size = draft.stat().st_size
        path = draft.replace(self.directory / f"{fingerprint}.{digest}.{size}.{files}.zip")
        return Archive(path=path, digest=digest, size=size, files=files)


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


SMALL_BYTES = 1024 * 1024
"""A changed file of at most this size ships again with the next call; see `Packer`."""

MAX_CHANGED_BYTES = 64 * 1024 * 1024
"""Pack again if more bytes than this changed, or were shipped as overlays beyond the archive."""

IGNORED_BYTES = 50 * MEGABYTE
"""If git ignores more than this of what ships, a warning names the setting ``ship``."""

MAX_BASES = 8
"""How many archives a `Packer` keeps for projects, or for other `Data` in the same project."""


class Packed(NamedTuple):
    """What ships for one call: an archive, and the overlay of later changes (None: no change)."""

    archive: Archive
    overlay: Spooled | None


class Packer:
    """Pack the projects of one client: everything at the first call, later only what changed.

    An overlay has the new and changed files of at most `SMALL_BYTES`, and the names of removed
    files. A warning names each larger file that changed, once. Larger files ship again if a file
    of the archive with code changes as well.

    Any thread may call `pack`; another call waits meanwhile. An archive stays in the cache while
    the packer uses it.
    """

    def __init__(self) -> None:
        self._bases: dict[tuple[str, frozenset[Path]], _Base] = {}
        self._lock = threading.Lock()
        self._notified: set[tuple[str, str]] = set()

    def close(self) -> None:
        """Forget the archives, so that the cache may remove them."""
        while self._bases:
            self._bases.popitem()[1].close()

    def pack(
        self,
        root: Path,
        *,
        exclude: Collection[Path],
        cache: Path,
        environ: Mapping[str, str],
        progress: Callable[[int, int], None] | None = None,
    ) -> Packed:
        """Return the archive of the project at *root*, and the overlay of what changed since.

        *exclude* has absolute paths to leave out, such as those that `Data` ships. *progress* is
        called in this thread with the bytes packed and the bytes to pack, or with zeros for each
        directory before the bytes are known. An exception of *progress* ends the packing. It
        mustn't be an `OSError`, because `pack` would report that as an error of the disk.

        Raises:
            PackError: The root can't be read, ``.kineticignore`` is invalid, or
                there is no space for the archive.
        """
        report: Callable[[int, int], None] = progress or (lambda done, total: None)
        with self._lock:
            excluded = [*exclude, cache, *_own_folders(environ)]
            rules = ignore.read_rules(root, environ)
            tree = scan(root, rules, excluded, lambda: report(0, 0))
            # `Data` elsewhere doesn't change what the project ships.
            key = str(root), frozenset(path for path in exclude if path.is_relative_to(root))
            base = self._bases.get(key)
            if base is not None and base.renew():
                difference = base.difference(tree)
                if not difference.needs_base(base):
                    return Packed(base.archive, self._pack_overlay(base, difference, root))
            if base is not None:
                self._bases.pop(key).close()
            self._notify_of_git(tree, root, excluded, environ)
            base = self._pack_all(tree, root, ArchiveCache(cache), environ, report)
            self._bases[key] = base
            if len(self._bases) > MAX_BASES:
                self._bases.pop(next(iter(self._bases))).close()
            return Packed(base.archive, None)

    def _pack_all(
        self,
        tree: Tree,
        root: Path,
        archives: ArchiveCache,
        environ: Mapping[str, str],
        progress: Callable[[int, int], None],
    ) -> _Base:
        """Archive *tree*, or find its archive in the cache."""
        if (cached := archives.find(tree.fingerprint)) is not None:
            # A warning has named these when the archive was made.
            self._unnotified("private", tree.private)
            self._unnotified(_omission(root), tree.omitted)
            return _Base(cached, tree, ())
        for notice in size_notices(tree, root, environ):
            logging.warning("%s", notice)
        draft: Path | None = None
        try:
            draft = archives.make_draft()
            # Compare the times before kinetic reads the files: a later change has a later time.
            now = time.time_ns()
            fresh = [entry.name for entry in tree.entries if _is_fresh(entry, now)]
            summary = _write_archive(tree, draft, progress)
            self._notify(tree, root, summary)
            with draft.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            # An archive's digest is never the fingerprint of a tree, so the next call packs again.
            fingerprint = digest if fresh or summary.uncertain else tree.fingerprint
            archive = archives.put(draft, digest, summary.files, fingerprint)
            base = _Base(archive, tree, {*fresh, *summary.uncertain})
            if len(os.listdir(archives.directory)) > 1:
                from kinetic import _collector  # the first call of a user needs no import of it

                _collector.prune_archives(archives.directory, _collector.Limits.of(environ))
            return base
        except BaseException as exc:
            if draft is not None:
                draft.unlink(missing_ok=True)
            if isinstance(exc, OSError):
                raise _pack_error(exc, root, draft, tree) from exc
            raise

    def _pack_overlay(self, base: _Base, difference: _Difference, root: Path) -> Spooled | None:
        """Return the overlay of what changed since *base*; None if nothing has."""
        sizes = {entry.name: format_size(entry.stamp.size) for entry in difference.large}
        if large := self._unnotified("large", sizes):
            described = [f"{name} ({sizes[name]})" for name in large]
            prefix = f"Too large to ship at each call, and changed or new in {root}:"
            logging.warning(
                "%s Jobs get them as they were at this client's first call, and don't get new "
                "ones. They ship if code changes, or with a new client. Pass such a file as Data "
                "instead, or list it in .kineticignore.",
                format_list(prefix, described),
            )
        tree = replace(difference.tree, entries=difference.small)
        if not (difference.small or difference.removed):
            self._notify(tree, root, _PackSummary())
            return None
        fingerprint = f"{tree.fingerprint} {difference.removed}"
        if base.overlay is not None and base.overlay[0] == fingerprint:
            return base.overlay[1]
        from kinetic._runner.protocol import overlay  # a first call has none

        now, summary = time.time_ns(), _PackSummary()
        content = overlay.encode({**difference.removed, **_read_changed(tree, summary)})
        self._notify(tree, root, summary)
        packed = Spooled(content, hashlib.sha256(content).hexdigest(), len(content))
        base.shipped += packed.size
        is_fresh = any(_is_fresh(entry, now) for entry in tree.entries)
        base.overlay = None if is_fresh or summary.uncertain else (fingerprint, packed)
        return packed

    def _notify_of_git(
        self, tree: Tree, root: Path, excluded: Collection[Path], environ: Mapping[str, str]
    ) -> None:
        """Warn once if git ignores much of what ships, or a module that this process imported."""
        ship, origin = configuration.ship(root, environ)
        if ship == "git":
            modules = self._unnotified("modules", _ignored_modules(tree, root))
            if modules:
                prefix = f"git ignores these modules of {root}, so jobs can't import them:"
                logging.warning(
                    "%s To ship one, add its name with a ! before it to .kineticignore.",
                    format_list(prefix, modules),
                )
        elif not origin and tree.size > IGNORED_BYTES and self._unnotified("ship", [str(root)]):
            rules = ignore.read_rules(root, {**environ, "KINETIC_SHIP": "git"})
            ignored = tree.size - scan(root, rules, excluded).size
            if ignored > IGNORED_BYTES:
                logging.warning(
                    'git ignores %s of what ships from %s. To leave it out, write ship = "git" to '
                    "[tool.kinetic] in pyproject.toml, or set KINETIC_SHIP=git; all silences this "
                    "warning. `kinetic package` lists what ships.",
                    format_size(ignored),
                    root,
                )

    def _notify(self, tree: Tree, root: Path, summary: _PackSummary) -> None:
        """Warn once about each file that is left out, has changed, or looks like a credential."""
        private = self._unnotified("private", sorted({*tree.private, *summary.private}))
        shipped = [entry.name for entry in tree.entries if entry.name not in summary.private]
        lookalikes = [name for name in shipped if ignore.looks_private(name.rpartition("/")[2])]
        for notice in credential_notices(self._unnotified("shipped", lookalikes), private, root):
            logging.warning("%s", notice)
        for prefix, names in (
            (_omission(root), [*tree.omitted, *summary.unreadable]),
            (f"Changed in {root} while it was packed, shipped as last read:", summary.changed),
        ):
            if unnotified := self._unnotified(prefix, names):
                logging.warning("%s", format_list(prefix, unnotified))

    def _unnotified(self, topic: str, names: Iterable[str]) -> list[str]:
        """Return the *names* that no earlier call with this *topic* has returned."""
        found = [name for name in names if (topic, name) not in self._notified]
        self._notified.update((topic, name) for name in found)
        return found


def _omission(root: Path) -> str:
    return f"Not shipped from {root}:"


def pack(
    root: Path,
    *,
    exclude: Collection[Path],
    cache: Path,
    environ: Mapping[str, str],
    progress: Callable[[int, int], None] | None = None,
) -> Archive:
    """Archive the whole project at *root*; see `Packer.pack`."""
    with contextlib.closing(Packer()) as packer:
        return packer.pack(
            root, exclude=exclude, cache=cache, environ=environ, progress=progress
        ).archive


def list_project(root: Path, environ: Mapping[str, str]) -> Tree:
    """Return what of the project at *root* ships without `Data`, and what doesn't.

    Raises:
        PackError: The root can't be read, or a file of rules is invalid.
    """
    tree = scan(root, ignore.read_rules(root, environ), _own_folders(environ))
    private: set[str] = set()
    for entry in tree.entries:
        if ignore.may_have_key(entry.name) and not entry.is_included:
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                if ignore.has_key(entry.name, file.read(ignore.HEAD_BYTES)):
                    private.add(entry.name)
    left_out = [*tree.left_out, *(LeftOut(name, CREDENTIAL) for name in private)]
    entries = [entry for entry in tree.entries if entry.name not in private]
    return Tree(entries=tuple(entries), left_out=tuple(sorted(left_out)))


def _ignored_modules(tree: Tree, root: Path) -> list[str]:
    """Return the files of imported modules in the project that git ignores."""
    ignored = [out.name for out in tree.left_out if out.reason.startswith(BY_GIT)]
    folders = tuple(name for name in ignored if name.endswith("/"))
    found: set[str] = set()
    base = os.path.realpath(root)
    for module in [*sys.modules.values()]:
        # The attribute may be missing, and looking for it may import a lazy module.
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and not discover.is_installed(file, base):
            path = discover.resolve_directory(file)
            name = os.path.relpath(path, base) if discover.is_within(path, base) else ""
            if name in ignored or (name and name.startswith(folders)):
                found.add(name)
    return sorted(found)


class _Base:
    """An archive, what it was made of, and the overlays that were shipped for it.

    ``known`` has the facts by name of what is in the archive; None for a file that may have changed
    since without another stamp. ``large`` has the names of its larger files. ``shipped`` counts the
    bytes of overlays. ``overlay`` is the latest one, with the fingerprint of its source.
    """

    def __init__(self, archive: Archive, tree: Tree, uncertain: Collection[str]) -> None:
        self.archive = archive
        self.known: dict[str, object] = {entry.name: entry.facts for entry in tree.entries}
        self.known.update(dict.fromkeys(uncertain))
        self.large = {entry.name for entry in tree.entries if entry.stamp.size > SMALL_BYTES}
        self._contents: dict[str, tuple[int, int, int]] = {}
        self.shipped = 0
        self.overlay: tuple[str, Spooled] | None = None
        self._lock = -1
        with contextlib.suppress(OSError):  # removed already, or a file system without locks
            self._lock = os.open(archive.path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # see `_collector.prune_archives`

    def close(self) -> None:
        """Let the cache remove the archive."""
        if self._lock >= 0:
            os.close(self._lock)

    def renew(self) -> bool:
        """Return whether the archive is still there, and renew the time of its last use."""
        with contextlib.suppress(OSError):  # a read-only disk keeps no time of use
            os.utime(self.archive.path)
        try:
            return self.archive.path.stat().st_size == self.archive.size
        except OSError:
            return False

    def difference(self, tree: Tree) -> _Difference:
        """Compare the archive with *tree*."""
        small: list[Entry] = []
        large: list[Entry] = []
        for entry in tree.entries:
            if self.known.get(entry.name) == entry.facts or self._has_content_of(entry):
                continue
            is_small = entry.is_directory or entry.stamp.size <= SMALL_BYTES
            (small if is_small else large).append(entry)
        removed = self.known.keys() - {entry.name for entry in tree.entries}
        # What is in a folder has a larger name than the folder, so it is removed first.
        return _Difference(
            tree, tuple(small), tuple(large), dict.fromkeys(sorted(removed, reverse=True))
        )

    def _has_content_of(self, entry: Entry) -> bool:
        """Return whether the archive has the same as *entry*, a file that has another stamp."""
        if entry.name not in self.known or entry.is_directory:
            return False
        with contextlib.suppress(OSError):
            if not self._contents:
                with zipfile.ZipFile(self.archive.path) as archive:
                    self._contents = {
                        info.filename: (info.file_size, info.external_attr >> 16, info.CRC)
                        for info in archive.infolist()
                    }
            size, mode, checksum = self._contents.get(entry.name, (-1, 0, 0))
            if size != entry.stamp.size or (mode ^ entry.stamp.mode) & PERMISSION_BITS:
                return False
            is_fresh, found = _is_fresh(entry, time.time_ns()), 0
            with open(entry.path, "rb") as file:
                while block := file.read(BLOCK_BYTES):
                    found = zlib.crc32(block, found)
            if found == checksum:
                if not is_fresh:
                    self.known[entry.name] = entry.facts
                return True
        return False


class _Difference(NamedTuple):
    """How a tree differs from an archive: *small* ships as an overlay, *large* doesn't.

    ``removed`` has the names that the tree lacks, in the order of their removal.
    """

    tree: Tree
    small: tuple[Entry, ...]
    large: tuple[Entry, ...]
    removed: dict[str, None]

    def needs_base(self, base: _Base) -> bool:
        """Return whether another archive is needed, because the overlay would be stale or large."""
        changed = [*(entry.name for entry in (*self.small, *self.large)), *self.removed]
        size = sum(entry.stamp.size for entry in self.small) + sum(map(len, changed))
        if size > MAX_CHANGED_BYTES or base.shipped > base.archive.size + MAX_CHANGED_BYTES:
            return True
        if not base.large.isdisjoint(self.removed):
            return True  # each job would still unpack it, and perhaps fill its disk
        # A new file with code doesn't count: tools keep copies of the code beside their results.
        return bool(self.large) and any(
            name in base.known and name.endswith(_CODE) for name in changed
        )


_CODE = (*all_suffixes(), ignore.IGNORE_FILE)
"""How the names of files with code end, and of files that decide what ships."""


def _is_fresh(entry: Entry, now: int) -> bool:
    """Return whether a file may change again without another stamp; *now* is in nanoseconds."""
    return not entry.is_directory and abs(now - entry.stamp.ctime_ns) < FRESH_NS


def _read_changed(tree: Tree, summary: _PackSummary) -> dict[str, Change | None]:
    """Read the entries of *tree*, which are small; None stands for one that must not ship."""
    from kinetic._runner.protocol.overlay import Change

    found: dict[str, Change | None] = {}
    for entry in tree.entries:
        content: bytes | None = None
        if not entry.is_directory:
            try:
                with open(entry.path, "rb") as file:
                    content = file.read(entry.stamp.size)
                    summary.note_change(entry, file)
            except OSError as exc:
                summary.note_unreadable(entry, exc)
                found[entry.name] = None
                continue
            if not entry.is_included and ignore.has_key(entry.name, content[: ignore.HEAD_BYTES]):
                summary.private.add(entry.name)
                found[entry.name] = None
                continue
        found[entry.name] = Change(entry.stamp.mode & PERMISSION_BITS, content)
    return found


def _own_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return kinetic's own folders, which must not ship: a project may contain them, with keys."""
    store = environ.get("KINETIC_STORE", "")
    stores = [] if not store or "://" in store else [Path(store).expanduser()]
    return [configuration.home(environ), *stores]


def _pack_error(exc: OSError, root: Path, draft: Path | None, tree: Tree) -> PackError:
    location = "" if draft is None else f" in {draft.parent}"
    if exc.errno in NO_SPACE_ERRNOS:
        error = PackError(
            f"No space is left{location} for the archive of {root} ({format_size(tree.size)} "
            "before compression). Free some, point KINETIC_HOME to another disk, or leave files "
            "out with .kineticignore.",
            culprit=str(root),
        )
        error.code = StoreFull.code
        return error
    return PackError(f"{root} cannot be archived{location}: {exc}", culprit=str(root))


@dataclass(slots=True)
class _PackSummary:
    """The files that an archive has or lacks; the next archive may differ in *uncertain* ones."""

    files: int = 0
    private: set[str] = field(default_factory=set[str])
    unreadable: list[str] = field(default_factory=list[str])
    changed: list[str] = field(default_factory=list[str])
    uncertain: list[str] = field(default_factory=list[str])

    def note_unreadable(self, entry: Entry, error: OSError) -> None:
        """Note that *entry* can't be opened; a file that was deleted meanwhile needs no notice."""
        if not isinstance(error, FileNotFoundError):
            self.unreadable.append(f"{entry.name} ({error.strerror or error})")
        # If the permission changes, so does the file's ctime, which the scan checks.
        if not isinstance(error, PermissionError):
            self.uncertain.append(entry.name)

    def note_change(self, entry: Entry, file: BinaryIO) -> None:
        """Note whether *file* has changed since the scan found it as *entry*."""
        if stamp_of(os.fstat(file.fileno())) != entry.stamp:
            self.changed.append(entry.name)
            self.uncertain.append(entry.name)


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
                summary.note_unreadable(entry, exc)
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
                summary.note_change(entry, file)
            summary.files += 1
    return summary


def _add_file(
    archive: zipfile.ZipFile, entry: Entry, first_block: bytes, file: BinaryIO
) -> Iterator[int]:
    """Add *first_block* and the rest of *file*, and yield how many bytes each step added."""
    sample = first_block[:SAMPLE_BYTES]
    is_compressible = len(zlib.compress(sample, COMPRESSION_LEVEL)) < COMPRESSIBLE_RATIO * len(
        sample
    )
    # `zipfile` compresses a file that is added by name, but not a file that is added by `ZipInfo`.
    name_or_info = entry.name if is_compressible else zipfile.ZipInfo(entry.name)
    # The file may grow meanwhile, but the archive keeps the size that the scan has found.
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
