# ruff: noqa: E501 - messages of Kubernetes stay on one line
"""Causes that no recording has: a table of objects, reason, outlook, and parts of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kinetic.aio.kubernetes.diagnosis.causes import Outlook
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts
from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.job_status import Reason
from tests.kubernetes.verdicts import check_any_order

Json = dict[str, Any]
BORN = "2026-01-01T00:00:00Z"
NAME = "tune-1"
IMAGE = "reg.example/team/train:1"
OPEN, BLOCKED, FINAL = Outlook.OPEN, Outlook.BLOCKED, Outlook.FINAL


# --- objects ------------------------------------------------------------------------------


def a_job(status: Json | None = None, *, labels: Json | None = None, suspend: bool = False) -> Json:
    metadata = {"name": NAME, "uid": "job-uid", "creationTimestamp": BORN, "labels": labels or {}}
    spec = {"completions": 1, "backoffLimitPerIndex": 0, "suspend": suspend}
    return {"metadata": metadata, "spec": spec, "status": status or {"active": 1}}


def a_pod(
    state: Json | None = None, *, image: str = IMAGE, asks: Json | None = None, **spec: Any
) -> Json:
    """Make a pod with one container in *state* that requests the resources *asks*."""
    metadata = {"name": f"{NAME}-abcde", "uid": "pod-uid", "creationTimestamp": BORN}
    status = {"phase": spec.pop("phase", "Pending"), **spec.pop("status", {})}
    container = {"name": "main", "image": image, "resources": {"limits": asks or {}}}
    if state is not None:
        status["containerStatuses"] = [{"name": "main", "state": state}]
    spec = {"nodeName": "n1", "restartPolicy": "Never", "containers": [container], **spec}
    return {"metadata": metadata, "spec": spec, "status": status}


def a_node(
    name: str,
    labels: Mapping[str, str] | None = None,
    *taints: str,
    cordoned: bool = False,
    ready: str = "True",
    **has: str,
) -> Json:
    """Make a node; *taints* are ``key=value:Effect``, and *has* are resources like ``gpu``."""
    names = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}
    resources = {"cpu": "8", "memory": "32Gi", **{names.get(key, key): has[key] for key in has}}
    parsed = [
        {"key": pair.partition("=")[0], "value": pair.partition("=")[2], "effect": effect}
        for pair, _, effect in (taint.rpartition(":") for taint in taints)
    ]
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/arch": "amd64", **(labels or {})}},
        "spec": {"taints": parsed, "unschedulable": cordoned},
        "status": {"allocatable": resources, "conditions": [{"type": "Ready", "status": ready}]},
    }


def event(reason: str, message: str, *, kind: str = "Pod", **more: Any) -> Json:
    target = {"kind": kind, "name": f"{NAME}-abcde" if kind == "Pod" else NAME}
    return {"reason": reason, "message": message, "involvedObject": target, **more}


def one_pod(
    state: Json | None = None, *, events: Sequence[Json] = (), absent: Any = (), **pod: Any
) -> JobFacts:
    return JobFacts(job=a_job(), pods=[a_pod(state, **pod)], events=events, absent=absent)


def image(message: str, name: str = IMAGE) -> JobFacts:
    """A pod whose image can't be pulled, with containerd's *message*."""
    text = f'Back-off pulling image "{name}": ErrImagePull: failed to pull and unpack image "{name}": {message}'
    return one_pod({"waiting": {"reason": "ImagePullBackOff", "message": text}}, image=name)


def refused(message: str) -> JobFacts:
    """A Job whose pod the API server refuses."""
    failed = event("FailedCreate", f"Error creating: {PODS}{message}", kind="Job")
    return JobFacts(job=a_job(), events=[failed])


def queued(*conditions: Json, checks: Any = (), **spec: Any) -> JobFacts:
    """A Job that Kueue holds, with the conditions of its Workload."""
    status = {"conditions": [*conditions], "admissionChecks": [*checks]}
    workload = {"spec": {"queueName": "research", **spec}, "status": status}
    labels = {"kueue.x-k8s.io/queue-name": "research"}
    return JobFacts(job=a_job(labels=labels, suspend=True), workload=workload)


def too_large(request: object, limit: object, flavor: str = "f") -> str:
    """Return the message of Kueue 0.19 about a request above a flavor's whole quota."""
    needed = f"previously considered podsets requests (0) + current podset request ({request})"
    return f"insufficient quota for r in flavor {flavor}, {needed} > maximum capacity ({limit})"


def reserved(reason: str, message: str = "", status: str = "False") -> Json:
    return {"type": "QuotaReserved", "status": status, "reason": reason, "message": message}


def unmounted(*message: str, absent: Any = ()) -> JobFacts:
    """A pod whose volumes aren't mounted, with an event for each *message*."""
    events = [event("FailedMount", text) for text in message]
    return one_pod({"waiting": {"reason": "ContainerCreating"}}, events=events, absent=absent)


def unstarted(message: str, reason: str = "CreateContainerError") -> JobFacts:
    """A pod whose container can't be created."""
    return one_pod({"waiting": {"reason": reason, "message": message}})


def unplaced(
    message: str, *nodes: Json, reason: str = "Unschedulable", events: Any = (), **pod: Any
) -> JobFacts:
    """A pod that the scheduler refuses with *message*."""
    refusal = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    pending = a_pod(status={"conditions": [refusal]}, nodeName=None, **pod)
    return JobFacts(job=a_job(), pods=[pending], nodes=nodes or None, events=events)


