# ruff: noqa: E501 - what the API says is one line each
"""Jobs without pods: what the API server refuses, what a queue holds, whose events these are."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.aio.kubernetes.diagnosis.verdict import Seen
from kinetic.job_status import Reason
from tests.kubernetes.situations import (
    BLOCKED,
    FINAL,
    NAME,
    OPEN,
    Json,
    Situation,
    a_job,
    check_any_order,
    event,
    told_of,
)


def refused(name: str, said: str, *words: str, **more: Any) -> Situation:
    """A pod that the API server does not make, in these words."""
    events = [event("FailedCreate", f"Error creating: {said}", kind="Job")]
    return told_of(name, Seen(job=a_job(), events=events), *words, **more)


PODS = f'pods "{NAME}-x" is forbidden: '
HOOK = 'Internal error occurred: failed calling webhook "pods.policy.example.com": failed to call webhook: Post "https://policy.ml.svc:443/check?timeout=10s": '
FATAL: Json = {"reason": Reason.REFUSED, "outlook": FINAL}
DOWN: Json = {"reason": Reason.REFUSED, "outlook": BLOCKED}

ADMISSION = [
    refused(
        "two maxima at once",
        PODS
        + "[maximum cpu usage per Container is 2, but limit is 4, maximum memory usage per Container is 1Gi, but limit is 2Gi]",
        "at most 2 of cpu a container, 4 is asked",
        "at most 1Gi of memory a container, 2Gi is asked",
        **FATAL,
    ),
    refused(
        "a minimum and a maximum at once",
        PODS
        + "[minimum memory usage per Container is 256Mi, but request is 64Mi, maximum cpu usage per Pod is 4, but limit is 8]",
        "at least 256Mi of memory",
        "at most 4 of cpu a pod, 8 is asked",
        "what it allows",
        **FATAL,
    ),
    refused(
        "limit and request too far apart",
        PODS + "cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000",
        "ratio per Container is 2, but provided ratio is 4.000000",
        **FATAL,
    ),
    refused(
        "more GPUs than the quota ever has",
        PODS
        + "exceeded quota: gpus, requested: requests.nvidia.com/gpu=4, used: requests.nvidia.com/gpu=0, limited: requests.nvidia.com/gpu=2",
        "allows requests.nvidia.com/gpu 2, the pod asks for requests.nvidia.com/gpu 4",
        reason=Reason.QUOTA,
        outlook=FINAL,
    ),
    refused(
        "the quota's GPUs are in use",
        PODS
        + "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=2, limited: requests.nvidia.com/gpu=2",
        "requests.nvidia.com/gpu 2 of 2",
        reason=Reason.QUOTA,
        outlook=OPEN,
    ),
    refused(
        "no quota for pods of this class",
        PODS + "insufficient quota to match these scopes: [{PriorityClass In [high]}]",
        "[{PriorityClass In [high]}]",
        reason=Reason.QUOTA,
        outlook=FINAL,
    ),
    refused(
        "a webhook takes too long",
        HOOK + "context deadline exceeded",
        "'pods.policy.example.com'",
        "context deadline exceeded",
        "nothing is wrong with the job",
        **DOWN,
    ),
    refused(
        "nobody trusts a webhook's certificate",
        HOOK + "tls: failed to verify certificate: x509: certificate signed by unknown authority",
        "x509: certificate signed by unknown authority",
        **DOWN,
    ),
    refused(
        "a webhook has no server",
        HOOK + 'no endpoints available for service "policy"',
        'no endpoints available for service "policy"',
        **DOWN,
    ),
    refused(
        "the service of a webhook is missing",
        HOOK + 'service "policy" not found',
        'service "policy" not found',
        **DOWN,
    ),
    refused(
        "a webhook says no",
        'admission webhook "warden.gke.io" denied the request: GKE Warden rejected the request because it violates one or more constraints: hostPath is not allowed',
        "'GKE Warden'",
        "hostPath is not allowed",
        **FATAL,
    ),
    refused(
        "a policy says no",
        PODS
        + "ValidatingAdmissionPolicy 'no-latest' with binding 'b' denied request: image tag latest is not allowed",
        "'no-latest'",
        "image tag latest is not allowed",
        **DOWN,
    ),
    refused(
        "a quota wants four things stated",
        PODS
        + "failed quota: team: must specify limits.cpu for: main; limits.memory for: main,proxy; requests.cpu for: main",
        "needs limits.cpu, limits.memory, requests.cpu stated",
        reason=Reason.QUOTA,
        outlook=FINAL,
    ),
    refused(
        "a quota that was made just now",
        PODS + "status unknown for quota: team, resources: pods",
        "just now",
        reason=Reason.REFUSED,
        outlook=OPEN,
    ),
    refused(
        "GKE's own policy",
        PODS
        + "GKE Warden rejected the request because it violates one or more constraints: hostNetwork is not allowed in Autopilot",
        "'GKE Warden'",
        "hostNetwork is not allowed in Autopilot",
        **FATAL,
    ),
    refused(
        "etcd is slow",
        "etcdserver: request timed out",
        "etcdserver: request timed out",
        "nothing is wrong with the job",
        reason=Reason.REFUSED,
        outlook=OPEN,
    ),
    refused(
        "the API server is slow",
        "Timeout: request did not complete within requested timeout - context deadline exceeded",
        "just now",
        reason=Reason.REFUSED,
        outlook=OPEN,
    ),
    refused(
        "the namespace is gone",
        'namespaces "ml" not found',
        "namespace 'ml' does not exist",
        reason=Reason.SETUP,
        outlook=BLOCKED,
    ),
    told_of(
        "the quota was used up once, now pods are made",
        Seen(
            job=a_job(),
            events=[
                event(
                    "FailedCreate",
                    f"Error creating: {PODS}exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4",
                    kind="Job",
                ),
                event("SuccessfulCreate", f"Created pod: {NAME}-abcde", kind="Job"),
            ],
        ),
        "no pod has been made yet",
        reason=None,
        outlook=OPEN,
        never=("quota",),
    ),
    told_of(
        "nobody has looked at the Job",
        Seen(job=a_job({})),
        "the Job controller has not looked at it yet",
        reason=None,
        outlook=OPEN,
    ),
]

QUEUE = {"kueue.x-k8s.io/queue-name": "research"}
UNFIT = "couldn't assign flavors to pod set main: "


def queued(*told_of: Json, spec: Json | None = None, **status: Any) -> Seen:
    """A Job that Kueue holds, with the conditions of its Workload."""
    job = a_job({}, metadata={"labels": QUEUE}, suspend=True)
    conditions = {"conditions": [*told_of], **status}
    return Seen(
        job=job, workload={"spec": {"queueName": "research", **(spec or {})}, "status": conditions}
    )


def is_so(kind: str, reason: str, message: str = "", status: str = "True") -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def not_reserved(said: str, reason: str = "Pending") -> Json:
    return is_so("QuotaReserved", reason, said, "False")


WAITS: Json = {"reason": Reason.QUEUED, "outlook": OPEN}
QUEUES = [
    told_of(
        "too much for one flavor, another is in use: it waits",
        queued(
            not_reserved(
                UNFIT
                + "insufficient quota for nvidia.com/gpu in flavor l4, previously considered podsets requests (0) + current podset request (16) > maximum capacity (8), insufficient unused quota for nvidia.com/gpu in flavor h100, 3 more needed"
            )
        ),
        "3 more GPUs of quota needed (flavor h100)",
        **WAITS,
    ),
    told_of(
        "too much for every flavor",
        queued(
            not_reserved(
                UNFIT
                + "insufficient quota for nvidia.com/gpu in flavor l4, request > maximum capacity (16 > 8), insufficient quota for nvidia.com/gpu in flavor h100, request > maximum capacity (16 > 4)"
            )
        ),
        "can never hold it",
        "maximum capacity (16 > 8)",
        reason=Reason.QUOTA,
        outlook=FINAL,
    ),
    told_of(
        "TPUs are in use, and the CPUs are too many for ever",
        queued(
            not_reserved(
                UNFIT
                + "insufficient unused quota for google.com/tpu in flavor v5e, 4 more needed, insufficient quota for cpu in flavor v5e, request > maximum capacity (64 > 8)"
            )
        ),
        "can never hold it",
        reason=Reason.QUOTA,
        outlook=FINAL,
    ),
    told_of(
        "two things are lacking",
        queued(
            not_reserved(
                UNFIT
                + "insufficient unused quota for cpu in flavor v5e, 2 more needed, insufficient unused quota for google.com/tpu in flavor v5e, 4 more needed"
            )
        ),
        "2 more CPUs",
        "4 more TPU chips",
        **WAITS,
    ),
    told_of(
        "one flavor does not match, another is in use",
        queued(
            not_reserved(
                UNFIT
                + "flavor l4 doesn't match node affinity, insufficient unused quota for nvidia.com/gpu in flavor h100, 1 more needed"
            )
        ),
        "1 more GPUs",
        **WAITS,
    ),
    told_of(
        "no flavor matches",
        queued(not_reserved(UNFIT + "flavor l4 doesn't match node affinity")),
        "cannot take it: flavor l4 doesn't match node affinity",
        reason=Reason.QUEUED,
        outlook=BLOCKED,
    ),
    told_of(
        "preempted in the queue",
        queued(
            not_reserved(
                "Preempted to accommodate a workload (UID: 1f, JobUID: 2e) due to prioritization in the ClusterQueue"
            ),
            is_so(
                "Evicted", "Preempted", "Preempted to accommodate a workload (UID: 1f, JobUID: 2e)"
            ),
        ),
        "Preempted: it was preempted by work of higher priority",
        "(UID: 1f, JobUID: 2e) due to prioritization in the ClusterQueue",
        **WAITS,
    ),
    told_of(
        "taken back, for its pods were not ready in time",
        queued(
            not_reserved("Exceeded the PodsReady timeout ml/tune-1"),
            is_so("Evicted", "PodsReadyTimeout", "Exceeded the PodsReady timeout ml/tune-1"),
        ),
        "its pods were not ready in time",
        **WAITS,
    ),
    told_of(
        "deactivated, for it was requeued too often",
        queued(
            is_so(
                "Evicted",
                "DeactivatedDueToRequeuingLimitExceeded",
                "The workload is deactivated due to exceeding the maximum number of re-queuing retries",
            ),
            spec={"active": False},
        ),
        "deactivated",
        "maximum number of re-queuing retries",
        reason=Reason.QUEUED,
        outlook=BLOCKED,
    ),
    told_of(
        "the queue is stopped",
        queued(not_reserved("ClusterQueue research is inactive")),
        "ClusterQueue research is inactive",
        reason=Reason.QUEUED,
        outlook=BLOCKED,
    ),
    told_of(
        "quota is there, machines are asked for",
        queued(
            is_so("QuotaReserved", "QuotaReserved"),
            admissionChecks=[
                {
                    "name": "dws",
                    "state": "Pending",
                    "message": "Provisioning Request wasn't provisioned. ETA: 2026-01-01T01:00:00Z",
                }
            ],
        ),
        "waits for dws",
        "ETA: 2026-01-01T01:00:00Z",
        **WAITS,
    ),
    told_of(
        "a check has refused it",
        queued(
            is_so("QuotaReserved", "QuotaReserved"),
            admissionChecks=[
                {"name": "dws", "state": "Rejected", "message": "Capacity is not available"}
            ],
        ),
        "check 'dws'",
        "has refused it: Capacity is not available",
        reason=Reason.QUEUED,
        outlook=BLOCKED,
    ),
    told_of(
        "nobody has seen its Workload",
        Seen(job=a_job({}, metadata={"labels": QUEUE}, suspend=True)),
        "queue 'research'",
        "was not seen",
        never=("others are before it",),
        **WAITS,
    ),
]

NO_ACCOUNT = f'Error creating: {PODS}error looking up service account ml/trainer: serviceaccount "trainer" not found'


def about(**more: Any) -> Json:
    made = event("FailedCreate", NO_ACCOUNT, kind="Job", **more)
    made["involvedObject"]["uid"] = "job-uid"
    return made


CLOCKS = [
    told_of(
        "its own event, of a clock that is behind",
        Seen(job=a_job(), events=[about(lastTimestamp="2025-12-31T23:59:50Z")]),
        "'trainer'",
        reason=Reason.SETUP,
        outlook=BLOCKED,
    ),
    told_of(
        "an event with the times of the newer API",
        Seen(
            job=a_job(),
            events=[
                about(
                    lastTimestamp=None,
                    eventTime="2026-01-01T00:00:01.000000Z",
                    series={"count": 9, "lastObservedTime": "2026-01-01T00:00:09.000000Z"},
                )
            ],
        ),
        "'trainer'",
        reason=Reason.SETUP,
        outlook=BLOCKED,
    ),
    told_of(
        "an event in the words of the newer API",
        Seen(
            job=a_job(),
            events=[
                {
                    "reason": "FailedCreate",
                    "note": NO_ACCOUNT,
                    "regarding": {"kind": "Job", "name": NAME},
                }
            ],
        ),
        "'trainer'",
        reason=Reason.SETUP,
        outlook=BLOCKED,
    ),
]


@pytest.mark.parametrize("case", [*ADMISSION, *QUEUES, *CLOCKS], ids=lambda case: case.name)
def test_a_job_without_pods_is_told_as_it_should_be(case: Situation) -> None:
    case.check(judge(case.seen))
    check_any_order(case.seen)
