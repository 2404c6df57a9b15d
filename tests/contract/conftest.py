"""Provide the emulator that the tests of the cloud store use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gcs.processes import fake_gcs

__all__ = ["fake_gcs"]


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    """Use the small project in every test of this folder."""
    return small_project