def scaled(*reports: tuple[str, str], nodes: Any = (), had_node: bool = False) -> JobFacts:
    """A pod that requests 16 TPU chips on nodes with 8, and the autoscaler's messages."""
    events = [
        event(reason, message, lastTimestamp=f"2026-01-01T00:0{second}:00Z")
        for second, (reason, message) in enumerate(reports)
    ]
    known = nodes or [a_node("a", {"pool": "tpu"}, tpu="8")]
    message = "0/1 nodes are available: 1 Insufficient google.com/tpu."
    facts = unplaced(message, *known, asks={"google.com/tpu": "16"}, events=events)
    return replace(facts, had_node=had_node)


def exited(
    code: int, reason: str = "Error", message: str = "", *, sidecar: bool = False, **more: Any
) -> JobFacts:
    """A Job that failed with its only pod; with *sidecar*, a sidecar ran out of memory."""
    end = {
        "exitCode": code,
        "reason": reason,
        "message": message,
        "finishedAt": "2026-01-01T00:00:09Z",
    }
    pod = a_pod({"terminated": end}, phase="Failed", status=more.pop("status", {}))
    if sidecar:
        name, limits = "gke-gcsfuse-sidecar", {"limits": {"memory": "256Mi"}}
        pod["spec"]["initContainers"] = [
            {"name": name, "restartPolicy": "Always", "resources": limits}
        ]
        killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
        pod["status"]["initContainerStatuses"] = [{"name": name, "state": killed}]
    condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    return JobFacts(job=a_job({"failed": 1, "conditions": [condition]}), pods=[pod], **more)


def removed(
    reason: str = "", message: str = "", by: str = "", nodes: Any = None, silent: bool = False
) -> JobFacts:
    """A Job whose pod was ended: *reason* in the pod's status, or *by* in a condition."""
    status: Json = {"reason": reason, "message": message} if reason else {}
    if by:
        condition = {"type": "DisruptionTarget", "status": "True", "reason": by, "message": message}
        status["conditions"] = [condition, *[{"type": "Ready", "status": "False"}] * silent]
    return exited(143, status=status, nodes=nodes)


def running(*taints: str, labels: Json | None = None, **node: Any) -> JobFacts:
    """A pod that runs on a node with *taints*."""
    pod = a_pod({"running": {"startedAt": BORN}}, phase="Running")
    return JobFacts(job=a_job(), pods=[pod], nodes=[a_node("n1", labels, *taints, **node)])


def beside(
    last: Json, *mounts: str, state: Json | None = None, program: Json | None = None
) -> JobFacts:
    """A pod whose FUSE sidecar ended with *last* three times, and is now in *state*."""
    name, limits = "gke-gcsfuse-sidecar", {"limits": {"memory": "256Mi"}}
    again = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed"}}
    main = program or {"waiting": {"reason": "PodInitializing"}}
    pod = a_pod(main, phase="Running" if program else "Pending")
    pod["spec"]["initContainers"] = [{"name": name, "restartPolicy": "Always", "resources": limits}]
    ended = {"state": state or again, "lastState": {"terminated": last}, "restartCount": 3}
    pod["status"]["initContainerStatuses"] = [{"name": name, **ended}]
    events = [event("FailedMount", DRIVER + text) for text in mounts]
    return JobFacts(job=a_job(), pods=[pod], events=events)


def mixed(added: Json, program: Json, phase: str = "Running") -> JobFacts:
    """A pod to which a webhook added a container, before the program's."""
    pod = a_pod(program, phase=phase)
    pod["spec"]["containers"][0]["name"] = "kinetic"
    pod["spec"]["containers"].insert(0, {"name": "proxy", "image": "mesh.io/proxy:1"})
    states = {"proxy": added, "kinetic": program}
    pod["status"]["containerStatuses"] = [{"name": name, "state": states[name]} for name in states]
    return JobFacts(job=a_job(), pods=[pod])


UNPULLED = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
RUNNING = {"running": {"startedAt": BORN}}
CREATED = {"waiting": {"reason": "ContainerCreating"}}
DONE = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": BORN, "finishedAt": BORN}}
DIED = {"terminated": {"exitCode": 3, "reason": "Error", "startedAt": BORN, "finishedAt": BORN}}


def deleted(code: int, *nodes: Json, committed: str = "", **conditions: str) -> JobFacts:
    """A Job that failed because a user deleted its pod, which then ended with *code*."""
    end = {"exitCode": code, "reason": "Error", "finishedAt": "2026-01-01T00:00:09Z"}
    known = [{"type": kind, "status": status} for kind, status in conditions.items()]
    pod = a_pod(
        {"terminated": {**end, "kinetic": committed}}, phase="Failed", status={"conditions": known}
    )
    pod["metadata"] |= {
        "deletionTimestamp": "2026-01-01T00:00:38Z",
        "deletionGracePeriodSeconds": 30,
    }
    condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    return JobFacts(job=a_job({"conditions": [condition]}), pods=[pod], nodes=nodes or None)


def unclaimed(message: str, claim: Json | None = None, *told: tuple[str, str]) -> JobFacts:
    """A pod with the claim ``store``, which the scheduler refuses with *message*."""
    volume = {"name": "store", "persistentVolumeClaim": {"claimName": "store"}}
    facts = unplaced(f"0/1 nodes are available: {message}", volumes=[volume])
    target = {"kind": "PersistentVolumeClaim", "name": "store"}
    events = [{"reason": why, "message": text, "involvedObject": target} for why, text in told]
    known = {"metadata": {"name": "store"}, **(claim or {})}
    return replace(facts, claims=[known], events=events)


