"""What the tests of the face need of pytest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.face.child import Child

# Without this, asyncio makes up a loop for the main thread when pytest-asyncio asks for "the" loop,
# and nobody closes it: the warning would fail whichever test the garbage collector runs in.
asyncio.set_event_loop(None)


COMMON = """
import asyncio, itertools, os, pathlib, pickle, signal, sys, threading, time
import kinetic
from kinetic import Cancelled, Completion, Failed, JobStatus, Lost, Succeeded

os.environ["KINETIC_PROGRESS"] = "off"  # on a slow machine, too, what is soon over is silent

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
    """Starts a script of the project in *tmp_path*."""
    return lambda code, *options: Child(COMMON + code, *options, folder=tmp_path)
