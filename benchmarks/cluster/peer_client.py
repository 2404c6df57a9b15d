"""The contender keras-kinetic: the public package, in its own virtualenv and process.

The package needs ``gcloud`` and a plug-in for GKE on PATH: programs that do nothing replace them.
Its settings and variables name the servers of a `Workspace`. They also name a container image, so
that it builds none. Its pods run its own runner in its own virtualenv.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cluster.servers import CLUSTER, ZONE, Cluster, Workspace

PACKAGE = "keras-kinetic==0.0.4"
IMAGE = "example.test/peer:1"
DRIVER = Path(__file__).parent / "peer_driver.py"
LIMIT_S = 1800.0


def _signing_key(path: Path) -> Path:
    """Write a new private key to the file *path*, and return *path*."""
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
    """Runs jobs with the package in the virtualenv of *python*."""

    def __init__(self, cluster: Cluster, python: Path, folder: Path) -> None:
        self._python = python
        self._key = _signing_key(folder / "key.pem")
        self._programs = folder / "programs"
        self._programs.mkdir()
        for name in ("gcloud", "gke-gcloud-auth-plugin"):
            (self._programs / name).write_text("#!/bin/sh\nexit 0\n")
            (self._programs / name).chmod(0o755)
        program = "import kinetic.runner, pathlib; print(*kinetic.runner.__path__)"
        completed = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, check=True
        )
        assert cluster.kubelet is not None, "the peer runs in pods that are processes"
        cluster.kubelet.set_image("/peer:", python=python, runner=Path(completed.stdout.strip()))

    def run(self, action: str, jobs: int, workspace: Workspace) -> Any:
        """Run *action*, a function of `peer_driver`, and return its answer.

        Raises:
            RuntimeError: The action failed; the message is the end of the error output.
        """
        arguments = [
            action,
            str(jobs),
            workspace.name,
            ZONE,
            CLUSTER,
            workspace.name,
            IMAGE,
            str(self._key),
        ]
        with tempfile.TemporaryFile() as errors:
            completed = subprocess.run(
                [self._python, DRIVER, *arguments],
                env=self._environment(workspace),
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=LIMIT_S,
            )
            if completed.returncode:
                errors.seek(0)
                raise RuntimeError(errors.read()[-4000:].decode(errors="replace"))
        return json.loads(completed.stdout.splitlines()[-1])

    def _environment(self, workspace: Workspace) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(workspace.kubeconfig),
            "STORAGE_EMULATOR_HOST": workspace.gcs,
            # The function's options don't say where the record of a batch goes, but these do.
            "KINETIC_PROJECT": workspace.name,
            "KINETIC_ZONE": ZONE,
            "KINETIC_CLUSTER": CLUSTER,
            "KINETIC_NAMESPACE": workspace.name,
        }