PODS = f'pods "{NAME}-x" is forbidden: '
HOOK = 'Internal error occurred: failed calling webhook "pods.policy.example.com": failed to call webhook: Post "https://policy.ml.svc:443/check?timeout=10s": '
RUNC = "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: error during container init: "
UNFIT = "couldn't assign flavors to pod set main: "
HELPLESS = " preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
NO_VICTIM = " preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod."
TAINTED = f"0/2 nodes are available: 2 node(s) had untolerated taint(s).{HELPLESS}"
NO_POOL = "pod didn't trigger scale-up: 2 node(s) didn't match Pod's node affinity/selector"
FAILED_UP = "Node scale up in zones us-central1-a associated with this pod failed: {}. Pod is at risk of not being scheduled."
DRIVER = 'MountVolume.SetUp failed for volume "data" : rpc error: code = '
PRESSED = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 51200Ki. Container main was using 1567440Ki, request is 0, has larger consumption of memory. "
GPU = {"nvidia.com/gpu": "1"}
TPU = {"google.com/tpu": "8"}
L4 = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
SPOT = {"cloud.google.com/gke-spot": "true"}
NOTICE = "cloud.google.com/impending-node-termination=:NoSchedule"
SLICE = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    "cloud.google.com/gke-tpu-topology": "2x4",
}
GPU_TAINT = "nvidia.com/gpu=present:NoSchedule"

# --- the table ------------------------------------------------------------------------------

