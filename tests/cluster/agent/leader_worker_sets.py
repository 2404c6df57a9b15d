"""A stand-in for the LeaderWorkerSet controller: it makes what that project's documents say.

A StatefulSet of leaders, for each leader one of its workers, a headless Service; the names,
labels and variables of the pods; and the whole group anew when one of its pods starts again.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from typing import Any

from aiohttp import web

from tests.cluster.agent.reflector import create, delete, owner, reflect
from tests.cluster.rest import Refused, Session

Json = dict[str, Any]

SETS = "/apis/leaderworkerset.x-k8s.io/v1"
KEY = "leaderworkerset.sigs.k8s.io"
NAME, GROUP, WORKER = f"{KEY}/name", f"{KEY}/group-index", f"{KEY}/worker-index"
SIZE, LEADER, UNIQUE = f"{KEY}/size", f"{KEY}/leader-name", f"{KEY}/group-key"
RECREATE = "RecreateGroupOnPodRestart"


class LeaderWorkerSets:
    """`sets` and `pods` run until they are cancelled; `complete` is the webhook."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def sets(self) -> None:
        """Make what a set wants; take it away with the set."""
        await reflect(self._session, f"{SETS}/leaderworkersets", self._set)

    async def pods(self) -> None:
        """Follow the pods of all sets."""
        await reflect(self._session, "/api/v1/pods", self._pod, label=NAME)

    async def _set(self, kind: str, found: Json) -> None:
        namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
        stateful = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
        if kind == "DELETED" or "deletionTimestamp" in found["metadata"]:
            # The garbage collector does it, but knows a new kind only half a minute later.
            await delete(self._session, f"{stateful}/{name}")
            return
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "ownerReferences": [owner(found)]},
            "spec": {
                "clusterIP": "None",
                "selector": {NAME: name},
                "publishNotReadyAddresses": True,
            },
        }
        await create(self._session, f"/api/v1/namespaces/{namespace}/services", service)
        template = found["spec"]["leaderWorkerTemplate"]
        pod = template["leaderTemplate"]
        size = str(template["size"])
        leaders = _stateful_set(
            found, name, name, found["spec"]["replicas"], {NAME: name, WORKER: "0"}, pod
        )
        leaders["spec"]["template"]["metadata"].setdefault("annotations", {})[SIZE] = size
        await create(self._session, stateful, leaders)
        wanted = found["spec"]["replicas"]
        there = await self._session.call("GET", f"{stateful}/{name}")
        if there["spec"]["replicas"] != wanted:
            scaled = {"spec": {"replicas": wanted}}
            await self._session.call("PATCH", f"{stateful}/{name}", scaled)

    async def _pod(self, kind: str, pod: Json) -> None:
        metadata = pod["metadata"]
        namespace, labels = metadata["namespace"], metadata["labels"]
        name, group = labels[NAME], labels[GROUP]
        path = f"{SETS}/namespaces/{namespace}/leaderworkersets/{name}"
        try:
            found = await self._session.call("GET", path)
        except Refused as refusal:
            if refusal.code != 404:
                raise
            return  # it goes with its set
        going = kind == "DELETED" or "deletionTimestamp" in metadata
        leader = f"{name}-{group}"
        if labels[WORKER] == "0" and not going:
            await self._workers(found, pod)
        template = found["spec"]["leaderWorkerTemplate"]
        statuses = pod.get("status", {}).get("containerStatuses") or ()
        restarted = any(one["restartCount"] for one in statuses)
        leads = labels[WORKER] == "0"
        if template["restartPolicy"] == RECREATE and (restarted or going) and not (leads and going):
            pods = f"/api/v1/namespaces/{namespace}/pods"
            if leads or await self._same_group(pods, leader, metadata):
                await delete(self._session, f"{pods}/{leader}", "Foreground")
        await self._status(found, path)

    async def _same_group(self, pods: str, leader: str, worker: Json) -> bool:
        """Whether the leader that is there now is the one of this worker."""
        try:
            found = await self._session.call("GET", f"{pods}/{leader}")
        except Refused as refusal:
            if refusal.code != 404:
                raise
            return False
        known = (worker.get("annotations") or {}).get(f"{KEY}/leader-uid")
        return bool(found["metadata"]["uid"] == known)

    async def _workers(self, found: Json, leader: Json) -> None:
        template, metadata = found["spec"]["leaderWorkerTemplate"], leader["metadata"]
        if template["size"] < 2:
            return
        labels = {name: metadata["labels"][name] for name in (NAME, GROUP, UNIQUE)}
        workers = _stateful_set(
            leader | {"apiVersion": "v1", "kind": "Pod"},
            metadata["name"],
            metadata["labels"][NAME],
            template["size"] - 1,
            labels,
            template["workerTemplate"],
        )
        workers["spec"]["ordinals"] = {"start": 1}
        notes = workers["spec"]["template"]["metadata"].setdefault("annotations", {})
        notes |= {SIZE: str(template["size"]), LEADER: metadata["name"]}
        notes[f"{KEY}/leader-uid"] = metadata["uid"]
        path = f"/apis/apps/v1/namespaces/{metadata['namespace']}/statefulsets"
        await create(self._session, path, workers)
        there = await self._session.call("GET", f"{path}/{metadata['name']}")
        (owner,) = there["metadata"]["ownerReferences"]
        if owner["uid"] != metadata["uid"]:
            raise Refused(409, {"message": "the workers of the leader's predecessor still exist"})

    async def _status(self, found: Json, path: str) -> None:
        namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
        pods = await self._session.call(
            "GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"{NAME}={name}"
        )
        ready = sum(
            one["type"] == "Ready" and one["status"] == "True"
            for pod in pods["items"]
            for one in pod.get("status", {}).get("conditions") or ()
        )
        size, wanted = found["spec"]["leaderWorkerTemplate"]["size"], found["spec"]["replicas"]
        leaders = sum(pod["metadata"]["labels"][WORKER] == "0" for pod in pods["items"])
        before = (found.get("status") or {}).get("conditions") or []
        conditions = _conditions(before, available=ready >= size * wanted)
        status = {"replicas": leaders, "readyReplicas": ready // size, "conditions": conditions}
        status["observedGeneration"] = found["metadata"]["generation"]
        if found.get("status") != status:
            await self._session.call("PATCH", f"{path}/status", {"status": status})

    async def complete(self, request: web.Request) -> web.Response:
        """Give a pod that is being created the labels and variables of its place in the group."""
        review = await request.json()
        pod = review["request"]["object"]
        patch = base64.b64encode(json.dumps(_completions(pod)).encode()).decode()
        answer = {"uid": review["request"]["uid"], "allowed": True}
        answer |= {"patchType": "JSONPatch", "patch": patch}
        return web.json_response(
            {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer}
        )


def _stateful_set(
    of: Json, name: str, service: str, replicas: int, labels: Json, pod: Json
) -> Json:
    template = copy.deepcopy(pod)
    metadata = template.setdefault("metadata", {})
    metadata["labels"] = (metadata.get("labels") or {}) | labels
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {
            "name": name,
            "labels": {NAME: labels[NAME]},
            "ownerReferences": [owner(of)],
        },
        "spec": {
            "replicas": replicas,
            "serviceName": service,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": template,
        },
    }


