"""Scan a project: find the files that ship, their order, and one fingerprint for all.

Symbolic links:

- A link to something inside the project ships as a copy of its target.
- A link out of the project doesn't ship; a warning names it. Pass files from elsewhere as `Data`,
  or set a root that contains them.
- A link to a directory that contains the link doesn't ship; a warning names the link.
- The fifth link in a chain of directory links doesn't ship; a warning names that link.
- A broken link doesn't ship; a warning names it.

Empty directories ship. Sockets, pipes, and devices don't.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kinetic import configuration
from kinetic._messages import format_size
from kinetic._packing import discover, ignore
from kinetic.errors import PackError

if TYPE_CHECKING:
    from kinetic._packing import git

FORMAT = b"kinetic tree 2\n"
MAX_LINKS = 4
"""How many links the path to a directory may contain."""

# The entries that an environment in the project's root adds to the project's own files.
_ENVIRONMENT_ENTRIES = frozenset(
    {"bin", "include", "lib64", "Scripts", "Include", "pyvenv.cfg", "conda-meta"}
)


class Stamp(NamedTuple):
    """The attributes that change with a file; ``ctime_ns`` changes even if size and mtime stay."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    mode: int


class Entry(NamedTuple):
    """A file or directory that ships; the name of a directory ends with ``/``.

    *is_included* says that a ``!pattern`` ships this file, even if it contains a key.
    """

    name: str
    path: str
    stamp: Stamp
    is_included: bool = False

    @property
    def is_directory(self) -> bool:
        return self.name.endswith("/")

    @property
    def facts(self) -> str:
        """A text that changes whenever the file does, or what ships of the directory."""
        if self.is_directory:  # not its times: files that don't ship change them too
            return f"{self.stamp.mode:o}"
        return f"{' '.join(map(str, self.stamp))}{' !' * self.is_included}"


CREDENTIAL = "is a credential"
"""The reason of a file that is left out because its name is that of a credential."""


BY_GIT = "git ignores it"
"""How the reason begins if git ignores a file."""


