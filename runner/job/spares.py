"""Workspaces that ended jobs leave to later jobs of the same project.

A spare is the folder of a job that has ended: its workspace, and a record of
what ``stat`` returned for each file before the job's function was called. The next
job gets the folder by one rename, and restores only the files that differ from the
record. So most jobs copy no file. The record shows every change of a file, because each
change sets the file's ``ctime``, and no program can set it back.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

WORKSPACE, RECORD = "workspace", ".record"
BYTECODE = "__pycache__"
"""A folder that no project has, because kinetic never packs one."""

TICK_S, TICKS = 0.001, 50
"""The pause (seconds) and the number of checks whether a file system's clock has advanced."""


class Record(NamedTuple):
    """The mode of each folder and the state of each file in a workspace, by their paths there."""

    folders: dict[str, int]
    files: dict[str, list[int]]

    @property
    def newest(self) -> int:
        """The time of the last change of a file, in nanoseconds."""
        return max((state[-1] for state in self.files.values()), default=0)


def take_record(root: str) -> Record:
    """Return the state of all folders and files in the workspace *root*, without bytecode."""
    record = Record({"": os.lstat(root).st_mode}, {})
    _scan(root, "", record)
    return record


def can_keep(folder: str) -> bool:
    """Return whether *folder* can have spares: its file system updates ``ctime`` at every change.

    A file system in memory fails this test: after a read through a memory mapping, a write through
    this mapping leaves the ``ctime`` as it was.
    """
    import mmap  # only the supervisor needs this module

    probe = f"{folder}/.kinetic-probe"
    try:
        with open(probe, "w+b") as file:
            file.write(b"0")
            file.flush()
            with mmap.mmap(file.fileno(), 1) as content:
                content[0] += 1
                created = os.stat(probe).st_ctime_ns
            if not wait_past(created, probe):
                return False
            before = os.stat(probe).st_ctime_ns
            for _ in range(TICKS):
                with mmap.mmap(file.fileno(), 1) as content:
                    content[0] += 1
                if os.stat(probe).st_ctime_ns > before:
                    return True
                time.sleep(TICK_S)
        return False
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


def write_record(work: str, digest: str, absent: Mapping[str, list[int]] | None = None) -> None:
    """Record the state of each file in the workspace in *work*, for a later `restore`.

    Call this while the workspace has only files and folders of the project *digest*. *absent* has
    earlier states of files of the project that the workspace lacks now. If the file system's clock
    doesn't advance, kinetic writes no record, because a record could miss a change.
    """
    path, record = f"{work}/{digest}{RECORD}", take_record(f"{work}/{WORKSPACE}")
    record.files.update(absent or {})
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        json.dump(record._asdict(), file)
    if not wait_past(record.newest, path):
        os.unlink(path)


def _scan(root: str, folder: str, record: Record) -> None:
    """Add the mode of each folder and the state of each file below *folder* to *record*."""
    with os.scandir(root + folder) as entries:
        for entry in entries:
            path = f"{folder}/{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if not entry.is_dir(follow_symlinks=False):
                record.files[path] = state_of(status)
            elif entry.name != BYTECODE:
                record.folders[path] = status.st_mode
                _scan(root, path, record)


def restore(
    work: str, digest: str, fill: Callable[[Iterable[str]], object], replaced: Collection[str] = ()
) -> bool:
    """Restore the workspace of a spare to its original content.

    *fill* gets the missing files' paths in the workspace, and copies the files. The caller replaces
    or removes the files *replaced*, so they are only removed here. Returns False if there is no
    record. If restoring fails, this function renames the workspace to ``broken``, and
    returns False.
    """
    root, record = f"{work}/{WORKSPACE}", f"{work}/{digest}{RECORD}"
    try:
        with open(record, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return False
    old_umask = os.umask(0)
    try:
        known: dict[str, Any] = json.loads(content)
        if os.path.islink(root):
            raise NotADirectoryError(errno.ENOTDIR, "the workspace is a link", root)
        files = {path: state for path, state in known["files"].items() if path not in replaced}
        if bring_back(root, Record(known["folders"], files), fill):
            # The record keeps the replaced files, so that a later job gets them back.
            absent = known["files"].keys() - files.keys()
            write_record(work, digest, {path: known["files"][path] for path in absent})
        return True
    except (OSError, ValueError):  # can't remove the old job's files, or the record is damaged
        with contextlib.suppress(OSError):
            os.unlink(record)
        with contextlib.suppress(FileNotFoundError):
            os.rename(root, f"{work}/broken")
        return False
    finally:
        os.umask(old_umask)


def bring_back(
    root: str,
    record: Record,
    fill: Callable[[Iterable[str]], object],
    suspects: Collection[str] = (),
    within: Collection[str] | None = None,
) -> Collection[str]:
    """Bring folders and files back to the state in *record*; return the files that were copied.

    Copy the files *suspects*, too. With *within*, look at these folders only, not at subfolders. If
    no file has changed, the bytecode of these files stays, which saves compiling them again. Call
    it with the umask 0.

    Raises:
        OSError: A file or folder can't be removed or made.
    """
    folders, files = record
    missing = {path: None for path in files if within is None or path.rpartition("/")[0] in within}
    bytecode: list[str] = []
    foreign: list[str] = []
    for folder, mode in folders.items():  # a folder comes before its subfolders
        if within is not None and folder not in within:
            continue
        path = root + folder
        try:
            if os.lstat(path).st_mode != mode:
                os.chmod(path, mode & 0o7777)
        except FileNotFoundError:
            os.mkdir(path, mode & 0o7777)
        with os.scandir(path) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if name not in folders:
                        is_bytecode = _has_bytecode_of(files, folder, entry)
                        (bytecode if is_bytecode else foreign).append(entry.path)
                elif (
                    files.get(name) == state_of(entry.stat(follow_symlinks=False))
                    and name not in suspects
                ):
                    del missing[name]
                else:
                    os.unlink(entry.path)
    if missing:
        foreign += bytecode
    if foreign:
        import shutil  # it maps compression libraries, which forks would inherit

        for path in foreign:
            shutil.rmtree(path)
    if missing:
        fill(missing)
    return missing


def _has_bytecode_of(files: Collection[str], folder: str, candidate: os.DirEntry[str]) -> bool:
    """Return whether *candidate* in *folder* has only the bytecode of *files* of the project."""
    # Python compares a file's time in seconds, so it could take bytecode of a file that an earlier
    # job has written for that of a later job's file.
    if candidate.name != BYTECODE:
        return False
    with os.scandir(candidate) as entries:
        found = [
            entry.name.endswith(".pyc")
            and entry.is_file(follow_symlinks=False)
            and f"{folder}/{entry.name.partition('.')[0]}.py" in files
            for entry in entries
        ]
    return bool(found) and all(found)


def state_of(status: os.stat_result) -> list[int]:
    """Return the fields that tell one state of a file from another; the last is its ``ctime``."""
    return [status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def wait_past(moment: int, path: str) -> bool:
    """Touch *path* until its ``ctime`` is after *moment* (ns); return False after all `TICKS`."""
    for _ in range(TICKS):
        os.utime(path)
        if os.stat(path).st_ctime_ns > moment:
            return True
        time.sleep(TICK_S)
    return False
