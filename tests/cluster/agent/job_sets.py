"""A stand-in for the JobSet controller: Jobs made and judged as that project's documents say."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.cluster.agent.container import clock
from tests.cluster.agent.reflector import create, delete, owner, reflect
from tests.cluster.rest import Refused, Session

Json = dict[str, Any]

SETS = "/apis/jobset.x-k8s.io/v1alpha2"
KEY = "jobset.sigs.k8s.io"
NAME = f"{KEY}/jobset-name"


class JobSets:
    """`sets` and `jobs` run until they are cancelled."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def sets(self) -> None:
        """Make what a set wants; take it away with the set."""
        await reflect(self._session, f"{SETS}/jobsets", self._set)

    async def jobs(self) -> None:
        """Follow the jobs of all sets."""
        await reflect(self._session, "/apis/batch/v1/jobs", self._job, label=NAME)

    async def _job(self, kind: str, job: Json) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["labels"][NAME]
        try:
            found = await self._session.call("GET", f"{SETS}/namespaces/{namespace}/jobsets/{name}")
        except Refused as refusal:
            if refusal.code != 404:
                raise
            return
        await self._set("MODIFIED", found)

    async def _set(self, kind: str, found: Json) -> None:
        namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
        path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        there = (await self._session.call("GET", path, labelSelector=f"{NAME}={name}"))["items"]
        if kind == "DELETED" or "deletionTimestamp" in found["metadata"]:
            for job in there:
                await delete(self._session, f"{path}/{job['metadata']['name']}")
            return
        if (found.get("status") or {}).get("terminalState"):
            return
        if await self._judged(found, there, path):
            return
        await self._service(found)
        suspended = bool(found["spec"].get("suspend"))
        for job in there:
            if bool(job["spec"].get("suspend")) != suspended and not ended(job):
                one = f"{path}/{job['metadata']['name']}"
                await self._session.call("PATCH", one, {"spec": {"suspend": suspended}})
        known = {job["metadata"]["name"] for job in there}
        for job in children(found):
            if job["metadata"]["name"] not in known:
                await create(self._session, path, job)
        await self._say_suspended(found, suspended=suspended)

    async def _say_suspended(self, found: Json, *, suspended: bool) -> None:
        """True as long as it is, false ever after; nothing of one that never was."""
        conditions = (found.get("status") or {}).get("conditions") or []
        before = [one for one in conditions if one["type"] == "Suspended"]
        if suspended == any(one["status"] == "True" for one in before):
            return
        condition = {
            "type": "Suspended",
            "status": "True" if suspended else "False",
            "reason": "SuspendedJobs" if suspended else "ResumeJobs",
            "message": f"jobset is {'suspended' if suspended else 'resumed'}",
            "lastTransitionTime": clock(),
        }
        others = [one for one in conditions if one["type"] != "Suspended"]
        await self._write(found, {"conditions": [*others, condition]})

    async def _service(self, found: Json) -> None:
        namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": found["spec"]["network"]["subdomain"],
                "ownerReferences": [owner(found)],
            },
            "spec": {
                "clusterIP": "None",
                "selector": {NAME: name},
                "publishNotReadyAddresses": True,
            },
        }
        await create(self._session, f"/api/v1/namespaces/{namespace}/services", service)

    async def _judged(self, found: Json, there: list[Json], path: str) -> bool:
        """Whether the set has ended: with its first failed job, or when all are complete."""
        failed = [job for job in there if ended(job) == "Failed"]
        if failed:
            message = (
                "jobset failed due to reaching max number of restarts "
                f"(first failed job: {failed[0]['metadata']['name']})"
            )
            await self._end(found, there, path, "Failed", "ReachedMaxRestarts", message)
            return True
        complete = {job["metadata"]["name"] for job in there if ended(job) == "Complete"}
        if complete != {job["metadata"]["name"] for job in children(found)}:
            return False
        message = "jobset completed successfully"
        await self._end(found, there, path, "Completed", "AllJobsCompleted", message)
        return True

    async def _end(
        self, found: Json, there: list[Json], path: str, state: str, reason: str, message: str
    ) -> None:
        condition = {"type": state, "status": "True", "reason": reason, "message": message}
        condition["lastTransitionTime"] = clock()
        before = (found.get("status") or {}).get("conditions") or []
        await self._write(found, {"terminalState": state, "conditions": [*before, condition]})
        for job in there:
            if not ended(job):
                await delete(self._session, f"{path}/{job['metadata']['name']}", "Foreground")

    async def _write(self, found: Json, status: Json) -> None:
        version = {"resourceVersion": found["metadata"]["resourceVersion"]}
        body = {"metadata": version, "status": status}
        await self._session.call("PATCH", f"{_path(found)}/status", body)


def _path(found: Json) -> str:
    metadata = found["metadata"]
    return f"{SETS}/namespaces/{metadata['namespace']}/jobsets/{metadata['name']}"


def ended(job: Json) -> str:
    """``Complete`` or ``Failed``, once it has."""
    for one in job.get("status", {}).get("conditions") or ():
        if one["type"] in ("Complete", "Failed") and one["status"] == "True":
            return str(one["type"])
    return ""


def children(found: Json) -> Iterator[Json]:
    """The Jobs of a JobSet."""
    name, spec = found["metadata"]["name"], found["spec"]
    for replicated in spec["replicatedJobs"]:
        for index in range(replicated["replicas"]):
            labels = {
                NAME: name,
                f"{KEY}/replicatedjob-name": replicated["name"],
                f"{KEY}/replicatedjob-replicas": str(replicated["replicas"]),
                f"{KEY}/job-index": str(index),
                f"{KEY}/restart-attempt": "0",
            }
            job = copy.deepcopy(replicated["template"])
            pod = job["spec"]["template"]
            for part in (job, pod):
                metadata = part.setdefault("metadata", {})
                metadata["labels"] = (metadata.get("labels") or {}) | labels
                metadata["annotations"] = (metadata.get("annotations") or {}) | labels
            job["metadata"]["name"] = f"{name}-{replicated['name']}-{index}"
            job["metadata"]["ownerReferences"] = [owner(found)]
            pod["spec"]["subdomain"] = spec["network"]["subdomain"]
            job["spec"]["suspend"] = bool(spec.get("suspend"))
            job["spec"].setdefault("completionMode", "Indexed")
            yield {"apiVersion": "batch/v1", "kind": "Job", **job}
