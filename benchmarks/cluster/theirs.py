"""keras-kinetic, the public package, unchanged, in a separate virtualenv and process.

It asks for ``gcloud`` and for a plug-in of GKE's on PATH: programs that do nothing replace them.
Its own settings and variables lead it to the servers of a `Corner`; a container image is named, so
that none is built; its pods run its own runner in its own virtualenv.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster.place import CLUSTER, ZONE, Corner, Place

__all__ = ["PACKAGE", "Peer", "installed"]

PACKAGE = "keras-kinetic==0.0.4"
IMAGE = "example.test/theirs:1"
DRIVER = Path(__file__).parent / "theirs_driver.py"
INSTALL_S, LIMIT_S = 1800.0, 1800.0


def installed(python: str | None) -> Path | None:
    """The interpreter of a virtualenv with `PACKAGE`: *python*, or one that is kept in the cache.

    None when the package index does not give it; why is on standard error.
    """
    if python:
        return Path(python)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kinetic-benchmarks" / PACKAGE.replace("==", "-")
    if not (folder / "complete").exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            command: list[str | Path] = [folder / "bin" / "pip", "install", "-q", PACKAGE]
            subprocess.run(command, check=True, timeout=INSTALL_S)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{PACKAGE} cannot be installed: {error}", file=sys.stderr)
            return None
        (folder / "complete").touch()
    return folder / "bin" / "python"


def _signing_key(path: Path) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(key)
    return path


class Peer:
    """Runs jobs with the package that *python* has."""

    def __init__(self, place: Place, python: Path, folder: Path) -> None:
        self._python = python
        self._key = _signing_key(folder / "key.pem")
        self._programs = folder / "programs"
        self._programs.mkdir()
        for name in ("gcloud", "gke-gcloud-auth-plugin"):
            (self._programs / name).write_text("#!/bin/sh\nexit 0\n")
            (self._programs / name).chmod(0o755)
        find = "import kinetic.runner, pathlib; print(*kinetic.runner.__path__)"
        said = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
        assert place.kubelet is not None, "the peer runs in pods that are processes"
        place.kubelet.set_image("/theirs:", python=python, runner=Path(said.stdout.strip()))

    def run(self, what: str, jobs: int, corner: Corner) -> Any:
        """Run `theirs_driver` with *what*, and return its answer.

        Raises:
            RuntimeError: It failed; with the end of its output.
        """
        given = [what, str(jobs), corner.name, ZONE, CLUSTER, corner.name, IMAGE, str(self._key)]
        with tempfile.TemporaryFile() as errors:
            done = subprocess.run(
                [self._python, DRIVER, *given],
                env=self._environment(corner),
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=LIMIT_S,
            )
            if done.returncode:
                errors.seek(0)
                raise RuntimeError(errors.read()[-4000:].decode(errors="replace"))
        return json.loads(done.stdout.splitlines()[-1])

    def _environment(self, corner: Corner) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(corner.kubeconfig),
            "STORAGE_EMULATOR_HOST": corner.gcs,
            # Beside what the function says: the record of a batch goes where these lead.
            "KINETIC_PROJECT": corner.name,
            "KINETIC_ZONE": ZONE,
            "KINETIC_CLUSTER": CLUSTER,
            "KINETIC_NAMESPACE": corner.name,
        }
