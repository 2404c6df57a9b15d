"""A private view of the file system for this process and its children (Linux).

In its own mount namespace, a job can have volumes at any path, even if the machine
lacks that path. Only the job's processes see the volumes. The kernel unmounts them when
the job's last process exits. Root makes the namespace directly. Other users make it
inside a user namespace that keeps their user and group IDs, if the kernel allows that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import sys
from collections.abc import Mapping

from .processes import LINUX, blocking_libc, libc_error

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
KEPT_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME
"""Flags of a mount that `statvfs` reports by the same numbers."""

ST_RELATIME = 0x1000

_entered = ""


def entered() -> str:
    """Return how this process got its namespace, ``root`` or ``user``; empty without one."""
    return _entered


@functools.cache
def available() -> str:
    """Return how a process of this user can get a namespace: ``root``, ``user``, or empty.

    The first call forks a child that tries to get one, in about a millisecond. The process must not
    have started threads by then.
    """
    if not LINUX:
        return ""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, _probe().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answer:
        found = answer.read().decode()
    with contextlib.suppress(ChildProcessError):  # the program itself may have reaped the child
        os.waitpid(child, 0)
    return found


def _probe() -> str:
    """Move this process to a new namespace; return how: ``root``, ``user``, or empty."""
    for mode in ("root", "user"):
        try:
            if mode == "root" and os.geteuid() != 0:
                continue
            _unshare(user=mode == "user")
            _mount("tmpfs", "/", "tmpfs")
        except OSError:
            continue
        return mode
    return ""


def enter() -> str:
    """Give this process its own mount namespace unless it has one; return ``root`` or ``user``.

    Raises:
        OSError: The kernel doesn't allow a namespace, or the process has threads.
    """
    global _entered
    if _entered:
        return _entered
    if not LINUX:
        raise OSError(errno.ENOSYS, f"{sys.platform} has no mount namespaces")
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError(errno.EBUSY, "a process with threads cannot get a mount namespace")
    if os.geteuid() == 0:
        try:
            _unshare(user=False)
        except PermissionError:  # root in a container may lack the capability
            pass
        else:
            _entered = "root"
            return _entered
    # A process can't leave a user namespace again. So a child first tries whether it can mount.
    if available() != "user":
        raise OSError(errno.EPERM, "the kernel allows this user no mount namespace")
    _unshare(user=True)
    _entered = "user"
    return _entered


def _unshare(*, user: bool) -> None:
    """Move this process to a new mount namespace; with *user*, inside a new user namespace."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | (CLONE_NEWUSER if user else 0)
    if blocking_libc.unshare(flags) != 0:
        raise libc_error("unshare")
    if user:
        # IDs are the same inside and outside. The kernel maps groups only if setgroups is denied.
        for file, content in (
            ("setgroups", b"deny"),
            ("uid_map", b"%d %d 1" % (uid, uid)),
            ("gid_map", b"%d %d 1" % (gid, gid)),
        ):
            with open(f"/proc/self/{file}", "wb", buffering=0) as map_file:
                map_file.write(content)
    _mount(None, "/", flags=MS_REC | MS_PRIVATE)


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Show *source* at *target*; both are files, or both are directories."""
    _mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        _make_read_only(target)


def overlay(lower: str, upper: str, work: str, target: str) -> None:
    """Show *lower* at *target*; writes of processes there go to *upper*.

    *work* is an empty directory for the kernel, on the file system of *upper*.

    Raises:
        OSError: The kernel can't mount overlays, or can't use these folders as layers.
    """
    # Name the folders by descriptor: mount options allow no long path, no comma, and no colon.
    fds = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (lower, upper, work)]
    try:
        paths = [f"/proc/self/fd/{fd}" for fd in fds]
        layers = "lowerdir={},upperdir={},workdir={}".format(*paths)
        # Without "volatile", the job's end waits until the kernel has written all the job's files
        # to the disk, although no file outlives the job.
        variants = ("redirect_dir=on,volatile", "volatile", "")
        if _entered == "user":  # overlayfs can't set its usual attributes there
            variants = ("userxattr,volatile", "userxattr", "")
        for variant in variants:
            try:
                _mount("overlay", target, "overlay", options=f"{layers},{variant}".rstrip(","))
                break
            except OSError as exc:
                # EINVAL: this kernel doesn't know an option.
                if exc.errno != errno.EINVAL or not variant:
                    raise
    finally:
        for fd in fds:
            os.close(fd)
    # The kernel makes directories without permissions in *work*, which kinetic couldn't remove.
    for folder, subfolders, _ in os.walk(work):
        for name in subfolders:
            os.chmod(os.path.join(folder, name), 0o700)


def mount_volumes(volumes: Mapping[str, str], scratch: str) -> None:
    """Mount each view at its mount point: ``{point: view}``, both absolute paths.

    If a point doesn't exist, the function replaces its nearest ancestor by a mirror: a
    memory file system that shows everything in the ancestor, and the point. A
    process can't create files directly in a mirror, because they would be lost
    with it. A directory for temporary files (with the sticky bit) stays
    writable. *scratch* is a directory of the job.
    """
    working_folder = "/"
    with contextlib.suppress(OSError):  # another process may have deleted the folder
        working_folder = os.getcwd()
    points = {os.path.realpath(point): view for point, view in volumes.items()}
    if len(points) != len(volumes):
        raise RuntimeError(f"two volumes have the same path: {', '.join(sorted(volumes))}")
    mounted: list[str] = []
    for point in sorted(points, key=lambda point: point.split("/")):
        view = points[point]
        if not os.path.exists(point):
            in_volume = any(point.startswith(f"{outer}/") for outer in mounted)
            _create(point, view, scratch, in_volume=in_volume)
        if os.path.isdir(point) != os.path.isdir(view):
            kind = "directory" if os.path.isdir(view) else "file"
            other = "file" if os.path.isdir(view) else "directory"
            raise RuntimeError(f"the volume at {point} is a {kind}, but that path is a {other}")
        bind(view, point)
        mounted.append(point)
    try:
        os.chdir(working_folder)  # a volume may be mounted at this path now
    except OSError:
        os.chdir("/")


def _create(point: str, view: str, scratch: str, *, in_volume: bool) -> None:
    """Create *point*, directly in a writable volume, and elsewhere by a mirror."""
    if in_volume:
        try:
            _make_like(view, point)
            return
        except OSError as exc:
            if exc.errno != errno.EROFS:
                raise
    ancestor = os.path.dirname(point)
    while not os.path.lexists(ancestor):
        ancestor = os.path.dirname(ancestor)
    if not os.path.isdir(ancestor):
        raise NotADirectoryError(errno.ENOTDIR, "a volume cannot be under this file", ancestor)
    _mirror(ancestor, point, view, scratch)


def _mirror(ancestor: str, point: str, view: str, scratch: str) -> None:
    """Replace *ancestor* by a mirror that also has *point*; see `mount_volumes`."""
    mode = stat.S_IMODE(os.stat(ancestor).st_mode)
    stage = f"{scratch}/mirror-{len(os.listdir(scratch))}"
    os.mkdir(stage, 0o700)
    _mount("tmpfs", stage, "tmpfs", options=f"mode={mode:o}")
    _mount(None, stage, flags=MS_UNBINDABLE)  # don't mirror *stage*, which *ancestor* may contain
    with os.scandir(ancestor) as entries:
        for entry in entries:
            _mirror_entry(entry, f"{stage}/{entry.name}")
    _make_like(view, f"{stage}/{os.path.relpath(point, ancestor)}")
    _mount(None, stage, flags=MS_PRIVATE)
    if ancestor == "/":
        os.chdir(stage)
        _mount(".", "/", flags=MS_MOVE)
        os.chroot(".")
        os.chdir("/")
    else:
        _mount(stage, ancestor, flags=MS_MOVE)
    if not mode & stat.S_ISVTX:  # otherwise jobs may write there, as in /tmp
        _make_read_only(ancestor)


def _mirror_entry(entry: os.DirEntry[str], target: str) -> None:
    """Show *entry* at the new path *target*: copy a link, and bind anything else."""
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
        return
    if entry.is_dir(follow_symlinks=False):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o600))
    try:
        bind(entry.path, target)
    except FileNotFoundError:  # another process removed the entry
        (os.rmdir if os.path.isdir(target) else os.unlink)(target)


def _make_like(view: str, target: str) -> None:
    """Create *target* and its parents: an empty directory if *view* is a directory, else a file."""
    if os.path.isdir(view):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o600))


def _make_read_only(target: str) -> None:
    """Make the mount at *target* read-only."""
    # The kernel doesn't let a process in a user namespace remove a mount's flags, so the call
    # repeats those that the mount has.
    flags = os.statvfs(target).f_flag
    kept_flags = flags & KEPT_FLAGS | (MS_RELATIME if flags & ST_RELATIME else 0)
    _mount(None, target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept_flags)


def _mount(
    source: str | None, target: str, kind: str | None = None, *, flags: int = 0, options: str = ""
) -> None:
    action = f"mount of {kind or source}" if kind or source else "change of mount flags"
    arguments = [
        os.fsencode(argument) if argument is not None else None
        for argument in (source, target, kind)
    ]
    flag_bits = ctypes.c_ulong(flags)
    if blocking_libc.mount(*arguments, flag_bits, options.encode() or None) != 0:
        raise libc_error(f"{action} at {target}")
