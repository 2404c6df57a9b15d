"""Find what a real node needs on this machine: programs and root permissions."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import binaries

PLUGINS = Path("/usr/lib/cni")
SYSTEM_PATH = "/usr/sbin:/sbin"
"""Folders where Debian keeps some programs; PATH may lack them."""

DEBIAN = {"3.11": "bookworm", "3.13": "trixie"}
"""Debian's release by Python version: pickled functions need the version that the tests use."""

PACKAGES = "containerd runc containernetworking-plugins debootstrap buildah iproute2"
HOW = (
    "these tests start a kubelet and containers, so run them on a disposable Linux machine. As "
    f"root, run `apt-get install --no-install-recommends {PACKAGES}`. Put a `kubelet` beside the "
    f"control plane's programs (in the folder of {binaries.VARIABLE}, or on PATH; "
    "`python -m tests.cluster.binaries` builds it where Go is installed)"
)


class MissingParts(Exception):
    """A program or permission is missing; the message says which, and how to get it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The paths of the programs, and the Debian release that images are built from."""

    kubelet: Path
    containerd: Path
    ctr: Path
    buildah: Path
    debootstrap: Path
    ip: Path
    release: str


def find(environ: Mapping[str, str] = os.environ) -> Parts:
    """Find all parts.

    Raises:
        MissingParts: A part is missing.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise MissingParts(f"this machine doesn't run Linux, or the user isn't root; {HOW}")
    python = "{}.{}".format(*sys.version_info)
    if python not in DEBIAN:
        known = " or ".join(DEBIAN)
        raise MissingParts(f"no Debian has Python {python}: run the tests with {known}; {HOW}")
    path = f"{environ.get('PATH', os.defpath)}:{SYSTEM_PATH}"
    kubelet_path = f"{environ.get(binaries.VARIABLE, '')}:{path}:{binaries.built(environ)}"
    names = ("containerd", "ctr", "buildah", "debootstrap", "ip")
    found = {"kubelet": shutil.which("kubelet", path=kubelet_path)}
    found |= {name: shutil.which(name, path=path) for name in (*names, "runc")}
    found["CNI plugins"] = str(PLUGINS) if (PLUGINS / "bridge").exists() else None
    if missing := [name for name, program in found.items() if program is None]:
        raise MissingParts(f"this machine has no {', no '.join(missing)}; {HOW}")
    programs = {name: Path(found[name] or "") for name in ("kubelet", *names)}
    return Parts(**programs, release=DEBIAN[python])
