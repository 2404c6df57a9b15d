"""Create folders that only this user can access, and check who can access a path."""

from __future__ import annotations

import os
import stat

MAKE_ATTEMPTS = 4
"""How often to try to create a folder: another process may remove its empty parent meanwhile."""


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its missing parents, accessible to this user only.

    Raises:
        OSError: The folder can't be created, or *path* is not a folder.
    """
    for attempt in range(MAKE_ATTEMPTS):
        try:
            os.mkdir(path, 0o700)  # the parent nearly always exists
        except FileNotFoundError:
            if attempt == MAKE_ATTEMPTS - 1:
                raise
            make_folder(os.path.dirname(os.path.abspath(path)))
            continue
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        return


def objection(path: str | os.PathLike[str], *, secret: bool = False) -> str:
    """Return why *path* isn't safe to use, with the command that fixes it; empty if it's safe.

    Other users could plant jobs in a folder that they can write to. If *path* is a *secret*, they
    must not read it either. A missing file is safe.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ""
    if status.st_uid != os.geteuid():
        return (
            f"{path} belongs to another user (uid {status.st_uid}), who could plant jobs and keys "
            f"there: type `chown -R {os.geteuid()} {path}` if it should belong to you, or set "
            "KINETIC_HOME or KINETIC_STORE to another path"
        )
    others = stat.S_IRWXG | stat.S_IRWXO if secret else stat.S_IWGRP | stat.S_IWOTH
    if not status.st_mode & others:
        return ""
    risk = "read or change it" if secret else "plant jobs and keys there"
    return (
        f"other users could {risk}: {path} has the mode {stat.S_IMODE(status.st_mode):04o}; "
        f"type `chmod go-{'rwx' if secret else 'w'} {path}`"
    )
