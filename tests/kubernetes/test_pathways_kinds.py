"""On a cluster with one kind of sets only, a client for the other kind can still manage them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kinetic.accelerators import parse
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.manifests import Placement
from kinetic.aio.kubernetes.pathways import PathwaysCluster
from kinetic.aio.kubernetes.pending import Patience
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.kubernetes.sets import KINDS
from kinetic.aio.ports import Phase, Resources
from kinetic.errors import LaunchError, NotFound
from kinetic.job_status import Reason
from tests.jobs import watching
from tests.kubernetes.faults import FaultServer, anonymous, answer, status, stream
from tests.kubernetes.orders import CREW, order, set_manifest

SPEC = order(resources=Resources(accelerator=parse("cpu:hosts=2")))
AT = Placement(namespace="ns", secret="s")
OTHER = {"lws": "jobset", "jobset": "lws"}


def the_set(kind: str, at: Placement = AT) -> dict[str, Any]:
    """Make the set of SPEC as the cluster stores it."""
    manifest = set_manifest(kind, SPEC, at)
    own = {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "1"}
    return {**manifest, "metadata": {**manifest["metadata"], **own}, "status": {}}


class Sets:
    """Answer like a server that has one set of each of these *kinds*, and no pods."""

    def __init__(self, *kinds: str) -> None:
        self.objects = {KINDS[kind].collection: the_set(kind) for kind in kinds}

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        collection = request.path.split("/")[6 if request.path.startswith("/apis") else 5]
        if request.method != "GET":
            missing = collection not in self.objects and request.path.startswith("/apis")
            return await (status(404, "NotFound") if missing else answer({}))(request)
        group = request.path.split("/")[2]
        if "." in group and collection not in self.objects:
            return await answer("404 page not found\n", 404)(request)
        if "watch" in request.query:
            return await stream(then="silent")(request)
        items = [self.objects[collection]] if collection in self.objects else []
        return await answer({"items": items, "metadata": {"resourceVersion": "1"}})(request)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def cluster(server: FaultServer, kind: str) -> AsyncIterator[PathwaysCluster]:
    """Open a client of this kind on a cluster that has only the other kind."""
    server.always = Sets(OTHER[kind])
    rhythm = Rhythm(longest_pause_s=0.02, longest_retry_after_s=0.02)
    cluster = PathwaysCluster(Api(anonymous(server)), AT, kind=kind, rhythm=rhythm)
    yield cluster
    await cluster.aclose()


async def test_deleting_by_labels_includes_the_other_kind(
    server: FaultServer, cluster: PathwaysCluster, kind: str
) -> None:
    await cluster.delete(labels=SPEC.labels)
    other = KINDS[OTHER[kind]]
    assert f"DELETE /apis/{other.api}/namespaces/ns/{other.collection}" in server.paths


async def test_a_watch_reports_sets_of_the_other_kind(cluster: PathwaysCluster) -> None:
    async with asyncio.timeout(60), watching(cluster, SPEC.labels) as watch:
        seen = await anext(watch)
        assert (seen.name, seen.phase) == (SPEC.name, Phase.PENDING)
    assert [found.name for found in await cluster.find(labels=SPEC.labels)] == [SPEC.name]


async def test_a_launch_fails_and_names_the_missing_kind(
    cluster: PathwaysCluster, kind: str
) -> None:
    with pytest.raises(LaunchError, match=rf"have {KINDS[kind].name} installed"):
        await cluster.launch(replace(SPEC, crew=CREW))


class Queued(Sets):
    """Serve a set whose pods Kueue holds one by one; only the pods name their Workload."""

    group = "leaderworkerset-grp-0-4f2a1"

    def __init__(self) -> None:
        super().__init__("lws")
        queued = self.objects["leaderworkersets"] = the_set("lws", replace(AT, queue="research"))
        template = queued["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        labels = {"kueue.x-k8s.io/pod-group-name": self.group, KINDS["lws"].label: "grp"}
        metadata = {**template["metadata"], "name": "grp-0", "uid": "p"}
        metadata["labels"] = {**template["metadata"]["labels"], **labels}
        held = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
        pod = {"metadata": metadata, "spec": {**template["spec"], **held}}
        self.objects["pods"] = {**pod, "status": {"phase": "Pending"}}
        message = "insufficient unused quota for cpu in flavor f, 2 more needed"
        waits = {"type": "QuotaReserved", "status": "False", "message": message}
        workload = {"metadata": {"name": self.group}, "spec": {"queueName": "research"}}
        self.objects["workloads"] = {**workload, "status": {"conditions": [waits]}}


async def test_a_watch_asks_why_a_queue_holds_the_pods_of_a_set(server: FaultServer) -> None:
    server.always = Queued()
    impatient = Patience(asked_s=0.1)
    cluster = PathwaysCluster(Api(anonymous(server)), AT, kind="lws", patience=impatient)
    async with aclosing(cluster), asyncio.timeout(60), watching(cluster, SPEC.labels) as watch:
        seen = [await anext(watch), await anext(watch)]
    assert {(found.phase, found.reason) for found in seen} == {(Phase.PENDING, Reason.QUEUED)}
    assert "cpu in flavor f, 2 more needed" in seen[1].message
    (request,) = (request for request in server.seen if request.path.endswith("/workloads"))
    assert request.query == {"fieldSelector": f"metadata.name={Queued.group}"}


async def test_find_asks_at_once_when_an_explanation_is_wanted(server: FaultServer) -> None:
    server.always = Queued()
    cluster = PathwaysCluster(Api(anonymous(server)), AT, kind="lws")
    async with aclosing(cluster), asyncio.timeout(60):
        (plain,) = await cluster.find(names=[SPEC.name])
        (seen,) = await cluster.find(names=[SPEC.name], explained=True)
    assert "cpu in flavor f, 2 more needed" in seen.message
    assert "2 more needed" not in plain.message


async def test_a_watch_fails_when_the_cluster_has_neither_kind(
    server: FaultServer, cluster: PathwaysCluster
) -> None:
    server.always = Sets()
    async with asyncio.timeout(60), watching(cluster) as watch:
        with pytest.raises(NotFound):
            await anext(watch)
    await cluster.delete(labels=SPEC.labels)
    assert await cluster.find() == []
