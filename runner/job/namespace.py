"""A private view of the file system for this process and its children (Linux).

In a mount namespace of its own a job can have volumes at any path, also at one
that does not exist: nobody else sees them, and they are gone with its last
process. Root makes one directly, other users inside a user namespace that
keeps their ids, where the kernel allows that.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import sys
from collections.abc import Mapping
from typing import Any

SUPPORTED = sys.platform == "linux"

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_NODIRATIME = 0x800
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_UNBINDABLE = 0x20000
MS_PRIVATE = 0x40000
MS_RELATIME = 0x200000
MNT_DETACH = 0x2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
INHERITED = {
    os.ST_NOSUID: MS_NOSUID,
    getattr(os, "ST_NODEV", 4): MS_NODEV,
    getattr(os, "ST_NOEXEC", 8): MS_NOEXEC,
    getattr(os, "ST_NOATIME", 1024): MS_NOATIME,
    getattr(os, "ST_NODIRATIME", 2048): MS_NODIRATIME,
    getattr(os, "ST_RELATIME", 4096): MS_RELATIME,
}
"""Flags that a user namespace may not take off a mount: a remount names them again."""

_entered = ""


def entered() -> str:
    """How this process came into its own namespace: ``root``, ``user``, or not: empty."""
    return _entered


@functools.cache
def available() -> str:
    """How a process of this user can get a namespace: ``root``, ``user``, or not: empty.

    Tries it in a short-lived child (about a millisecond); the answer is kept.
    Call it before threads are started: it forks.
    """
    if not SUPPORTED:
        return ""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, _probe().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        found = answer.read().decode()
    with contextlib.suppress(ChildProcessError):  # somebody may wait for all children
        os.waitpid(child, 0)
    return found


def _probe() -> str:
    for way in ("root", "user"):
        try:
            if way == "root" and os.geteuid() != 0:
                continue
            _unshare(user=way == "user")
            _mount("tmpfs", "/", "tmpfs")
        except OSError:
            continue
        return way
    return ""


def enter() -> str:
    """Give this process its own mount namespace, once; return how: ``root`` or ``user``.

    Raises:
        OSError: The kernel does not allow it, or the process has threads.
    """
    global _entered
    if _entered:
        return _entered
    if not SUPPORTED:
        raise OSError(errno.ENOSYS, f"{sys.platform} has no mount namespaces")
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError(errno.EBUSY, "a process with threads cannot get a mount namespace")
    if os.geteuid() == 0:
        try:
            _unshare(user=False)
        except PermissionError:
            pass
        else:
            _entered = "root"
            return _entered
    # In a user namespace that cannot mount there is no way back, so it is tried first.
    if available() != "user":
        raise OSError(errno.EPERM, "the kernel allows this user no mount namespace")
    _unshare(user=True)
    _entered = "user"
    return _entered


def _unshare(*, user: bool) -> None:
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | (CLONE_NEWUSER if user else 0)
    _call("unshare", flags, what="unshare")
    if user:
        # The same ids inside and outside; groups can only be mapped when none can be dropped.
        for file, content in (
            ("setgroups", b"deny"),
            ("uid_map", b"%d %d 1" % (uid, uid)),
            ("gid_map", b"%d %d 1" % (gid, gid)),
        ):
            with open(f"/proc/self/{file}", "wb", buffering=0) as map_file:
                map_file.write(content)
    _mount(None, "/", flags=MS_REC | MS_PRIVATE)


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Show *source*, a file or directory, at *target*, which is one too."""
    _mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        _make_read_only(target)


def overlay(lower: str, upper: str, work: str, target: str) -> None:
    """Show *lower* at *target*, with everything that is written there going to *upper*.

    *work* is an empty directory beside *upper*.

    Raises:
        OSError: The kernel cannot, or not with these file systems.
    """
    # By descriptor: the options have no room for long paths, nor for commas and colons.
    opened = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (lower, upper, work)]
    try:
        places = [f"/proc/self/fd/{fd}" for fd in opened]
        layers = "lowerdir={},upperdir={},workdir={}".format(*places)
        # Volatile: nothing of it outlives the job, and without it the end of the
        # job would wait until all that is unwritten on the disk is written.
        ways = ("redirect_dir=on,volatile", "volatile", "")
        if _entered == "user":
            ways = ("userxattr,volatile", "userxattr", "")
        for way in ways:
            try:
                _mount("overlay", target, "overlay", options=f"{layers},{way}".rstrip(","))
                break
            except OSError as exc:
                if exc.errno != errno.EINVAL or not way:
                    raise
    finally:
        for fd in opened:
            os.close(fd)
    # The kernel's own directories in there have no permissions, which a plain
    # removal of the tree would stumble over.
    for folder, inside, _ in os.walk(work):
        for name in inside:
            os.chmod(os.path.join(folder, name), 0o700)


