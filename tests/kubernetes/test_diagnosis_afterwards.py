# ruff: noqa: E501 - what is told is one line each
"""What follows an end: another pod, a deadline, a policy; and what only events tell of it."""

from __future__ import annotations

from functools import partial

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.aio.kubernetes.diagnosis.verdict import Seen
from kinetic.job_status import JobStatus, Reason
from tests.kubernetes.situations import (
    BLOCKED,
    FAILED,
    FINAL,
    NAME,
    OPEN,
    PENDING,
    RUNNING,
    RUNS,
    SUCCEEDED,
    Json,
    Situation,
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
    told_of_pods,
    waiting,
)

LIMIT = {"limits": {"memory": "64Mi"}}
SMALL = a_container(resources=LIMIT)


told = partial(
    told_of_pods, job=failed_job(), status=FAILED, reason=Reason.USER_ERROR, outlook=FINAL
)

PRESSED = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 51200Ki. Container main was using 1567440Ki, request is 0, has larger consumption of memory. "

LATE = "2026-01-01T00:05:00Z"
LEFT = {"metadata": {"name": f"{NAME}-zzzzz", "uid": "pod-2", "creationTimestamp": LATE}}
MANY = a_job({"active": 1, "failed": 1}, backoffLimit=6)
FULL = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
GPU = {"nvidia.com/gpu": "1"}


def again(pod: Json) -> Json:
    return {**pod, "metadata": {**pod["metadata"], **LEFT["metadata"]}}


AFTERWARDS = [
    told(
        "preempted, then no place",
        [
            failed_pod(143, status=disrupted("PreemptionByScheduler")),
            again(not_placed(FULL, asks=GPU)),
        ],
        "preempted by a pod of higher priority",
        "a new pod waits: a node has 1 GPU, but it is in use",
        job=MANY,
        nodes=[a_node("n1", gpu="1")],
        status=PENDING,
        reason=Reason.PREEMPTED,
        outlook=OPEN,
    ),
    told(
        "the node was lost, another pod runs",
        again(a_pod(RUNS, phase="Running")),
        "the node was removed from the cluster under the pod",
        "another pod runs",
        job=MANY,
        gone=[failed_pod(137, status=disrupted("DeletionByPodGC", "PodGC: node no longer exists"))],
        status=RUNNING,
        reason=Reason.NODE_LOST,
        outlook=OPEN,
        never=("Kubernetes starts",),
    ),
    told(
        "out of memory, then the image is gone",
        [
            failed_pod(137, "OOMKilled", containers=[SMALL]),
            again(a_pod(waiting("ErrImagePull", "reg.example/team/train:1: not found"))),
        ],
        "out of memory",
        "a new pod waits: the image reg.example/team/train:1 does not exist",
        job=MANY,
        status=PENDING,
        reason=Reason.IMAGE_PULL,
        outlook=FINAL,
    ),
    told(
        "evicted, then the quota is used up",
        failed_pod(143, status=disrupted("EvictionByEvictionAPI")),
        "evicted",
        "quota 'team' is used up",
        job=MANY,
        events=[
            event("SuccessfulCreate", f"Created pod: {NAME}-abcde", kind="Job"),
            event(
                "FailedCreate",
                f'Error creating: pods "{NAME}-x" is forbidden: exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4',
                kind="Job",
            ),
        ],
        status=PENDING,
        reason=Reason.QUOTA,
        outlook=OPEN,
    ),
    told(
        "the last of three failures counts, however they are listed",
        [
            {
                **failed_pod(7),
                "metadata": {"name": "tune-1-a", "uid": "3", "creationTimestamp": LATE},
            },
            failed_pod(5),
        ],
        "failed in 2 attempts; the last: the program ended with exit code 7",
    ),
]

