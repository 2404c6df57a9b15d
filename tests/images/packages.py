"""A folder of packages in place of an index, and the uv that installs from it."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from kinetic.aio.images import bootstrap
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


def repack_runner(folder: Path) -> None:
    """Write wheels of the packages that a pod installs for the runner to *folder*."""
    for line in bootstrap.CONSTRAINTS.read_text().splitlines():
        name = line.partition("==")[0]
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # its marker excludes this platform
            continue
        about = found.read_text("WHEEL") or ""
        tag = about.partition("Tag: ")[2].partition("\n")[0]
        stem = f"{found.name.replace('-', '_')}-{found.version}"
        with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as archive:
            for file in found.files or ():
                path = str(file)
                if not path.startswith("..") and "__pycache__" not in path:
                    is_record = path.endswith(".dist-info/RECORD")
                    archive.writestr(path, "" if is_record else file.read_binary())
