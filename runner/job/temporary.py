"""The folder for temporary files of a job or worker on this machine: its ``TMPDIR``.

It lies in the user's folder for temporary files, whose disk the user has chosen, and whose path is
short enough for sockets. A link in the job's folder names it. So a process that removes the job's
folder finds it, also after a crash.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping

from ..protocol.wire import SHARED_TMPDIR
from . import processes

VARIABLE = "TMPDIR"

LINK = "tmp"
"""The name of the link in the job's folder."""

_OWN_FOLDER = re.compile(r"(/.*)?/kinetic-[0-9a-f]{8}")
_USUAL_PARENTS = ("/tmp", "/var/tmp")


def make(work: str, executor: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Make the folder of the job in *work*; return the variables that name it.

    A job whose *environment* has a captured ``TMPDIR`` gets no folder. If none can be made, the job
    uses the user's folder.
    """
    if VARIABLE in environment:
        return {}
    parent, link = environment.get(SHARED_TMPDIR), f"{work}/{LINK}"
    for candidate in (parent, *_USUAL_PARENTS):
        if not candidate:
            continue
        folder = f"{candidate}/kinetic-{executor[:8]}"
        try:
            os.symlink(folder, link)  # first, so that a crash leaves no folder without a link
            os.mkdir(folder, 0o700)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(link)
        else:
            return {VARIABLE: folder, SHARED_TMPDIR: candidate}
    return {VARIABLE: parent} if parent else {}


def find(work: str) -> str:
    """Return the folder of the job in *work*; empty if it has none."""
    return _target_of(f"{work}/{LINK}")


def _target_of(link: str) -> str:
    try:
        target = os.readlink(link)
    except OSError:
        return ""
    return target if _OWN_FOLDER.fullmatch(target) else ""


def clear(folder: str) -> None:
    """Remove all that is in *folder*, which a job may have removed itself."""
    try:
        for name in os.listdir(folder):
            try:
                os.unlink(f"{folder}/{name}")
            except OSError:  # the job has left a folder, or has changed the permissions
                os.chmod(folder, 0o700)
                processes.remove(f"{folder}/{name}")
    except OSError:
        processes.remove(folder)
        with contextlib.suppress(OSError):
            os.mkdir(folder, 0o700)


def remove_if_small(work: str, entries: int) -> bool:
    """Remove the folder of the job in *work*, and the link; return whether they're gone.

    A folder with more than *entries* files and folders stays.
    """
    if target := find(work):
        try:
            if not processes.remove_if_small(target, entries):
                return False
        except FileNotFoundError:
            pass  # the job has removed it
        except OSError:
            return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{work}/{LINK}")
    return True


def remove_all(works: list[str]) -> None:
    """Remove folders of jobs, or the links of such folders, and the jobs' temporary files."""
    for work in works:
        for link in (work, f"{work}/{LINK}"):
            if target := _target_of(link):
                processes.remove(target)
        processes.remove(work)
