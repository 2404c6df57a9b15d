"""A namespace set up with nothing but the guide's manifest runs jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinetic import aio
from tests.cluster.fixtures import Namespace, on_cluster
from tests.cluster.rights import await_granted

MANIFEST = Path(__file__).parents[2] / "kinetic/doctor/namespace.yaml"
COLLECTIONS = {
    "ServiceAccount": "serviceaccounts",
    "Role": "rbac.authorization.k8s.io/v1/roles",
    "RoleBinding": "rbac.authorization.k8s.io/v1/rolebindings",
}


@on_cluster
def double(x: int) -> int:
    print("doubling", x)
    return 2 * x


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


async def test_jobs_run_in_a_namespace_set_up_with_the_manifest(
    configured: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submitter has the permissions that the manifest grants, and no others."""
    monkeypatch.setenv("KINETIC_KUBE_CONTEXT", "dev")
    configured.call("DELETE", "serviceaccounts/kinetic")  # created for all other tests
    *others, binding = documents()
    subject = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "dev"}
    for document in (*others, {**binding, "subjects": [subject]}):
        configured.call("POST", COLLECTIONS[document["kind"]], document)
    role = next(x for x in others if x["metadata"]["name"] == "kinetic" and "rules" in x)
    granted = {"rules": [rule for rule in role["rules"] if rule["apiGroups"] == ["batch"]]}
    await asyncio.to_thread(await_granted, configured, granted, "dev")
    async with asyncio.timeout(120), aio.Client() as client:
        job = await client.submit(double, 4)
        assert [line async for line in job.logs(follow=True)] == ["doubling 4"]
        assert await job == 8
        batch = await client.run_async_map(double, range(3), progress=False)
        assert await batch.results() == [0, 2, 4]


@pytest.mark.timeout(120)
async def test_a_client_that_attaches_sees_at_once_why_a_job_waits(configured: Namespace) -> None:
    """Only the Job's events say that Kubernetes can't create its pod."""
    configured.call("DELETE", "serviceaccounts/kinetic")
    async with asyncio.timeout(90), aio.Client() as client:
        job = await client.submit(double, 4)
        while not configured.call("GET", "events")["items"]:  # Kubernetes tries and reports it
            await asyncio.sleep(0.1)
        async with aio.Client() as other:
            same = await other.attach(job.job_id)
            assert "KINETIC_SERVICE_ACCOUNT" in await same.reason()
        await job.cancel()
