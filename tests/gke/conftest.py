"""A client's environment that leads to the cluster of the tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from tests.cluster.fixtures import (
    Namespace,
    bucket,
    control_plane,
    gcs_server,
    groups,
    kubelet,
    namespace,
    nodes,
)

__all__ = ["bucket", "control_plane", "gcs_server", "groups", "kubelet", "namespace", "nodes"]

IMAGE = "example.test/image:1"
"""Any name will do: the processes run in the interpreter of the tests."""

GRANTED_S = 60.0


@pytest.fixture
def configured(
    namespace: Namespace,
    bucket: str,
    gcs_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Namespace:
    """The namespace, with the variables by which users name cluster and bucket."""
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    monkeypatch.setenv("KINETIC_KUBE_CONTEXT", "admin")
    monkeypatch.setenv("KINETIC_NAMESPACE", namespace.name)
    monkeypatch.setenv("KINETIC_STORE", f"gs://{bucket}")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server)
    namespace.kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs_server)
    # Else each job would unpack all there is here.
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(Path(__file__).parent))
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return namespace


def await_granted(namespace: Namespace, role: dict[str, Any], user: str) -> None:
    """Return once the API server knows that *user* has *role*: it learns of it a moment later."""
    until = time.monotonic() + GRANTED_S
    while not all(_may(namespace, rule, user) for rule in role["rules"]):
        assert time.monotonic() < until, f"{user} has no rights after {GRANTED_S:g} s"
        time.sleep(0.02)


def _may(namespace: Namespace, rule: dict[str, Any], user: str) -> bool:
    """Whether *user* may do the first thing that *rule* grants with each of its resources."""
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
    path = f"/apis/{review['apiVersion']}/subjectaccessreviews"
    for resource in rule["resources"]:
        kind, _, below = resource.partition("/")
        about = {"namespace": namespace.name, "group": rule["apiGroups"][0], "resource": kind}
        about |= {"subresource": below, "verb": rule["verbs"][0]}
        body = review | {"spec": {"user": user, "resourceAttributes": about}}
        if not namespace.admin.call("POST", path, body)["status"]["allowed"]:
            return False
    return True


@pytest.fixture
async def client(configured: Namespace) -> AsyncIterator[aio.Client]:
    async with aio.Client() as client:
        yield client
