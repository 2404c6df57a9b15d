"""A node as the API server sees it: registered, renewed, and told of its pods."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.cluster.agent.container import clock
from tests.cluster.agent.pod import RETRY_S, UNREACHABLE
from tests.cluster.rest import STRATEGIC, Refused

if TYPE_CHECKING:
    from tests.cluster.agent.kubelet import Kubelet

Json = dict[str, Any]

RENEW_S = 8.0
LEASE_S = 40
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
VERSION = "v1.35.4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a node has. *memory* in the words of Kubernetes, *tpu* and *gpu* in chips."""

    name: str
    cpu: int = 16
    memory: str = "64Gi"
    pods: int = 500
    tpu: int = 0
    gpu: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    taints: list[Json] = field(default_factory=list)

    def capacity(self) -> dict[str, str]:
        """Its resources, by their names in Kubernetes."""
        found = {"cpu": str(self.cpu), "memory": self.memory, "pods": str(self.pods)}
        found |= {"google.com/tpu": str(self.tpu)} if self.tpu else {}
        found |= {"nvidia.com/gpu": str(self.gpu)} if self.gpu else {}
        return found | {"ephemeral-storage": "100Gi"}


class Node:
    """Runs until it is cancelled; its pods are the kubelet's business."""

    def __init__(self, kubelet: Kubelet, machine: Machine) -> None:
        self.machine = machine
        self.name = machine.name
        self.ready = asyncio.Event()
        self._mine = {
            "fieldSelector": f"spec.nodeName={machine.name}",
            "allowWatchBookmarks": "true",
        }
        self._kubelet = kubelet

    async def run(self) -> None:
        """Register it, then renew and watch."""
        await self._until(self._register)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew(), name=f"lease of {self.name}")
            group.create_task(self._watch(), name=f"pods of {self.name}")

    async def _until(self, step: Any) -> None:
        while True:
            with contextlib.suppress(Refused, *UNREACHABLE):
                await step()
                return
            await asyncio.sleep(RETRY_S)

    async def _register(self) -> None:
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
        }
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels | self.machine.labels},
            "spec": {"taints": self.machine.taints},
        }
        try:
            await self._kubelet.session.call("POST", "/api/v1/nodes", body)
        except Refused as refusal:
            if refusal.code != 409:
                raise
        await self._renew_once()
        path = f"/api/v1/nodes/{self.name}/status"
        await self._kubelet.session.call("PATCH", path, {"status": self._status()}, STRATEGIC)

    def _status(self) -> Json:
        now = clock()
        conditions = [
            {"type": kind, "status": "False", "reason": f"KubeletHas{what}", "message": "fine"}
            for kind, what in (
                ("MemoryPressure", "SufficientMemory"),
                ("DiskPressure", "NoDiskPressure"),
                ("PIDPressure", "SufficientPID"),
            )
        ]
        conditions.append(
            {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "fine"}
        )
        for one in conditions:
            one |= {"lastHeartbeatTime": now, "lastTransitionTime": now}
        return {
            "capacity": self.machine.capacity(),
            "allocatable": self.machine.capacity(),
            "conditions": conditions,
            "addresses": [
                {"type": "Hostname", "address": self.name},
                {"type": "InternalIP", "address": "127.0.0.1"},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._kubelet.port}},
            "nodeInfo": {
                "machineID": self.name, "systemUUID": self.name, "bootID": self.name,
                "kernelVersion": "6.0", "osImage": "processes", "operatingSystem": "linux",
                "architecture": "amd64", "containerRuntimeVersion": "containerd://2.0.0",
                "kubeletVersion": VERSION, "kubeProxyVersion": "",
            },
        }  # fmt: skip

    async def _renew_once(self) -> None:
        now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": LEASE_S, "renewTime": now}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": "kube-node-lease"},
            "spec": spec,
        }
        try:
            await self._kubelet.session.call("PATCH", f"{LEASES}/{self.name}", {"spec": spec})
        except Refused as refusal:
            if refusal.code != 404:
                raise
            await self._kubelet.session.call("POST", LEASES, lease)

    async def _renew(self) -> None:
        while True:
            await self._until(self._renew_once)
            await asyncio.sleep(RENEW_S)

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(Refused, *UNREACHABLE):
                listed = await self._kubelet.session.call("GET", "/api/v1/pods", **self._mine)
                self._kubelet.listed(self.name, listed["items"])
                self.ready.set()
                await self._follow(listed["metadata"]["resourceVersion"])
            await asyncio.sleep(RETRY_S)

    async def _follow(self, since: str) -> None:
        """Go on where the server has ended the watch, until it says that is too long ago."""
        while True:
            events = self._kubelet.session.watch("/api/v1/pods", since, **self._mine)
            async for event in events:
                since = event["object"]["metadata"]["resourceVersion"]
                self._kubelet.changed(event["type"], event["object"])
            await asyncio.sleep(RETRY_S / 10)
