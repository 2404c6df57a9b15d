"""Checks of a Kubernetes cluster: the way to it, rights, and what jobs there need."""

from __future__ import annotations

import datetime
import urllib.parse
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kinetic._tasks import all_or_none
from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.aio.kubernetes.http import Forbidden
from kinetic.aio.kubernetes.manifests import Placement
from kinetic.aio.kubernetes.rights import NEEDED_BY, Right, rights, role
from kinetic.configuration import Target
from kinetic.doctor.checks import Check, Finding, State
from kinetic.errors import AuthError, NotFound

GROUP = "cluster"
ONCE = RetryPolicy(total_s=0.0)
LIMITS = Limits(retry=ONCE, rights_s=0.0, connect_s=10.0, idle_s=20.0)
"""A doctor says what is wrong now; who runs jobs is more patient."""

SETS = {"lws": "leaderworkerset.x-k8s.io", "jobset": "jobset.x-k8s.io"}
WAITING_S = 300.0
"""A pod that has waited for so long is worth a word."""

CONCERNING = frozenset(
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


class Cluster:
    """The cluster of *target*; *at* says where in it jobs go."""

    def __init__(self, target: Target, at: Placement, environ: Mapping[str, str]) -> None:
        self._target = target
        self._at = at
        self._environ = environ
        self._opened: Api | None = None

    def checks(self, *, after: tuple[str, ...]) -> list[Check]:
        """Those of the cluster, which is looked for *after* other checks."""
        own = "set KINETIC_NAMESPACE, or create it: kubectl create namespace "
        table = [
            Check(name="way to the cluster", group=GROUP, look=self._open, needs=after),
            self._check("API server", self._version, "way to the cluster"),
            self._check("namespace", self._namespace, "API server", own + self._at.namespace),
            self._check("rights", self._rights, "API server"),
            self._check("service account", self._account, "namespace"),
            self._check("sets of pods", self._sets, "API server"),
            self._check("nodes", self._nodes, "API server"),
            self._check("waiting pods", self._waiting, "namespace"),
            self._check("warnings", self._warnings, "namespace"),
        ]
        if self._at.queue:
            table.append(self._check("queue", self._queue, "namespace"))
        return table

    def _check(self, name: str, look: Any, needs: str, advice: str = "") -> Check:
        return Check(name=name, group=GROUP, look=look, needs=(needs,), advice=advice)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.aclose()

    @property
    def _api(self) -> Api:
        assert self._opened is not None  # what asks for it needs the check that opens it
        return self._opened

    @property
    def _place(self) -> str:
        return f"/api/v1/namespaces/{urllib.parse.quote(self._at.namespace, safe='')}"

    async def _open(self) -> Finding:
        self._opened = Api(await open_access(self._target, self._environ, ONCE), LIMITS)
        return Finding(State.OK, f"{self._opened.cluster} at {self._opened.server}")

    async def _version(self) -> Finding:
        found = await self._api.call("GET", "/version")
        return Finding(State.OK, f"Kubernetes {found.get('gitVersion', 'of no version')}")

    async def _namespace(self) -> Finding:
        try:
            found = await self._api.call("GET", self._place)
        except Forbidden:
            return Finding(State.SKIPPED, f"{self._at.namespace!r} may not be looked at")
        except NotFound:
            return Finding(State.FAILED, f"there is no namespace {self._at.namespace!r}")
        phase = found.get("status", {}).get("phase", "")
        if phase == "Terminating":
            return Finding(State.FAILED, f"{self._at.namespace!r} is being removed")
        labels: dict[str, str] = found["metadata"].get("labels") or {}
        if labels.get(ENFORCED) == "restricted" and not self._at.run_as_user:
            return self._restricted()
        return Finding(State.OK, f"{self._at.namespace!r} is there")

    def _restricted(self) -> Finding:
        """Tell which pods a namespace refuses that lets none run as root."""
        words = f"{self._at.namespace!r} enforces the Pod Security Standard 'restricted'"
        if self._at.run_as_user == 0:
            return Finding(
                State.FAILED,
                f"{words}, and run_as_user is 0, which is root: it refuses every pod",
                "unset KINETIC_RUN_AS_USER, or set it to the number of another user",
            )
        return Finding(
            State.WARNING,
            f"{words}: it refuses pods with an image of your own; those with images that kinetic "
            "builds run as an unprivileged user",
            "before you use container_image=, set KINETIC_RUN_AS_USER, or run_as_user in the "
            "profile, to a user ID that the image can run as, such as 1000",
        )

    async def _rights(self) -> Finding:
        wanted = rights(self._at.namespace)
        allowed = await all_or_none(*(self._may(one) for one in wanted))
        missing = [one for one, may in zip(wanted, allowed, strict=True) if not may]
        if not missing:
            return Finding(State.OK, f"all {len(wanted)} that kinetic uses")
        grave = [one for one in missing if self._is_needed(one)]
        words = "; ".join(_of_resource(missing))
        user = await self._user()
        advice = "---\n".join(
            role(next(one for one in missing if one.namespace == where), user)
            for where in dict.fromkeys(one.namespace for one in missing)
        )
        return Finding(
            State.FAILED if grave else State.WARNING,
            f"missing: {words}",
            f"an administrator of the cluster applies this (kubectl apply -f -):\n{advice}",
        )

    def _is_needed(self, right: Right) -> bool:
        if right.resource == "workloads":
            return bool(self._at.queue)
        if self._target.backend == "pathways":
            kind = self._environ.get("KINETIC_MULTIHOST") or "lws"
            if right.group == SETS.get(kind.strip().lower()):
                return True
        return right.resource not in NEEDED_BY

    async def _may(self, right: Right) -> bool:
        resource, _, below = right.resource.partition("/")
        attributes = {
            "namespace": right.namespace,
            "verb": right.verb,
            "group": right.group,
            "resource": resource,
            "subresource": below,
        }
        answer = await self._review(
            "authorization.k8s.io/v1",
            "SelfSubjectAccessReview",
            {"resourceAttributes": attributes},
        )
        return bool(answer.get("status", {}).get("allowed"))

    async def _user(self) -> str:
        try:
            answer = await self._review("authentication.k8s.io/v1", "SelfSubjectReview", {})
        except (AuthError, NotFound):  # it is of Kubernetes 1.28
            return "YOU"
        return str(answer["status"]["userInfo"].get("username") or "YOU")

    async def _review(self, group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        body = {"apiVersion": group, "kind": kind} | ({"spec": spec} if spec else {})
        return await self._api.call("POST", f"/apis/{group}/{kind.lower()}s", body=body)

    async def _account(self) -> Finding:
        name = self._at.service_account
        try:
            path = f"{self._place}/serviceaccounts/{urllib.parse.quote(name, safe='')}"
            found = await self._api.call("GET", path)
        except Forbidden:
            words = f"{name!r} may not be looked at; were it missing, no pod could be made"
            return Finding(State.SKIPPED, words)
        except NotFound:
            return Finding(
                State.FAILED,
                f"there is no service account {name!r} in {self._at.namespace!r}, so no pod "
                "can be made",
                f"kubectl create serviceaccount {name} -n {self._at.namespace}, or set "
                "KINETIC_SERVICE_ACCOUNT",
            )
        annotations: dict[str, str] = found["metadata"].get("annotations") or {}
        identity = annotations.get(IDENTITY)
        if identity:
            return Finding(State.OK, f"{name!r} acts as {identity}")
        if self._target.kube_context is None:
            return Finding(
                State.WARNING,
                f"{name!r} acts as no service account of Google's: pods get to the bucket only "
                "by what is granted to themselves, or to their node",
                f"kubectl annotate serviceaccount {name} -n {self._at.namespace} "
                f"{IDENTITY}=ACCOUNT@{self._target.project}.iam.gserviceaccount.com",
            )
        return Finding(State.OK, f"{name!r} is there")

    async def _sets(self) -> Finding:
        there: list[str] = []
        for kind, group in SETS.items():
            try:
                await self._api.call("GET", f"/apis/{group}")
                there.append(kind)
            except (NotFound, Forbidden):
                continue
        wanted = (self._environ.get("KINETIC_MULTIHOST") or "lws").strip().lower()
        if wanted in there:
            return Finding(State.OK, f"there is {' and '.join(there)}")
        several = self._target.backend == "pathways"
        return Finding(
            State.FAILED if several else State.WARNING,
            f"{SETS.get(wanted, wanted)} is not installed: jobs on several hosts need it",
            "install LeaderWorkerSet (https://lws.sigs.k8s.io) or JobSet and set "
            "KINETIC_MULTIHOST; jobs on one host need neither",
        )

    async def _nodes(self) -> Finding:
        try:
            found = await self._api.call("GET", "/api/v1/nodes")
        except Forbidden:
            return Finding(State.SKIPPED, "nodes may not be looked at")
        nodes: list[dict[str, Any]] = found.get("items") or []
        broken = [one["metadata"]["name"] for one in nodes if not _is_ready(one)]
        bare = [one["metadata"]["name"] for one in nodes if _lacks_driver(one)]
        words = f"{len(nodes) - len(broken)} of {len(nodes)} are ready"
        if pressed := [words for one in nodes for words in _pressures(one)]:
            words += f"; {', '.join(pressed[:SHOWN])}"
        if bare:
            return Finding(
                State.WARNING,
                f"{words}; no driver runs on {', '.join(bare[:SHOWN])}: its GPUs are not offered",
                "see whether the daemon set of NVIDIA's driver runs: kubectl get daemonsets -n "
                "kube-system",
            )
        if broken or pressed or not nodes:
            advice = f"kubectl describe node {broken[0]}" if broken else "kubectl describe nodes"
            if not nodes:
                advice = "add a node pool, unless the cluster makes nodes when pods ask for them"
            return Finding(State.WARNING, words, advice)
        return Finding(State.OK, words)

    async def _waiting(self) -> Finding:
        query = {"fieldSelector": "status.phase=Pending"}
        try:
            found = await self._api.call("GET", f"{self._place}/pods", query=query)
        except Forbidden:
            return Finding(State.SKIPPED, "pods may not be looked at")
        pods: list[dict[str, Any]] = found.get("items") or []
        old = [one["metadata"]["name"] for one in pods if _age_s(one) > WAITING_S]
        if not old:
            return Finding(State.OK, f"{len(pods)} wait, none for more than {WAITING_S / 60:g} min")
        return Finding(
            State.WARNING,
            f"{len(old)} wait for more than {WAITING_S / 60:g} min: {', '.join(old[:SHOWN])}",
            f"kubectl describe pod {old[0]} -n {self._at.namespace}",
        )

    async def _warnings(self) -> Finding:
        query = {"fieldSelector": "type=Warning"}
        try:
            found = await self._api.call("GET", f"{self._place}/events", query=query)
        except Forbidden:
            return Finding(State.SKIPPED, "events may not be looked at")
        every: list[dict[str, Any]] = found.get("items") or []
        events = [one for one in every if one.get("reason") in CONCERNING]
        if not events:
            return Finding(State.OK, "no events that would concern jobs")
        counted = Counter(str(one["reason"]) for one in events)
        words = ", ".join(f"{number} {reason}" for reason, number in counted.most_common())
        last = " ".join(str(events[-1].get("message", "")).split())[:200]
        return Finding(
            State.WARNING,
            f"{words}; the last says: {last}",
            f"kubectl get events -n {self._at.namespace} --field-selector type=Warning",
        )

    async def _queue(self) -> Finding:
        name = urllib.parse.quote(self._at.queue, safe="")
        namespace = urllib.parse.quote(self._at.namespace, safe="")
        path = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues/{name}"
        try:
            await self._api.call("GET", path)
        except Forbidden:
            return Finding(State.SKIPPED, f"{self._at.queue!r} may not be looked at")
        except NotFound:
            return Finding(
                State.FAILED,
                f"there is no queue {self._at.queue!r} in {self._at.namespace!r}, or no Kueue",
                "create a LocalQueue of this name, or unset KINETIC_QUEUE",
            )
        return Finding(State.OK, f"{self._at.queue!r} is there")


def _of_resource(missing: list[Right]) -> list[str]:
    """The missing verbs of each resource, in one phrase."""
    verbs: dict[str, list[str]] = {}
    for one in missing:
        name = f"{one.resource}.{one.group}" if one.group else one.resource
        what = NEEDED_BY.get(one.resource)
        verbs.setdefault(f"{name} ({what})" if what else name, []).append(one.verb)
    return [f"{', '.join(several)} {name}" for name, several in verbs.items()]


def _conditions(node: dict[str, Any]) -> dict[str, str]:
    conditions: list[dict[str, Any]] = node.get("status", {}).get("conditions") or []
    return {one["type"]: one["status"] for one in conditions}


def _is_ready(node: dict[str, Any]) -> bool:
    return _conditions(node).get("Ready") == "True"


def _pressures(node: dict[str, Any]) -> list[str]:
    name = node["metadata"]["name"]
    kinds = [kind for kind, status in _conditions(node).items() if status == "True"]
    return [f"{name} has {kind}" for kind in kinds if kind.endswith("Pressure")]


def _lacks_driver(node: dict[str, Any]) -> bool:
    allocatable: dict[str, Any] = node.get("status", {}).get("allocatable") or {}
    labelled = GPU_LABEL in (node["metadata"].get("labels") or {})
    return labelled and str(allocatable.get(GPU, "0")) == "0"


def _age_s(pod: dict[str, Any]) -> float:
    made = datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    return (datetime.datetime.now(datetime.UTC) - made).total_seconds()
