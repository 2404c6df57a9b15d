"""The directory that a job runs in: a private, writable view of the project's tree.

kinetic unpacks a project's archive once per machine. A view is an overlay over the unpacked tree,
or a copy of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from ..protocol.private import make_folder
from . import namespace, processes, spares
from .opening import read_input

if TYPE_CHECKING:
    import zipfile

    from ..protocol.overlay import Change
    from ..protocol.wire import Code
    from ..stores.objects import Objects

ONE_READ_BYTES = 1 << 18
MIB = 1 << 20

_SHA256 = re.compile("[0-9a-f]{64}")  # compiled here, once for all forks


class Weight(NamedTuple):
    """Size of a tree: its number of files, and its bytes."""

    files: int
    size: int

    def exceeds(self, files: int, size: int) -> bool:
        """Return whether the tree has more than *files* files, or more than *size* bytes."""
        return self.files > files or self.size > size


class Tree(NamedTuple):
    """A read-only tree that jobs share."""

    path: str
    weight: Weight


def shared_tree(folder: str, build: Callable[[str], Weight]) -> Tree:
    """Return the tree in *folder*; if there is none, *build* makes it in an empty directory.

    Processes that need the same tree wait for the process that builds it. If the builder is
    killed, the next process builds the tree again. `discard_tree` keeps the tree while this process
    lives.
    """
    while True:
        found = find_tree(folder) or _build_tree(folder, build)
        if found is not None and _hold_tree(folder, found):
            return found


def _build_tree(folder: str, build: Callable[[str], Weight]) -> Tree | None:
    """Build the tree unless another process has built it; return None if *folder* was removed."""
    make_folder(folder)
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # `discard_tree` has removed it
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # While this process waited, `discard_tree` may have removed the folder.
        if not (os.path.isdir(folder) and os.path.samestat(os.fstat(lock), os.stat(folder))):
            return None
        if (found := find_tree(folder)) is not None:
            return found
        part = os.path.join(folder, "part")
        if os.path.isdir(part):  # this process has the lock, so the builder of *part* has died
            _discard(part)
        os.mkdir(part, 0o700)
        try:
            weight = build(part)
        except BaseException:
            _discard(part)  # a failed build must not fill the disk
            raise
        # The rename completes the tree in one step; the new name contains the weight.
        tree = os.path.join(folder, f"tree-{weight.files}-{weight.size}")
        os.rename(part, tree)
        return Tree(tree, weight)
    finally:
        os.close(lock)


_held: dict[str, int] = {}
"""The descriptors of trees that this process has locked."""


def _hold_tree(folder: str, tree: Tree) -> bool:
    """Lock *tree* until this process ends; return False if it no longer exists."""
    try:
        known = _held.get(tree.path)
        # Another process may have removed the tree, and made it anew.
        if known is not None and os.path.samestat(os.fstat(known), os.stat(tree.path)):
            return True
        fd = os.open(tree.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    fcntl.flock(fd, fcntl.LOCK_SH)
    if not os.path.isdir(tree.path):  # removed before the lock
        os.close(fd)
        return False
    _held[tree.path] = fd  # it stays open on purpose: the tree may be mounted
    os.utime(folder)
    return True


def discard_tree(folder: str, unused_since: float) -> bool:
    """Remove the tree in *folder*, unless a process holds it or used it after *unused_since*."""
    with contextlib.ExitStack() as locks:
        try:
            for path in (folder, *(f"{folder}/{name}" for name in os.listdir(folder))):
                if path == folder or os.path.basename(path).startswith("tree-"):
                    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    locks.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(folder).st_mtime >= unused_since:
                return False
            for name in os.listdir(folder):
                if name.startswith("tree-"):
                    _discard(f"{folder}/part")
                    # The rename makes the tree incomplete in one step.
                    os.rename(f"{folder}/{name}", f"{folder}/part")
        except OSError:  # another process uses or removes the tree
            return False
        _discard(folder)
        return True


def find_tree(folder: str) -> Tree | None:
    """Return the tree in the directory *folder*; None if no process has built it."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    for name in names:
        if name.startswith("tree-"):
            files, size = name.split("-")[1:]
            return Tree(f"{folder}/{name}", Weight(int(files), int(size)))
    return None


