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
from typing import Any

WORKSPACE, RECORD = "workspace", ".record"
TICK_S, TICKS = 0.001, 50
"""The pause (seconds) and the number of checks whether a file system's clock has advanced."""


def can_keep(folder: str) -> bool:
    """Return whether *folder* can have spares: its file system updates ``ctime`` at every change.

    A file system in memory fails this test: after a read through a memory mapping, a write through
    this mapping leaves the ``ctime`` as it was.
    """
    import mmap  # only the supervisor needs this module

    probe = f"{folder}/probe"
    try:
        with open(probe, "w+b") as file:
            file.write(b"0")
            file.flush()
            with mmap.mmap(file.fileno(), 1) as content:
                content[0] += 1
                created = os.stat(probe).st_ctime_ns
            if not _wait_past(created, probe):
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


def project_of(names: Collection[str]) -> str:
    """Return the project digest of a spare with the entries *names*; empty for other folders."""
    records = (name.removesuffix(RECORD) for name in names if name.endswith(RECORD))
    return next(records, "") if WORKSPACE in names else ""


def foreign_entries(names: Iterable[str], digest: str) -> list[str]:
    """Return the entries among *names* that a spare of the project *digest* doesn't need."""
    return [name for name in names if name not in (WORKSPACE, digest + RECORD)]


def write_record(work: str, digest: str, absent: Mapping[str, list[int]] | None = None) -> None:
    """Record the state of each file in the workspace in *work*, for a later `restore`.

    Call this while the workspace has only files and folders of the project *digest*. *absent* has
    earlier states of files of the project that the workspace lacks now. If the file system's clock
    doesn't advance, kinetic writes no record, because a record could miss a change.
    """
    root, record = f"{work}/{WORKSPACE}", f"{work}/{digest}{RECORD}"
    folders: dict[str, int] = {"": os.lstat(root).st_mode}
    files = dict[str, list[int]](absent or {})
    _scan(root, "", folders, files)
    newest = max((state[-1] for state in files.values()), default=0)
    fd = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        json.dump({"folders": folders, "files": files}, file)
    if not _wait_past(newest, record):
        os.unlink(record)


def _scan(root: str, folder: str, folders: dict[str, int], files: dict[str, list[int]]) -> None:
    """Add the mode of each folder and the state of each file below *folder*, by their paths."""
    with os.scandir(root + folder) as entries:
        for entry in entries:
            path = f"{folder}/{entry.name}"
            status = entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                folders[path] = status.st_mode
                _scan(root, path, folders, files)
            else:
                files[path] = _file_state(status)


def restore(
    work: str,
    digest: str,
    fill: Callable[[Iterable[str]], object],
    replaced: Collection[str] = (),
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
        if _restore(root, known["folders"], files, fill):
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


def _restore(
    root: str,
    folders: dict[str, int],
    files: dict[str, list[int]],
    fill: Callable[[Iterable[str]], object],
) -> bool:
    """Restore folders and files; return whether a file had to be copied.

    If no file has changed, the bytecode of these files stays, which saves compiling them again.
    """
    missing = dict.fromkeys(files)
    bytecode: list[str] = []
    foreign: list[str] = []
    for folder, mode in folders.items():  # a folder comes before its subfolders
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
                elif files.get(name) == _file_state(entry.stat(follow_symlinks=False)):
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
    return bool(missing)


def _has_bytecode_of(files: Collection[str], folder: str, candidate: os.DirEntry[str]) -> bool:
    """Return whether *candidate* in *folder* has only the bytecode of *files* of the project.

    Python compares a file's time in seconds, so it could take bytecode of a file that an earlier
    job has written for that of a later job's file.
    """
    if candidate.name != "__pycache__":
        return False
    with os.scandir(candidate) as entries:
        return all(
            entry.name.endswith(".pyc")
            and entry.is_file(follow_symlinks=False)
            and f"{folder}/{entry.name.partition('.')[0]}.py" in files
            for entry in entries
        )


def _file_state(status: os.stat_result) -> list[int]:
    """Return the fields that tell one state of a file from another; the last is its ``ctime``."""
    return [status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _wait_past(moment: int, path: str) -> bool:
    """Touch *path* until its ``ctime`` is after *moment* (ns); return False after all `TICKS`."""
    for _ in range(TICKS):
        os.utime(path)
        if os.stat(path).st_ctime_ns > moment:
            return True
        time.sleep(TICK_S)
    return False
