"""Where the control plane's programs are: named, installed, or built here with Go.

``python -m tests.cluster.binaries`` builds them if need be, and prints their folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "KUBEBUILDER_ASSETS"
NAMES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
BUILT = (*NAMES, "kubelet")
"""The kubelet is for tests/node alone."""

SOURCE = Path(__file__).parent / "hyperkube"
MISSING = (
    f"there is no Kubernetes here: let {VARIABLE} name a folder with {', '.join(NAMES)}, have them "
    "on PATH, or install Go, of the version in tests/cluster/hyperkube/go.mod or newer, and build "
    "them once: `python -m tests.cluster.binaries` (5 minutes, 3.5 GB of Go's cache)"
)


class MissingBinaries(Exception):
    """They are not there; the message says how to get them."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """The paths of the four programs."""

    etcd: Path
    apiserver: Path
    manager: Path
    scheduler: Path


def find(environ: Mapping[str, str] = os.environ) -> Binaries:
    """The first place that has all four: `VARIABLE`, PATH, what was built here before.

    Raises:
        MissingBinaries: No place has.
    """
    for path in (environ.get(VARIABLE, ""), environ.get("PATH", os.defpath), str(built(environ))):
        found = [shutil.which(name, path=path) for name in NAMES] if path else [None]
        if None not in found:
            return Binaries(*(Path(one) for one in found if one))
    raise MissingBinaries(MISSING)


def built(environ: Mapping[str, str]) -> Path:
    """Where what is built from the sources as they are now is kept."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    version = next(
        line.split()[-1]
        for line in (SOURCE / "go.mod").read_text().splitlines()
        if line.strip().startswith("k8s.io/kubernetes v")
    )
    return Path(cache) / "kinetic-tests" / f"kubernetes-{version}"


def build(environ: Mapping[str, str] = os.environ) -> Binaries:
    """Find them, or build them with Go. Minutes, the first time.

    Raises:
        MissingBinaries: There is no Go, or it cannot build them.
    """
    try:
        return find(environ)
    except MissingBinaries:
        go = shutil.which("go")
        if go is None:
            raise
    folder = built(environ)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the second who builds finds them
        if not (folder / "hyperkube").exists():
            compile_with(go, folder, environ)
        for name in BUILT:
            if not (folder / name).is_symlink():
                (folder / name).symlink_to("hyperkube")
    return find(environ)


def compile_with(go: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Build the one program that is all of them.

    Raises:
        MissingBinaries: Go cannot; it has said why.
    """
    part = folder / "hyperkube.part"
    command = [go, "build", "-trimpath", "-ldflags", linked(folder.name), "-o", part, "."]
    done = subprocess.run(command, cwd=SOURCE, env={**environ, "CGO_ENABLED": "0"}, check=False)
    if done.returncode:
        raise MissingBinaries(f"`go build` in {SOURCE} ended with {done.returncode}. {MISSING}")
    part.rename(folder / "hyperkube")


def linked(name: str) -> str:
    """What the linker is told: Kubernetes does not know its version otherwise."""
    version = name.removeprefix("kubernetes-")
    major, minor, _ = version.removeprefix("v").split(".", 2)
    known = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    known["buildDate"] = "1970-01-01T00:00:00Z"
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    flags = [f"-X {one}.{key}={value}" for one in packages for key, value in known.items()]
    return " ".join(["-s", "-w", *flags])


if __name__ == "__main__":
    try:
        print(build().apiserver.parent)
    except MissingBinaries as missing:
        sys.exit(str(missing))
