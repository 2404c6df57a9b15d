"""Names of the folders for temporary files that jobs on this machine have."""

from __future__ import annotations

import re

VARIABLE, PARENT = "TMPDIR", "KINETIC_TMPDIR"
"""The variable with a job's folder, and the one with the user's folder, which all jobs share."""

_OWN_FOLDER = re.compile(r"(/.*)?/kinetic-[0-9a-f]{8}")


def folder_in(parent: str, executor: str) -> str:
    """Return the path of a job's folder; it is short, because sockets in it may have 100 bytes."""
    return f"{parent}/kinetic-{executor[:8]}"


def is_own(folder: str) -> bool:
    """Return whether *folder* is the path of a job's folder."""
    return _OWN_FOLDER.fullmatch(folder) is not None


def shared_parent(folder: str) -> str:
    """Return the user's folder for temporary files; *folder* may be the one of a job."""
    matched = _OWN_FOLDER.fullmatch(folder)
    return folder if matched is None else matched[1] or "/"
