"""A fake API server's jobs, pods, and logs, with faults in watches and logs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from datetime import datetime, tzinfo
from typing import Any

from aiohttp import web

from kinetic.aio.kubernetes.manifests import Placement, job_manifest
from tests.kubernetes.faults import cut
from tests.kubernetes.orders import order

Json = dict[str, Any]
AT = Placement(namespace="ns", secret="grp-1")


class World:
    """Serve jobs, pods, and logs. Each of ``faults`` affects one of the next watches of a kind.

    They are ``eof``, ``cut``, ``silent``, ``gone`` (410), ``expired`` (410 as an event),
    ``error`` (500 as an event), ``unauthorized`` (401 as an event: the token ran out),
    ``stranger`` (401), ``broken`` (503), ``busy`` (429 for an hour), ``garbage``, ``bookmark``,
    ``twice`` (each event twice), and ``old`` (all events again).

    ``log`` has the lines of every pod, each with its time. A log fault is ``broken`` (500), or
    cuts or ends the connection after a number of lines. With ``kubelet_note``, a request that
    follows a log ends at once with these bytes, as from a kubelet that can't follow it.
    """

    def __init__(self) -> None:
        self.version = 100
        self.forgotten = 0
        self.objects: dict[str, dict[str, Json]] = {"jobs": {}, "pods": {}}
        self.faults: dict[str, deque[str]] = {"jobs": deque(), "pods": deque()}
        self.counts: Counter[str] = Counter()
        self.log: list[tuple[str, bytes]] = []
        self.time_zone: tzinfo | None = None
        self.log_faults: deque[tuple[str, int]] = deque()
        self.log_queries: list[dict[str, str]] = []
        self.kubelet_note = b""
        self.since: dict[str, list[int]] = {"jobs": [], "pods": []}
        self._history: list[tuple[int, str, str, Json]] = []
        self._news = asyncio.Event()

    # --- changes ---

    def put(self, kind: str, document: Json) -> Json:
        """Create or update an object."""
        self.version += 1
        name = document["metadata"]["name"]
        event = "MODIFIED" if name in self.objects[kind] else "ADDED"
        metadata = {**document["metadata"], "resourceVersion": str(self.version)}
        stored = {**document, "metadata": metadata}
        self.objects[kind][name] = stored
        self._record(kind, event, stored)
        return stored

    def drop(self, kind: str, name: str) -> None:
        """Delete an object."""
        self.version += 1
        stored = self.objects[kind].pop(name)
        metadata = {**stored["metadata"], "resourceVersion": str(self.version)}
        self._record(kind, "DELETED", {**stored, "metadata": metadata})

    def forget(self) -> None:
        """Forget all earlier versions, so that no watch can resume from them."""
        self.forgotten = self.version

    def _record(self, kind: str, event: str, document: Json) -> None:
        self._history.append((self.version, kind, event, document))
        self._news.set()
        self._news = asyncio.Event()

    def job(self, number: int, life: int = 1, **status: Any) -> Json:
        """Put a Job; the same number with another *life* is another Job with the same name."""
        manifest = job_manifest(order(name=f"job-{number}", labels={"n": str(number)}), AT)
        metadata = {**manifest["metadata"], "uid": f"job-{number}/{life}"}
        metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"
        return self.put("jobs", {**manifest, "metadata": metadata, "status": status})

    def pod(self, number: int, state: Json | None = None, life: int = 1, **status: Any) -> Json:
        """Put the pod of that Job with its container in *state*."""
        spec = order(name=f"job-{number}", labels={"n": str(number)})
        template = job_manifest(spec, AT)["spec"]["template"]
        owner = {"kind": "Job", "name": f"job-{number}", "uid": f"job-{number}/{life}"}
        metadata = {
            **template["metadata"],
            "name": f"job-{number}-0-{life}",
            "uid": f"pod-{number}/{life}",
            "creationTimestamp": "2026-01-01T00:00:01Z",
            "ownerReferences": [{**owner, "controller": True}],
        }
        containers = [{"name": "kinetic", "state": state or {}}]
        status = {"phase": "Running", "containerStatuses": containers, **status}
        pod_spec = {**template["spec"], "nodeName": "node"}
        return self.put("pods", {"metadata": metadata, "spec": pod_spec, "status": status})

    def run(self, number: int, life: int = 1) -> None:
        """Put a Job and its running pod."""
        self.job(number, life)
        self.pod(number, {"running": {"startedAt": "2026-01-01T00:00:02Z"}}, life)

    def end(self, number: int, life: int = 1) -> None:
        """Let the Job and its pod succeed."""
        terminated = {"exitCode": 0, "startedAt": "2026-01-01T00:00:02Z"}
        self.pod(number, {"terminated": terminated}, life, phase="Succeeded")
        self.job(number, life, conditions=[{"type": "Complete", "status": "True"}])

    def remove(self, number: int) -> None:
        """Delete the Job and its pods."""
        self.drop("jobs", f"job-{number}")
        for name in [name for name in self.objects["pods"] if name.startswith(f"job-{number}-")]:
            self.drop("pods", name)

    def write(self, second: str, *lines: bytes) -> None:
        """Add lines to the log, all with the time ``HH:MM:SS.fraction``."""
        self.log += [(f"2026-01-01T{second}Z", line) for line in lines]
        self._news.set()
        self._news = asyncio.Event()

    # --- answers ---

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a list or a watch."""
        kind = request.path.rpartition("/")[2]
        if kind == "log":
            return await self._log(request)
        if kind not in self.objects:
            return web.json_response({"items": []})
        if "watch" not in request.query:
            self.counts[f"list {kind}"] += 1
            metadata = {"resourceVersion": str(self.version)}
            items = [*self.objects[kind].values()]
            return web.json_response({"metadata": metadata, "items": items})
        self.counts[f"watch {kind}"] += 1
        since = int(request.query["resourceVersion"])
        self.since[kind].append(since)
        fault = self.faults[kind].popleft() if self.faults[kind] else ""
        if fault == "gone" or since < self.forgotten:
            return web.json_response({"code": 410, "reason": "Expired"}, status=410)
        if fault in ("broken", "stranger"):
            code = {"broken": 503, "stranger": 401}[fault]
            return web.json_response({"code": code}, status=code)
        if fault == "busy":
            return web.json_response({"code": 429}, status=429, headers={"Retry-After": "3600"})
        return await self._stream(request, kind, since, fault)

    async def _log(self, request: web.BaseRequest) -> web.StreamResponse:
        query = dict(request.query)
        self.log_queries.append(query)
        fault, after = self.log_faults.popleft() if self.log_faults else ("", -1)
        if fault == "broken":
            return web.json_response({"code": 500}, status=500)
        response = web.StreamResponse()
        await response.prepare(request)
        at = 0
        if "tailLines" in query:
            at = max(0, len(self.log) - int(query["tailLines"]))
        while True:
            news = self._news
            while at < len(self.log) and after != 0:
                moment, line = self.log[at]
                at += 1
                if moment >= query.get("sinceTime", "").removesuffix("Z"):
                    await response.write(self._stamp(moment) + b" " + line + b"\n")
                    after -= 1
            if after == 0 and fault == "cut":
                await asyncio.sleep(0.01)  # lets the client receive what was written
                return cut(request)
            if "follow" in query and self.kubelet_note:
                await response.write(self.kubelet_note)
                return response
            if after == 0 or "follow" not in query or self.ended:
                return response
            await news.wait()

    def _stamp(self, moment: str) -> bytes:
        """Return a line's time as the node's container runtime writes it."""
        if self.time_zone is None:
            return moment.encode()
        local = datetime.fromisoformat(f"{moment[:19]}Z").astimezone(self.time_zone).isoformat()
        return f"{local[:19]}{moment[19:-1]}{local[19:]}".encode()

    @property
    def ended(self) -> bool:
        """Whether every pod has succeeded."""
        pods = self.objects["pods"].values()
        return all(pod["status"]["phase"] == "Succeeded" for pod in pods)

    async def _stream(
        self, request: web.BaseRequest, kind: str, since: int, fault: str
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if fault == "old":
            since = 0
        while True:
            news = self._news
            for version, changed_kind, event, document in [*self._history]:
                if changed_kind == kind and version > since and fault != "silent":
                    await _write(response, event, document)
                    if fault == "twice":
                        await _write(response, event, document)
                    since = version
            match fault:
                case "eof":
                    return response
                case "cut":
                    await response.write(b'{"type": "ADDED", "obj')
                    return cut(request)
                case "garbage":
                    await response.write(b"<html>502</html>\n")
                case "expired" | "error" | "unauthorized":
                    code = {"expired": 410, "error": 500, "unauthorized": 401}[fault]
                    await _write(response, "ERROR", {"kind": "Status", "code": code})
                    return response
                case "bookmark":
                    self.version += 1
                    bookmark = {"metadata": {"resourceVersion": str(self.version)}}
                    await _write(response, "BOOKMARK", bookmark)
                    return response
            fault = "silent" if fault == "silent" else ""
            await news.wait()


async def _write(response: web.StreamResponse, event: str, document: Json) -> None:
    await response.write(json.dumps({"type": event, "object": document}).encode() + b"\n")