def place(volumes: Mapping[str, str], scratch: str) -> None:
    """Show each view at its point: ``{point: view}``, both absolute paths.

    A point that does not exist is made in a mirror of its nearest existing
    ancestor: a memory file system that shows all that is there, and the point.
    The ancestor's own list of names is read-only in this process, because what
    is created there would be lost with it; a directory for temporary files
    (with the sticky bit) stays writable. *scratch* is a directory of the job.
    """
    here = _cwd()
    points = {os.path.realpath(point): view for point, view in volumes.items()}
    if len(points) != len(volumes):
        raise RuntimeError(f"two volumes have the same place: {', '.join(sorted(volumes))}")
    ordered = sorted(points, key=lambda point: point.split("/"))
    outer = [one for one in ordered if not any(_inside(one, other) for other in ordered)]
    _mirror_missing({point: points[point] for point in outer}, scratch)
    for point in ordered:
        if not os.path.exists(point):
            _create_within(point, points[point], scratch)
        _check_kind(point, points[point])
        bind(points[point], point)
    _return(here)


def _create_within(point: str, view: str, scratch: str) -> None:
    """Make a point inside another volume, which is the job's own and so may be written to."""
    try:
        _make_like(view, point)
    except OSError as exc:
        if exc.errno != errno.EROFS:
            raise
        _mirror_missing({point: view}, scratch)


def _mirror_missing(points: Mapping[str, str], scratch: str) -> None:
    mirrors: dict[str, list[str]] = {}
    for point in points:
        if not os.path.exists(point):
            mirrors.setdefault(_nearest(point), []).append(point)
    for ancestor in sorted(mirrors):
        _mirror(ancestor, {point: points[point] for point in mirrors[ancestor]}, scratch)


def _nearest(point: str) -> str:
    """The nearest ancestor that exists."""
    while not os.path.lexists(point):
        point = os.path.dirname(point)
    if not os.path.isdir(point):
        raise NotADirectoryError(errno.ENOTDIR, "a volume cannot be under this file", point)
    return point


def _mirror(ancestor: str, points: Mapping[str, str], scratch: str) -> None:
    mode = stat.S_IMODE(os.stat(ancestor).st_mode)
    stage = f"{scratch}/mirror-{len(os.listdir(scratch))}"
    os.mkdir(stage, 0o700)
    _mount("tmpfs", stage, "tmpfs", options=f"mode={mode:o}")
    _mount(None, stage, flags=MS_UNBINDABLE)  # it may lie in what it shows
    with os.scandir(ancestor) as entries:
        for entry in entries:
            _show(entry, f"{stage}/{entry.name}")
    for point, view in points.items():
        _make_like(view, f"{stage}/{os.path.relpath(point, ancestor)}")
    _mount(None, stage, flags=MS_PRIVATE)
    if ancestor == "/":
        _change_root(stage)
    else:
        _mount(stage, ancestor, flags=MS_MOVE)
    if not mode & stat.S_ISVTX:
        _make_read_only(ancestor)


def _show(entry: os.DirEntry[str], target: str) -> None:
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
        return
    if entry.is_dir(follow_symlinks=False):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        bind(entry.path, target)
    except FileNotFoundError:  # it went meanwhile
        (os.rmdir if os.path.isdir(target) else os.unlink)(target)


def _make_like(view: str, target: str) -> None:
    """Create an empty *target* of the kind of *view*, with its parents."""
    if os.path.isdir(view):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o600))


def _check_kind(point: str, view: str) -> None:
    if os.path.isdir(point) != os.path.isdir(view):
        kind = "directory" if os.path.isdir(view) else "file"
        raise RuntimeError(f"the volume at {point} is a {kind}, and there is something else there")


def _change_root(root: str) -> None:
    os.chdir(root)
    try:
        number = PIVOT_ROOT.get(os.uname().machine)
        if number is None:
            raise OSError(errno.ENOSYS, "pivot_root")
        _call("syscall", number, b".", b".", what="pivot_root")
    except OSError:
        # The first root of a kernel cannot be pivoted, nor one that is no mount.
        _mount(".", "/", flags=MS_MOVE)
        os.chroot(".")
    else:
        _call("umount2", b".", MNT_DETACH, what="umount2 of the old root")
    os.chdir("/")


def _make_read_only(target: str) -> None:
    kept = os.statvfs(target).f_flag
    flags = functools.reduce(
        lambda all_flags, one: all_flags | (INHERITED[one] if kept & one else 0), INHERITED, 0
    )
    _mount(None, target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def _inside(path: str, other: str) -> bool:
    return path != other and path.startswith(other.rstrip("/") + "/")


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _return(folder: str | None) -> None:
    """Stand where we stood, in what is mounted there now."""
    try:
        os.chdir(folder or "/")
    except OSError:
        os.chdir("/")


def _mount(
    source: str | None, target: str, kind: str | None = None, *, flags: int = 0, options: str = ""
) -> None:
    words = f"mount of {kind or source or 'flags'} at {target}"
    texts = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    _call("mount", *texts, flags, options.encode() or None, what=words)


def _call(name: str, *args: Any, what: str) -> None:
    """Call the C library; what fails is an OSError that says what and where."""
    import ctypes

    if _libc is None:
        _load()
    ctypes.set_errno(0)
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


_libc: Any = None


def _load() -> None:
    """ctypes costs three milliseconds, so only who mounts something pays them."""
    global _libc
    import ctypes

    _libc = ctypes.CDLL(None, use_errno=True)
    text, number = ctypes.c_char_p, ctypes.c_ulong
    _libc.mount.argtypes = [text, text, text, number, text]
    _libc.umount2.argtypes = [text, ctypes.c_int]
    _libc.unshare.argtypes = [ctypes.c_int]
    _libc.syscall.argtypes = [ctypes.c_long, text, text]
