"""Clients of the Kubernetes platform in a test's namespace, and jobs that a test controls."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic.aio.kubernetes.access import open_context
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.manifests import Placement
from kinetic.aio.kubernetes.pathways import PathwaysCluster
from kinetic.aio.kubernetes.pending import Patience
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.kubernetes.request import Request
from kinetic.aio.ports import Cluster, Image, JobSpec, Resources
from tests.cluster.fixtures import Namespace
from tests.jobs import DEADLINE_S, job_spec
from tests.orders import order_of

IMAGE = "example.org/python:1"
IMPATIENT = Patience(asked_s=0.5, slow_s=2.0, report_s=1.0, hopeless_s=1.0, least_s=0.5)
LENIENT = replace(IMPATIENT, least_s=30.0)
"""The patience of a client that gives every job 30 s to start, whatever its start_timeout."""

PROGRAM = """
import json, os, sys, signal
whole = json.loads(os.environ["KINETIC_ORDER"])
order = json.loads(whole["client"]["facts"])
order["attempt"] = whole["attempt"]
for name in ("FAILURES", "DISRUPTIONS"):
    order["attempt"] += int(os.environ.get("KINETIC_" + name) or 0)
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
print(*order["lines"], sep="\\n", flush=True)
if order["gate"]:
    os.open(order["gate"], os.O_RDONLY)
for name in order["shown"]:
    print(os.environ.get(name, "-"), flush=True)
print("attempt", order["attempt"], flush=True)
print(os.environ["KINETIC_POD_UID"], flush=True)
sys.exit(order["code"])
"""
"""What the pods run in place of kinetic's runner."""


class CountingApi(Api):
    """An `Api` that counts its requests by verb and resource."""

    requests: Counter[str]

    async def call(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        """See `Api.call`."""
        right = Request(method=method, path=path, query=more.get("query") or {}).right
        self.requests[f"{right.verb} {right.resource}"] += 1
        return await super().call(method, path, **more)


class Place:
    """The clients of a namespace, and a folder for the gates of its jobs."""

    def __init__(self, namespace: Namespace, folder: Path) -> None:
        self.namespace = namespace
        self.requests: Counter[str] = Counter()
        self._folder = folder
        self._opened: list[Cluster] = []
        self._files: list[int] = []
        (folder / "program.py").write_text(PROGRAM)

    async def open(
        self, patience: Patience = IMPATIENT, rhythm: Rhythm | None = None, **placement: Any
    ) -> GkeCluster:
        """Open a client."""
        at = Placement(namespace=self.namespace.name, **placement)
        cluster = GkeCluster(await self._api(), at, patience=patience, rhythm=rhythm)
        self._opened.append(cluster)
        return cluster

    async def open_groups(
        self, kind: str, namespace: str = "", patience: Patience = IMPATIENT, **placement: Any
    ) -> PathwaysCluster:
        """Open a client for jobs on several hosts."""
        at = Placement(namespace=namespace or self.namespace.name, **placement)
        cluster = PathwaysCluster(await self._api(), at, kind=kind, patience=patience)
        self._opened.append(cluster)
        return cluster

    async def _api(self) -> CountingApi:
        environ = {"KUBECONFIG": str(self.namespace.kubeconfig)}
        api = CountingApi(await open_context("admin", environ))
        api.requests = self.requests
        return api

    def job(
        self,
        name: str,
        *,
        lines: list[str] | None = None,
        gate: str = "",
        code: int = 0,
        **more: Any,
    ) -> JobSpec:
        """Make a job that prints *lines*, waits for *gate*, prints its attempt, and ends."""
        facts: dict[str, Any] = {
            "lines": lines or [],
            "gate": str(self._gate(gate)) if gate else "",
            "code": code,
            "shown": more.pop("shown", []),
        }
        fields = dict[str, Any]()
        labels = {"test": "yes", "name": name}
        if (attempt := more.pop("attempt", None)) is not None:
            fields["attempt"] = attempt
            labels["kinetic.dev/attempt"] = str(attempt)
        if (group := more.pop("group", None)) is not None:
            fields["group_id"] = group
            labels["kinetic.dev/submission"] = group
        image = Image(uri=IMAGE, command=(sys.executable, str(self._folder / "program.py")))
        defaults: dict[str, Any] = {
            "labels": labels,
            "image": image,
            "order": order_of(facts, **fields),
            "resources": Resources(cpu=0.1),
            "grace": 2.0,
        }
        return job_spec(name, facts, **defaults | more)

    def _gate(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            os.mkfifo(path)
        return path

    def open_gate(self, gate: str) -> None:
        """Let the jobs that wait for *gate* continue."""
        self._files.append(os.open(self._folder / gate, os.O_RDWR | os.O_NONBLOCK))

    async def call(self, method: str, path: str, body: Any = None, **query: str) -> dict[str, Any]:
        """Send a request to the namespace without a client."""
        return await asyncio.to_thread(self.namespace.call, method, path, body, **query)

    async def items(self, path: str) -> list[dict[str, Any]]:
        """Return the objects of a collection."""
        found: list[dict[str, Any]] = (await self.call("GET", path))["items"]
        return found

    async def aclose(self) -> None:
        """Close all clients and gates."""
        for cluster in self._opened:
            await cluster.aclose()
        for fd in self._files:
            os.close(fd)


async def explained(cluster: Cluster, name: str, text: str) -> None:
    """Wait until the message of a waiting job contains *text*. No watch runs that could end it."""
    async with asyncio.timeout(DEADLINE_S):
        while not any(text in seen.message for seen in await cluster.find(names=[name])):
            await asyncio.sleep(0.05)
