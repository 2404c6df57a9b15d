"""The secrets of this user on this machine: the key of all submissions, and what each keeps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from kinetic._runner.private import make_folder

__all__ = ["KEY_BYTES", "drop", "keep", "kept", "root_key"]

KEY_BYTES = 32


def root_key(home: Path) -> bytes:
    """The key in *home*, made on first use; all who ask at once get the same.

    Raises:
        ValueError: The file holds something else.
        OSError: It can be neither read nor made.
    """
    path = home / "key"
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        make_folder(home)
        draft = home / f".key-{os.urandom(8).hex()}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(os.urandom(KEY_BYTES))
            os.link(draft, path)  # whole, or somebody else's
        except FileExistsError:
            pass
        finally:
            draft.unlink()
        key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path} is damaged: {len(key)} bytes instead of {KEY_BYTES}")
    return key


def keep(home: Path, name: str, content: bytes) -> None:
    """Keep *content* under *name*, for this user only; a reader sees all of it or nothing.

    Raises:
        OSError: It cannot be written.
    """
    path = _path(home, name)
    make_folder(path.parent)
    draft = path.with_name(f".{os.urandom(8).hex()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def kept(home: Path, name: str) -> bytes:
    """What is kept under *name*.

    Raises:
        FileNotFoundError: Nothing is.
        OSError: It cannot be read.
    """
    return _path(home, name).read_bytes()


def drop(home: Path, names: Collection[str]) -> None:
    """Keep these no longer; those that are absent do not matter.

    Raises:
        OSError: One cannot be removed.
    """
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            _path(home, name).unlink()


def _path(home: Path, name: str) -> Path:
    if not name or name.startswith(".") or "/" in name:
        raise ValueError(f"{name!r} is no name for a secret")
    return home / "local" / "secrets" / name
