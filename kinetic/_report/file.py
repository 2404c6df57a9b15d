"""Write a report's file atomically."""

from __future__ import annotations

import os
from pathlib import Path

from kinetic._replacing import replacing
from kinetic.errors import ConfigurationError


def check_path(path: str | os.PathLike[str]) -> Path:
    """Check that the folder of *path* exists, and return the absolute path.

    Raises:
        ConfigurationError: The folder doesn't exist.
    """
    target = Path(path).expanduser().absolute()
    folder = target.parent
    if not folder.is_dir():
        raise ConfigurationError(
            f"can't write the report to {target}: there is no folder {folder}; create it, or name "
            "another folder"
        )
    return target


def write(path: Path, page: str) -> None:
    """Replace the file at *path* with *page* in one step; a reader finds the old or the new page.

    Raises:
        ConfigurationError: The file can't be written; the old file stays.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(
            f"can't write the report to {path}: {exc.strerror or exc}; name another place, or free "
            "some space there"
        ) from exc
