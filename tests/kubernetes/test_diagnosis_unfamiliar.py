# ruff: noqa: E501 - what the platform says is one line each
"""What nobody had recorded: written down from Kubernetes' own formats, with what is to be told.

Patterns that the cause and the advice must have were written before the code was tried on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.aio.kubernetes.diagnosis.verdict import Seen, merged
from tests.kubernetes.situations import (
    CREATING,
    RUNS,
    Json,
    a_container,
    a_job,
    a_node,
    a_pod,
    check_any_order,
    disrupted,
    ended,
    event,
    failed_job,
    failed_pod,
    not_placed,
    waiting,
)


@dataclass(frozen=True)
class Case:
    name: str
    seen: Seen
    status: str
    cause: Sequence[str]
    advice: Sequence[str]
    never: Sequence[str] = ()


def pods(
    pod: Json | list[Json],
    *,
    events: Sequence[Json] = (),
    nodes: Sequence[Json] | None = None,
    job: Json | None = None,
    gone: Sequence[Json] = (),
) -> Seen:
    there = pod if isinstance(pod, list) else [pod]
    return Seen(job=job or a_job(), pods=there, events=events, nodes=nodes, gone=gone)


def seq(*steps: Seen) -> Seen:
    """What is known after all of these."""
    known = Seen()
    for one in steps:
        known = merged(known, one)
    return known


DELETED = {"deletionTimestamp": "2026-01-01T00:00:40Z", "deletionGracePeriodSeconds": 30}
"""Ten seconds after it was made."""


def fin(code: int, at: str = "2026-01-01T00:00:15Z", reason: str = "", said: str = "") -> Json:
    told = ended(code, reason, said)
    told["terminated"]["finishedAt"] = at
    return told


def queued(conditions: Sequence[Json], *, spec: Json | None = None, **status: object) -> Seen:
    """A Job that Kueue holds, with these conditions of its Workload."""
    labels = {"kueue.x-k8s.io/queue-name": "team-a"}
    suspended = {"conditions": [{"type": "Suspended", "status": "True"}]}
    job = a_job(suspended, suspend=True, metadata={"labels": labels})
    named = {"queueName": "team-a", **(spec or {})}
    return Seen(job=job, workload={"spec": named, "status": {"conditions": conditions, **status}})


def qr(said: str, reason: str = "Pending", status: str = "False") -> Json:
    return {"type": "QuotaReserved", "status": status, "reason": reason, "message": said}


def late(job: Json, *events: Json) -> Seen:
    """What somebody finds who comes when no pod is there any more."""
    return Seen(job=job, events=events)


made = event("SuccessfulCreate", "Created pod: tune-1-abcde", kind="Job")
mount = a_pod(CREATING)

CASES = [
    Case(
        "nfs server does not answer",
        pods(
            mount,
            events=[
                event(
                    "FailedMount",
                    'MountVolume.SetUp failed for volume "data" : mount failed: exit status 32\nMounting command: mount\nMounting arguments: -t nfs 10.0.0.9:/exports/data /var/lib/kubelet/pods/x/volumes/kubernetes.io~nfs/data\nOutput: mount.nfs: Connection timed out',
                )
            ],
        ),
        "PENDING",
        [r"data", r"Connection timed out"],
        [r"10\.0\.0\.9|server|reach"],
    ),
    Case(
        "pd attached elsewhere",
        pods(
            mount,
            events=[
                event(
                    "FailedAttachVolume",
                    'Multi-Attach error for volume "pvc-1a2b" Volume is already exclusively attached to one node and can\'t be attached to another',
                )
            ],
        ),
        "PENDING",
        [r"pvc-1a2b", r"another (node|pod)|exclusively"],
        [r"ReadWriteMany|end|wait|other"],
    ),
    Case(
        "projected token audience",
        pods(
            a_pod(CREATING, node="n1"),
            events=[
                event(
                    "FailedMount",
                    'MountVolume.SetUp failed for volume "kube-api-access-x" : failed to fetch token: serviceaccounts "trainer" is forbidden: User "system:node:n1" cannot create resource "serviceaccounts/token" in API group "" in the namespace "ml": no relationship found between node \'n1\' and this object',
                )
            ],
        ),
        "PENDING",
        [r"token"],
        [r"again|wait|administrator"],
    ),
    Case(
        "cni ip exhausted",
        pods(
            mount,
            events=[
                event(
                    "FailedCreatePodSandBox",
                    'Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox "abc": plugin type="ptp" failed (add): failed to allocate for range 0: no IP addresses available in range set: 10.4.0.1-10.4.0.254',
                )
            ],
        ),
        "PENDING",
        [r"no IP addresses? (available|left)|address"],
        [r"administrator|fewer pods|again|range"],
    ),
    Case(
        "pull denied by 429 toomanyrequests with digest",
        pods(
            a_pod(
                waiting(
                    "ImagePullBackOff",
                    'Back-off pulling image "busybox@sha256:00": ErrImagePull: failed to pull and unpack image "docker.io/library/busybox@sha256:00": failed to copy: httpReadSeeker: failed open: unexpected status code https://registry-1.docker.io/v2/library/busybox/blobs/sha256:00: 429 Too Many Requests - Server message: toomanyrequests: You have reached your unauthenticated pull rate limit.',
                )
            )
        ),
        "PENDING",
        [r"limit"],
        [r"again|own"],
    ),
    Case(
        "image config: unsupported media type",
        pods(
            a_pod(
                waiting(
                    "ErrImagePull",
                    'failed to pull and unpack image "reg.example/team/train:1": unsupported media type application/vnd.docker.distribution.manifest.v1+prettyjws: not implemented: media type "application/vnd.docker.distribution.manifest.v1+prettyjws" is no longer supported since containerd v2.1, please rebuild the image as "application/vnd.docker.distribution.manifest.v2+json"',
                )
            )
        ),
        "PENDING",
        [r"(media type|no longer supported)"],
        [r"rebuild"],
    ),
    Case(
        "signature policy",
        pods(
            a_pod(
                waiting(
                    "SignatureValidationFailed",
                    "image pull failed for reg.example/team/train:1 because the signature validation failed: Source image rejected: A signature was required, but no signature exists",
                )
            )
        ),
        "PENDING",
        [r"signature"],
        [r"sign"],
    ),
    Case(
        "registry unavailable reason",
        pods(
            a_pod(
                waiting(
                    "RegistryUnavailable",
                    'image pull failed for reg.example/team/train:1 because the registry is unavailable: pinging container registry reg.example: Get "https://reg.example/v2/": dial tcp 10.0.0.1:443: connect: connection refused',
                )
            )
        ),
        "PENDING",
        [r"reg\.example", r"refused|reach|unavailable"],
        [r"reach|check|again"],
    ),
    Case(
        "pod rejected for topology affinity",
        pods(
            a_pod(
                phase="Failed",
                status={
                    "reason": "TopologyAffinityError",
                    "message": "Pod was rejected: Resources cannot be allocated with Topology locality",
                },
            ),
            job=failed_job(message="Job has reached the specified backoff limit"),
        ),
        "FAILED",
        [r"Topology locality"],
        [r"again|single-numa|topology|less"],
    ),
    Case(
        "unexpected admission gpu",
        pods(
            a_pod(
                phase="Failed",
                status={
                    "reason": "UnexpectedAdmissionError",
                    "message": "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu, which is unexpected",
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"nvidia\.com/gpu", r"unhealthy|no healthy"],
        [r"again|node|administrator"],
    ),
    Case(
        "node shutdown graceful rejection",
        pods(
            a_pod(
                phase="Failed",
                status={
                    "reason": "NodeShutdown",
                    "message": "Pod was rejected as the node is shutting down.",
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"shut"],
        [r"again"],
    ),
    Case(
        "suspended by deadline then resumed? JobSuspended with active",
        pods(
            [],
            job=a_job(
                {
                    "conditions": [
                        {
                            "type": "Suspended",
                            "status": "True",
                            "reason": "JobSuspended",
                            "message": "Job suspended",
                        }
                    ]
                },
                suspend=True,
            ),
        ),
        "PENDING",
        [r"suspend"],
        [r"resume"],
    ),
    Case(
        "job deadline exceeded while pending unschedulable",
        pods(
            [],
            job=failed_job(
                "DeadlineExceeded",
                "Job was active longer than specified deadline",
                activeDeadlineSeconds=60,
            ),
            gone=[
                not_placed(
                    "0/3 nodes are available: 3 Insufficient cpu.",
                    asks={"cpu": "64"},
                    metadata={"deletionTimestamp": "2026-01-01T00:01:00Z"},
                )
            ],
        ),
        "FAILED",
        [r"60", r"cpu|CPU"],
        [r"time|timeout|cpu|CPU|ask"],
    ),
    Case(
        "mutating webhook not allowed",
        pods(
            [],
            job=a_job({}),
            events=[
                event(
                    "FailedCreate",
                    'Error creating: admission webhook "mutate.istio.io" denied the request: namespace not injected; set label istio-injection=disabled on pod',
                    kind="Job",
                )
            ],
        ),
        "PENDING|FAILED",
        [r"mutate\.istio\.io", r"istio-injection=disabled"],
        [r"says|change|administrator"],
    ),
    Case(
        "kyverno long policy",
        pods(
            [],
            job=a_job({}),
            events=[
                event(
                    "FailedCreate",
                    "Error creating: admission webhook \"validate.kyverno.svc-fail\" denied the request: \n\nresource Pod/ml/tune-1-x was blocked due to the following policies \n\nrequire-labels:\n  check-team: 'validation error: The label `team` is required. rule check-team failed at path /metadata/labels/team/'",
                    kind="Job",
                )
            ],
        ),
        "PENDING|FAILED",
        [r"label `team` is required"],
        [r"label|policy|change"],
    ),
    Case(
        "LimitRange ephemeral default too big",
        pods(
            [],
            job=a_job({}),
            events=[
                event(
                    "FailedCreate",
                    'Error creating: pods "tune-1-x" is forbidden: [maximum cpu usage per Container is 4, but limit is 8, maximum memory usage per Pod is 16Gi, but limit is 34359738368]',
                    kind="Job",
                )
            ],
        ),
        "PENDING|FAILED",
        [r"4 of cpu|cpu.*4", r"16Gi of memory|memory.*16Gi", r"8"],
        [r"less"],
    ),
    Case(
        "quota exceeded for ephemeral, human units",
        pods(
            [],
            job=a_job({}),
            events=[
                event(
                    "FailedCreate",
                    'Error creating: pods "tune-1-x" is forbidden: exceeded quota: disk, requested: requests.ephemeral-storage=107374182400, used: requests.ephemeral-storage=0, limited: requests.ephemeral-storage=53687091200',
                    kind="Job",
                )
            ],
        ),
        "PENDING|FAILED",
        [r"disk", r"50Gi", r"100Gi"],
        [r"less|raised"],
    ),
    Case(
        "5000 jobs quota",
        pods(
            [],
            job=a_job({}),
            events=[
                event(
                    "FailedCreate",
                    'Error creating: pods "tune-1-x" is forbidden: exceeded quota: gke-resource-quotas, requested: pods=1, used: pods=1500, limited: pods=1500',
                    kind="Job",
                )
            ],
        ),
        "PENDING",
        [r"gke-resource-quotas", r"1500"],
        [r"wait|delete|raised"],
    ),
    Case(
        "init container waits in CrashLoop with OnFailure",
        pods(
            a_pod(
                waiting("PodInitializing"),
                init=[
                    (
                        a_container("fetch"),
                        waiting(
                            "CrashLoopBackOff",
                            "back-off 40s restarting failed container=fetch pod=x",
                            lastState={
                                "terminated": {
                                    "exitCode": 7,
                                    "reason": "Error",
                                    "message": "curl: (6) Could not resolve host: data.example",
                                }
                            },
                            restartCount=3,
                        ),
                    )
                ],
                restartPolicy="OnFailure",
            )
        ),
        "PENDING",
        [r"fetch", r"Could not resolve host"],
        [r"fetch"],
    ),
    Case(
        "container killed by memory of node (oom without limit)",
        pods(failed_pod(137, "OOMKilled"), job=failed_job()),
        "FAILED",
        [r"no memory limit"],
        [r"memory="],
    ),
    Case(
        "sigkill due to liveness w/out events, deleted grace",
        pods(
            failed_pod(
                137,
                metadata={
                    "deletionTimestamp": "2026-01-01T00:00:08Z",
                    "deletionGracePeriodSeconds": 2,
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"deleted"],
        [r"again|audit"],
    ),
    Case(
        "dns config nodes not ready",
        pods(
            a_pod(CREATING),
            events=[
                event(
                    "NetworkNotReady",
                    "network is not ready: container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:Network plugin returns error: cni plugin not initialized",
                )
            ],
        ),
        "PENDING",
        [r"network"],
        [r"again|administrator|wait"],
    ),
    Case(
        "scheduler too many pods",
        pods(
            not_placed(
                "0/2 nodes are available: 2 Too many pods. preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod.",
                asks={"cpu": "1"},
            ),
            nodes=[a_node("n1", pods="10"), a_node("n2", pods="10")],
        ),
        "PENDING",
        [r"pods"],
        [r"wait|other work"],
        [r"Insufficient"],
    ),
    Case(
        "volume zone conflict",
        pods(
            not_placed(
                "0/3 nodes are available: 3 node(s) had volume node affinity conflict. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.",
                asks={"cpu": "1"},
            ),
            nodes=[a_node("n1"), a_node("n2"), a_node("n3")],
        ),
        "PENDING",
        [r"volume"],
        [r"zone|volume"],
    ),
    Case(
        "max volume count",
        pods(
            not_placed(
                "0/2 nodes are available: 2 node(s) exceed max volume count. preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod.",
                asks={"cpu": "1"},
            ),
            nodes=[a_node("n1"), a_node("n2")],
        ),
        "PENDING",
        [r"volumes?"],
        [r"wait|fewer|end"],
    ),
    Case(
        "dra claims unsatisfied",
        pods(
            not_placed(
                "0/2 nodes are available: 2 cannot allocate all claims. still not schedulable, preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.",
                asks={"cpu": "1"},
                resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
            ),
            nodes=[a_node("n1"), a_node("n2")],
        ),
        "PENDING",
        [r"claim"],
        [r"claim|device|driver"],
    ),
    Case(
        "unschedulable node just tainted by operator",
        pods(
            not_placed(
                "0/1 nodes are available: 1 node(s) had untolerated taint {team: vision}. preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.",
                asks={"cpu": "1"},
            ),
            nodes=[a_node("n1", None, "team=vision:NoSchedule")],
        ),
        "PENDING",
        [r"team=vision|team: vision"],
        [r"tolerat|taint"],
    ),
    Case(
        "gcsfuse sidecar missing",
        pods(
            a_pod(
                CREATING,
                metadata={"annotations": {"gke-gcsfuse/volumes": "true"}},
                volumes=[{"name": "b", "csi": {"driver": "gcsfuse.csi.storage.gke.io"}}],
            ),
            events=[
                event(
                    "FailedMount",
                    'MountVolume.SetUp failed for volume "b" : rpc error: code = FailedPrecondition desc = failed to find the sidecar container in Pod spec',
                )
            ],
        ),
        "PENDING",
        [r"sidecar"],
        [r"sidecar|annotation|add-on|driver"],
    ),
    Case(
        "gcsfuse bucket missing",
        pods(
            a_pod(CREATING),
            events=[
                event(
                    "FailedMount",
                    'MountVolume.SetUp failed for volume "b" : rpc error: code = NotFound desc = failed to get GCS bucket "nobucket": googleapi: Error 404: The specified bucket does not exist., notFound',
                )
            ],
        ),
        "PENDING",
        [r"nobucket|bucket"],
        [r"create|name|correct"],
    ),
    Case(
        "gcsfuse permission",
        pods(
            a_pod(CREATING),
            events=[
                event(
                    "FailedMount",
                    'MountVolume.SetUp failed for volume "b" : rpc error: code = PermissionDenied desc = failed to get GCS bucket "b1": googleapi: Error 403: train@p.iam.gserviceaccount.com does not have storage.objects.list access to the Google Cloud Storage bucket. Permission \'storage.objects.list\' denied on resource (or it may not exist)., forbidden',
                )
            ],
        ),
        "PENDING",
        [r"storage\.objects\.list|403|b1"],
        [r"train@p\.iam|role|storage\.object"],
    ),
    Case(
        "job podReplacement: pod stuck terminating on lost node",
        pods(
            a_pod(
                RUNS,
                phase="Running",
                metadata={
                    "deletionTimestamp": "2026-01-01T00:06:00Z",
                    "deletionGracePeriodSeconds": 30,
                },
                status={
                    "conditions": [
                        {"type": "Ready", "status": "False"},
                        {
                            "type": "DisruptionTarget",
                            "status": "True",
                            "reason": "DeletionByTaintManager",
                            "message": "Taint manager: deleting due to NoExecute taint",
                        },
                    ]
                },
            ),
            nodes=[a_node("n1", None, "node.kubernetes.io/unreachable:NoExecute", ready="Unknown")],
        ),
        "RUNNING",
        [r"node"],
        [r"again|wait|nothing"],
    ),
    Case(
        "deleted pod, exits 1 in handler, job failed",
        seq(
            pods(a_pod(RUNS, phase="Running")),
            pods(a_pod(fin(1), phase="Failed", metadata=DELETED)),
            pods([], job=failed_job(message="Job has reached the specified backoff limit")),
        ),
        "FAILED",
        [r"deleted"],
        [r"again|audit"],
    ),
    Case(
        "pod crashed BEFORE deletion",
        seq(
            pods(a_pod(fin(3, "2026-01-01T00:00:05Z"), phase="Failed", metadata=DELETED)),
            pods([], job=failed_job()),
        ),
        "FAILED",
        [r"exit code 3"],
        [r"log"],
        [r"deleted"],
    ),
    Case(
        "oom with sidecar succeeding",
        pods(
            a_pod(
                fin(137, reason="OOMKilled"),
                fin(0),
                phase="Failed",
                containers=[
                    a_container(resources={"limits": {"memory": "2Gi"}}),
                    a_container("logger"),
                ],
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"out of memory", r"2Gi"],
        [r"memory"],
    ),
    Case(
        "helper container failed while main ok",
        pods(
            a_pod(
                fin(0), fin(9), phase="Failed", containers=[a_container(), a_container("uploader")]
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"uploader", r"exit code 9"],
        [r"log"],
    ),
    Case(
        "both fail: first to fail is cause",
        pods(
            a_pod(
                fin(143, "2026-01-01T00:00:20Z"),
                fin(2, "2026-01-01T00:00:12Z"),
                phase="Failed",
                containers=[a_container(), a_container("db")],
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"db", r"exit code 2"],
        [r"log"],
    ),
    Case(
        "job killed by user: foreground deletion with pod running",
        pods(
            a_pod(RUNS, phase="Running", metadata=DELETED),
            job=a_job(
                metadata={
                    "deletionTimestamp": "2026-01-01T00:00:10Z",
                    "finalizers": ["foregroundDeletion"],
                }
            ),
        ),
        "RUNNING",
        [r"(Job (was|is)( being)? deleted|being stopped)"],
        [],
    ),
    Case(
        "suspended while pod running: stop",
        pods(
            a_pod(RUNS, phase="Running", metadata=DELETED),
            job=a_job({"active": 1, "conditions": []}, suspend=True),
        ),
        "RUNNING",
        [r"suspend"],
        [r"resume"],
    ),
    Case(
        "resumed after suspension, new pod pending",
        seq(
            pods(a_pod(RUNS, phase="Running")),
            pods(
                a_pod(fin(143), phase="Failed", metadata=DELETED),
                job=a_job(
                    {
                        "conditions": [
                            {"type": "Suspended", "status": "True", "reason": "JobSuspended"}
                        ]
                    },
                    suspend=True,
                ),
            ),
            pods(
                a_pod(CREATING, metadata={"name": "tune-1-zzzzz", "uid": "p2"}),
                job=a_job(
                    {
                        "active": 1,
                        "conditions": [
                            {"type": "Suspended", "status": "False", "reason": "JobResumed"}
                        ],
                    }
                ),
            ),
        ),
        "PENDING",
        [r".*"],
        [],
        [r"exit code 143"],
    ),
    Case(
        "eviction by drain with PDB: exit 143 & backoff 0 w/out ignore",
        pods(
            a_pod(
                fin(143),
                phase="Failed",
                metadata=DELETED,
                status=disrupted("EvictionByEvictionAPI", "Eviction API: evicting"),
            ),
            job=failed_job(message="Job has reached the specified backoff limit"),
        ),
        "FAILED",
        [r"evicted|drain"],
        [r"again"],
    ),
    Case(
        "preempted by scheduler with exit 0 in handler",
        pods(
            a_pod(
                fin(0),
                phase="Succeeded",
                metadata=DELETED,
                status=disrupted(
                    "PreemptionByScheduler",
                    "default-scheduler: preempting to accommodate a higher priority pod",
                ),
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"preempted|priority"],
        [r"again|priority"],
    ),
    Case(
        "kubelet evicts on memory pressure with usage",
        pods(
            a_pod(
                fin(137),
                phase="Failed",
                status={
                    "reason": "Evicted",
                    "message": "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80240Ki. Container main was using 7340032Ki, request is 1Gi, has larger consumption of memory. ",
                    **disrupted(
                        "TerminationByKubelet",
                        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80240Ki. Container main was using 7340032Ki, request is 1Gi, has larger consumption of memory. ",
                    ),
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"short of memory|low on", r"7Gi", r"1Gi"],
        [r"memory"],
    ),
    Case(
        "pid pressure",
        pods(
            a_pod(
                fin(137),
                phase="Failed",
                status={
                    "reason": "Evicted",
                    "message": "The node was low on resource: pids. Threshold quantity: 1k, available: 3. ",
                    **disrupted("TerminationByKubelet", "The node was low on resource: pids."),
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"pids|processes"],
        [r"process|machine|fewer"],
    ),
    Case(
        "max failed indexes",
        Seen(
            job={
                **a_job(
                    {
                        "failed": 2,
                        "failedIndexes": "1,3",
                        "completedIndexes": "0,2",
                        "conditions": [
                            {
                                "type": "Failed",
                                "status": "True",
                                "reason": "MaxFailedIndexesExceeded",
                                "message": "Job has exceeded the specified maximal number of failed indexes",
                            }
                        ],
                    },
                    completions=5,
                    parallelism=2,
                    completionMode="Indexed",
                    backoffLimitPerIndex=0,
                    maxFailedIndexes=1,
                )
            },
            gone=[
                a_pod(
                    fin(4),
                    phase="Failed",
                    metadata={
                        "annotations": {"batch.kubernetes.io/job-completion-index": "3"},
                        "name": "t3",
                        "uid": "u3",
                    },
                )
            ],
        ),
        "FAILED",
        [r"index 1", r"index 3", r"exit code 4"],
        [r"log|maxFailed"],
    ),
    Case(
        "pod failure policy FailJob by exit code",
        seq(
            pods(a_pod(fin(42), phase="Failed")),
            pods(
                a_pod(fin(42), phase="Failed"),
                job=failed_job(
                    "PodFailurePolicy",
                    "Container main for pod ml/tune-1-abcde failed with exit code 42 matching FailJob rule at index 0",
                ),
            ),
        ),
        "FAILED",
        [r"exit code 42"],
        [r"log"],
    ),
    Case(
        "job DeadlineExceeded with running pod killed",
        seq(
            pods(a_pod(RUNS, phase="Running")),
            pods(
                a_pod(fin(143), phase="Failed", metadata=DELETED),
                job=failed_job(
                    "DeadlineExceeded",
                    "Job was active longer than specified deadline",
                    activeDeadlineSeconds=300,
                ),
            ),
        ),
        "FAILED",
        [r"300|5 min|deadline|time limit"],
        [r"time"],
        [r"somebody deleted"],
    ),
    Case(
        "pod deadline own",
        pods(
            a_pod(
                fin(143),
                phase="Failed",
                status={
                    "reason": "DeadlineExceeded",
                    "message": "Pod was active on the node longer than the specified deadline",
                },
                activeDeadlineSeconds=90,
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"90"],
        [r"timeout|time"],
    ),
    Case(
        "container cannot run: oci runtime cgroup",
        pods(
            failed_pod(
                128,
                "StartError",
                'failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: error during container init: error setting cgroup config for procHooks process: failed to write "4194304": write /sys/fs/cgroup/memory.max: device or resource busy: unknown',
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"cgroup|memory"],
        [r"memory|runtime|again"],
    ),
    Case(
        "exec missing lib interpreter",
        pods(
            failed_pod(
                128,
                "StartError",
                'failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: error during container init: exec: "/app/run.sh": stat /app/run.sh: no such file or directory: unknown',
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"/app/run\.sh"],
        [r"command|image"],
    ),
    Case(
        "exit 139 with message",
        pods(
            failed_pod(
                139,
                "Error",
                'Fatal Python error: Segmentation fault\n  File "/app/x.py", line 3 in <module>',
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"SIGSEGV|segmentation"],
        [r"native|log"],
    ),
    Case(
        "exit 1 with CUDA driver mismatch log",
        pods(
            failed_pod(
                1,
                "Error",
                "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"CUDA driver version is insufficient"],
        [r"driver|CUDA|log"],
    ),
    Case(
        "workload identity 403 log",
        pods(
            failed_pod(
                1,
                "Error",
                "google.api_core.exceptions.Forbidden: 403 GET https://storage.googleapis.com/storage/v1/b/p-kn-jobs/o/x: train@p.iam.gserviceaccount.com does not have storage.objects.get access to the Google Cloud Storage object.",
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"403|storage\.objects\.get"],
        [r"train@p\.iam"],
    ),
    Case(
        "metadata server no SA",
        pods(
            failed_pod(
                1,
                "Error",
                "google.auth.exceptions.RefreshError: ('Failed to retrieve http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token from the Google Compute Engine metadata service. Status: 404 Response: b\"unable to generate access token\"'",
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"metadata"],
        [r"workload identity|service account|identity"],
    ),
    Case(
        "node deleted then pod GC",
        seq(
            pods(a_pod(RUNS, phase="Running"), nodes=[a_node("n1")]),
            pods(
                a_pod(
                    RUNS,
                    phase="Failed",
                    metadata=DELETED,
                    status=disrupted("DeletionByPodGC", "PodGC: node no longer exists"),
                ),
                job=failed_job(),
            ),
        ),
        "FAILED",
        [r"node was removed|no longer"],
        [r"again"],
    ),
    Case(
        "liveness killed with restartPolicy never",
        pods(
            a_pod(fin(137), phase="Failed"),
            job=failed_job(),
            events=[
                event(
                    "Unhealthy",
                    "Liveness probe failed: HTTP probe failed with statuscode: 503",
                    count=3,
                ),
                event("Killing", "Container main failed liveness probe, will be restarted"),
            ],
        ),
        "FAILED",
        [r"liveness probe", r"503|3 times"],
        [r"probe|answer"],
    ),
    Case("job never looked at (status {})", pods([], job=a_job({})), "PENDING", [r"no pod"], []),
    Case(
        "pod failed no containers status: admission OutOfmemory",
        pods(
            a_pod(
                phase="Failed",
                status={
                    "reason": "OutOfmemory",
                    "message": "Pod was rejected: Node didn't have enough resource: memory, requested: 34359738368, used: 1073741824, capacity: 16106127360",
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"memory", r"32Gi"],
        [r"less|scheduler|node"],
    ),
    Case(
        "node affinity rejected at admission",
        pods(
            a_pod(
                phase="Failed",
                status={
                    "reason": "NodeAffinity",
                    "message": "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"node", r"affinity|selector"],
        [r"again|selector|node"],
    ),
    Case(
        "resize infeasible / container restarts too often by OnFailure backoff",
        pods(
            a_pod(
                waiting(
                    "CrashLoopBackOff",
                    "back-off 5m0s restarting failed container=main",
                    lastState={
                        "terminated": {
                            "exitCode": 1,
                            "reason": "Error",
                            "message": "ModuleNotFoundError: No module named 'jaxx'",
                        }
                    },
                    restartCount=7,
                ),
                phase="Running",
                restartPolicy="OnFailure",
            )
        ),
        "RUNNING",
        [r"ModuleNotFoundError"],
        [r"log|image|depend"],
    ),
    Case(
        "native sidecar never starts so main waits",
        pods(
            a_pod(
                waiting("PodInitializing"),
                init=[
                    (
                        a_container("proxy", image="reg.example/proxy:9", restartPolicy="Always"),
                        waiting(
                            "ImagePullBackOff",
                            'Back-off pulling image "reg.example/proxy:9": ErrImagePull: failed to resolve reference "reg.example/proxy:9": reg.example/proxy:9: not found',
                        ),
                    )
                ],
            )
        ),
        "PENDING",
        [r"proxy:9", r"does not exist"],
        [r"push|name|tag"],
    ),
    Case(
        "kueue localqueue missing",
        queued([qr("LocalQueue team-a doesn't exist", "Inadmissible")]),
        "PENDING",
        [r"team-a", r"doesn't exist"],
        [r"correct|name|queue"],
    ),
    Case(
        "kueue clusterqueue inactive",
        queued([qr("ClusterQueue cq is inactive", "Inadmissible")]),
        "PENDING",
        [r"cq is inactive"],
        [r"administrator|mend"],
    ),
    Case(
        "kueue flavors taint",
        queued(
            [
                qr(
                    "couldn't assign flavors to pod set main: untolerated taint {key: cloud.google.com/gke-tpu} in flavor tpu",
                    "Pending",
                )
            ]
        ),
        "PENDING",
        [r"untolerated taint"],
        [r"tolerat|administrator|mend|queue"],
    ),
    Case(
        "kueue needs more quota",
        queued(
            [
                qr(
                    "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor l4, 3 more needed",
                    "Pending",
                )
            ]
        ),
        "PENDING",
        [r"3 more GPUs"],
        [r"wait"],
    ),
    Case(
        "kueue preempted within cluster queue",
        queued(
            [
                qr("The workload has been preempted"),
                {
                    "type": "Evicted",
                    "status": "True",
                    "reason": "Preempted",
                    "message": "Preempted to accommodate a workload (UID: u, JobUID: j) due to prioritization in the ClusterQueue",
                },
            ]
        ),
        "PENDING",
        [r"preempted|higher priority"],
        [r"wait"],
    ),
    Case(
        "kueue check retry provisioning",
        queued(
            [qr("Quota reserved in ClusterQueue cq", "QuotaReserved", "True")],
            admissionChecks=[
                {
                    "name": "dws",
                    "state": "Pending",
                    "message": "Waiting for resources. Currently there are not enough resources available to fulfill the request.",
                }
            ],
        ),
        "PENDING",
        [r"dws", r"not enough resources"],
        [r"wait"],
    ),
    Case(
        "kueue max retries deactivated",
        queued(
            [
                {
                    "type": "Evicted",
                    "status": "True",
                    "reason": "DeactivatedDueToRequeuingLimitExceeded",
                    "message": "The workload is deactivated by Kueue: exceeding the maximum number of re-queuing retries",
                }
            ],
            spec={"active": False},
        ),
        "PENDING",
        [r"deactivated", r"re-queuing"],
        [r"active|submit"],
    ),
    Case(
        "late: evicted pod by events",
        late(
            failed_job(message="Job has reached the specified backoff limit"),
            made,
            event(
                "Evicted",
                "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 400Mi. Container main was using 62Gi, request is 0, has larger consumption of ephemeral-storage. ",
            ),
        ),
        "FAILED",
        [r"disk|ephemeral", r"62Gi"],
        [r"ephemeral-storage|bucket"],
    ),
    Case(
        "late: preempted by events",
        late(failed_job(), made, event("Preempted", "Preempted by pod 6b2c on node n1")),
        "FAILED",
        [r"preempted"],
        [r"again"],
    ),
    Case(
        "late: image never pulled, deadline",
        late(
            failed_job(
                "DeadlineExceeded",
                "Job was active longer than specified deadline",
                activeDeadlineSeconds=120,
            ),
            made,
            event("Scheduled", "Successfully assigned ml/tune-1-abcde to n1"),
            event("Pulling", 'Pulling image "reg.example/team/train:1"'),
            event(
                "Failed",
                'Failed to pull image "reg.example/team/train:1": failed to resolve reference "reg.example/team/train:1": reg.example/team/train:1: not found',
            ),
            event("Failed", "Error: ErrImagePull"),
            event("BackOff", 'Back-off pulling image "reg.example/team/train:1"'),
        ),
        "FAILED",
        [r"120", r"does not exist|not found"],
        [r"push|name|tag"],
    ),
    Case(
        "late: node not ready taint",
        late(
            failed_job(),
            made,
            event("NodeNotReady", "Node is not ready"),
            event("TaintManagerEviction", "Marking for deletion Pod ml/tune-1-abcde"),
        ),
        "FAILED",
        [r"node"],
        [r"again"],
    ),
    Case(
        "late: nothing but backoff limit",
        late(failed_job(message="Job has reached the specified backoff limit")),
        "FAILED",
        [r"backoff limit|how its program ended|failed"],
        [r"again|log|events|see"],
    ),
    Case(
        "pod exited while node was cordoned by drain w/ exit 1 own",
        pods(
            a_pod(
                fin(1, "2026-01-01T00:00:08Z", said="ValueError: bad shape"),
                phase="Failed",
                status=disrupted("EvictionByEvictionAPI", "Eviction API: evicting"),
                metadata=DELETED,
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"ValueError: bad shape|evict"],
        [r"log|again"],
    ),
    Case(
        "hostPort",
        pods(
            not_placed(
                "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports. preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.",
                asks={"cpu": "1"},
            ),
            nodes=[a_node("n1")],
        ),
        "PENDING",
        [r"ports?"],
        [r"port"],
    ),
    Case(
        "topology spread",
        pods(
            not_placed(
                "0/2 nodes are available: 2 node(s) didn't match pod topology spread constraints (missing required label). preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.",
                asks={"cpu": "1"},
            ),
            nodes=[a_node("n1"), a_node("n2")],
        ),
        "PENDING",
        [r"spread|label"],
        [r"label|spread"],
    ),
    Case(
        "arm image pod on arm selector none",
        pods(
            not_placed(
                "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.",
                asks={"cpu": "1"},
                nodeSelector={"kubernetes.io/arch": "arm64"},
            ),
            nodes=[a_node("n1"), a_node("n2")],
        ),
        "PENDING",
        [r"arm64", r"amd64"],
        [r"accelerator=|pool"],
    ),
    Case(
        "gpu label right, count beyond",
        pods(
            not_placed(
                "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                asks={"nvidia.com/gpu": "8"},
                nodeSelector={"cloud.google.com/gke-accelerator": "nvidia-l4"},
            ),
            nodes=[a_node("n1", {"cloud.google.com/gke-accelerator": "nvidia-l4"}, gpu="4")],
        ),
        "PENDING",
        [r"8 GPUs", r"4"],
        [r"less|larger"],
    ),
    Case(
        "spot pool absent",
        pods(
            not_placed(
                "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
                asks={"cpu": "1"},
                nodeSelector={"cloud.google.com/gke-spot": "true"},
            ),
            nodes=[a_node("n1")],
        ),
        "PENDING",
        [r"gke-spot"],
        [r"spot|pool"],
    ),
    Case(
        "no nodes",
        pods(not_placed("no nodes available to schedule pods", asks={"cpu": "1"}), nodes=[]),
        "PENDING",
        [r"no node"],
        [r"pool"],
    ),
    Case(
        "scheduler words, nodes unknown, gpu",
        pods(
            not_placed(
                "0/12 nodes are available: 12 Insufficient nvidia.com/gpu. preemption: 0/12 nodes are available: 12 No preemption victims found for incoming pod.",
                asks={"nvidia.com/gpu": "1"},
            )
        ),
        "PENDING",
        [r"GPU"],
        [r"wait"],
    ),
    Case(
        "scale up: gke quota exceeded",
        pods(
            not_placed(
                "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                asks={"nvidia.com/gpu": "1"},
            ),
            nodes=[a_node("n1")],
            events=[
                event(
                    "FailedScaleUp",
                    "Node scale up in zones us-central1-a associated with this pod failed: GCE quota exceeded. Pod is at risk of not being scheduled.",
                )
            ],
        ),
        "PENDING",
        [r"quota", r"us-central1-a"],
        [r"quota"],
    ),
    Case(
        "scale up: timed out",
        pods(
            not_placed("0/1 nodes are available: 1 Insufficient cpu.", asks={"cpu": "64"}),
            nodes=[a_node("n1")],
            events=[
                event(
                    "FailedScaleUp",
                    "Node scale up in zones us-central1-a associated with this pod failed: Internal error. Pod is at risk of not being scheduled.",
                )
            ],
        ),
        "PENDING",
        [r"Internal error"],
        [r"wait|zone|quota"],
    ),
    Case(
        "binary auth",
        Seen(
            job=a_job({}),
            events=[
                event(
                    "FailedCreate",
                    'Error creating: admission webhook "imagepolicywebhook.image-policy.k8s.io" denied the request: Image docker.io/library/busybox denied by Binary Authorization default admission rule. Denied by always_deny admission rule',
                    kind="Job",
                )
            ],
        ),
        "PENDING|FAILED",
        [r"Binary Authorization", r"busybox|always_deny"],
        [r"image|attest"],
    ),
    Case(
        "job quota count/jobs",
        Seen(
            job=a_job({}),
            events=[
                event(
                    "FailedCreate",
                    'Error creating: pods "tune-1-x" is forbidden: exceeded quota: objs, requested: count/pods=1, used: count/pods=40, limited: count/pods=40',
                    kind="Job",
                )
            ],
        ),
        "PENDING",
        [r"objs", r"40"],
        [r"wait|delete|raised"],
    ),
    Case(
        "rbac of controller",
        Seen(
            job=a_job({}),
            events=[
                event(
                    "FailedCreate",
                    'Error creating: pods "tune-1-x" is forbidden: unable to validate against any security context constraint: [provider "restricted": Forbidden: spec.containers[0].capabilities.drop]',
                    kind="Job",
                )
            ],
        ),
        "PENDING|FAILED",
        [r"security context constraint"],
        [r"change|give|administrator|right"],
    ),
    Case(
        "node name set and absent",
        pods(a_pod(phase="Pending", node="ghost"), nodes=[a_node("n1")]),
        "PENDING",
        [r"ghost"],
        [r"node|name"],
    ),
    Case(
        "evicted quota of emptyDir memory",
        pods(
            a_pod(
                fin(137),
                phase="Failed",
                status={
                    "reason": "Evicted",
                    "message": 'Usage of EmptyDir volume "shm" exceeds the limit "64Mi". ',
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"shm", r"64Mi"],
        [r"raise|less"],
    ),
    Case(
        "local ephemeral container limit",
        pods(
            a_pod(
                fin(137),
                phase="Failed",
                status={
                    "reason": "Evicted",
                    "message": "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. ",
                },
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"10Gi"],
        [r"raise|bucket"],
    ),
    Case(
        "unknown phase: node lost w/o taint",
        pods(
            a_pod(
                RUNS,
                phase="Unknown",
                status={
                    "reason": "NodeLost",
                    "message": "Node n1 which was running pod tune-1-abcde is unresponsive",
                },
            )
        ),
        "RUNNING|PENDING|FAILED",
        [r"node"],
        [r"wait|again"],
    ),
    Case(
        "pod stuck terminating with finalizer after failure",
        pods(
            a_pod(
                fin(5, "2026-01-01T00:00:05Z"),
                phase="Failed",
                metadata={**DELETED, "finalizers": ["example.com/hold"]},
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"exit code 5", r"example\.com/hold"],
        [r"finalizer|kubectl"],
    ),
    Case(
        "an image without the runner",
        pods(
            failed_pod(
                2,
                message="python3: can't open file '/app/remote_runner.py': [Errno 2] No such file or directory\n",
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"not made for kinetic", r"/app/remote_runner\.py"],
        [r"build-image", r"kinetic\.images runner"],
        [r"see its log"],
    ),
    Case(
        "the pod has no credentials",
        pods(
            failed_pod(
                74,
                message="kinetic: there are no credentials for Cloud Storage here (Your default "
                "credentials were not found.); let the pods' service account act as one of "
                "Google's (workload identity)\n",
            ),
            job=failed_job(),
        ),
        "FAILED",
        [r"no credentials for Cloud Storage"],
        [r"service account of the pod", r"workload identity", r"STORAGE_EMULATOR_HOST"],
        [r"exit code 74", r"see its log", r"default credentials"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_told_has_cause_and_next_step(case: Case) -> None:
    verdict = judge(case.seen)
    assert verdict.status.name in case.status.split("|"), verdict.text
    for pattern in case.cause:
        assert re.search(pattern, verdict.text, re.IGNORECASE), verdict.text
    for pattern in case.never:
        assert not re.search(pattern, verdict.text, re.IGNORECASE), verdict.text
    for pattern in case.advice:
        assert re.search(pattern, verdict.advice, re.IGNORECASE), verdict.text
    check_any_order(case.seen)


def test_words_of_nobody_keep_the_advice_and_names_with_braces_are_names() -> None:
    volume = {"name": "data", "csi": {"driver": "{weird}.example"}}
    said = 'MountVolume.SetUp failed for volume "data" : it went wrong'
    pod = a_pod(CREATING, volumes=[volume])
    verdict = judge(pods(pod, events=[event("FailedMount", said)]))
    assert "'{weird}.example' is right" in verdict.advice
