"""Silence the engine's log while courses of events are simulated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import logging


@pytest.fixture(autouse=True)
def quiet(home: Path) -> Iterator[None]:
    """Hide the engine's log, because the trace of a course tells more."""
    assert os.environ["KINETIC_HOME"] == str(home)
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    yield
    logging.set_verbosity(before)