class LeftOut(NamedTuple):
    """A file or directory that doesn't ship, and why; a notable one may surprise the user."""

    name: str
    reason: str
    is_notable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The files and directories that ship, ordered by the bytes of their names, parents first.

    ``left_out`` has the other files and directories, by name.
    """

    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def omitted(self) -> tuple[str, ...]:
        """A phrase about each entry that the job may need although it was left out."""
        return tuple(f"{out.name} {out.reason}" for out in self.left_out if out.is_notable)

    @property
    def private(self) -> tuple[str, ...]:
        """The names of credentials that were left out."""
        return tuple(out.name for out in self.left_out if out.reason == CREDENTIAL)

    @property
    def size(self) -> int:
        """The size of all files, in bytes."""
        return sum(entry.stamp.size for entry in self.entries if not entry.is_directory)

    @property
    def fingerprint(self) -> str:
        """A hash of all names and stamps; it changes whenever a file does."""
        digest = hashlib.sha256(FORMAT)
        for entry in self.entries:
            digest.update(f"{entry.name}\0{entry.facts}\n".encode())
        return digest.hexdigest()


def stamp_of(status: os.stat_result) -> Stamp:
    """Return the stamp in a stat result."""
    return Stamp(
        status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_mode
    )


def scan(
    root: Path,
    rules: ignore.Rules,
    exclude: Collection[Path] = (),
    check: Callable[[], object] = object,
) -> Tree:
    """Scan *root*, without what *rules* and *exclude* (absolute paths) leave out.

    An excluded path that contains the root is ignored, because the code must ship. *check* is
    called before each directory; an exception of it ends the scan.

    Raises:
        PackError: The root isn't a directory, or can't be read.
    """
    return _Scan(os.path.realpath(root), rules, exclude).run(check)


class _Directory(NamedTuple):
    """A directory to scan.

    ``ancestors`` has the device and inode of the directory and of its parents; ``links`` counts the
    links in its path. ``folder`` has git's rules for it; None if they don't count.
    """

    name: str
    path: str
    stamp: Stamp
    ancestors: frozenset[tuple[int, int]]
    links: int
    folder: git.Folder | None


class _Scan:
    def __init__(self, root: str, rules: ignore.Rules, exclude: Collection[Path]) -> None:
        self._root = root
        self._rules = rules
        excluded = {os.path.realpath(path) for path in exclude}
        self._excluded = {path for path in excluded if not discover.is_within(root, path)}
        self._entries: list[Entry] = []
        self._left_out: list[LeftOut] = []
        self._ignored: set[str] = set()

    def run(self, check: Callable[[], object]) -> Tree:
        status = self._status_of_root()
        identity = frozenset({(status.st_dev, status.st_ino)})
        # Use a stack, because a tree may be deeper than Python's limit of recursion.
        stack: list[Entry | _Directory] = [
            _Directory("", self._root, stamp_of(status), identity, 0, self._rules.git)
        ]
        while stack:
            match stack.pop():
                case Entry() as entry:
                    self._entries.append(entry)
                case _Directory() as directory:
                    check()
                    stack.extend(reversed(self._scan_directory(directory)))
        return Tree(entries=tuple(self._shipped()), left_out=tuple(sorted(self._left_out)))

    def _shipped(self) -> list[Entry]:
        """Return the entries without the ignored directories in which nothing ships."""
        kept: list[Entry] = []
        needed: set[str] = set()
        for entry in reversed(self._entries):  # the content of a directory comes before it
            if entry.name not in self._ignored or entry.name in needed:
                kept.append(entry)
                needed.add(f"{entry.name.rstrip('/').rpartition('/')[0]}/")
        return kept[::-1]

    def _status_of_root(self) -> os.stat_result:
        try:
            status = os.stat(self._root)
            os.scandir(self._root).close()
        except OSError as exc:
            raise PackError(
                f"The project {self._root} cannot be read: {exc.strerror}", culprit=self._root
            ) from exc
        return status

    def _scan_directory(self, directory: _Directory) -> list[Entry | _Directory]:
        """Add *directory* to the entries, and return those of its children that ship."""
        try:
            with os.scandir(directory.path) as listing:
                entries = list(listing)
        except OSError as exc:
            self._leave_out(directory.name, f"cannot be read ({exc.strerror})", is_notable=True)
            entries = []
        names = {entry.name for entry in entries}
        if not names.isdisjoint(discover.ENVIRONMENT_MARKERS):
            if directory.name:
                self._leave_out(directory.name, "is a virtual environment")
                return []
            entries = _without_environment(entries)
        # An earlier run may have made a home that KINETIC_HOME doesn't name now, with its key.
        if directory.name and "key" in names and os.path.isdir(f"{directory.path}/local/v1"):
            self._leave_out(directory.name, "is a KINETIC_HOME")
            return []
        if directory.folder is not None:
            directory = directory._replace(folder=directory.folder.opened(directory.path, names))
        if directory.name:
            self._entries.append(Entry(directory.name, directory.path, directory.stamp))
        children = [
            child for entry in entries if (child := self._scan_entry(directory, entry)) is not None
        ]
        children.sort(key=lambda child: os.fsencode(child.name))
        return children

    def _scan_entry(self, parent: _Directory, entry: os.DirEntry[str]) -> Entry | _Directory | None:
        """Return a file that ships, or a directory to scan; None if *entry* doesn't ship."""
        name, relative = entry.name, parent.name + entry.name
        path, is_link = entry.path, False
        if name in ignore.NEVER_SHIPPED:
            self._leave_out(relative, "never ships")
            return None
        if not self._is_nameable(relative):
            return None
        status: os.stat_result | OSError
        try:
            if is_link := entry.is_symlink():
                path = os.path.realpath(path)
            status = entry.stat()
        except OSError as exc:
            status = exc  # a rule may leave it out without a notice
        is_directory = isinstance(status, os.stat_result) and stat.S_ISDIR(status.st_mode)
        folder = parent.folder
        is_plain_directory = is_directory and not is_link  # for git, a link to one is a file
        excluded, reason = self._rules.verdict(relative, name, is_directory=is_directory)
        is_ignored = False
        if excluded is None and folder is not None:
            line = folder.why_ignored(name, is_directory=is_plain_directory)
            is_ignored = line is not None
            # Something in an ignored directory may ship.
            may_ship = is_plain_directory and (folder.has_tracked(name) or self._rules.includes)
            if is_ignored and not may_ship:
                excluded, reason = True, f"{BY_GIT} ({line})"
        shown_name = f"{relative}/" if is_directory else relative
        if excluded:
            self._leave_out(shown_name, reason)
            return None
        if isinstance(status, OSError):
            if is_link:
                reason = f"is a link to {path} ({status.strerror})"
                self._leave_out(relative, reason, is_notable=True)
            elif not isinstance(status, FileNotFoundError):  # deleted meanwhile
                self._leave_out(relative, f"cannot be read ({status.strerror})", is_notable=True)
            return None
        if is_link and not self._may_follow(parent, relative, path, status):
            return None
        if path in self._excluded:
            self._leave_out(shown_name, "ships as Data, or belongs to kinetic")
            return None
        if excluded is None and ignore.is_private(name):
            self._leave_out(shown_name, CREDENTIAL)
            return None
        if is_directory:
            ancestors = parent.ancestors | {(status.st_dev, status.st_ino)}
            links = parent.links + is_link
            if folder is not None:
                folder = folder.child(name, is_ignored=is_ignored)
            if is_ignored:
                self._ignored.add(shown_name)
            return _Directory(shown_name, path, stamp_of(status), ancestors, links, folder)
        if not stat.S_ISREG(status.st_mode):
            self._leave_out(relative, "is neither a file nor a directory", is_notable=True)
            return None
        return Entry(relative, path, stamp_of(status), excluded is False)

    def _leave_out(self, name: str, reason: str, *, is_notable: bool = False) -> None:
        self._left_out.append(LeftOut(name, reason, is_notable))

    def _is_nameable(self, relative: str) -> bool:
        """Return whether the name is valid UTF-8; note an entry whose name isn't."""
        try:
            relative.encode()
        except UnicodeEncodeError:
            name = repr(os.fsencode(relative))
            self._leave_out(name, "has a name that is not UTF-8", is_notable=True)
            return False
        return True

    def _may_follow(
        self, parent: _Directory, relative: str, target: str, status: os.stat_result
    ) -> bool:
        """Return whether the link *relative* may ship as its *target*; note why it may not."""
        is_directory = stat.S_ISDIR(status.st_mode)
        is_notable = True
        if not discover.is_within(target, self._root):
            reason = f"is a link out of the project, to {target}"
        elif self._is_excluded_target(target, is_directory):
            # The target itself is excluded, so the link needs no notice.
            reason, is_notable = f"is a link to {target}, which doesn't ship", False
        elif self._is_private_target(target, is_directory):
            reason, is_notable = CREDENTIAL, False
        elif is_directory and (status.st_dev, status.st_ino) in parent.ancestors:
            reason = f"is a link that leads back to {target}"
        elif is_directory and parent.links >= MAX_LINKS:
            reason = f"is a link to {target} inside {MAX_LINKS} linked folders"
        else:
            return True
        self._leave_out(relative, reason, is_notable=is_notable)
        return False

    def _is_excluded_target(self, target: str, is_directory: bool) -> bool:
        """Return whether the target of a link may not ship under any name."""
        parts = os.path.relpath(target, self._root).split(os.sep)
        directory = target if is_directory else os.path.dirname(target)
        return (
            not ignore.NEVER_SHIPPED.isdisjoint(parts)
            or any(discover.is_within(target, path) for path in self._excluded)
            or discover.is_in_environment(directory, self._root)
        )

    def _is_private_target(self, target: str, is_directory: bool) -> bool:
        """Return whether a link leads to a credential that no rule includes by name."""
        parts = os.path.relpath(target, self._root).split(os.sep)
        if not any(map(ignore.is_private, parts)):
            return False
        verdict = self._rules.verdict("/".join(parts), parts[-1], is_directory=is_directory)
        return verdict[0] is not False


