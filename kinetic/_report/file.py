"""The file of a report: whether it can be written, and how it is, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from kinetic._replacing import replacing
from kinetic.errors import ConfigurationError


def place_for(path: str | os.PathLike[str]) -> Path:
    """The absolute path of the file at *path*, once it is certain that it can be there.

    Raises:
        ConfigurationError: It cannot.
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
            f"the report cannot be written to {place}: {folder} is not writable for you; name "
            "another folder"
        )
    return place


def write(place: Path, page: str) -> None:
    """Put *page* at *place*, in one step: whoever reads the file finds the old one or this.

    Raises:
        ConfigurationError: The file system refuses it; what was there is as it was.
    """
    try:
        with replacing(place) as beside:
            beside.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(
            f"the report cannot be written to {place}: {exc.strerror or exc}; free some space "
            "there, or name another place"
        ) from exc
