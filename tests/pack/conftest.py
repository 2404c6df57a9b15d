"""Fixtures that write projects, pack them, and run scripts in fresh interpreters."""

from __future__ import annotations

import json
import os
import textwrap
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kinetic._packing import archive
from tests import programs

REPOSITORY = Path(__file__).parents[2]

Make = Callable[[Path, Mapping[str, "str | bytes"]], Path]
Python = Callable[..., str]


@pytest.fixture
def make() -> Make:
    """Return a function that writes files; a name that ends with ``/`` makes a directory."""

    def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
        root.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = root / name
            if name.endswith("/"):
                path.mkdir(parents=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                content if isinstance(content, bytes) else textwrap.dedent(content).encode()
            )
        return root

    return write


@pytest.fixture
def python(home: Path) -> Python:
    """Return a function that runs a script, which can import kinetic, and returns its output."""

    def run(*command: str, cwd: Path, stdin: str = "", **environ: str) -> str:
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environ}
        return programs.python(*command, cwd=cwd, env=environ, stdin=stdin)

    return run


@pytest.fixture
def pack(tmp_path: Path) -> Callable[..., archive.Archive]:
    """Return a function that packs a directory."""

    def pack_directory(
        root: Path, *exclude: Path, cache: Path | None = None, **options: Any
    ) -> archive.Archive:
        environ = options.pop("environ", {"HOME": str(tmp_path)})
        cache = tmp_path / "cache" if cache is None else cache
        return archive.pack(root, exclude=exclude, cache=cache, environ=environ, **options)

    return pack_directory


def settle(root: Path) -> None:
    """Wait until a new change in *root* gets a later timestamp than all earlier ones."""
    newest = max((path.lstat().st_ctime_ns for path in root.rglob("*")), default=0)
    deadline = time.monotonic() + 60
    while time.time_ns() - newest <= archive.FRESH_NS:
        assert time.monotonic() < deadline
        os.sched_yield()


def names(packed: archive.Archive) -> list[str]:
    with zipfile.ZipFile(packed.path) as opened:
        return opened.namelist()


def contents(packed: archive.Archive) -> dict[str, bytes]:
    """Return the files by name, after checking that the archive isn't damaged."""
    with zipfile.ZipFile(packed.path) as opened:
        assert opened.testzip() is None
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith("/")}


def last_line(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])
