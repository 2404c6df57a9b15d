"""kinetic's own wheel, made of the tree that is running: no version has to be released for it."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kinetic import _version
from kinetic.errors import ConfigurationError

__all__ = ["Wheel", "installed_wheel", "package_files", "wheel"]

DISTRIBUTION = "kinetic-aio"
EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The time of every entry: the oldest one a zip can name, and the same on every machine."""

TAG = "py3-none-any"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel under the file name that installers insist on."""

    name: str
    content: bytes


def wheel(files: Mapping[str, bytes], metadata: str, entry_points: str = "") -> Wheel:
    """The wheel of *files*, named relative to the root of an environment; pure.

    The same files and metadata give the same bytes on every machine: nothing is
    compressed, because libraries differ in how.

    Raises:
        ValueError: *metadata* names no distribution or no version.
    """
    name, version = _field(metadata, "Name"), _field(metadata, "Version")
    stem = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version.replace('-', '_')}"
    info = f"{stem}.dist-info"
    entries = {
        **{path: files[path] for path in sorted(files)},
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: kinetic\nRoot-Is-Purelib: true\nTag: {TAG}\n"
        ).encode(),
        **({f"{info}/entry_points.txt": entry_points.encode()} if entry_points else {}),
    }
    rows = [f"{path},{_digest(body)},{len(body)}" for path, body in entries.items()]
    entries[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, body in entries.items():
            entry = zipfile.ZipInfo(path, EARLIEST)
            entry.create_system = 3  # Unix, wherever it is made
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, body)
    return Wheel(f"{stem}-{TAG}.whl", buffer.getvalue())


def package_files(package: Path) -> dict[str, bytes]:
    """Every file of the package in folder *package* that a wheel of it has; reads the disk."""
    found: dict[str, bytes] = {}
    folders = [package]
    for folder in folders:  # grows: a link inside (the runner's, in a checkout) is followed
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                folders.append(path)
            elif path.is_file() and path.suffix not in (".pyc", ".pyo"):
                found[path.relative_to(package.parent).as_posix()] = path.read_bytes()
    return found


@functools.cache
def installed_wheel() -> Wheel:
    """The wheel of the kinetic that is running, wherever it was imported from; made once.

    Raises:
        ConfigurationError: It was never installed, so nobody knows what it depends on.
    """
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as exc:
        raise ConfigurationError(
            f"{DISTRIBUTION} runs here without being installed, so no image can be given it; "
            "install it, e.g. with `pip install -e` on its source"
        ) from exc
    metadata = installed.read_text("METADATA") or ""
    entry_points = installed.read_text("entry_points.txt") or ""
    return wheel(package_files(Path(_version.__file__).parent), metadata, entry_points)


def _field(metadata: str, name: str) -> str:
    header = metadata.partition("\n\n")[0]
    match = re.search(rf"^{name}: *(\S+)", header, re.MULTILINE)
    if match is None:
        raise ValueError(f"the metadata of {DISTRIBUTION} has no {name}")
    return match[1]


def _digest(body: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(body).digest())
    return f"sha256={encoded.rstrip(b'=').decode()}"