OVER = "DeadlineExceeded"
NO_ACCOUNT = f'Error creating: pods "{NAME}-" is forbidden: error looking up service account ml/trainer: serviceaccount "trainer" not found'
BLOCKED_PULL = waiting(
    "ImagePullBackOff",
    'Back-off pulling image "reg.example/team/train:1": ErrImagePull: reg.example/team/train:1: not found',
)
TIMES = [
    told(
        "its time was over before any pod could be made",
        [],
        "time limit of 9 s passed before any pod could be made: service account 'trainer' does not exist",
        "then submit it again",
        job=failed_job(OVER, activeDeadlineSeconds=9),
        events=[event("FailedCreate", NO_ACCOUNT, kind="Job", count=5)],
        reason=Reason.SETUP,
        never=("the program was stopped", "by itself"),
    ),
    told(
        "its time was over while it had no node",
        [],
        "before the program ever ran: a node has 1 GPU, but it is in use",
        "give it more time",
        job=failed_job(OVER, activeDeadlineSeconds=9),
        gone=[not_placed(FULL, asks=GPU, metadata={"deletionTimestamp": LATE})],
        nodes=[a_node("n1", gpu="1")],
        reason=Reason.UNSCHEDULABLE,
    ),
    told(
        "its time was over while the image was pulled",
        [],
        "before the program ever ran: the image reg.example/team/train:1 does not exist",
        job=failed_job(OVER, activeDeadlineSeconds=9),
        gone=[a_pod(BLOCKED_PULL, metadata={"deletionTimestamp": LATE})],
        reason=Reason.IMAGE_PULL,
    ),
    told(
        "its time was over between two starts",
        failed_pod(3),
        "time limit of 9 s passed; 1 of its starts had failed by then, the last: the program ended with exit code 3",
        job=failed_job(OVER, activeDeadlineSeconds=9, backoffLimit=6),
        reason=Reason.DEADLINE,
    ),
    told(
        "its time was over while a new pod waited",
        [],
        "while a new pod waited: a node has 1 GPU, but it is in use",
        job=failed_job(OVER, activeDeadlineSeconds=9, backoffLimit=6),
        gone=[
            failed_pod(143, status=disrupted("PreemptionByScheduler")),
            again(not_placed(FULL, asks=GPU)),
        ],
        nodes=[a_node("n1", gpu="1")],
        reason=Reason.DEADLINE,
    ),
]


def trace(reason: str, message: str) -> list[Json]:
    return [event("Scheduled", "Successfully assigned"), event(reason, message)]


TRACES = [
    told(
        "only an event is left of an eviction",
        [],
        "volume 'scratch' passed its sizeLimit of 10Mi",
        events=trace("Evicted", 'Usage of EmptyDir volume "scratch" exceeds the limit "10Mi". '),
        reason=Reason.OUT_OF_DISK,
    ),
    told(
        "only an event is left of pressure",
        [],
        "short of memory",
        events=trace("Evicted", PRESSED),
        reason=Reason.EVICTED,
    ),
    told(
        "only an event is left of a preemption",
        [],
        "preempted by a pod of higher priority",
        events=trace("Preempted", "Preempted by pod 1f2e on node n1"),
        reason=Reason.PREEMPTED,
    ),
    told(
        "only an event is left of a taint",
        [],
        "thrown out",
        events=trace("TaintManagerEviction", "Marking for deletion Pod ml/tune-1-abcde"),
        reason=Reason.EVICTED,
    ),
    told(
        "a deletion that was called off is no trace",
        [],
        "its pods are gone",
        events=trace("TaintManagerEviction", "Cancelling deletion of Pod ml/tune-1-abcde"),
        reason=Reason.LOST,
    ),
    told(
        "the event of another job with a longer name is no trace",
        [],
        "its pods are gone",
        events=[event("Preempted", "Preempted by pod 1f2e on node n1", name="tune-1-2-abcde")],
        reason=Reason.LOST,
    ),
    told(
        "an event of an earlier job of this name is no trace",
        [],
        "its pods are gone",
        events=[
            event(
                "Preempted",
                "Preempted by pod 1f2e on node n1",
                lastTimestamp="2025-01-01T00:00:00Z",
            )
        ],
        reason=Reason.LOST,
    ),
]

