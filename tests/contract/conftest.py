"""The server that the store of the cloud platforms is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gcs import processes


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    """Of every test here."""
    return small_project


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a fake-gcs-server; its bucket is for one test after the other."""
    if not processes.BINARY:
        pytest.skip(processes.MISSING)
    with processes.running(tmp_path_factory.mktemp("gcs") / "log") as url:
        yield url
