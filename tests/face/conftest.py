"""Fixtures of the tests of the user-facing API."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import Script, prelude

COMMON = f"""{prelude(backend="local", accelerator="cpu")}
@remote
def inverse(value):
    return 1 / value

@remote
def waits_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
    return os.path.basename(name)
"""


@pytest.fixture
def script(tmp_path: Path):
    """Return a function that starts a script of a project in *tmp_path*."""
    return lambda code, *options: Script(COMMON + code, folder=tmp_path, options=options)
