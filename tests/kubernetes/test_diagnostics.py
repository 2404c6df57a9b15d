"""Ask about waiting jobs: which objects kinetic reads, when, and what it may not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

import pytest

from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.manifests import JOB, Paths
from kinetic.aio.kubernetes.pending import Diagnostics, Patience, PendingMonitor
from kinetic.aio.kubernetes.reflector import Changed, Listed
from kinetic.aio.kubernetes.tables import Entry, Table
from kinetic.aio.kubernetes.trimming import trim
from kinetic.errors import NotFound
from tests.kubernetes.faults import FaultServer, anonymous, answer, status

FORBIDDEN = status(403, "Forbidden", 'User "x" cannot list resource "events"')
EVENT = {"reason": "FailedMount", "message": "no such volume"}
ENTRY = Entry("job-1")


@pytest.fixture
async def api(server: FaultServer) -> AsyncIterator[Api]:
    api = Api(anonymous(server))
    yield api
    await api.aclose()


async def test_a_forbidden_request_is_not_repeated_soon(server: FaultServer, api: Api) -> None:
    diagnostics = Diagnostics(api, Paths("ns"), Patience(rights_s=3600.0))
    server.always = FORBIDDEN
    for _ in range(3):
        assert (await diagnostics.read_facts(ENTRY)).events == []
    assert len(server.seen) == 1


async def test_a_permission_granted_later_is_used(
    server: FaultServer, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    diagnostics = Diagnostics(api, Paths("ns"), Patience(rights_s=0.01))
    server.always = FORBIDDEN
    with caplog.at_level(logging.INFO, logger="absl"):
        for _ in range(3):
            assert (await diagnostics.read_facts(ENTRY)).events == []
            await asyncio.sleep(0.02)  # longer than rights_s, so the next call asks again
    assert caplog.text.count("explains without events") == 1, "the warning appears once"
    server.always = answer({"items": [EVENT]})
    assert (await diagnostics.read_facts(ENTRY)).events == [EVENT]


# --- a cluster in memory ------------------------------------------------------------------

Json = dict[str, Any]
GPU = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
UNPLACED = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
}


def a_node(name: str, labels: Json, *, ready: str = "True", heartbeat: str = "") -> Json:
    ready_condition = {"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {"allocatable": {"cpu": "8"}, "conditions": [ready_condition]},
    }


class Objects:
    """Answer the reads of an `Api` from memory."""

    def __init__(self, **pod: Any) -> None:
        metadata = {"name": "job-1-x", "uid": "p", "labels": {JOB: "job-1"}}
        metadata |= {"ownerReferences": [{"controller": True, "uid": "j", "name": "job-1"}]}
        self.pod: Json = {"metadata": metadata, **pod}
        self.nodes: list[Json] = []
        self.claims: dict[str, Json] = {}
        self.events: list[Json] = []
        self.reads: list[str] = []
        self.table = Table()
        self.table.feed(
            Listed(items=[{"metadata": {"name": "job-1", "uid": "j"}}], version="1"), pods=False
        )
        self.table.feed(Listed(items=[trim(self.pod)], version="1"), pods=True)

    async def call(self, method: str, path: str, *, query: Json | None = None) -> Json:
        self.reads.append(path.rpartition("/")[2])
        field, _, value = str((query or {}).get("fieldSelector")).partition("=")
        if "/persistentvolumeclaims/" in path:
            if (claim := self.claims.get(path.rpartition("/")[2])) is None:
                raise NotFound(f"there is no {path}")
            return claim
        if path.endswith("/nodes"):
            chosen = [
                n for n in self.nodes if field != "metadata.name" or n["metadata"]["name"] == value
            ]
            return {"items": chosen}
        return {"items": [e for e in self.events if e["involvedObject"]["uid"] == value]}

    async def explain(self) -> str:
        """Return the text of the job's diagnosis after one inquiry."""
        [*self.table.news()]
        diagnostics = Diagnostics(cast("Api", self), Paths("ns"), Patience())
        self.table.learn("job-1", await diagnostics.read_facts(self.table.entries["job-1"]))
        [*self.table.news()]
        verdict = self.table.entries["job-1"].verdict
        assert verdict is not None
        return verdict.text


