"""Check a Kubernetes cluster: access, permissions, and what jobs need in it."""

from __future__ import annotations

import datetime
import os
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kinetic._tasks import all_or_none
from kinetic.aio._engine.submission import LABEL_SUBMISSION
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.aio.kubernetes.manifests import Placement
from kinetic.aio.kubernetes.pending import KUEUE_VERSIONS
from kinetic.aio.kubernetes.request import Forbidden
from kinetic.aio.kubernetes.reviews import is_allowed, user_name
from kinetic.aio.kubernetes.rights import NEEDED_BY, Right, by_resource, rights, role
from kinetic.configuration import Target
from kinetic.doctor.checks import Check, Finding, State, failed, ok, skipped, warning
from kinetic.errors import NotFound

GROUP = "cluster"

ONCE = RetryPolicy(total_s=0.0)
LIMITS = Limits(retry=ONCE, rights_s=0.0, connect_s=10.0, idle_s=20.0)
"""No retries: the doctor reports what fails now."""

SETS = {"lws": "leaderworkerset.x-k8s.io", "jobset": "jobset.x-k8s.io"}
"""The API group of each value of KINETIC_MULTIHOST."""

WAITING_S = 300.0
"""The doctor reports pods that have been pending for more than these seconds."""

EVENTS = frozenset(
    {
        "BackOff",
        "Evicted",
        "FailedAttachVolume",
        "FailedCreate",
        "FailedCreatePodSandBox",
        "FailedMount",
        "FailedScheduling",
        "FreeDiskSpaceFailed",
        "NodeNotReady",
        "OOMKilling",
        "Unhealthy",
    }
)
"""Reasons of events that concern jobs."""

ENFORCED = "pod-security.kubernetes.io/enforce"
"""The label of a namespace with the Pod Security Standard that its pods must satisfy."""

IDENTITY = "iam.gke.io/gcp-service-account"
GPU_LABEL, GPU = "cloud.google.com/gke-accelerator", "nvidia.com/gpu"

SHOWN = 5
"""Maximum number of names in a finding."""


async def check_access(target: Target, environ: Mapping[str, str] = os.environ) -> None:
    """Send one request to the cluster of *target* with the credentials of this machine.

    Raises:
        ConfigurationError: The cluster doesn't exist, or can't be reached from here.
        AuthError: There are no credentials, or they are refused.
        Unavailable: A server that must be asked doesn't answer.
    """
    api = Api(await open_access(target, environ, ONCE), LIMITS)
    try:
        listing = Right(verb="list", group="batch", resource="jobs", namespace=target.namespace)
        await is_allowed(api, listing)
    finally:
        await api.aclose()