def make_view(tree: Tree, target: str, layers: str, *, mounts: bool) -> bool:
    """Create the directory *target* as a private, writable view of *tree*.

    *layers* is a directory on the same file system, in which an overlay keeps what the job
    writes. Returns whether the view is a copy.

    Raises:
        RuntimeError: A process has added files to *tree*, or removed or changed some.
    """
    if worth_mounting(tree.weight, mounts=mounts) and _mount_overlay(tree.path, target, layers):
        return False
    if copy(tree.path, target) != tree.weight:
        message = f"{tree.path} was changed; remove it and submit again: kinetic makes it anew"
        raise RuntimeError(message)
    return True


def worth_mounting(weight: Weight, *, mounts: bool) -> bool:
    """Return whether *mounts* are allowed, and an overlay is cheaper than a copy.

    A user other than root needs a user namespace for an overlay, and sudo doesn't work in one. So
    for such users, kinetic copies a tree if the copy takes less than about a second.
    """
    if not mounts or not processes.LINUX or not weight.exceeds(200, 32 * MIB):
        return False
    may_mount = bool(namespace.entered()) or os.geteuid() == 0
    return may_mount or weight.exceeds(20_000, 1024 * MIB)


def _mount_overlay(tree: str, target: str, layers: str) -> bool:
    """Show *tree* at *target* by an overlay; return False if that isn't possible."""
    upper, work = os.path.join(layers, "upper"), os.path.join(layers, "work")
    try:
        namespace.enter()
        for folder in (target, upper, work):
            os.makedirs(folder, mode=0o700)
        namespace.overlay(tree, upper, work, target)
    except OSError:
        # Some file systems can't be a layer, and some kernels refuse overlays.
        _discard(layers)
        if os.path.isdir(target):
            os.rmdir(target)
        return False
    return True


def copy(source: str, target: str) -> Weight:
    """Copy a tree of files and directories to the new *target*.

    The copy has the same permissions, but its owner may also enter and write all directories.
    """
    old_umask = os.umask(0)
    try:
        return Weight(*_copy(source, target, os.stat(source).st_mode))
    finally:
        os.umask(old_umask)


def _copy(source: str, target: str, mode: int) -> tuple[int, int]:
    """Copy *source* to the new folder *target*; return the number of its files and bytes."""
    os.mkdir(target, mode & 0o777 | 0o700)
    files = size = 0
    folders: list[os.DirEntry[str]] = []
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry)
            else:
                size += copy_file(entry.path, f"{target}/{entry.name}")
                files += 1
    for folder in folders:
        mode = folder.stat(follow_symlinks=False).st_mode
        inner = _copy(folder.path, f"{target}/{folder.name}", mode)
        files, size = files + inner[0], size + inner[1]
    return files, size


def copy_file(source: str, target: str, mode: int | None = None) -> int:
    """Copy one file to a new one and return its size in bytes.

    The copy gets the permissions *mode*, or those of *source*, less the umask.
    """
    source_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(source_fd)
        mode = status.st_mode & 0o777 if mode is None else mode
        target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            if status.st_size > ONE_READ_BYTES:
                return _copy_content(source_fd, target_fd)
            content = os.read(source_fd, status.st_size + 1)
            if os.write(target_fd, content) != len(content):  # a full disk takes only a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
            return len(content)
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)


