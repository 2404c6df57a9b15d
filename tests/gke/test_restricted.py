"""Run jobs in a namespace that enforces the Pod Security Standard ``restricted``."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from kinetic import accelerators, aio, errors
from kinetic.aio.images import recipe
from kinetic.aio.kubernetes.manifests import Placement, job_manifest
from kinetic.aio.ports import Image, JobSpec, Resources
from tests.cluster.fixtures import Namespace, on_cluster
from tests.cluster.rest import Refused
from tests.kubernetes.orders import order

DEADLINE_S = 120.0
FUSE = {"uri": "gs://b/x", "is_dir": True, "fuse": True, "mount": "/mounted"}
VOLUME = {"uri": "data/1/manifest", "is_dir": True, "fuse": False, "mount": "/data"}


@pytest.fixture
def restricted(configured: Namespace) -> Namespace:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    path = f"/api/v1/namespaces/{configured.name}"
    configured.admin.call("PATCH", path, {"metadata": {"labels": labels}})
    while not _refuses_pods(configured):  # the API server reads the label a little later
        time.sleep(0.05)
    return configured


def _refuses_pods(namespace: Namespace) -> bool:
    spec = {"containers": [{"name": "main", "image": "r.io/root:1"}]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root"}, "spec": spec}
    try:
        namespace.call("POST", "pods", body, dryRun="All")
    except Refused:
        return True
    return False


@on_cluster
def add(a: int, b: int) -> int:
    return a + b


def pod(spec: JobSpec, at: Placement) -> dict[str, Any]:
    manifest = job_manifest(spec, at)["spec"]["template"]
    return {"apiVersion": "v1", "kind": "Pod", **manifest, "metadata": {"name": "one"}}


@pytest.mark.parametrize("accelerator", ["cpu", "gpu-l4", "tpu-v6e-8"])
def test_the_pod_of_an_image_that_kinetic_builds_is_accepted(
    restricted: Namespace, accelerator: str
) -> None:
    built = Image(uri="r.io/base:1", command=("python3",), user=recipe.USER)
    resources = Resources(accelerator=accelerators.parse(accelerator))
    spec = order(image=built, data=[FUSE, VOLUME], resources=resources)
    at = Placement(namespace=restricted.name, secret="s")
    restricted.call("POST", "pods", pod(spec, at), dryRun="All")
    with pytest.raises(Refused, match="runAsNonRoot"):
        restricted.call("POST", "pods", pod(spec, replace(at, run_as_user=0)), dryRun="All")


async def test_a_users_own_image_runs_as_the_configured_user(
    restricted: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_RUN_AS_USER", "1000")
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        assert await client.run(add, 1, 2) == 3


async def test_a_users_own_image_that_is_refused_fails_and_names_the_setting(
    restricted: Namespace, client: aio.Client
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(errors.JobError, match="KINETIC_RUN_AS_USER"):
            await client.run(add, 1, 2)
