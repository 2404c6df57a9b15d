"""A cluster that has one kind of sets only: the client of the other kind works with those."""

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
from kinetic.aio.kubernetes.sets import KINDS, LIFE
from kinetic.aio.ports import Phase, Resources
from kinetic.errors import LaunchError, NotFound
from kinetic.job_status import Reason
from tests.kubernetes.faults import FaultServer, anonymous, answer, status, stream
from tests.kubernetes.orders import order
from tests.kubernetes.places import watching

SPEC = order(resources=Resources(accelerator=parse("cpu:hosts=2")))
AT = Placement(namespace="ns", secret="s", annotations={LIFE: "a"})
OTHER = {"lws": "jobset", "jobset": "lws"}


def the_set(kind: str, at: Placement = AT) -> dict[str, Any]:
    """What the cluster has of SPEC."""
    manifest = KINDS[kind].manifest(SPEC, at)
    own = {"uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "1"}
    return {**manifest, "metadata": {**manifest["metadata"], **own}, "status": {}}


class Sets:
    """What is answered by a server that has the sets of these *kinds*, and no pods."""

    def __init__(self, *kinds: str) -> None:
        self.there = {KINDS[kind].collection: the_set(kind) for kind in kinds}

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        collection = request.path.split("/")[6 if request.path.startswith("/apis") else 5]
        if request.method != "GET":
            gone = collection not in self.there and request.path.startswith("/apis")
            return await (status(404, "NotFound") if gone else answer({}))(request)
        if collection != "pods" and collection not in self.there:
            return await answer("404 page not found\n", 404)(request)
        if "watch" in request.query:
            return await stream(then="silent")(request)
        items = [self.there[collection]] if collection in self.there else []
        return await answer({"items": items, "metadata": {"resourceVersion": "1"}})(request)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def cluster(server: FaultServer, kind: str) -> AsyncIterator[PathwaysCluster]:
    """A client of this kind, of a cluster that has only the other."""
    server.always = Sets(OTHER[kind])
    rhythm = Rhythm(longest_pause_s=0.02, longest_retry_after_s=0.02)
    made = PathwaysCluster(Api(anonymous(server)), AT, kind=kind, rhythm=rhythm)
    yield made
    await made.aclose()


async def test_all_that_carry_labels_are_deleted(
    server: FaultServer, cluster: PathwaysCluster, kind: str
) -> None:
    await cluster.delete(labels=SPEC.labels)
    other = KINDS[OTHER[kind]]
    assert f"DELETE /apis/{other.api}/namespaces/ns/{other.collection}" in server.paths


async def test_a_watch_tells_of_the_kind_there_is(cluster: PathwaysCluster) -> None:
    async with asyncio.timeout(60), watching(cluster, SPEC.labels) as watch:
        seen = await anext(watch)
        assert (seen.name, seen.phase) == (SPEC.name, Phase.PENDING)
    assert [one.name for one in await cluster.find(labels=SPEC.labels)] == [SPEC.name]


async def test_who_submits_is_told_what_is_missing(cluster: PathwaysCluster, kind: str) -> None:
    with pytest.raises(LaunchError, match=rf"have {KINDS[kind].name} installed"):
        await cluster.launch(SPEC)


class Queued(Sets):
    """A set whose pods Kueue holds, each by itself: they alone tell which Workload is theirs."""

    group = "leaderworkerset-grp-0-4f2a1"

    def __init__(self) -> None:
        super().__init__("lws")
        made = self.there["leaderworkersets"] = the_set("lws", replace(AT, queue="research"))
        template = made["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        labels = {"kueue.x-k8s.io/pod-group-name": self.group, KINDS["lws"].label: "grp"}
        metadata = {**template["metadata"], "name": "grp-0", "uid": "p"}
        metadata["labels"] = {**template["metadata"]["labels"], **labels}
        held = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
        pod = {"metadata": metadata, "spec": {**template["spec"], **held}}
        self.there["pods"] = {**pod, "status": {"phase": "Pending"}}
        message = "insufficient unused quota for cpu in flavor f, 2 more needed"
        waits = {"type": "QuotaReserved", "status": "False", "message": message}
        named = {"metadata": {"name": self.group}, "spec": {"queueName": "research"}}
        self.there["workloads"] = {**named, "status": {"conditions": [waits]}}


async def test_why_a_queue_holds_the_pods_of_a_set_is_asked(server: FaultServer) -> None:
    server.always = Queued()
    impatient = Patience(asked_s=0.1)
    cluster = PathwaysCluster(Api(anonymous(server)), AT, kind="lws", patience=impatient)
    async with aclosing(cluster), asyncio.timeout(60), watching(cluster, SPEC.labels) as watch:
        seen = [await anext(watch), await anext(watch)]
    assert {(one.phase, one.reason) for one in seen} == {(Phase.PENDING, Reason.QUEUED)}
    assert "cpu in flavor f, 2 more needed" in seen[1].message
    (asked,) = (one for one in server.seen if one.path.endswith("/workloads"))
    assert asked.query == {"fieldSelector": f"metadata.name={Queued.group}"}


async def test_it_is_asked_at_once_for_who_wants_an_explanation(server: FaultServer) -> None:
    server.always = Queued()
    cluster = PathwaysCluster(Api(anonymous(server)), AT, kind="lws")
    async with aclosing(cluster), asyncio.timeout(60):
        (plain,) = await cluster.find(names=[SPEC.name])
        (seen,) = await cluster.find(names=[SPEC.name], explained=True)
    assert "cpu in flavor f, 2 more needed" in seen.message
    assert "2 more CPUs" not in plain.message


async def test_a_watch_where_there_are_no_sets_at_all_says_so(
    server: FaultServer, cluster: PathwaysCluster
) -> None:
    server.always = Sets()
    async with asyncio.timeout(60), watching(cluster) as watch:
        with pytest.raises(NotFound):
            await anext(watch)
    await cluster.delete(labels=SPEC.labels)
    assert await cluster.find() == []
