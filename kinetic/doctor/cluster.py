"""Check a Kubernetes cluster: access to it, permissions in it, and what its jobs need."""

from __future__ import annotations

import datetime
import os
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from kinetic._labels import SUBMISSION
from kinetic.aio._net.retry import NO_RETRIES
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import ONE_TRY, Api
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    annotations_of,
    condition,
    get_dict,
    get_list,
    labels_of,
)
from kinetic.aio.kubernetes.manifests import POD_SECURITY, Placement
from kinetic.aio.kubernetes.pending import KUEUE
from kinetic.aio.kubernetes.request import Forbidden
from kinetic.aio.kubernetes.reviews import is_allowed, missing_rights, user_name
from kinetic.aio.kubernetes.rights import NEEDED_BY, Right, by_resource, rights, role
from kinetic.aio.kubernetes.sets import KINDS
from kinetic.configuration import Target
from kinetic.doctor.checks import Check, Finding, State, failed, ok, skipped, warning
from kinetic.errors import NotFound

GROUP = "cluster"

SET_API_GROUPS = {name: kind.group for name, kind in KINDS.items()}
"""The API group of each value of KINETIC_MULTIHOST."""

MAX_PENDING_S = 300.0
"""The doctor reports pods that have been pending for longer than these seconds."""

EVENT_REASONS = frozenset(
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
"""The ``reason`` of Kubernetes events that concern jobs."""

IDENTITY_ANNOTATION = "iam.gke.io/gcp-service-account"
GPU_LABEL, GPU_RESOURCE = "cloud.google.com/gke-accelerator", "nvidia.com/gpu"

MAX_NAMES = 5
"""Maximum number of names in a finding."""


async def check_access(target: Target, environ: Mapping[str, str] = os.environ) -> None:
    """Send one request to the cluster of *target* with the credentials of this machine.

    Raises:
        ConfigurationError: The cluster doesn't exist, or can't be reached from this machine.
        AuthError: There are no credentials, or the cluster or Google refuses them.
        Unavailable: The API server, or Google's API, doesn't answer.
    """
    async with aclosing(Api(await open_access(target, environ, NO_RETRIES), ONE_TRY)) as api:
        right = Right(verb="list", group="batch", resource="jobs", namespace=target.namespace)
        await is_allowed(api, right)


class Cluster:
    """Check the cluster of *target*; *placement* has the namespace and settings of jobs' pods."""

    def __init__(self, target: Target, placement: Placement, environ: Mapping[str, str]) -> None:
        self._target = target
        self._placement = placement
        self._environ = environ
        self._opened_api: Api | None = None
        self._group_kill_pools: tuple[str, ...] = ()

    def checks(self, *, after: tuple[str, ...]) -> list[Check]:
        """Return the checks, which run only if the checks named in *after* don't fail."""
        advice = (
            f"set KINETIC_NAMESPACE, or run kubectl create namespace {self._placement.namespace}"
        )
        check = partial(Check, group=GROUP)
        table = [
            check(name="access", probe=self._access, needs=after),
            check(name="API server", probe=self._version, needs=("access",)),
            _check("namespace", self._namespace, "API server", advice),
            check(name="permissions", probe=self._permissions, needs=("API server",)),
            _check("service account", self._service_account, "namespace"),
            check(name="sets of pods", probe=self._set_controllers, needs=("API server",)),
            _check("nodes", self._nodes, "API server"),
            _check("pending pods", self._pending, "namespace"),
            _check("warnings", self._warnings, "namespace"),
        ]
        if self._target.kube_context is None:
            table.append(check(name="memory", probe=self._memory, needs=("access",)))
        if self._placement.queue:
            table.append(_check("queue", self._queue, "namespace"))
        return table

    async def aclose(self) -> None:
        """Close the connections."""
        if self._opened_api is not None:
            await self._opened_api.aclose()

    @property
    def _api(self) -> Api:
        assert self._opened_api is not None  # all other checks run after `_access`, which opens it
        return self._opened_api

    @property
    def _namespace_path(self) -> str:
        return f"/api/v1/namespaces/{_quote(self._placement.namespace)}"

    async def _access(self) -> Finding:
        access = await open_access(self._target, self._environ, NO_RETRIES)
        self._opened_api, self._group_kill_pools = Api(access, ONE_TRY), access.group_kill_pools
        return ok(f"{self._opened_api.cluster} at {self._opened_api.server}")

    async def _memory(self) -> Finding:
        """Check what the kernel does with a container that passes its memory limit."""
        if not (pools := self._group_kill_pools):
            return ok("an item that runs out of memory doesn't end its worker")
        return warning(
            "the kernel kills all processes of a container that runs out of memory in node pool "
            f"{', '.join(pools[:MAX_NAMES])}, so an item takes its worker along, unless the worker "
            "ends it in time",
            "write `kubeletConfig: {singleProcessOOMKill: true}` to a file, and run gcloud "
            f"container node-pools update {pools[0]} --cluster={self._target.cluster} "
            f"--location={self._target.zone} --system-config-from-file=FILE, which recreates its "
            "nodes",
        )

    async def _version(self) -> Finding:
        answer = await self._api.call("GET", "/version")
        return ok(f"Kubernetes {answer.get('gitVersion', 'of an unknown version')}")

    async def _namespace(self) -> Finding:
        """Check that the namespace exists and admits the pods of jobs."""
        name = self._placement.namespace
        try:
            answer = await self._api.call("GET", self._namespace_path)
        except NotFound:
            return failed(f"there is no namespace {name!r}")
        if answer.get("status", {}).get("phase", "") == "Terminating":
            return failed(f"{name!r} is being removed")
        standard = labels_of(answer).get(POD_SECURITY)
        if standard != "restricted" or self._placement.run_as_user:
            return ok(f"{name!r} exists")
        evidence = f"{name!r} enforces the Pod Security Standard 'restricted'"
        if self._placement.run_as_user == 0:
            return failed(
                f"{evidence} and refuses every pod, because run_as_user is 0, which is root",
                "unset KINETIC_RUN_AS_USER, or set it to another user ID",
            )
        return warning(
            f"{evidence}: it refuses pods with your own image; images that kinetic builds run as "
            "an unprivileged user",
            "before you use container_image=, set KINETIC_RUN_AS_USER, or run_as_user in the "
            "profile, to a user ID that the image can run as, such as 1000",
        )

    async def _permissions(self) -> Finding:
        """Check the user's rights; the advice is YAML that grants the missing rights."""
        wanted = rights(self._placement.namespace)
        missing = await missing_rights(self._api, wanted)
        if not missing:
            return ok(f"you have all {len(wanted)} permissions that kinetic uses")
        user = await user_name(self._api)
        # `role` grants all rights in a namespace, so it needs one right per namespace.
        by_namespace = {right.namespace: right for right in reversed(missing)}
        roles = "---\n".join(role(right, user) for right in reversed(by_namespace.values()))
        is_needed = any(self._is_needed(right) for right in missing)
        return Finding(
            State.FAILED if is_needed else State.WARNING,
            f"missing: {'; '.join(by_resource(missing))}",
            f"an administrator of the cluster must apply this YAML (kubectl apply -f -):\n{roles}",
        )

    @property
    def _set_kind(self) -> str:
        """The kind of object for jobs on several hosts: a key of `SET_API_GROUPS`, if valid."""
        return (self._environ.get("KINETIC_MULTIHOST") or "lws").strip().lower()

    def _is_needed(self, right: Right) -> bool:
        """Return whether every job of this target needs *right*."""
        if right.resource == "workloads":
            return bool(self._placement.queue)
        if self._target.backend == "pathways" and right.group == SET_API_GROUPS.get(self._set_kind):
            return True
        return right.resource not in NEEDED_BY

    async def _service_account(self) -> Finding:
        """Check that the service account of pods exists and, on GKE, acts as a Google account."""
        name, namespace = self._placement.service_account, self._placement.namespace
        try:
            answer = await self._api.call(
                "GET", f"{self._namespace_path}/serviceaccounts/{_quote(name)}"
            )
        except NotFound:
            return failed(
                f"there is no service account {name!r} in {namespace!r}, so no pod can be created",
                f"kubectl create serviceaccount {name} -n {namespace}, or set "
                "KINETIC_SERVICE_ACCOUNT",
            )
        if identity := annotations_of(answer).get(IDENTITY_ANNOTATION):
            return ok(f"{name!r} acts as {identity}")
        if self._target.kube_context is None:
            return warning(
                f"{name!r} acts as no Google service account: pods reach the bucket only with "
                "their own permissions or those of their node",
                f"kubectl annotate serviceaccount {name} -n {namespace} "
                f"{IDENTITY_ANNOTATION}=ACCOUNT@{self._target.project}.iam.gserviceaccount.com",
            )
        return ok(f"{name!r} exists")

    async def _set_controllers(self) -> Finding:
        """Check that the controller of jobs on several hosts is installed."""
        installed: list[str] = []
        for kind, group in SET_API_GROUPS.items():
            with suppress(NotFound, Forbidden):
                await self._api.call("GET", f"/apis/{group}")
                installed.append(kind)
        set_kind = self._set_kind
        if set_kind in installed:
            return ok(f"installed: {' and '.join(installed)}")
        return Finding(
            State.FAILED if self._target.backend == "pathways" else State.WARNING,
            f"{SET_API_GROUPS.get(set_kind, set_kind)} is not installed: jobs on several hosts "
            "need it",
            "install LeaderWorkerSet (https://lws.sigs.k8s.io), or install JobSet and set "
            "KINETIC_MULTIHOST=jobset; jobs on one host need neither",
        )

    async def _nodes(self) -> Finding:
        """Check that nodes are ready and not under pressure, and that the drivers of GPUs run."""
        nodes = await self._list("/api/v1/nodes")
        if not nodes:
            advice = "add a node pool, unless the cluster adds nodes when pods need them"
            return warning("the cluster has no nodes", advice)
        by_name: dict[str, Document] = {node["metadata"]["name"]: node for node in nodes}
        broken = [name for name, node in by_name.items() if condition(node, "Ready") is None]
        pressure = [
            f"{name} has {found['type']}"
            for name, node in by_name.items()
            for found in get_list(get_dict(node, "status"), "conditions")
            if found["type"].endswith("Pressure") and found["status"] == "True"
        ]
        without_driver = [name for name, node in by_name.items() if _lacks_driver(node)]
        evidence = f"{len(nodes) - len(broken)} of {len(nodes)} nodes are ready"
        if pressure:
            evidence += f"; {', '.join(pressure[:MAX_NAMES])}"
        if without_driver:
            return warning(
                f"{evidence}; no GPU driver runs on {', '.join(without_driver[:MAX_NAMES])}: their "
                "GPUs are not available",
                "check that NVIDIA's daemon set runs: kubectl get daemonsets -n kube-system",
            )
        if broken or pressure:
            return warning(evidence, f"kubectl describe node {''.join(broken[:1])}".rstrip())
        return ok(evidence)

    async def _pending(self) -> Finding:
        """Check that no pod has been pending for `MAX_PENDING_S`."""
        pods = await self._list(f"{self._namespace_path}/pods", "status.phase=Pending")
        limit = f"{MAX_PENDING_S / 60:g} min"
        oldest = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=MAX_PENDING_S)
        overdue = [
            pod["metadata"]
            for pod in pods
            if datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"]) < oldest
        ]
        if not overdue:
            return ok(f"{len(pods)} pods are pending, none for more than {limit}")
        names = [pod["name"] for pod in overdue]
        advice = f"kubectl describe pod {names[0]} -n {self._placement.namespace}"
        if SUBMISSION in overdue[0].get("labels", {}):
            advice = "kinetic jobs list shows why each job waits"
        return warning(
            f"{len(names)} pods are pending for more than {limit}: {', '.join(names[:MAX_NAMES])}",
            advice,
        )

    async def _warnings(self) -> Finding:
        """Check that the namespace has no warning event with one of `EVENT_REASONS`."""
        warnings = await self._list(f"{self._namespace_path}/events", "type=Warning")
        events = [event for event in warnings if event.get("reason") in EVENT_REASONS]
        if not events:
            return ok("no events that concern jobs")
        counts = Counter(str(event["reason"]) for event in events)
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        message = " ".join(str(events[-1].get("message", "")).split())[:200]
        return warning(
            f"{reasons}; the last event says: {message}",
            f"kubectl get events -n {self._placement.namespace} --field-selector type=Warning",
        )

    async def _queue(self) -> Finding:
        namespace, queue = self._placement.namespace, self._placement.queue
        path = f"{KUEUE}/namespaces/{_quote(namespace)}/localqueues/{_quote(queue)}"
        with suppress(NotFound):
            await self._api.call("GET", path)
            return ok(f"{queue!r} exists")
        return failed(
            f"there is no queue {queue!r} in {namespace!r}, or Kueue is not installed",
            "create a LocalQueue of this name, or unset KINETIC_QUEUE",
        )

    async def _list(self, path: str, fields: str = "") -> list[dict[str, Any]]:
        query = {"fieldSelector": fields} if fields else {}
        answer = await self._api.call("GET", path, query=query)
        return answer.get("items") or []


def _check(
    name: str, probe: Callable[[], Awaitable[Finding]], needs: str, advice: str = ""
) -> Check:
    """Return a check that is skipped if the user lacks permission to read its objects."""

    async def probe_if_permitted() -> Finding:
        try:
            return await probe()
        except Forbidden:
            return skipped(f"you lack permission to read the {name}; jobs run without it")

    return Check(name=name, group=GROUP, probe=probe_if_permitted, needs=(needs,), advice=advice)


def _quote(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _lacks_driver(node: Document) -> bool:
    allocatable = get_dict(get_dict(node, "status"), "allocatable")
    return GPU_LABEL in labels_of(node) and str(allocatable.get(GPU_RESOURCE, "0")) == "0"
