"""The directory a job runs in: a private copy of the project's tree.

An archive is unpacked once on a machine, then every job gets a view of that
tree in which it may write as it likes.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from . import trees

if TYPE_CHECKING:
    import zipfile

    from .wire import Code

__all__ = ["Objects", "Site", "clear", "enter", "held", "lay_out", "prepare"]

CHUNK = 1 << 20
HELD = 4
"""How many small projects a process keeps in memory, for those that it makes workspaces for."""

_held: dict[str, trees.Held | None] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a job may put things.

    ``work`` is its own directory and goes with it, ``cache`` is shared by the
    jobs of this machine; ``mounts`` allows it a private mount namespace.
    ``alone`` says that the whole file system is for this job only, and ``log``
    gives the last lines that it has written, where nobody else keeps them.
    """

    work: str | Path
    cache: str | Path
    mounts: bool
    alone: bool = False
    log: Callable[[], str] | None = None

    def getting(self, library: str) -> str:
        """What to do that *library* is there when the job runs."""
        if self.alone:
            return f"add {library} to the project's dependencies"
        return f"install {library} for {sys.executable}, which runs local jobs"


class Objects(Protocol):
    """What is read here of a store; a missing object is a ``KeyError``."""

    def get(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> tuple[bytes, Mapping[str, str]]: ...

    def path(self, name: str) -> Path | None:
        """The file that holds exactly the content, if there is one."""
        ...

    def fetch(self, name: str, path: Path) -> None:
        """Write the content to a new file."""
        ...


def held(code: Code, site: Site) -> trees.Held | None:
    """The tree of a project that is small and was unpacked before, for `lay_out`."""
    place = _place(code, site)
    if place not in _held:
        tree = trees.find(place)
        if tree is None:
            return None
        while len(_held) >= HELD:
            del _held[next(iter(_held))]
        _held[place] = trees.hold(tree)
        os.utime(place)
    return _held[place]


def lay_out(tree: trees.Held, site: Site) -> None:
    """Make the job's folder, with the workspace in it, for a process that will `enter` it.

    Raises:
        OSError: It cannot be made; nothing of it is left.
    """
    os.mkdir(site.work, 0o700)
    try:
        tree.write(f"{site.work}/workspace")
    except OSError:
        os.rmdir(site.work)
        raise


def clear(tree: trees.Held, site: Site) -> bool:
    """Remove what `lay_out` has made; False if there is more, or less."""
    try:
        tree.remove(f"{site.work}/workspace")
        os.rmdir(site.work)
    except OSError:
        return False
    return True


def prepare(code: Code | None, objects: Objects, site: Site) -> Path:
    """Make the workspace, stand where the caller stood, import from where it did.

    Returns the workspace, which is empty when there is no *code*. Changes
    ``sys.path`` and the working directory of this process.

    Raises:
        RuntimeError: The archive is gone from the store.
        ValueError: It is not the one that was submitted, or not a sound one.
    """
    root = os.path.join(site.work, "workspace")
    if code is None:
        os.mkdir(root, 0o700)
    else:
        place = _place(code, site)
        tree = trees.shared(place, lambda part: _unpack(code, objects, place, part))
        layers = os.path.join(site.work, "layers", "workspace")
        trees.view(tree, root, layers, mounts=site.mounts)
    enter(code, site)
    return Path(root)


def enter(code: Code | None, site: Site) -> None:
    """Stand where the caller stood, and import from where it did, in a workspace that is there."""
    root = f"{site.work}/workspace"
    stand, imports = root, [root]
    if code is not None:
        stand = _under(root, code.cwd or "")
        imports = [_under(root, entry) for entry in code.sys_path]
        if stand != root:
            os.makedirs(stand, exist_ok=True)
    os.chdir(stand)
    for entry in reversed(imports):
        if entry not in sys.path:
            sys.path.insert(0, entry)


def _place(code: Code, site: Site) -> str:
    return os.path.join(site.cache, "code", _hexadecimal(code.digest))


def _unpack(code: Code, objects: Objects, place: str, part: str) -> trees.Weight:
    try:
        archive = objects.path(code.name)
        if archive is None:
            archive = Path(place, "archive")
            archive.unlink(missing_ok=True)
            objects.fetch(code.name, archive)
    except KeyError:
        words = f"the project's archive {code.name} is gone from the store; submit the job again"
        raise RuntimeError(words) from None
    with open(archive, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != code.digest:
            raise ValueError(f"{code.name} is not what was submitted: its SHA-256 differs")
        file.seek(0)
        import zipfile  # it costs milliseconds, and most jobs find the tree unpacked

        with zipfile.ZipFile(file) as members:
            weight = _extract(members, part)
    if archive.parent == Path(place):
        archive.unlink()
    return weight


def _extract(members: zipfile.ZipFile, root: str) -> trees.Weight:
    files = size = 0
    modes: dict[str, int] = {}
    for member in members.infolist():
        target = _under(root, member.filename.removesuffix("/"))
        kind, mode = stat.S_IFMT(member.external_attr >> 16), member.external_attr >> 16 & 0o777
        if member.is_dir():
            os.makedirs(target, mode=0o700, exist_ok=True)
            modes[target] = (mode or 0o755) | 0o700
        elif kind in (0, stat.S_IFREG):
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            size += _extract_file(members, member, target, (mode or 0o644) | 0o400)
            files += 1
        else:
            raise ValueError(f"the archive's {member.filename!r} is no file or directory")
    for folder, mode in modes.items():
        os.chmod(folder, mode)
    return trees.Weight(files, size)


def _extract_file(members: zipfile.ZipFile, member: zipfile.ZipInfo, target: str, mode: int) -> int:
    # Exclusive: nothing that an earlier member made is written through or over.
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file, members.open(member) as content:
        while chunk := content.read(CHUNK):
            file.write(chunk)
        os.fchmod(fd, mode)
        return file.tell()


def _under(root: str, relative: str) -> str:
    """A path in the workspace.

    Raises:
        ValueError: It would not be in there.
    """
    if relative in ("", "."):
        return root
    if "\0" in relative or not {"", ".", ".."}.isdisjoint(relative.split("/")):
        raise ValueError(f"{relative!r} is not a path inside the workspace")
    return f"{root}/{relative}"


def _hexadecimal(digest: str) -> str:
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is no SHA-256")
    return digest