TABLE: list[tuple[str, JobFacts, Reason | None, Any, tuple[str, ...]]] = [
    # Images.
    ("the registry's name is unknown", image("dial tcp: lookup reg.example on 10.0.0.10:53: no such host"), Reason.IMAGE_PULL, BLOCKED, ("no such host", "nodes can reach it")),
    ("the registry limits pulls", image("429 Too Many Requests - Server message: toomanyrequests: pull rate limit.", "team/train:1"), Reason.IMAGE_PULL, OPEN, ("limits how often",)),
    ("private or absent", image('denied: Permission "artifactregistry.repositories.downloadArtifacts" denied on resource "r" (or it may not exist)'), Reason.IMAGE_PULL, BLOCKED, ("or it may not exist", "reader role")),
    ("the repository is not there", image("failed to authorize: failed to fetch oauth token: unexpected status: 404 Not Found"), Reason.IMAGE_PULL, FINAL, ("create the repository",)),
    ("the name is not there", image("unexpected status: 404 Not Found: NAME_UNKNOWN: repository name not known to registry"), Reason.IMAGE_PULL, FINAL, ("NAME_UNKNOWN", "push it")),
    ("another architecture", image("no match for platform in manifest: not found"), Reason.IMAGE_PULL, FINAL, ("linux/amd64",)),
    ("a name like an error", image("x/not-found/forbidden-403:timeout: manifest unknown", "x/not-found/forbidden-403:timeout"), Reason.IMAGE_PULL, FINAL, ("manifest unknown",)),
    ("an unknown message is quoted", image("something nobody has seen yet"), Reason.IMAGE_PULL, BLOCKED, (IMAGE, "something nobody has seen yet")),
    # Admission.
    ("a quota that is in use", refused("exceeded quota: gpus, requested: requests.nvidia.com/gpu=2,pods=1, used: requests.nvidia.com/gpu=7,pods=4, limited: requests.nvidia.com/gpu=8,pods=10"), Reason.QUOTA, OPEN, ("exceeded quota: gpus", "wait")),
    ("too many Jobs", refused("exceeded quota: gke-resource-quotas, requested: count/jobs.batch=1, used: count/jobs.batch=5k, limited: count/jobs.batch=5k"), Reason.QUOTA, OPEN, ("exceeded quota: gke-resource-quotas", "delete finished Jobs")),
    ("a quota requires a limit", refused("failed quota: team: must specify limits.memory for: main; requests.cpu for: main"), Reason.QUOTA, FINAL, ("quota: team", "limits.memory", "memory=")),
    ("a LimitRange", refused("[minimum memory usage per Container is 256Mi, but request is 64Mi, maximum cpu usage per Pod is 4, but limit is 8]"), Reason.REFUSED, FINAL, ("LimitRange", "256Mi", "limit is 8")),
    ("Pod Security, restricted", refused('violates PodSecurity "restricted:latest": runAsNonRoot != true (pod or container "main" must set securityContext.runAsNonRoot=true)'), Reason.REFUSED, FINAL, ('PodSecurity "restricted', "KINETIC_RUN_AS_USER")),
    ("a webhook takes too long", refused(HOOK + "context deadline exceeded"), Reason.REFUSED, BLOCKED, ('webhook "pods.policy.example.com"', "the job is not at fault")),
    ("a webhook has no service", refused(HOOK + 'service "policy" not found'), Reason.REFUSED, BLOCKED, ('service "policy" not found',)),
    ("a webhook denies it", refused('admission webhook "policy.example.com" denied the request: images must come from us'), Reason.REFUSED, BLOCKED, ('"policy.example.com" denied', "images must come from us")),
    ("Autopilot denies it", refused('admission webhook "warden-validating.common-webhooks.networking.gke.io" denied the request: GKE Warden rejected the request because it violates one or more constraints: hostPath is not allowed'), Reason.REFUSED, BLOCKED, ("GKE Warden", "hostPath is not allowed")),
    ("a policy denies it", refused("ValidatingAdmissionPolicy 'no-latest' with binding 'b' denied request: image tag latest is not allowed"), Reason.REFUSED, BLOCKED, ("'no-latest'", "image tag latest is not allowed")),
    ("the namespace is being deleted", refused("unable to create new content in namespace ml because it is being terminated"), Reason.CANCELLED, FINAL, ("namespace ml", "use another namespace")),
    ("a permission is missing", refused('User "ada@example.com" cannot create resource "pods" in API group "" in the namespace "ml"'), Reason.REFUSED, BLOCKED, ("ada@example.com", 'cannot create resource "pods"')),
    ("etcd is slow", refused("etcdserver: request timed out"), Reason.REFUSED, OPEN, ("etcdserver: request timed out", "Kubernetes retries")),
    ("an unknown refusal", refused("never heard of"), Reason.REFUSED, BLOCKED, ("never heard of", "administrator")),
    # Queues: messages of Kueue 0.19, and the reasons it gives if UnadmittedWorkloadsObservability is on.
    ("quota is in use, and the reason isn't given", queued(reserved("Pending", UNFIT + "insufficient unused quota for cpu in flavor f, 1 more needed")), Reason.QUEUED, OPEN, ("waiting in queue", "1 more needed", "isn't an error")),
    ("quota that never fits, and the reason isn't given", queued(reserved("Pending", UNFIT + too_large(3, 2))), Reason.QUOTA, FINAL, ("can never hold it", "(3) > maximum capacity (2)")),
    ("quota for a part", queued(reserved("ExceedsMaxQuota", UNFIT + too_large(8, 2)), podSets=[{"count": 8, "minCount": 1}]), Reason.QUEUED, OPEN, ("waiting in queue", "isn't an error")),
    ("no quota for a part", queued(reserved("Pending", UNFIT + too_large("6Gi", "2G")), podSets=[{"count": 2, "minCount": 1}]), Reason.QUOTA, FINAL, ("can never hold it", "(6Gi)")),
    ("another flavor is in use", queued(reserved("ExceedsMaxQuota", UNFIT + too_large(3, 2) + ", insufficient unused quota for cpu in flavor g, 1 more needed")), Reason.QUEUED, OPEN, ("waiting in queue", "flavor g")),
    ("another flavor has quota for a part", queued(reserved("ExceedsMaxQuota", UNFIT + too_large(8, 2) + ", " + too_large(8, 0, "g")), podSets=[{"count": 8, "minCount": 1}]), Reason.QUEUED, OPEN, ("waiting in queue", "flavor g")),
    ("a resource that the queue lacks", queued(reserved("Pending", UNFIT + "resource google.com/tpu unavailable in ClusterQueue")), Reason.QUEUED, BLOCKED, ("cannot take it", "google.com/tpu unavailable", "accelerator=")),
    ("no flavor, and the reason isn't given", queued(reserved("Pending", UNFIT + "flavor l4 doesn't match node affinity")), Reason.QUEUED, BLOCKED, ("flavor l4 doesn't match", "accelerator=")),
    ("no such queue, and the reason isn't given", queued(reserved("Inadmissible", "LocalQueue nosuch doesn't exist")), Reason.QUEUED, BLOCKED, ("nosuch", "KINETIC_QUEUE")),
    ("a stopped queue evicted it", queued(reserved("Inadmissible", "ClusterQueue research is inactive"), {"type": "Evicted", "status": "True", "reason": "ClusterQueueStopped", "message": "The ClusterQueue is stopped"}), Reason.QUEUED, BLOCKED, ("Kueue evicted it (ClusterQueueStopped)", "cannot take it: ClusterQueue research is inactive", "start the queue again")),
    ("quota is in use", queued(reserved("WaitingForQuota", UNFIT + "insufficient unused quota for nvidia.com/gpu in flavor h100, 3 more needed")), Reason.QUEUED, OPEN, ("'research'", "nvidia.com/gpu in flavor h100, 3 more needed")),
    ("quota that never fits", queued(reserved("ExceedsMaxQuota", UNFIT + "insufficient quota for cpu in flavor f, request > maximum capacity (8 > 2)")), Reason.QUOTA, FINAL, ("can never hold it", "8 > 2")),
    ("no such queue", queued(reserved("Misconfigured", "LocalQueue nosuch doesn't exist")), Reason.QUEUED, BLOCKED, ("nosuch", "KINETIC_QUEUE")),
    ("no flavor", queued(reserved("NoMatchingFlavor", UNFIT + "flavor l4 doesn't match node affinity")), Reason.QUEUED, BLOCKED, ("flavor l4 doesn't match", "accelerator=")),
    ("the queue is stopped", queued(reserved("Suspended", "ClusterQueue research is stopped")), Reason.QUEUED, BLOCKED, ("is stopped", "administrator")),
    ("a reason of later versions", queued(reserved("TopologyPlacementFailed", "no rack has room")), Reason.QUEUED, OPEN, ("no rack has room", "isn't an error")),
    ("others are before it", queued(), Reason.QUEUED, OPEN, ("'research'", "others are before it")),
    ("the queue evicted it", queued(reserved("WaitingForQuota"), {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "to accommodate a workload"}), Reason.QUEUED, OPEN, ("Kueue preempted it", "to accommodate a workload", "waiting in queue")),
    ("its queue stopped it, and its Workload can't be read", replace(queued(), workload=None, events=[event("Stopped", "Preempted to accommodate a workload (UID: 1)", kind="Job")]), Reason.QUEUED, OPEN, ("Kueue preempted it", "to accommodate a workload", "waiting in queue", "check that Kueue runs")),
    ("its queue stopped it, and its Workload is older", replace(queued(reserved("Pending", UNFIT + "no quota")), pods=[a_pod({"running": {"startedAt": BORN}}, phase="Running")]), Reason.QUEUED, OPEN, ("is being stopped: Kueue stopped it", "waiting in queue 'research'")),
    ("its queue evicted it for slowness", queued(reserved("Pending"), {"type": "Evicted", "status": "True", "reason": "PodsReadyTimeout", "message": "Exceeded the PodsReady timeout"}), Reason.QUEUED, OPEN, ("Kueue evicted it (PodsReadyTimeout)", "Exceeded the PodsReady timeout")),
    ("a gate of the queue's topology", unplaced("Scheduling is blocked due to non-empty scheduling gates", reason="SchedulingGated", schedulingGates=[{"name": "kueue.x-k8s.io/topology"}]), Reason.QUEUED, BLOCKED, ("scheduling gate 'kueue.x-k8s.io/topology'", "controller of that gate")),
    ("deactivated", queued({"type": "Evicted", "status": "True", "reason": "Deactivated", "message": "exceeding the maximum number of re-queuing retries"}, active=False), Reason.QUEUED, BLOCKED, ("deactivated", "re-queuing retries")),
    ("machines were requested", queued(reserved("QuotaReserved", status="True"), checks=[{"name": "dws", "state": "Pending", "message": "ETA: 2026-01-01T01:00:00Z"}]), Reason.QUEUED, OPEN, ("waits for admission check 'dws'", "ETA: 2026-01-01T01:00:00Z")),
    ("a check refused it", queued(reserved("QuotaReserved", status="True"), checks=[{"name": "dws", "state": "Rejected", "message": "Capacity is not available"}]), Reason.QUEUED, BLOCKED, ("check 'dws'", "Capacity is not available")),
    # Claims.
    ("provisioning fails", unclaimed("pod has unbound immediate PersistentVolumeClaims.", {"spec": {"storageClassName": "fast"}}, ("ProvisioningFailed", "googleapi: Error 403: Quota 'SSD_TOTAL_GB' exceeded")), Reason.SETUP, BLOCKED, ("'store' (StorageClass 'fast') is not bound", "Quota 'SSD_TOTAL_GB' exceeded", "kubectl describe persistentvolumeclaim")),
    ("a claim that another pod has", unclaimed("node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode."), Reason.SETUP, OPEN, ("'store' keeps the pod from a node", "ReadWriteMany")),
    ("a lost volume", unclaimed('persistentvolumeclaim "store" bound to non-existent persistentvolume "pv-1"'), Reason.SETUP, BLOCKED, ("'store'", "pv-1", "volume")),
    ("a claim is bound, and resources are in use", unclaimed("1 Insufficient cpu." + NO_VICTIM, {"status": {"phase": "Bound"}}), Reason.UNSCHEDULABLE, OPEN, ("Insufficient cpu", "in use")),
    ("a disk that is attached elsewhere", unmounted('Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) tune-0'), Reason.SETUP, OPEN, ("already used by pod(s) tune-0", "ReadWriteMany")),
    # Nodes.
    ("one node is unwell, one has a taint", unplaced(TAINTED, a_node("a", L4, "node.kubernetes.io/not-ready=:NoSchedule", gpu="1"), a_node("b", L4, "team=other:NoSchedule", gpu="1"), asks=GPU, nodeSelector=L4), Reason.UNSCHEDULABLE, OPEN, ("a has temporary taint not-ready", "b has taint team=other", "wait")),
    ("one node is cordoned, one has a taint", unplaced(TAINTED, a_node("a", L4, cordoned=True, gpu="1"), a_node("b", L4, GPU_TAINT, gpu="1"), asks=GPU, nodeSelector=L4), Reason.UNSCHEDULABLE, OPEN, ("a has been cordoned", "b has taint nvidia.com/gpu=present", "uncordoned")),
    ("the autoscaler removes the node", unplaced(TAINTED, a_node("a", {}, "ToBeDeletedByClusterAutoscaler=1:NoSchedule")), Reason.UNSCHEDULABLE, OPEN, ("a has temporary taint ToBeDeletedByClusterAutoscaler",)),
    ("a GPU has no driver yet", unplaced("0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", a_node("n1", L4), asks=GPU), Reason.UNSCHEDULABLE, OPEN, ("n1 has no usable nvidia-l4 yet", "gpu-driver-version")),
    ("no pool has the accelerator", unplaced(TAINTED, a_node("a", SLICE, tpu="4"), asks=GPU, nodeSelector=L4), Reason.UNSCHEDULABLE, BLOCKED, ("no node has gke-accelerator=nvidia-l4", "node pool")),
    ("it fits now", unplaced("0/1 nodes are available: 1 node(s) had untolerated taint(s).", a_node("a")), Reason.UNSCHEDULABLE, OPEN, ("a can hold it", "untolerated taint(s)")),
    ("a cause other than resources", unplaced("0/1 nodes are available: 1 Too many pods.", a_node("a")), Reason.UNSCHEDULABLE, OPEN, ("Too many pods",)),
    ("the scheduler failed itself", unplaced("binding volumes: context deadline exceeded", a_node("a"), reason="SchedulerError"), Reason.UNSCHEDULABLE, BLOCKED, ("context deadline exceeded",)),
    ("unknown nodes, in use", unplaced("0/2 nodes are available: 2 Insufficient nvidia.com/gpu." + NO_VICTIM, asks=GPU), Reason.UNSCHEDULABLE, OPEN, ("in use (it requests 1 GPU)", "wait")),
    ("unknown nodes, never", unplaced("0/2 nodes are available: 2 Insufficient nvidia.com/gpu." + HELPLESS, asks=GPU), Reason.UNSCHEDULABLE, BLOCKED, ("no node takes the pod (it requests 1 GPU)", "node pools")),
    # The autoscaler.
    ("no stock, then a pause", scaled(("FailedScaleUp", FAILED_UP.format("GCE out of resources")), ("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 in backoff after failed scale-up")), Reason.UNSCHEDULABLE, OPEN, ("us-central1-a", "out of resources", "another zone")),
    ("the project's quota", scaled(("FailedScaleUp", FAILED_UP.format("GCE quota exceeded"))), Reason.QUOTA, OPEN, ("GCE quota exceeded", "quota of the cloud project raised")),
    ("no address left", scaled(("FailedScaleUp", FAILED_UP.format("IP space exhausted"))), Reason.UNSCHEDULABLE, OPEN, ("IP space exhausted", "another zone")),
    ("a pool at its limit", scaled(("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached")), Reason.UNSCHEDULABLE, OPEN, ("max node group size reached", "let the node pool grow")),
    ("no pool could hold it", scaled(("NotTriggerScaleUp", NO_POOL)), Reason.UNSCHEDULABLE, FINAL, ("requests 16 TPU chips", "a has only 8 TPU chips", "can never start as requested")),
    ("no pool could hold it now, but its machine is replaced", scaled(("NotTriggerScaleUp", NO_POOL), had_node=True), Reason.UNSCHEDULABLE, OPEN, ("a has only 8 TPU chips", "an earlier pod had a node", "wait for such a node")),
    ("a pool whose nodes are unwell", scaled(("NotTriggerScaleUp", "pod didn't trigger scale-up: 1 not ready for scale-up")), Reason.UNSCHEDULABLE, OPEN, ("not ready for scale-up",)),
    ("no pool grows, the node is cordoned", scaled(("NotTriggerScaleUp", NO_POOL), nodes=[a_node("a", {}, cordoned=True, tpu="16")]), Reason.UNSCHEDULABLE, OPEN, ("a has been cordoned", "the autoscaler adds no node now")),
    # Starting.
    ("the FUSE driver is not in the cluster", unmounted(DRIVER + "driver name gcsfuse.csi.storage.gke.io not found", absent=["gcsfuse.csi.storage.gke.io"]), Reason.SETUP, FINAL, ("the cluster has no storage driver gcsfuse.csi.storage.gke.io", "omit fuse=True")),
    ("the FUSE driver is not on the node yet", unmounted(DRIVER + "driver name gcsfuse.csi.storage.gke.io not found"), Reason.SETUP, BLOCKED, ("gcsfuse.csi.storage.gke.io not found", "enable the Cloud Storage FUSE CSI driver")),
    ("no FUSE sidecar", unmounted(DRIVER + "FailedPrecondition desc = failed to find the sidecar container in Pod spec"), Reason.SETUP, BLOCKED, ("failed to find the sidecar", "enable the Cloud Storage FUSE CSI driver")),
    ("the FUSE sidecar was killed", unmounted(DRIVER + "ResourceExhausted desc = the sidecar container terminated due to OOMKilled exit code 137"), Reason.SETUP, BLOCKED, ("OOMKilled exit code 137; correct what the message names",)),
    ("the FUSE sidecar crashes", beside({"exitCode": 1, "reason": "Error", "message": "cannot start gcsfuse"}), Reason.SETUP, BLOCKED, ("the program waits for a sidecar", "'gke-gcsfuse-sidecar' ended with exit code 1: cannot start gcsfuse", "restarts so far: 3", "kubectl logs tune-1-abcde -c gke-gcsfuse-sidecar")),
    ("the FUSE sidecar ended just now", beside({}, state={"terminated": {"exitCode": 2, "reason": "Error"}}), Reason.SETUP, BLOCKED, ("'gke-gcsfuse-sidecar' ended with exit code 2",)),
    ("the FUSE sidecar has too little memory to start", beside({"exitCode": 137, "reason": "OOMKilled"}), Reason.OUT_OF_MEMORY, BLOCKED, ("limit of 256Mi", "gke-gcsfuse/memory-limit")),
    ("the FUSE sidecar crashes, and an event says why", beside({"exitCode": 1, "reason": "Error"}, 'NotFound desc = failed to get GCS bucket "b": storage: bucket doesn\'t exist'), Reason.SETUP, BLOCKED, ("ended with exit code 1", "bucket doesn't exist", "create the bucket")),
    ("the FUSE sidecar crashes while the program runs", beside({"exitCode": 139, "reason": "Error"}, state={"running": {}}, program={"running": {"startedAt": BORN}}), Reason.SETUP, OPEN, ("running: container 'gke-gcsfuse-sidecar' crashed with signal 11",)),
    ("a container that runs before the program", beside({}, state={"running": {}}), None, OPEN, ("waits for container 'gke-gcsfuse-sidecar', which isn't ready", "wait")),
    ("the bucket is not there", unmounted(DRIVER + 'NotFound desc = failed to get GCS bucket "b": storage: bucket doesn\'t exist'), Reason.SETUP, BLOCKED, ("bucket doesn't exist", "create the bucket")),
    ("the bucket may not be read", unmounted(DRIVER + 'PermissionDenied desc = failed to get GCS bucket "b": googleapi: Error 403: x@y.iam does not have storage.objects.list access'), Reason.SETUP, BLOCKED, ("storage.objects.list", "roles/storage.objectUser")),
    ("a Secret is missing", unmounted('MountVolume.SetUp failed for volume "key" : secret "s" not found', "Unable to attach or mount volumes: unmounted volumes=[key]"), Reason.SETUP, BLOCKED, ('secret "s" not found', "create the Secret", "starts automatically")),
    ("an unknown mount error", unmounted(DRIVER + "InvalidArgument desc = flag provided but not defined: -xxx"), Reason.SETUP, BLOCKED, ("flag provided but not defined: -xxx",)),
    ("a limit below what the runtime needs", unstarted("runc create failed: unable to start container process: container init was OOM-killed (memory limit too low?)"), Reason.OUT_OF_MEMORY, BLOCKED, ("too low", "memory=")),
    ("a node lacks the store", unmounted('MountVolume.SetUp failed for volume "store" : hostPath type check failed: /shared/kinetic is not a directory'), Reason.SETUP, BLOCKED, ("/shared/kinetic is not a directory", "mount the store's volume", "KINETIC_STORE_CLAIM")),
    ("a Secret that is not read yet", unmounted('MountVolume.SetUp failed for volume "key" : failed to sync secret cache: timed out waiting for the condition'), None, OPEN, ("failed to sync secret cache", "isn't an error")),
    ("no credentials", exited(1, message="no credentials for Cloud Storage here"), Reason.SETUP, FINAL, ("exit code 1", "service account of the pod", "STORAGE_EMULATOR_HOST")),
    ("no identity", exited(1, message="Failed to retrieve http://metadata/ from the Google Compute Engine metadata service. Status: 404"), Reason.SETUP, FINAL, ("Status: 404", "GKE_METADATA")),
    ("no runner in the image", exited(2, message="python3: can't open file '/app/remote_runner.py': [Errno 2] No such file"), Reason.SETUP, FINAL, ("doesn't contain kinetic's runner", "kinetic.images runner")),
    ("the job cannot be run in its image", exited(42, message="pip says much\nkinetic: this job cannot be run: its image has Python 3.9.1; use another"), Reason.SETUP, FINAL, ("exit code 42: this job cannot be run: its image has Python 3.9.1; use another",)),
    ("no Python in the image", unstarted('exec: "python3": executable file not found in $PATH: unknown'), Reason.SETUP, BLOCKED, ("no python3 on its PATH", "python:3.12-slim")),
    ("a disruption of later versions", removed(by="DeletionByTomorrow", message="the rack is moved"), Reason.NODE_LOST, FINAL, ("the platform ended it: the rack is moved",)),
    ("no such user", unstarted(RUNC + "unable to find user trainer: no matching entries in passwd file"), Reason.SETUP, BLOCKED, ("unable to find user trainer", "KINETIC_RUN_AS_USER")),
    ("the node is slow", unstarted("failed to sync secret cache: timed out waiting for the condition", "CreateContainerConfigError"), None, OPEN, ("not created container 'main' yet",)),
    ("its node is silent", one_pod(phase="Unknown"), Reason.NODE_LOST, OPEN, ("its node n1 does not answer",)),
    ("its node died before it started the pod", replace(one_pod(), nodes=[a_node("n1", ready="Unknown")]), Reason.NODE_LOST, OPEN, ("its node n1 does not answer", "Kubernetes replaces the pod")),
    ("its node is gone before it started the pod", replace(one_pod(), nodes=[a_node("n2")], hosts={"n1": None}), Reason.NODE_LOST, OPEN, ("its node n1 does not exist", "Kubernetes replaces the pod")),
    ("its node is newer than the list of nodes", replace(one_pod(), nodes=[a_node("n2")], hosts={"n1": a_node("n1")}), None, OPEN, ("being created",)),
    # Containers of others.
    ("another's image, before the program starts", mixed(UNPULLED, CREATED, "Pending"), Reason.SETUP, BLOCKED, ("'proxy', which the cluster added", "mesh.io/proxy:1", "KINETIC_POD_ANNOTATIONS")),
    ("another's image, while the program runs", mixed(UNPULLED, RUNNING), Reason.SETUP, OPEN, ("running", "'proxy', which the cluster added")),
    ("the program's image, while another runs", mixed(RUNNING, UNPULLED), Reason.IMAGE_PULL, FINAL, (f"the image {IMAGE} cannot be pulled",)),
    ("the images of both", mixed(UNPULLED, UNPULLED, "Pending"), Reason.IMAGE_PULL, FINAL, (f"the image {IMAGE} cannot be pulled",)),
    ("the program has ended, another runs", mixed(RUNNING, DONE), None, FINAL, ("succeeded",)),
    ("the program has ended, another has no image", mixed(UNPULLED, DONE, "Pending"), None, FINAL, ("succeeded",)),
    ("the program has succeeded, another failed", mixed(DIED, DONE, "Failed"), None, FINAL, ("succeeded",)),
    ("the program has failed, another succeeded", mixed(DONE, DIED, "Failed"), Reason.USER_ERROR, FINAL, ("exit code 3",)),
    # Ends.
    ("out of memory without a limit", exited(137, "OOMKilled"), Reason.OUT_OF_MEMORY, FINAL, ("has no memory limit", "larger machine")),
    ("a sidecar ran out of memory", exited(1, sidecar=True), Reason.USER_ERROR, FINAL, ("exit code 1", "gke-gcsfuse-sidecar")),
    ("another processor", exited(255, "Error", "exec /app/train: exec format error"), Reason.SETUP, FINAL, ("/app/train", "architecture")),
    ("killed, with the last lines of its log", exited(137, "Error", "step 41: loss 0.3"), Reason.LOST, FINAL, ("signal 9", "step 41: loss 0.3")),
    ("aborted", exited(134), Reason.USER_ERROR, FINAL, ("SIGABRT",)),
    ("trapped", exited(133), Reason.USER_ERROR, FINAL, ("SIGTRAP", "native code")),
    ("interrupted", exited(130), Reason.LOST, FINAL, ("SIGINT",)),
    ("no permission on the bucket", exited(1, message="403 POST https://storage.googleapis.com/upload/storage/v1/b/x/o: train@p.iam.gserviceaccount.com does not have storage.objects.create access"), Reason.SETUP, FINAL, ("403 POST", "give train@p.iam.gserviceaccount.com roles/storage.objectUser")),
    ("a critical pod of the system", removed("Preempting", "Preempted in order to admit critical pod", "TerminationByKubelet"), Reason.PREEMPTED, FINAL, ("critical pod of the system",)),
    ("short of memory", removed("Evicted", PRESSED, "TerminationByKubelet"), Reason.EVICTED, FINAL, ("evicted by its node", "main was using 1567440Ki", "memory=")),
    ("short of process numbers", removed("Evicted", "The node was low on resource: pids. ", "TerminationByKubelet"), Reason.EVICTED, FINAL, ("evicted by its node", "low on resource: pids")),
    ("the spot machine is taken back", removed(by="TerminationByKubelet", message="Pod was terminated in response to imminent node shutdown.", nodes=[a_node("n1", SPOT)]), Reason.PREEMPTED, FINAL, ("took its spot machine back",)),
    ("its spot machine is about to go", exited(143, nodes=[a_node("n1", SPOT, NOTICE)]), Reason.PREEMPTED, FINAL, ("took its spot machine back",)),
    ("the node is removed", removed(by="DeletionByPodGC", message="PodGC: node no longer exists"), Reason.NODE_LOST, FINAL, ("node was removed from the cluster",)),
    ("the node does not answer", removed(by="DeletionByTaintManager", message="x", silent=True), Reason.NODE_LOST, FINAL, ("its node n1 does not answer",)),
    ("the taint of a node, which is named", removed(by="DeletionByTaintManager", message="x", nodes=[a_node("n1", {}, "maintenance=now:NoExecute")]), Reason.EVICTED, FINAL, ("its node got the taint maintenance (NoExecute)",)),
    ("an operator's taint", removed(by="DeletionByTaintManager", message="x"), Reason.EVICTED, FINAL, ("its node got a taint",)),
    ("a refusal of the node", removed("TopologyAffinityError", "Pod was rejected: Resources cannot be allocated with Topology locality"), Reason.EVICTED, FINAL, ("Topology locality",)),
    ("a user deleted the pod", deleted(143), Reason.LOST, FINAL, ("a user or a controller deleted the pod while it ran",)),
    ("a user deleted the pod, whose job took that for a preemption", deleted(75, committed="preempted"), Reason.LOST, FINAL, ("a user or a controller deleted the pod while it ran",)),
    ("a user deleted the pod on a spot machine", deleted(75, a_node("n1", SPOT), committed="preempted"), Reason.LOST, FINAL, ("a user or a controller deleted the pod while it ran",)),
    ("Kueue stopped a pod of a set", deleted(143, TerminationTarget="True"), Reason.PREEMPTED, FINAL, ("stopped by Kueue",)),
    ("the pod of a dead node was deleted", deleted(143, Ready="False"), Reason.NODE_LOST, FINAL, ("its node n1 does not answer",)),
    # Running.
    ("a notice of a spot machine", running(NOTICE, labels=SPOT), Reason.PREEMPTED, OPEN, ("takes its spot machine back",)),
    ("a notice before maintenance", running(NOTICE), Reason.PREEMPTED, OPEN, ("for maintenance",)),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_the_verdict_has_the_cause_and_its_reason(row: Any) -> None:
    _, seen, reason, outlook, parts = row
    verdict = judge(seen)
    assert (verdict.reason, verdict.outlook) == (reason, outlook), verdict.text
    for part in parts:
        assert part in verdict.text, verdict.text
    check_any_order(seen)


@pytest.mark.parametrize(
    "times",
    [
        {"eventTime": "2026-01-01T00:00:01.000000Z", "series": {"lastObservedTime": BORN}},
        {"lastTimestamp": "2025-12-31T23:59:50Z"},
    ],
)
def test_an_event_from_a_clock_that_is_behind_counts_by_its_uid(times: Json) -> None:
    (failed,) = refused('serviceaccount "trainer" not found').events
    failed = {**failed, **times, "involvedObject": {**failed["involvedObject"], "uid": "job-uid"}}
    assert "trainer" in judge(JobFacts(job=a_job(), events=[failed])).message
    other = {**failed, "involvedObject": {**failed["involvedObject"], "uid": "another"}}
    assert "trainer" not in judge(JobFacts(job=a_job(), events=[other])).message
