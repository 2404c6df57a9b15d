"""What a real node takes of this machine: programs, the rights of root, room for images."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import binaries

PLUGINS = Path("/usr/lib/cni")
ALSO = "/usr/sbin:/sbin"
"""Where Debian keeps some of them; not everybody's PATH has these."""

DEBIAN = {"3.11": "bookworm", "3.13": "trixie"}
"""The release of Debian with the Python that the tests run in: functions travel between equals."""

PACKAGES = "containerd runc containernetworking-plugins debootstrap buildah iproute2"
HOW = (
    "these tests start a kubelet and containers, and are for a Linux machine that may be thrown "
    f"away: as root, `apt-get install --no-install-recommends {PACKAGES}`, and have a `kubelet` "
    f"beside the control plane's programs (in the folder of {binaries.VARIABLE}, or on PATH; "
    "`python -m tests.cluster.binaries` builds it where Go is installed)"
)


class MissingParts(Exception):
    """Something is not there; the message says what, and how to get it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The paths of the programs, and the release of Debian that images are made of."""

    kubelet: Path
    containerd: Path
    ctr: Path
    buildah: Path
    debootstrap: Path
    ip: Path
    release: str


def find(environ: Mapping[str, str] = os.environ) -> Parts:
    """All of them.

    Raises:
        MissingParts: One is not here.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise MissingParts(f"this is no Linux, or nobody is root; {HOW}")
    python = "{}.{}".format(*sys.version_info)
    if python not in DEBIAN:
        known = " or ".join(DEBIAN)
        raise MissingParts(f"no Debian has Python {python}: run the tests with {known}; {HOW}")
    path = f"{environ.get('PATH', os.defpath)}:{ALSO}"
    places = f"{environ.get(binaries.VARIABLE, '')}:{path}:{binaries.built(environ)}"
    names = ("containerd", "ctr", "buildah", "debootstrap", "ip")
    found = {"kubelet": shutil.which("kubelet", path=places)}
    found |= {name: shutil.which(name, path=path) for name in (*names, "runc")}
    found["CNI plugins"] = str(PLUGINS) if (PLUGINS / "bridge").exists() else None
    if lacking := [name for name, where in found.items() if where is None]:
        raise MissingParts(f"there is no {', no '.join(lacking)} here; {HOW}")
    programs = {name: Path(found[name] or "") for name in ("kubelet", *names)}
    return Parts(**programs, release=DEBIAN[python])