def _without_environment(entries: Iterable[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    """Return the entries of a root that don't belong to the virtual environment in it."""
    kept: list[os.DirEntry[str]] = []
    for entry in entries:
        if entry.name in _ENVIRONMENT_ENTRIES:
            continue
        if entry.name in ("lib", "Lib") and _has_packages(entry.path):
            continue
        kept.append(entry)
    return kept


def _has_packages(library: str) -> bool:
    """Return whether a ``lib`` belongs to an environment, and not to the project."""
    names = os.listdir(library) if os.path.isdir(library) else []
    return "site-packages" in names or any(
        os.path.isdir(os.path.join(library, name, "site-packages")) for name in names
    )


SIZE_VARIABLE = "KINETIC_CONTEXT_SIZE_WARN_MB"
MEGABYTE = 1_000_000


def size_notices(tree: Tree, root: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a notice about a large project.

    Raises:
        ConfigurationError: `KINETIC_CONTEXT_SIZE_WARN_MB` is not a number.
    """
    limit = configuration.number(SIZE_VARIABLE, 100.0, environ)
    if tree.size > limit * MEGABYTE:
        files = [entry for entry in tree.entries if not entry.is_directory]
        largest = sorted(files, key=lambda entry: entry.stamp.size, reverse=True)[:5]
        descriptions = [f"{entry.name} ({format_size(entry.stamp.size)})" for entry in largest]
        yield (
            f"The project {root} has {format_size(tree.size)}, more than "
            f"{SIZE_VARIABLE}={limit:g}. Largest: {', '.join(descriptions)}. Leave out "
            "with .kineticignore what the job does not need, or pass it as Data."
        )


def credential_notices(
    lookalikes: Sequence[str], private: Sequence[str], root: Path
) -> Iterator[str]:
    """Yield notices about credentials: *private*, left out, and *lookalikes*, which ship."""
    if private:
        yield (
            format_list(f"Not shipped from {root}, because they are credentials:", private)
            + " To ship one, add its name with a ! before it to .kineticignore. Add its name "
            "without the ! to silence this warning."
        )
    if lookalikes:
        prefix = f"These files of {root} look like secrets and are shipped with the code:"
        yield format_list(prefix, lookalikes) + " List them in .kineticignore to keep them here."


def format_list(prefix: str, items: Sequence[str]) -> str:
    """Return a sentence that begins with *prefix* and lists the first ten *items*."""
    more = f" and {len(items) - 10} more" if len(items) > 10 else ""
    return f"{prefix} {', '.join(items[:10])}{more}."
