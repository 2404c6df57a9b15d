"""Small disks that become full, and what a store has left."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Disk:
    """A small disk for one test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ballast = path / "ballast"

    def fill(self) -> None:
        """Use up the free space."""
        with contextlib.suppress(OSError), self.ballast.open("ab", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    def free(self) -> None:
        """Release the space that `fill` took."""
        self.ballast.unlink()


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """Have a disk of this size at the folder *path*."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(path)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("only root can mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def left_in(store: Path) -> list[str]:
    """List the objects of a store, without content that submissions share."""
    paths = [path for path in store.rglob("*") if path.is_file() and path.suffix != ".lock"]
    names = [str(path.relative_to(store)) for path in paths]
    return [name for name in names if not name.startswith(("code/", "functions/", "data/"))]
