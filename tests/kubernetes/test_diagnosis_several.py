# ruff: noqa: E501 - what is told is one line each
"""Several containers, several pods: what of them is told, and what a restart or a silent node makes of it."""

from __future__ import annotations

from functools import partial

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.aio.kubernetes.diagnosis.verdict import Seen
from kinetic.job_status import Reason
from tests.kubernetes.situations import (
    BLOCKED,
    CREATING,
    FINAL,
    OPEN,
    RUNNING,
    RUNS,
    Json,
    Situation,
    a_container,
    a_job,
    a_node,
    a_pod,
    check_any_order,
    ended,
    event,
    told_of_pods,
    waiting,
)

IMAGE = "reg.example/team/train:1"
INDEX = "batch.kubernetes.io/job-completion-index"


told = partial(told_of_pods, reason=Reason.SETUP, outlook=BLOCKED)

FUSE = a_container("fuse", restartPolicy="Always")
TWO = [a_container(), a_container("proxy", image="reg.example/proxy:1")]
NO_PROXY = waiting(
    "ImagePullBackOff",
    'Back-off pulling image "reg.example/proxy:1": ErrImagePull: reg.example/proxy:1: not found',
)
SILENT = a_node("n1", ready="Unknown")

SEVERAL = [
    told(
        "the program runs, an image beside it is missing",
        a_pod(RUNS, NO_PROXY, containers=TWO),
        "running, but container 'proxy' cannot start: the image reg.example/proxy:1 does not exist",
        status=RUNNING,
        reason=Reason.IMAGE_PULL,
        outlook=OPEN,
    ),
    told(
        "the program has ended, an image beside it is missing",
        a_pod(ended(0), NO_PROXY, containers=TWO),
        "container 'main' ended with exit code 0, but container 'proxy' cannot start, so the Job never completes",
        status=RUNNING,
        reason=Reason.IMAGE_PULL,
    ),
    told(
        "what is beside it runs, the program's image is missing",
        a_pod(waiting("ErrImagePull", f"{IMAGE}: not found"), RUNS, containers=TWO),
        "the image reg.example/team/train:1 does not exist",
        reason=Reason.IMAGE_PULL,
        outlook=FINAL,
    ),
    told(
        "a helper has ended well, the program runs: that is as it should be",
        a_pod(RUNS, ended(0), phase="Running", containers=TWO),
        "running",
        status=RUNNING,
        reason=None,
        outlook=OPEN,
        never=("never completes",),
    ),
    told(
        "a helper has failed, the program runs",
        a_pod(RUNS, ended(3), phase="Running", containers=TWO),
        "container 'proxy' ended with exit code 3: the pod will have failed",
        status=RUNNING,
        reason=None,
        outlook=OPEN,
        never=("never completes",),
    ),
    told(
        "the program ran out of memory, the proxy runs on",
        a_pod(
            ended(137, "OOMKilled"),
            RUNS,
            phase="Running",
            containers=[a_container(resources={"limits": {"memory": "1Gi"}}), TWO[1]],
        ),
        "out of memory",
        "1Gi",
        "container 'proxy' still runs",
        status=RUNNING,
        reason=Reason.OUT_OF_MEMORY,
    ),
    told(
        "a helper is out of memory and starts again",
        a_pod(
            RUNS,
            waiting("CrashLoopBackOff", "back-off", lastState=ended(137, "OOMKilled")),
            phase="Running",
            containers=TWO,
            restartPolicy="OnFailure",
        ),
        "container 'proxy' fails each time",
        "out of memory",
        status=RUNNING,
        reason=Reason.OUT_OF_MEMORY,
        outlook=OPEN,
    ),
    told(
        "it runs again, after it was out of memory",
        a_pod(
            {**RUNS, "lastState": ended(137, "OOMKilled"), "restartCount": 2},
            phase="Running",
            restartPolicy="OnFailure",
        ),
        "running, after 2 failed starts",
        "out of memory",
        status=RUNNING,
        reason=None,
        outlook=OPEN,
    ),
    told(
        "an init container is out of memory again and again",
        a_pod(
            waiting("PodInitializing"),
            init=[
                (
                    a_container("fetch", resources={"limits": {"memory": "64Mi"}}),
                    waiting("CrashLoopBackOff", "back-off", lastState=ended(137, "OOMKilled")),
                )
            ],
            restartPolicy="OnFailure",
        ),
        "container 'fetch' fails each time",
        "64Mi",
        reason=Reason.OUT_OF_MEMORY,
    ),
    told(
        "the end before a restart is not known",
        a_pod(
            waiting("CrashLoopBackOff", "back-off 5m0s restarting failed container=main"),
            phase="Running",
            restartPolicy="OnFailure",
        ),
        "how it ended is not known",
        status=RUNNING,
        reason=Reason.USER_ERROR,
        outlook=OPEN,
        never=("None",),
    ),
    told(
        "a probe stops it again and again",
        a_pod(
            waiting("CrashLoopBackOff", "back-off", lastState=ended(137)),
            phase="Running",
            restartPolicy="OnFailure",
        ),
        "the liveness probe failed 6 times",
        events=[
            event(
                "Unhealthy",
                "Liveness probe failed: HTTP probe failed with statuscode: 500",
                count=4,
            ),
            event(
                "Unhealthy",
                'Liveness probe failed: Get "http://10.0.0.1:80/": context deadline exceeded',
                count=2,
            ),
            event("Killing", "Container main failed liveness probe, will be restarted", count=2),
        ],
        status=RUNNING,
        reason=Reason.USER_ERROR,
        outlook=OPEN,
    ),
    told(
        "the startup probe has not succeeded yet",
        a_pod(
            RUNS,
            phase="Running",
            status={
                "containerStatuses": [
                    {"name": "main", "ready": False, "started": False, "state": RUNS}
                ]
            },
        ),
        "its startup probe fails so far",
        events=[
            event(
                "Unhealthy",
                "Startup probe failed: dial tcp 10.0.0.1:80: connect: connection refused",
            )
        ],
        status=RUNNING,
        reason=None,
        outlook=OPEN,
    ),
    told(
        "a sidecar that is not ready holds the program",
        a_pod(waiting("PodInitializing"), init=[(FUSE, {**RUNS, "started": False})]),
        "sidecar 'fuse' runs and is not ready yet",
        reason=None,
        outlook=OPEN,
    ),
    told(
        "the node went away before anything began",
        a_pod(CREATING),
        "its node n1 does not answer",
        nodes=[SILENT],
        reason=Reason.NODE_LOST,
        outlook=OPEN,
    ),
    told(
        "two images are amiss, each in its way",
        a_pod(
            waiting("ErrImagePull", f"{IMAGE}: not found"),
            waiting("ErrImagePull", "unexpected status: 403 Forbidden"),
            containers=TWO,
        ),
        f"the image {IMAGE} does not exist",
        "besides, container 'proxy': the nodes may not read the image reg.example/proxy:1",
        reason=Reason.IMAGE_PULL,
        outlook=FINAL,
    ),
    told(
        "it was restarted again and again, and now its node is silent",
        a_pod(
            waiting("CrashLoopBackOff", "back-off", lastState=ended(1)),
            phase="Running",
            restartPolicy="OnFailure",
        ),
        "its node n1 does not answer",
        nodes=[SILENT],
        status=RUNNING,
        reason=Reason.NODE_LOST,
        outlook=OPEN,
    ),
    told(
        "a phase that nobody knows",
        a_pod(phase="Unknown"),
        "its node n1 does not answer",
        reason=Reason.NODE_LOST,
        outlook=OPEN,
    ),
    told(
        "a node that was named and is not there",
        a_pod(node="gone"),
        "there is no node 'gone'",
        nodes=[a_node("n1")],
        reason=Reason.UNSCHEDULABLE,
    ),
]