class Cluster:
    """Check the cluster of *target*; *at* has the namespace and the settings of jobs' pods."""

    def __init__(self, target: Target, at: Placement, environ: Mapping[str, str]) -> None:
        self._target = target
        self._at = at
        self._environ = environ
        self._opened: Api | None = None

    def checks(self, *, after: tuple[str, ...]) -> list[Check]:
        """Return the checks, which run only if the checks named in *after* don't fail."""
        create = f"set KINETIC_NAMESPACE, or run kubectl create namespace {self._at.namespace}"
        table = [
            Check(name="access", group=GROUP, look=self._access, needs=after),
            Check(name="API server", group=GROUP, look=self._version, needs=("access",)),
            _check("namespace", self._namespace, "API server", create),
            Check(name="permissions", group=GROUP, look=self._permissions, needs=("API server",)),
            _check("service account", self._service_account, "namespace"),
            Check(name="sets of pods", group=GROUP, look=self._sets, needs=("API server",)),
            _check("nodes", self._nodes, "API server"),
            _check("pending pods", self._pending, "namespace"),
            _check("warnings", self._warnings, "namespace"),
        ]
        if self._at.queue:
            table.append(_check("queue", self._queue, "namespace"))
        return table

    async def aclose(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.aclose()

    @property
    def _api(self) -> Api:
        assert self._opened is not None  # other checks need `_access`, which opens it
        return self._opened

    @property
    def _place(self) -> str:
        return f"/api/v1/namespaces/{_quoted(self._at.namespace)}"

    async def _access(self) -> Finding:
        self._opened = Api(await open_access(self._target, self._environ, ONCE), LIMITS)
        return ok(f"{self._opened.cluster} at {self._opened.server}")

    async def _version(self) -> Finding:
        found = await self._api.call("GET", "/version")
        return ok(f"Kubernetes {found.get('gitVersion', 'of an unknown version')}")

    async def _namespace(self) -> Finding:
        name = self._at.namespace
        try:
            found = await self._api.call("GET", self._place)
        except NotFound:
            return failed(f"there is no namespace {name!r}")
        if found.get("status", {}).get("phase", "") == "Terminating":
            return failed(f"{name!r} is being removed")
        labels: dict[str, str] = found["metadata"].get("labels") or {}
        if labels.get(ENFORCED) != "restricted" or self._at.run_as_user:
            return ok(f"{name!r} exists")
        words = f"{name!r} enforces the Pod Security Standard 'restricted'"
        if self._at.run_as_user == 0:
            return failed(
                f"{words} and refuses every pod, because run_as_user is 0, which is root",
                "unset KINETIC_RUN_AS_USER, or set it to another user ID",
            )
        return warning(
            f"{words}: it refuses pods with your own image; images that kinetic builds run as an "
            "unprivileged user",
            "before you use container_image=, set KINETIC_RUN_AS_USER, or run_as_user in the "
            "profile, to a user ID that the image can run as, such as 1000",
        )

    async def _permissions(self) -> Finding:
        wanted = rights(self._at.namespace)
        allowed = await all_or_none(*(is_allowed(self._api, one) for one in wanted))
        missing = [one for one, may in zip(wanted, allowed, strict=True) if not may]
        if not missing:
            return ok(f"all {len(wanted)} that kinetic uses")
        user = await user_name(self._api)
        first = {one.namespace: one for one in reversed(missing)}  # a Role for each namespace
        roles = "---\n".join(role(one, user) for one in reversed(first.values()))
        needed = any(self._is_needed(one) for one in missing)
        return Finding(
            State.FAILED if needed else State.WARNING,
            f"missing: {'; '.join(by_resource(missing))}",
            f"an administrator of the cluster applies this (kubectl apply -f -):\n{roles}",
        )

    @property
    def _kind_of_set(self) -> str:
        return (self._environ.get("KINETIC_MULTIHOST") or "lws").strip().lower()

    def _is_needed(self, right: Right) -> bool:
        if right.resource == "workloads":
            return bool(self._at.queue)
        if self._target.backend == "pathways" and right.group == SETS.get(self._kind_of_set):
            return True
        return right.resource not in NEEDED_BY

    async def _service_account(self) -> Finding:
        name, namespace = self._at.service_account, self._at.namespace
        try:
            found = await self._api.call("GET", f"{self._place}/serviceaccounts/{_quoted(name)}")
        except NotFound:
            return failed(
                f"there is no service account {name!r} in {namespace!r}, so no pod can be created",
                f"kubectl create serviceaccount {name} -n {namespace}, or set "
                "KINETIC_SERVICE_ACCOUNT",
            )
        annotations: dict[str, str] = found["metadata"].get("annotations") or {}
        if identity := annotations.get(IDENTITY):
            return ok(f"{name!r} acts as {identity}")
        if self._target.kube_context is None:
            return warning(
                f"{name!r} acts as no Google service account: pods reach the bucket only with "
                "their own permissions or those of their node",
                f"kubectl annotate serviceaccount {name} -n {namespace} "
                f"{IDENTITY}=ACCOUNT@{self._target.project}.iam.gserviceaccount.com",
            )
        return ok(f"{name!r} exists")

    async def _sets(self) -> Finding:
        installed: list[str] = []
        for kind, group in SETS.items():
            try:
                await self._api.call("GET", f"/apis/{group}")
                installed.append(kind)
            except (NotFound, Forbidden):
                continue
        wanted = self._kind_of_set
        if wanted in installed:
            return ok(f"installed: {' and '.join(installed)}")
        return Finding(
            State.FAILED if self._target.backend == "pathways" else State.WARNING,
            f"{SETS.get(wanted, wanted)} is not installed: jobs on several hosts need it",
            "install LeaderWorkerSet (https://lws.sigs.k8s.io), or install JobSet and set "
            "KINETIC_MULTIHOST=jobset; jobs on one host need neither",
        )

    async def _nodes(self) -> Finding:
        nodes = await self._list("/api/v1/nodes")
        if not nodes:
            advice = "add a node pool, unless the cluster adds nodes when pods need them"
            return warning("there are none", advice)
        conditions = {one["metadata"]["name"]: _conditions(one) for one in nodes}
        broken = [name for name, found in conditions.items() if found.get("Ready") != "True"]
        pressure = [
            f"{name} has {kind}"
            for name, found in conditions.items()
            for kind, status in found.items()
            if kind.endswith("Pressure") and status == "True"
        ]
        bare = [one["metadata"]["name"] for one in nodes if _lacks_driver(one)]
        words = f"{len(nodes) - len(broken)} of {len(nodes)} are ready"
        if pressure:
            words += f"; {', '.join(pressure[:SHOWN])}"
        if bare:
            return warning(
                f"{words}; no GPU driver runs on {', '.join(bare[:SHOWN])}: their GPUs are not "
                "available",
                "check that NVIDIA's daemon set runs: kubectl get daemonsets -n kube-system",
            )
        if broken or pressure:
            return warning(words, f"kubectl describe node {broken[0] if broken else ''}".rstrip())
        return ok(words)

    async def _pending(self) -> Finding:
        pods = await self._list(f"{self._place}/pods", "status.phase=Pending")
        limit = f"{WAITING_S / 60:g} min"
        late = [one["metadata"] for one in pods if _age_s(one) > WAITING_S]
        if not late:
            return ok(f"{len(pods)}, none for more than {limit}")
        old = [pod["name"] for pod in late]
        see = f"kubectl describe pod {old[0]} -n {self._at.namespace}"
        if LABEL_SUBMISSION in late[0].get("labels", {}):
            see = "kinetic jobs list shows why each job waits"
        return warning(
            f"{len(old)} for more than {limit}: {', '.join(old[:SHOWN])}",
            see,
        )

    async def _warnings(self) -> Finding:
        found = await self._list(f"{self._place}/events", "type=Warning")
        events = [one for one in found if one.get("reason") in EVENTS]
        if not events:
            return ok("no events that concern jobs")
        counted = Counter(str(one["reason"]) for one in events)
        words = ", ".join(f"{number} {reason}" for reason, number in counted.most_common())
        last = " ".join(str(events[-1].get("message", "")).split())[:200]
        return warning(
            f"{words}; the last says: {last}",
            f"kubectl get events -n {self._at.namespace} --field-selector type=Warning",
        )

    async def _queue(self) -> Finding:
        namespace, queue = self._at.namespace, self._at.queue
        for version in KUEUE_VERSIONS:
            path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{_quoted(namespace)}/localqueues/"
            try:
                await self._api.call("GET", path + _quoted(queue))
            except NotFound:
                continue
            return ok(f"{queue!r} exists")
        return failed(
            f"there is no queue {queue!r} in {namespace!r}, or Kueue is not installed",
            "create a LocalQueue of this name, or unset KINETIC_QUEUE",
        )

    async def _list(self, path: str, fields: str = "") -> list[dict[str, Any]]:
        query = {"fieldSelector": fields} if fields else {}
        found = await self._api.call("GET", path, query=query)
        items: list[dict[str, Any]] = found.get("items") or []
        return items


def _check(
    name: str, look: Callable[[], Awaitable[Finding]], needs: str, advice: str = ""
) -> Check:
    """Return a check that is skipped if the user may not read the objects it checks."""

    async def permitted() -> Finding:
        try:
            return await look()
        except Forbidden:
            return skipped(f"no permission to read the {name}; jobs run without it")

    return Check(name=name, group=GROUP, look=permitted, needs=(needs,), advice=advice)


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _conditions(node: dict[str, Any]) -> dict[str, str]:
    conditions: list[dict[str, Any]] = node.get("status", {}).get("conditions") or []
    return {one["type"]: one["status"] for one in conditions}


def _lacks_driver(node: dict[str, Any]) -> bool:
    allocatable: dict[str, Any] = node.get("status", {}).get("allocatable") or {}
    labelled = GPU_LABEL in (node["metadata"].get("labels") or {})
    return labelled and str(allocatable.get(GPU, "0")) == "0"


def _age_s(pod: dict[str, Any]) -> float:
    created = datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return (datetime.datetime.now(datetime.UTC) - created).total_seconds()
