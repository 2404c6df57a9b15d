"""Fixtures of the tests of the user-facing API."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.face.child import Child

COMMON = """
import asyncio, itertools, os, pathlib, pickle, signal, sys, threading, time
import kinetic
from kinetic import Cancelled, Completion, Failed, JobStatus, Lost, Succeeded

os.environ["KINETIC_PROGRESS"] = "off"  # a slow machine would show progress of short jobs

def remote(function):
    return kinetic.run(backend="local", accelerator="cpu")(function)

@remote
def inverse(value):
    return 1 / value

@remote
def waits_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
    return os.path.basename(name)

def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

here = os.getcwd()
"""


@pytest.fixture
def script(tmp_path: Path):
    """Return a function that starts a script of a project in *tmp_path*."""
    return lambda code, *options: Child(COMMON + code, *options, folder=tmp_path)