NOT_AGAIN = "Pod ml/tune-1-abcde has condition DisruptionTarget matching FailJob rule at index 0"
STARTED_TWICE = {
    **RUNS,
    "lastState": ended(1),
    "restartCount": 1,
}
AFTER_ASKED = {"deletionTimestamp": "2026-01-01T00:00:35Z", "deletionGracePeriodSeconds": 30}
BEFORE = {"deletionTimestamp": "2026-01-01T00:01:35Z", "deletionGracePeriodSeconds": 30}
POLICIES = [
    told(
        "the event of a pod that is not its last is no trace",
        [],
        "its pods are gone",
        events=[
            event("SuccessfulCreate", "Created pod: tune-1-aaaaa", kind="Job"),
            event("Preempted", "Preempted by pod 1f2e on node n1", name="tune-1-aaaaa"),
            event("SuccessfulCreate", "Created pod: tune-1-bbbbb", kind="Job"),
            event("SuccessfulCreate", "Created pod: tune-1-ccccc", kind="Job"),
        ],
        reason=Reason.LOST,
    ),
    told(
        "of two pods that only events tell of, the last one counts",
        [],
        "before the program ever ran: pulling the image reg.example/team/train:1",
        job=failed_job("DeadlineExceeded", activeDeadlineSeconds=9),
        events=[
            event("SuccessfulCreate", "Created pod: tune-1-zzzzz", kind="Job"),
            event("SuccessfulCreate", "Created pod: tune-1-aaaaa", kind="Job"),
            event("Scheduled", "Successfully assigned", name="tune-1-aaaaa"),
            event("Pulling", 'Pulling image "reg.example/team/train:1"', name="tune-1-aaaaa"),
            event("Started", "Container started", name="tune-1-zzzzz"),
        ],
        reason=Reason.DEADLINE,
    ),
    told(
        "somebody deleted it, and its handler chose the exit code",
        failed_pod(3, metadata=AFTER_ASKED),
        "somebody deleted the pod while it ran, and its program ended with exit code 3 then",
        reason=Reason.LOST,
    ),
    told(
        "it had failed before somebody deleted it",
        failed_pod(3, metadata=BEFORE),
        "the program ended with exit code 3",
        never=("somebody",),
    ),
    told(
        "it was out of memory while somebody deleted it",
        failed_pod(137, "OOMKilled", metadata=AFTER_ASKED),
        "out of memory",
        reason=Reason.OUT_OF_MEMORY,
    ),
    told(
        "the policy fails the Job for an eviction: that is no exit code's meaning",
        failed_pod(143, status=disrupted("EvictionByEvictionAPI")),
        "evicted by an administrator",
        "by the Job's policy that means 'do not retry'",
        job=failed_job("PodFailurePolicy", NOT_AGAIN),
        reason=Reason.EVICTED,
        never=("exit code 143",),
    ),
    told(
        "the autoscaler has removed the node",
        failed_pod(143, status=disrupted("EvictionByEvictionAPI")),
        "the autoscaler removed its node",
        events=[event("ScaleDown", "deleting pod for node scale down")],
        reason=Reason.EVICTED,
    ),
    told(
        "the node of a pod that vanished is not there either",
        [],
        "the node was removed from the cluster under the pod",
        gone=[a_pod(RUNS, phase="Running")],
        nodes=[a_node("n2")],
        reason=Reason.NODE_LOST,
    ),
    told(
        "its Job deleted it while its program ran once more",
        [],
        "failed in each of 2 starts; the last: the program ended with exit code 1",
        gone=[
            a_pod(
                STARTED_TWICE,
                phase="Running",
                restartPolicy="OnFailure",
                metadata={"deletionTimestamp": LATE},
            )
        ],
        never=("somebody",),
    ),
    told(
        "only events are left of a program that was started again and again",
        [],
        "the program failed each time it was started",
        events=[
            event("BackOff", "Back-off restarting failed container main in pod tune-1-abcde_ml(1f)")
        ],
    ),
    told(
        "a hook after its start failed",
        failed_pod(137),
        "postStart hook failed",
        events=[event("FailedPostStartHook", "PostStartHook failed")],
        reason=Reason.SETUP,
    ),
    told(
        "its time was over, and it did not listen",
        [],
        "time limit of 9 s passed; the program was stopped: it did not react to SIGTERM",
        job=failed_job("DeadlineExceeded", activeDeadlineSeconds=9),
        gone=[failed_pod(137, metadata={"deletionTimestamp": LATE})],
        reason=Reason.DEADLINE,
    ),
    told(
        "its time was over before it had a node, and only events are left",
        [],
        "before the program ever ran: no node can take it: 2 node(s) had untolerated taint(s)",
        job=failed_job("DeadlineExceeded", activeDeadlineSeconds=9),
        events=[
            event(
                "FailedScheduling", "0/2 nodes are available: 2 node(s) had untolerated taint(s)."
            )
        ],
        nodes=[a_node("n1")],
        reason=Reason.UNSCHEDULABLE,
    ),
    told(
        "its time was over before it had a node: the Job says what it asked for",
        [],
        "before the program ever ran: no node has pool=tpu (there is gpu)",
        job=failed_job(
            "DeadlineExceeded",
            activeDeadlineSeconds=9,
            template={"spec": {"containers": [a_container()], "nodeSelector": {"pool": "tpu"}}},
        ),
        events=[
            event(
                "FailedScheduling",
                "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
            )
        ],
        nodes=[a_node("n1", {"pool": "gpu"})],
        reason=Reason.UNSCHEDULABLE,
    ),
    told(
        "its time was over before its image came, and only events are left",
        [],
        "before the program ever ran: pulling the image reg.example/team/train:1",
        job=failed_job("DeadlineExceeded", activeDeadlineSeconds=9),
        events=trace("Pulling", 'Pulling image "reg.example/team/train:1"'),
        reason=Reason.DEADLINE,
    ),
    told(
        "preempted before anybody looked: the new pod waits",
        again(not_placed(FULL, asks=GPU)),
        "preempted by a pod of higher priority",
        "a new pod waits",
        job=MANY,
        events=[event("Preempted", "Preempted by pod 1f2e on node n1")],
        nodes=[a_node("n1", gpu="1")],
        status=PENDING,
        reason=Reason.PREEMPTED,
        outlook=OPEN,
    ),
]

