# ruff: noqa: E501 - what Kubernetes says is one line each
"""How pods and Jobs end: by themselves, by limits, by nodes; in the words of several versions."""

from __future__ import annotations

from functools import partial

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.job_status import Reason
from tests.kubernetes.situations import (
    FAILED,
    FINAL,
    RUNS,
    Situation,
    a_container,
    a_node,
    a_pod,
    check_any_order,
    disrupted,
    ended,
    event,
    failed_job,
    failed_pod,
    told_of_pods,
    waiting,
)

LIMIT = {"limits": {"memory": "64Mi"}}
SMALL = a_container(resources=LIMIT)
PROXY = a_container("proxy", image="reg.example/proxy:1")


told = partial(
    told_of_pods, job=failed_job(), status=FAILED, reason=Reason.USER_ERROR, outlook=FINAL
)

RUNC = "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: "

EXITS = [
    told(
        "all of the container dies with its child, as cgroup v2 has it",
        failed_pod(137, "OOMKilled", containers=[SMALL]),
        "memory limit of 64Mi",
        reason=Reason.OUT_OF_MEMORY,
        never=("child",),
    ),
    told(
        "the limit is the pod's",
        failed_pod(137, "OOMKilled", resources={"limits": {"memory": "2Gi"}}),
        "memory limit of its pod (2Gi)",
        reason=Reason.OUT_OF_MEMORY,
    ),
    told(
        "there is no limit: the node had no memory left",
        failed_pod(137, "OOMKilled"),
        "has no memory limit",
        "larger machine",
        reason=Reason.OUT_OF_MEMORY,
    ),
    told(
        "a second container is out of memory",
        a_pod(
            ended(143),
            ended(137, "OOMKilled", finishedAt="x"),
            phase="Failed",
            containers=[a_container(), {**PROXY, "resources": LIMIT}],
            status={
                "containerStatuses": [
                    {
                        "name": "main",
                        "state": {
                            "terminated": {
                                "exitCode": 143,
                                "reason": "Error",
                                "finishedAt": "2026-01-01T00:00:09Z",
                            }
                        },
                    },
                    {
                        "name": "proxy",
                        "state": {
                            "terminated": {
                                "exitCode": 137,
                                "reason": "OOMKilled",
                                "finishedAt": "2026-01-01T00:00:05Z",
                            }
                        },
                    },
                ]
            },
        ),
        "container 'proxy': out of memory",
        "64Mi",
        reason=Reason.OUT_OF_MEMORY,
    ),
    told(
        "a sidecar is out of memory, then the program fails",
        failed_pod(
            1,
            init=[
                (
                    a_container("fuse", restartPolicy="Always"),
                    {**RUNS, "lastState": ended(137, "OOMKilled")},
                )
            ],
        ),
        "exit code 1",
        "sidecar 'fuse' beside it was killed for want of memory",
    ),
    told(
        "an init container is out of memory",
        a_pod(
            waiting("PodInitializing"),
            phase="Failed",
            init=[(a_container("fetch", resources=LIMIT), ended(137, "OOMKilled"))],
        ),
        "init container 'fetch'",
        "64Mi",
        "the program never started",
        "memory=",
        reason=Reason.OUT_OF_MEMORY,
    ),
    told(
        "an init container's command is not in the image",
        a_pod(
            waiting("PodInitializing"),
            phase="Failed",
            init=[
                (
                    a_container("fetch"),
                    ended(
                        128, "StartError", RUNC + 'exec: "curl": executable file not found in $PATH'
                    ),
                )
            ],
        ),
        "init container 'fetch'",
        "command 'curl' is not in the image",
        reason=Reason.SETUP,
    ),
    told(
        "an init container says why",
        a_pod(
            waiting("PodInitializing"),
            phase="Failed",
            init=[(a_container("fetch"), ended(4, message="no such dataset"))],
        ),
        "exit code 4",
        "no such dataset",
        reason=Reason.SETUP,
    ),
    told(
        "too little memory to begin with",
        failed_pod(
            128,
            "StartError",
            RUNC + "container init was OOM-killed (memory limit too low?): unknown",
            containers=[SMALL],
        ),
        "memory limit of 64Mi is too low",
        reason=Reason.OUT_OF_MEMORY,
    ),
    told(
        "the working directory is not there",
        failed_pod(
            128,
            "StartError",
            RUNC
            + 'error during container init: chdir to cwd ("/srv/app") set in config.json failed: no such file or directory: unknown',
        ),
        "working directory '/srv/app' is not there",
        reason=Reason.SETUP,
        never=("command",),
    ),
    told(
        "the program is for another processor",
        failed_pod(255, "Error", "exec /app/train: exec format error"),
        "'/app/train' is built for another processor",
        reason=Reason.SETUP,
    ),
    told(
        "containerd was restarted",
        failed_pod(255, "Unknown"),
        "restarted under the program",
        reason=Reason.NODE_LOST,
        never=("see its log",),
    ),
    told(
        "killed from outside, with the last lines of its log",
        failed_pod(137, "Error", "step 41: loss 0.3"),
        "signal 9",
        "step 41: loss 0.3",
        reason=Reason.LOST,
    ),
    told(
        "crashed, with the last lines of its log",
        failed_pod(139, "Error", "Fatal Python error: Segmentation fault"),
        "SIGSEGV",
        "Fatal Python error",
    ),
    told(
        "an exit code with words",
        failed_pod(255, "Error", "cannot find the dataset"),
        "exit code 255 and said: cannot find the dataset",
    ),
    told(
        "a probe failed, and the program's handler chose the exit code",
        failed_pod(3),
        "the liveness probe failed 3 times",
        events=[
            event("Unhealthy", "Liveness probe failed: command timed out", count=3),
            event("Killing", "Container main failed liveness probe, will be restarted"),
        ],
    ),
    told(
        "a startup probe, told in many words",
        failed_pod(137),
        "the startup probe failed 5 times",
        events=[
            event(
                "Unhealthy",
                "Startup probe failed: dial tcp 10.0.0.1:80: connect: connection refused",
                count=3,
            ),
            event(
                "Unhealthy",
                "(combined from similar events): Startup probe failed: timeout",
                count=2,
            ),
            event("Killing", "Stopping container main"),
        ],
    ),
    told(
        "exit code 0 beside a proxy that failed",
        a_pod(ended(0), ended(1), phase="Failed", containers=[a_container(), PROXY]),
        "container 'proxy'",
        "exit code 1",
    ),
]

