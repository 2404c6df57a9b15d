"""The server that the store of the cloud platforms is tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gcs.processes import fake_gcs

__all__ = ["fake_gcs"]


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    """Of every test here."""
    return small_project