def _copy_content(source_fd: int, target_fd: int) -> int:
    """Copy the content of one file, in the kernel if possible; return the number of bytes."""
    size = 0
    if hasattr(os, "copy_file_range"):  # only Linux has it
        try:
            while count := os.copy_file_range(source_fd, target_fd, 1 << 30):
                size += count
            return size
        except OSError:
            if size:
                raise  # if the first call fails, these file systems may not support it
    with open(source_fd, "rb", closefd=False) as source, open(target_fd, "wb", closefd=False) as to:
        while content := source.read(MIB):
            size += to.write(content)
    return size


def _discard(folder: str) -> None:
    import shutil  # it maps compression libraries, which every fork would inherit

    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Where a job runs: its directories, and what its machine allows.

    ``work`` is the job's own directory, which kinetic removes after the job. The jobs of this
    machine share ``cache``. ``mounts`` allows a private mount namespace. ``exclusive`` says that
    only this job uses the file system, as in a pod. ``log`` returns the last lines of the log; it
    is None if the platform keeps the log. ``reusable`` says that a later job may reuse ``work``
    (see `spares`).
    """

    work: str | Path
    cache: str | Path
    mounts: bool
    exclusive: bool = False
    log: Callable[[], str] | None = None
    reusable: bool = False

    def install_advice(self, library: str) -> str:
        """Return the steps that make *library* available to the job."""
        if self.exclusive:
            return (
                f"add {library} to the dependencies in pyproject.toml or requirements.txt, or to "
                "your own image (container_image=)"
            )
        return (
            f"install {library} for {sys.executable}, which runs local jobs, or pass "
            "capture_env_vars=['PYTHONPATH'] if your program finds it by that variable"
        )


def prepare(code: Code | None, objects: Objects, place: JobPlace) -> None:
    """Make the workspace, and let this process begin in it as the caller's process did.

    Sets the working directory and ``sys.path``; see `make` for the errors.
    """
    folder, root = make(code, objects, place), f"{place.work}/{spares.WORKSPACE}"
    imports = [root] if code is None else [_path_within(root, entry) for entry in code.sys_path]
    os.chdir(folder)
    for entry in reversed(imports):
        if entry not in sys.path:
            sys.path.insert(0, entry)


def make(code: Code | None, objects: Objects, place: JobPlace) -> str:
    """Make the workspace, or restore one that an ended job has left (see `spares`).

    Without *code*, the workspace is empty. Returns the folder in which the job begins.

    Raises:
        RuntimeError: The archive, or its overlay, is no longer in the store.
        ValueError: An archive was changed, or is damaged.
    """
    work = os.fspath(place.work)
    root = f"{work}/{spares.WORKSPACE}"
    if code is None:
        os.mkdir(root, 0o700)
        return root
    folder = _path_within(root, code.cwd or "")
    changed = _read_overlay(code, objects)
    if not place.reusable or not spares.restore(
        work,
        code.digest,
        lambda missing: _copy_missing(code, objects, place, missing),
        replaced={f"/{name}" for name in changed},
    ):
        tree, layers = _project_tree(code, objects, place), f"{work}/layers/workspace"
        copied = make_view(tree, root, layers, mounts=place.mounts)
        if copied and place.reusable:
            spares.write_record(work, code.digest)
    _apply(changed, root)
    if folder != root:
        os.makedirs(folder, exist_ok=True)
    return folder


def fill(code: Code, objects: Objects, place: JobPlace, missing: Iterable[str]) -> None:
    """Copy the files *missing*, paths in the workspace, into it as they were submitted."""
    changed = _read_overlay(code, objects)
    names = {path.removeprefix("/") for path in missing}
    _copy_missing(code, objects, place, [f"/{name}" for name in names - changed.keys()])
    root = f"{place.work}/{spares.WORKSPACE}"
    _apply({name: changed[name] for name in names & changed.keys()}, root)


def _read_overlay(code: Code, objects: Objects) -> Mapping[str, Change | None]:
    """Return what has changed in the project since its archive was made."""
    if code.overlay is None:
        return {}
    try:
        content = read_input(objects, code.overlay)
    except KeyError:
        raise RuntimeError(_no_longer_stored(code.overlay.name)) from None
    from ..protocol import overlay  # most jobs have none

    return overlay.decode(content)


def _apply(changed: Mapping[str, Change | None], root: str) -> None:
    """Make the workspace *root* as the project was when *changed* was read."""
    modes: dict[str, int] = {}
    for name, change in changed.items():
        path = _path_within(root, name.removesuffix("/"))
        if name.endswith("/"):
            if change is None:
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(path)  # its content comes before it, and is removed
            else:
                os.makedirs(path, mode=0o700, exist_ok=True)
                modes[path] = change.mode & 0o777 | 0o700
            continue
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        if change is not None:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with _new_file(path) as file:
                file.write(change.content or b"")
                os.fchmod(file.fileno(), change.mode & 0o777 | 0o400)
    for folder, mode in modes.items():
        os.chmod(folder, mode)


def _project_tree(code: Code, objects: Objects, place: JobPlace) -> Tree:
    if not _SHA256.fullmatch(code.digest):
        raise ValueError(f"{code.digest!r} isn't a SHA-256")
    folder = f"{place.cache}/code/{code.digest}"
    return shared_tree(folder, lambda target: _unpack(code, objects, folder, target))


def _copy_missing(code: Code, objects: Objects, place: JobPlace, missing: Iterable[str]) -> None:
    tree = _project_tree(code, objects, place)
    for path in missing:
        copy_file(tree.path + path, f"{place.work}/{spares.WORKSPACE}{path}")


def _unpack(code: Code, objects: Objects, folder: str, target: str) -> Weight:
    """Fetch the project's archive into *folder*, and unpack it into *target*."""
    archive = Path(folder, "archive")
    archive.unlink(missing_ok=True)
    try:
        objects.fetch(code.name, archive)
    except KeyError:
        raise RuntimeError(_no_longer_stored(code.name)) from None
    with open(archive, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != code.digest:
            raise ValueError(f"{code.name} is not what was submitted: its SHA-256 differs")
        file.seek(0)
        import zipfile  # slow to import, and most jobs find the tree unpacked

        with zipfile.ZipFile(file) as members:
            weight = _extract(members, target)
    archive.unlink()
    return weight


def _no_longer_stored(name: str) -> str:
    return f"the project's archive {name} is no longer in the store; submit the job again"


def _extract(members: zipfile.ZipFile, root: str) -> Weight:
    """Extract files and folders into *root*, with their permissions; return their weight."""
    files = size = 0
    modes: dict[str, int] = {}
    for member in members.infolist():
        target = _path_within(root, member.filename.removesuffix("/"))
        kind, mode = stat.S_IFMT(member.external_attr >> 16), member.external_attr >> 16 & 0o777
        if member.is_dir():
            os.makedirs(target, mode=0o700, exist_ok=True)
            modes[target] = (mode or 0o755) | 0o700
        elif kind in (0, stat.S_IFREG):
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            with _new_file(target) as file, members.open(member) as content:
                while chunk := content.read(MIB):
                    size += file.write(chunk)
                os.fchmod(file.fileno(), (mode or 0o644) | 0o400)
            files += 1
        else:
            raise ValueError(f"the archive's {member.filename!r} isn't a file or directory")
    for folder, mode in modes.items():
        os.chmod(folder, mode)
    return Weight(files, size)


def _new_file(path: str) -> BinaryIO:
    # O_EXCL, because a member must not overwrite an earlier member, or follow its link.
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _path_within(root: str, relative: str) -> str:
    """Return the path of *relative* in the workspace *root*.

    Raises:
        ValueError: The path would lie outside the workspace.
    """
    if relative in ("", "."):
        return root
    if "\0" in relative or not {"", ".", ".."}.isdisjoint(relative.split("/")):
        raise ValueError(f"{relative!r} is not a path inside the workspace")
    return f"{root}/{relative}"