PRESSED = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 51200Ki. Container main was using 1567440Ki, request is 0, has larger consumption of memory. "
DISRUPTED = [
    told(
        "the node was short of memory: the limit is the pod's",
        failed_pod(
            137,
            status={
                "reason": "Evicted",
                "message": "The node was low on resource: memory. Pod tune-1-abcde was using 3Gi, request is 1Gi, has larger consumption of memory. ",
            },
        ),
        "pod tune-1-abcde used 3Gi, its request is 1Gi",
        reason=Reason.EVICTED,
    ),
    told(
        "a critical pod of the system needed the place",
        failed_pod(
            137,
            status={
                "reason": "Preempting",
                "message": "Preempted in order to admit critical pod",
                **disrupted(
                    "TerminationByKubelet",
                    "Pod was preempted by Kubelet to accommodate a critical pod.",
                ),
            },
        ),
        "critical pod of the system",
        reason=Reason.PREEMPTED,
        never=("shut down",),
    ),
    told(
        "the node was short of memory: who used how much",
        failed_pod(
            137,
            status={
                "reason": "Evicted",
                "message": PRESSED,
                **disrupted("TerminationByKubelet", PRESSED),
            },
        ),
        "container main used 1.49Gi, its request is 0",
        reason=Reason.EVICTED,
    ),
    told(
        "the node was short of process numbers",
        failed_pod(
            137,
            status={
                "reason": "Evicted",
                "message": "The node was low on resource: pids. Threshold quantity: 100, available: 80. ",
                **disrupted("TerminationByKubelet", "The node was low on resource: pids. "),
            },
        ),
        "short of pids",
        reason=Reason.EVICTED,
    ),
    told(
        "the node was short of inodes",
        failed_pod(
            137,
            status={
                "reason": "Evicted",
                "message": "The node was low on resource: inodes. ",
                **disrupted("TerminationByKubelet", "The node was low on resource: inodes. "),
            },
        ),
        "short of disk",
        reason=Reason.EVICTED,
    ),
    told(
        "the node was short and took no pod",
        a_pod(
            phase="Failed",
            status={"reason": "Evicted", "message": "The node had condition: [DiskPressure]. "},
        ),
        "the node refused the pod, for it was short itself (DiskPressure)",
        reason=Reason.EVICTED,
    ),
    told(
        "a container passed its own storage limit",
        failed_pod(
            137,
            status={
                "reason": "Evicted",
                "message": 'Container main exceeded its local ephemeral storage limit "20Mi". ',
            },
        ),
        "ephemeral-storage limit of 20Mi",
        reason=Reason.OUT_OF_DISK,
    ),
    told(
        "the node was shut down in good order",
        failed_pod(
            143,
            status={
                "reason": "Terminated",
                "message": "Pod was terminated in response to imminent node shutdown.",
                **disrupted(
                    "TerminationByKubelet",
                    "Pod was terminated in response to imminent node shutdown.",
                ),
            },
            nodeSelector={"cloud.google.com/gke-spot": "true"},
        ),
        "spot machine was taken back",
        reason=Reason.PREEMPTED,
    ),
    told(
        "placed on a node that was shutting down",
        a_pod(
            phase="Failed",
            status={
                "reason": "NodeShutdown",
                "message": "Pod was rejected as the node is shutting down.",
            },
        ),
        "its node was shut down",
        reason=Reason.PREEMPTED,
    ),
    told(
        "the node was out of service",
        failed_pod(137, status=disrupted("DeletionByPodGC", "PodGC: node no longer exists")),
        "node was removed from the cluster",
        reason=Reason.NODE_LOST,
    ),
    told(
        "a taint of a node that does not answer",
        failed_pod(
            137,
            status=disrupted(
                "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"
            ),
            metadata={"deletionTimestamp": "2026-01-01T00:01:00Z"},
        ),
        "the node was lost",
        nodes=[a_node("n1", {}, "node.kubernetes.io/unreachable=:NoExecute", ready="Unknown")],
        reason=Reason.NODE_LOST,
    ),
    told(
        "a taint of an operator",
        failed_pod(
            143,
            status=disrupted(
                "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"
            ),
        ),
        "taint 'maintenance'",
        nodes=[a_node("n1", {}, "maintenance=true:NoExecute")],
        reason=Reason.EVICTED,
    ),
    told(
        "the node has fewer devices than the scheduler knew",
        a_pod(
            phase="Failed",
            status={
                "reason": "UnexpectedAdmissionError",
                "message": "Pod was rejected: Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0, which is unexpected",
            },
        ),
        "Requested: 1, Available: 0",
        reason=Reason.UNSCHEDULABLE,
    ),
    told(
        "the node refused for a cause of later versions",
        a_pod(
            phase="Failed",
            status={
                "reason": "TopologyAffinityError",
                "message": "Pod was rejected: Resources cannot be allocated with Topology locality",
            },
        ),
        "Topology locality",
        reason=Reason.UNSCHEDULABLE,
    ),
]


@pytest.mark.parametrize(
    "case",
    [*EXITS, *DISRUPTED],
    ids=lambda case: case.name,
)
def test_an_end_is_told_as_it_should_be(case: Situation) -> None:
    case.check(judge(case.seen))
    check_any_order(case.seen)
