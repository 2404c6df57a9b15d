"""A folder of packages in place of an index, and the uv that installs from it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from kinetic.aio.images.current import find_uv
from kinetic.errors import ConfigurationError

try:
    UV = find_uv()
except ConfigurationError as exc:  # pragma: no cover
    UV = ""
    REASON = str(exc)
else:
    REASON = ""

needs_uv = pytest.mark.skipif(not UV, reason=REASON)


def package(folder: Path, name: str, version: str, content: str = "") -> None:
    """Write a wheel that can be installed without a network."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", content or f"VERSION = {version!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of packages in place of an index."""
    folder = tmp_path_factory.mktemp("index")
    package(folder, "knsix", "1.0")
    package(folder, "knsix", "2.0")
    package(folder, "jaxlib", "0.1")
    return folder
