"""Copies of directory trees, and trees that many jobs share.

A shared tree is made once, whole or not at all, by one of any number of
processes. A job never gets the tree itself: it gets a copy, or a private
overlay whose upper layer takes everything that it writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass

from . import namespace
from .private import make_folder

__all__ = [
    "Held",
    "Shared",
    "Weight",
    "copy",
    "copy_file",
    "discard",
    "find",
    "hold",
    "shared",
    "view",
    "worth_mounting",
]

READ_AT_ONCE = 1 << 18
MIB = 1 << 20
HELD_FILES, HELD_BYTES = 64, 256 * 1024
NOT_HERE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


@dataclass(frozen=True, slots=True)
class Weight:
    """How much a tree holds; *size* in bytes."""

    files: int
    size: int


@dataclass(frozen=True, slots=True)
class Shared:
    """A tree that nobody may write to."""

    path: str
    weight: Weight


def shared(place: str, build: Callable[[str], Weight]) -> Shared:
    """The tree of *place*, made by *build* in an empty directory if it is not there.

    Processes that want the same tree wait for one that makes it; when that one
    is killed, the next begins anew. Nobody can `discard` it as long as this
    process lives.
    """
    while True:
        found = find(place) or _made(place, build)
        if found is not None and _kept(place, found):
            return found


def _made(place: str, build: Callable[[str], Weight]) -> Shared | None:
    """Make the tree, unless somebody else has; None: the place was discarded meanwhile."""
    make_folder(place)
    try:
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (os.path.isdir(place) and os.path.samestat(os.fstat(lock), os.stat(place))):
            return None
        if (found := find(place)) is not None:
            return found
        part = os.path.join(place, "part")
        if os.path.isdir(part):  # somebody died over it: we hold the lock
            _discard(part)
        os.mkdir(part, 0o700)
        try:
            weight = build(part)
        except BaseException:
            _discard(part)  # what fills the disk must not stay there
            raise
        # One step makes it complete, and carries its weight in the name.
        tree = os.path.join(place, f"tree-{weight.files}-{weight.size}")
        os.rename(part, tree)
        return Shared(tree, weight)
    finally:
        os.close(lock)


def _kept(place: str, tree: Shared) -> bool:
    """Hold *tree* until this process ends; False: it is gone.

    By a lock on the tree, which may be mounted: the descriptor stays open on purpose.
    """
    try:
        held = os.open(tree.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    fcntl.flock(held, fcntl.LOCK_SH)
    if not os.path.isdir(tree.path):
        os.close(held)
        return False
    os.utime(place)
    return True


def discard(place: str, before: float) -> bool:
    """Remove the tree of *place*, unless a process holds it or one began to since *before*."""
    with contextlib.ExitStack() as locks:
        try:
            for path in (place, *(f"{place}/{name}" for name in os.listdir(place))):
                if path == place or os.path.basename(path).startswith("tree-"):
                    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    locks.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(place).st_mtime >= before:
                return False
            for name in os.listdir(place):
                if name.startswith("tree-"):
                    _discard(f"{place}/part")
                    os.rename(f"{place}/{name}", f"{place}/part")  # in one step it is no tree
        except OSError:  # somebody has it, or was faster
            return False
        _discard(place)
        return True


def find(place: str) -> Shared | None:
    """The tree of *place*, if it has been made."""
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        return None
    for name in names:
        if name.startswith("tree-"):
            files, size = name.split("-")[1:]
            return Shared(f"{place}/{name}", Weight(int(files), int(size)))
    return None


@dataclass(frozen=True, slots=True)
class Held:
    """A small tree in memory: paths, permissions and contents; folders before what is in them."""

    folders: tuple[tuple[str, int], ...]
    files: tuple[tuple[str, int, bytes], ...]

    def write(self, target: str) -> None:
        """Make it at *target*, which must not exist.

        Raises:
            OSError: It cannot be made; nothing of it is left.
        """
        before = os.umask(0)
        try:
            for path, mode in self.folders:
                os.mkdir(f"{target}{path}", mode)
            for path, mode, content in self.files:
                _write(f"{target}{path}", mode, content)
        except BaseException:
            _discard(target)
            raise
        finally:
            os.umask(before)

    def remove(self, target: str) -> None:
        """Remove it again.

        Raises:
            OSError: It is not as it was written: something is left.
        """
        for path, _, _ in self.files:
            os.unlink(f"{target}{path}")
        for path, _ in reversed(self.folders):
            os.rmdir(f"{target}{path}")


def _write(path: str, mode: int, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        if os.write(fd, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(fd)


def hold(tree: Shared) -> Held | None:
    """Read *tree*, if it is small and whole."""
    if tree.weight.files > HELD_FILES or tree.weight.size > HELD_BYTES:
        return None
    folders = [("", os.stat(tree.path).st_mode & 0o777 | 0o700)]
    files: list[tuple[str, int, bytes]] = []
    size = 0
    for path, _ in folders:  # grows while it is walked
        with os.scandir(f"{tree.path}{path}") as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode & 0o777
                if entry.is_dir(follow_symlinks=False):
                    folders.append((f"{path}/{entry.name}", mode | 0o700))
                else:
                    with open(entry.path, "rb") as file:
                        content = file.read()
                    files.append((f"{path}/{entry.name}", mode, content))
                    size += len(content)
    whole = Weight(len(files), size) == tree.weight and len(folders) <= HELD_FILES
    return Held(tuple(folders), tuple(files)) if whole else None


def view(tree: Shared, target: str, layers: str, *, mounts: bool) -> None:
    """Make *target*, a new directory, a private and writable view of *tree*.

    *layers* is where an overlay keeps what is written, on the same file system.

    Raises:
        RuntimeError: Somebody took something out of *tree*.
    """
    if worth_mounting(tree.weight, mounts=mounts) and _overlaid(tree.path, target, layers):
        return
    if copy(tree.path, target) != tree.weight:
        words = f"{tree.path} is not as it was made; remove it and submit again: it is made anew"
        raise RuntimeError(words)


def worth_mounting(weight: Weight, *, mounts: bool) -> bool:
    """Whether an overlay is cheaper than copying this much, where *mounts* are allowed.

    As an ordinary user it takes a user namespace, in which sudo and the like
    do not work: not for what is copied within a second.
    """
    if not mounts or not namespace.SUPPORTED:
        return False
    if namespace.entered() or os.geteuid() == 0:
        return weight.files > 200 or weight.size > 32 * MIB
    return weight.files > 20_000 or weight.size > 1024 * MIB


def _overlaid(tree: str, target: str, layers: str) -> bool:
    upper, work = os.path.join(layers, "upper"), os.path.join(layers, "work")
    try:
        namespace.enter()
        for folder in (target, upper, work):
            os.makedirs(folder, mode=0o700)
        namespace.overlay(tree, upper, work, target)
    except OSError:
        # Not every file system can be a layer, and not every kernel lets us.
        _discard(layers)
        if os.path.isdir(target):
            os.rmdir(target)
        return False
    return True


def copy(source: str, target: str) -> Weight:
    """Copy a tree of files and directories to *target*, which must not exist.

    Permissions are kept, but the copy's owner may enter and write all directories.
    """
    before = os.umask(0)
    try:
        return Weight(*_copy(source, target, os.stat(source).st_mode))
    finally:
        os.umask(before)


def _copy(source: str, target: str, mode: int) -> tuple[int, int]:
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
        more = _copy(folder.path, f"{target}/{folder.name}", mode)
        files, size = files + more[0], size + more[1]
    return files, size


def copy_file(source: str, target: str, mode: int | None = None) -> int:
    """Copy one file to a new one and return its size in bytes.

    The copy gets the permissions *mode*, or those of *source*, less the umask.
    """
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(reading)
        mode = status.st_mode & 0o777 if mode is None else mode
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            if status.st_size > READ_AT_ONCE:
                return _copy_content(reading, writing)
            content = os.read(reading, READ_AT_ONCE + 1)
            if os.write(writing, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
            return len(content)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _copy_content(reading: int, writing: int) -> int:
    size = 0
    if hasattr(os, "copy_file_range"):
        try:
            while moved := os.copy_file_range(reading, writing, 1 << 30):
                size += moved
            return size
        except OSError as exc:
            if exc.errno not in NOT_HERE or size:
                raise
    while content := os.read(reading, MIB):
        view = memoryview(content)
        while view.nbytes:
            view = view[os.write(writing, view) :]
        size += len(content)
    return size


def _discard(folder: str) -> None:
    import shutil  # it maps compression libraries, which every fork would inherit

    shutil.rmtree(folder, ignore_errors=True)