def mounting(claim: str) -> Objects:
    volume = {"name": "store", "persistentVolumeClaim": {"claimName": claim}}
    refusal = {
        **UNPLACED,
        "message": "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
    }
    spec = {"volumes": [volume, {"name": "key", "secret": {}}]}
    return Objects(spec=spec, status={"phase": "Pending", "conditions": [refusal]})


async def test_an_inquiry_reads_the_claims_of_a_pod_and_their_events() -> None:
    cluster = mounting("store")
    cluster.claims["store"] = {
        "metadata": {"name": "store", "uid": "c"},
        "spec": {"storageClassName": "fast"},
        "status": {"phase": "Pending"},
    }
    target = {"kind": "PersistentVolumeClaim", "name": "store", "uid": "c"}
    text = 'storageclass.storage.k8s.io "fast" not found'
    cluster.events = [{"reason": "ProvisioningFailed", "message": text, "involvedObject": target}]
    message = await cluster.explain()
    assert "'store' (StorageClass 'fast') is not bound" in message
    assert text in message


async def test_a_claim_has_its_name_without_permission_to_read_it() -> None:
    assert "'store' is not bound" in await mounting("store").explain()


async def test_an_inquiry_reads_a_node_that_the_list_of_nodes_lacks() -> None:
    cluster = Objects(spec={"nodeName": "n1"}, status={"phase": "Pending"})
    assert "its node n1 does not exist" in await cluster.explain()
    cluster = Objects(spec={"nodeName": "n1"}, status={"phase": "Pending"})
    cluster.nodes = [a_node("n1", {}, ready="Unknown")]
    assert "its node n1 does not answer" in await cluster.explain()


@pytest.mark.looptime
async def test_a_reason_is_read_again_when_the_nodes_change() -> None:
    cluster = Objects(
        spec={"nodeSelector": GPU}, status={"phase": "Pending", "conditions": [UNPLACED]}
    )
    cluster.nodes = [a_node("n1", {}, heartbeat="1")]
    news = asyncio.Event()
    diagnostics = Diagnostics(
        cast("Api", cluster), Paths("ns"), Patience(asked_s=4.0, nodes_s=30.0)
    )
    [*cluster.table.news()]
    monitor = asyncio.create_task(PendingMonitor(cluster.table, diagnostics, news.set).work())

    async def next_message() -> str:
        await news.wait()
        news.clear()
        return [seen.message for seen in cluster.table.news()][-1]

    assert "no node has gke-accelerator=nvidia-l4" in await next_message()
    await asyncio.sleep(100)  # the inquiries that are due by the waiting time
    [*cluster.table.news()]
    news.clear()
    cluster.nodes = [a_node("n1", {}, heartbeat="2")]
    cluster.reads.clear()
    await asyncio.sleep(100)
    assert set(cluster.reads) == {"nodes"}, "a heartbeat is no change"
    cluster.nodes = [a_node("n1", {}), a_node("n2", GPU, ready="True")]
    assert "n2 can hold it" in await next_message()
    assert asyncio.get_running_loop().time() < 250, "long before the next inquiry is due"
    monitor.cancel()
    with suppress(asyncio.CancelledError):
        await monitor


async def test_a_list_of_nodes_is_forgotten_when_the_pod_gets_a_node() -> None:
    """The node may be newer than the list, and is not lost then."""
    cluster = Objects(
        spec={"nodeSelector": GPU}, status={"phase": "Pending", "conditions": [UNPLACED]}
    )
    cluster.nodes = [a_node("n1", {})]
    assert "no node has gke-accelerator" in await cluster.explain()
    bound = {**cluster.pod, "spec": {"nodeName": "n2"}, "status": {"phase": "Pending"}}
    cluster.table.feed(Changed(document=trim(bound), deleted=False), pods=True)
    (seen,) = cluster.table.news()
    assert "being created" in seen.message