def pods_of_indexes(*pods: Json) -> list[Json]:
    for index, pod in enumerate(pods):
        pod["metadata"] |= {
            "name": f"tune-1-{index}-abcde",
            "uid": f"pod-{index}",
            "labels": {INDEX: str(index)},
        }
    return [*pods]


def test_indexes_that_wait_for_different_things_are_all_told() -> None:
    unplaced = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes are available: 2 node(s) had untolerated taint(s).",
    }
    pods = pods_of_indexes(
        a_pod(RUNS, phase="Running"),
        a_pod(waiting("ErrImagePull", f"{IMAGE}: not found")),
        a_pod(node=None, status={"conditions": [unplaced]}),
        a_pod(node=None, status={"conditions": [unplaced]}),
    )
    job = a_job({"active": 4, "ready": 1}, completions=4, parallelism=4)
    verdict = judge(Seen(job=job, pods=pods))
    assert verdict.status is RUNNING
    assert "index 1 waits: the image reg.example/team/train:1 does not exist" in verdict.text
    assert "index 2 and 3 wait: no node can take it" in verdict.text
    assert "(4 active, 1 ready)" in verdict.text


def test_pods_that_run_and_a_quota_that_is_used_up_are_both_told() -> None:
    said = 'pods "x" is forbidden: exceeded quota: team, requested: pods=1, used: pods=2, limited: pods=2'
    pods = pods_of_indexes(a_pod(RUNS, phase="Running"), a_pod(RUNS, phase="Running"))
    job = a_job({"active": 2, "ready": 2}, completions=3, parallelism=3)
    refused = event("FailedCreate", f"Error creating: {said}", kind="Job")
    verdict = judge(Seen(job=job, pods=pods, events=[refused]))
    assert (verdict.status, verdict.reason) == (RUNNING, Reason.QUOTA)
    assert "no further pod is made: quota 'team' is used up" in verdict.text


@pytest.mark.parametrize("case", [*SEVERAL], ids=lambda case: case.name)
def test_what_is_with_several_containers_is_told_as_it_should_be(case: Situation) -> None:
    case.check(judge(case.seen))
    check_any_order(case.seen)