AVAILABLE = ("Available", "AllGroupsReady", "All replicas are ready")
PROGRESSING = ("Progressing", "GroupsProgressing", "Replicas are progressing")


def _conditions(before: list[Json], *, available: bool) -> list[Json]:
    """One of the two is true; the other, once it was, is false."""
    kind, reason, message = AVAILABLE if available else PROGRESSING
    now = {"type": kind, "status": "True", "reason": reason, "message": message}
    kept = [one | {"status": "False"} if one["type"] != kind else now for one in before]
    return kept if now in kept else [*kept, now]


def _completions(pod: Json) -> list[Json]:
    """A JSON patch: the pod's place in its group, and how it finds the leader."""
    metadata = pod["metadata"]
    labels, (base, _, ordinal) = metadata["labels"], metadata["name"].rpartition("-")
    leads = labels.get(WORKER) == "0"
    group = ordinal if leads else labels[GROUP]
    place = {GROUP: group, WORKER: "0" if leads else ordinal}
    leader = metadata["name"] if leads else base
    key = hashlib.sha1(f"{metadata.get('namespace', '')}/{leader}".encode()).hexdigest()
    place[UNIQUE] = labels.get(UNIQUE, key)
    patch = [
        {"op": "add", "path": f"/metadata/labels/{name.replace('/', '~1')}", "value": value}
        for name, value in place.items()
    ]
    subdomain = pod["spec"].get("subdomain", labels[NAME])
    known = {
        "LWS_LEADER_ADDRESS": f"{leader}.{subdomain}.{metadata.get('namespace', 'default')}",
        "LWS_GROUP_SIZE": metadata["annotations"][SIZE],
        "LWS_WORKER_INDEX": place[WORKER],
    }
    added = [{"name": name, "value": value} for name, value in known.items()]
    for number, one in enumerate(pod["spec"]["containers"]):
        own = [each for each in one.get("env") or () if each["name"] not in known]
        path = f"/spec/containers/{number}/env"
        patch.append({"op": "add", "path": path, "value": [*added, *own]})
    return patch
