"""Write the file of a report, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from kinetic._replacing import replacing
from kinetic.errors import ConfigurationError


def place_for(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of *path*, after checking that a report can be written there.

    Raises:
        ConfigurationError: The folder doesn't exist or isn't writable, or *path* is a folder.
    """
    place = Path(path).expanduser().absolute()
    folder = place.parent
    if not os.path.isdir(folder):
        raise ConfigurationError(
            f"the report cannot be written to {place}: there is no folder {folder}; make it first, "
            "or name another"
        )
    if os.path.isdir(place):
        raise ConfigurationError(
            f"the report cannot be written to {place}: that is a folder; name a file in it, such "
            f"as {place / 'report.html'}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"the report cannot be written to {place}: you may not write to {folder}; name "
            "another folder"
        )
    return place


def write(place: Path, page: str) -> None:
    """Replace the file at *place* by *page* in one step, so that readers see one or the other.

    Raises:
        ConfigurationError: The file system refuses it; the old file stays.
    """
    try:
        with replacing(place) as beside:
            beside.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(
            f"the report cannot be written to {place}: {exc.strerror or exc}; free some space "
            "there, or name another place"
        ) from exc