WELL = [
    told(
        "a program that ended well is not started again, and does not run",
        a_pod(ended(0), phase="Running", restartPolicy="OnFailure"),
        "succeeded",
        job=a_job(),
        status=SUCCEEDED,
        reason=None,
    ),
    told(
        "its parallelism was set to 0 while it ran",
        a_pod(RUNS, phase="Running", metadata={"deletionTimestamp": LATE}),
        "is being stopped, because its parallelism was set to 0",
        job=a_job(parallelism=0),
        status=RUNNING,
        reason=Reason.QUEUED,
        outlook=OPEN,
        never=("somebody",),
    ),
    told(
        "its parallelism was set to 0, and its pod has ended since",
        failed_pod(143, metadata={"deletionTimestamp": LATE}),
        "parallelism is 0, so nothing will run",
        job=a_job({}, parallelism=0),
        status=PENDING,
        reason=Reason.QUEUED,
        outlook=BLOCKED,
    ),
    told(
        "a success after a failure",
        [
            failed_pod(3),
            {**a_pod(ended(0), phase="Succeeded"), **LEFT},
        ],
        "succeeded, after 1 failed attempt (the last: the program ended with exit code 3)",
        job=a_job({"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}),
        status=SUCCEEDED,
        reason=None,
    ),
    Situation(
        name="its Job is gone, and it never had a node",
        seen=Seen(pods=[not_placed(FULL, asks=GPU)], nodes=[a_node("n1", gpu="1")]),
        status=JobStatus.NOT_FOUND,
        reason=Reason.CANCELLED,
        outlook=OPEN,
        words=("waits to start: a node has 1 GPU, but it is in use", "delete the pod"),
        never=("costs",),
    ),
    told(
        "a success with a sidecar that was out of memory before",
        a_pod(
            ended(0),
            phase="Succeeded",
            init=[(a_container("fuse", restartPolicy="Always"), ended(137, "OOMKilled"))],
        ),
        "succeeded",
        job=a_job({"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]}),
        status=SUCCEEDED,
        reason=None,
    ),
]

DONE = a_job({"succeeded": 1, "conditions": [{"type": "Complete", "status": "True"}]})
MANY_DONE = {**DONE, "spec": {**DONE["spec"], "completions": 2}}
GOING = {"deletionTimestamp": LATE}

EARLY = [
    told(
        "its pod is deleted before it ran, and its Job tells a moment later why",
        [],
        "somebody deleted the pod before it ever ran",
        job=a_job(),
        gone=[not_placed(FULL, metadata=GOING)],
        status=PENDING,
        reason=Reason.LOST,
        outlook=OPEN,
    ),
    told(
        "its pod was deleted before it ran, and its Job has no other reason",
        [],
        "somebody deleted the pod before it ever ran",
        gone=[not_placed(FULL, metadata=GOING)],
        reason=Reason.LOST,
    ),
    told(
        "its pod was deleted before it ran, for its Job was out of time",
        [],
        "time limit of 1 s passed before the program ever ran",
        job=failed_job("DeadlineExceeded", activeDeadlineSeconds=1),
        gone=[not_placed(FULL, metadata=GOING)],
        reason=Reason.UNSCHEDULABLE,
    ),
]


@pytest.mark.parametrize(
    "case", [*AFTERWARDS, *TIMES, *TRACES, *POLICIES, *WELL, *EARLY], ids=lambda case: case.name
)
def test_what_follows_an_end_is_told_as_it_should_be(case: Situation) -> None:
    case.check(judge(case.seen))
    check_any_order(case.seen)


@pytest.mark.parametrize(
    ("seen", "executor"),
    [
        (Seen(job=DONE, pods=[a_pod(RUNS, phase="Running")]), "pod-uid"),
        (Seen(job=DONE, gone=[a_pod(RUNS, phase="Running")]), "pod-uid"),
        (Seen(job=DONE, pods=[failed_pod(3), again(a_pod(RUNS, phase="Running"))]), "pod-2"),
        (Seen(job=DONE), ""),
        (Seen(job=MANY_DONE, pods=[a_pod(RUNS, phase="Running")]), ""),
    ],
)
def test_who_has_succeeded_is_told_though_its_own_end_is_told_later(
    seen: Seen, executor: str
) -> None:
    verdict = judge(seen)
    assert (verdict.status, verdict.executor) == (SUCCEEDED, executor)
