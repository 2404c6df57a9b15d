# ruff: noqa: E501 - what is told is one line each
"""Pods without a node: their volumes, and what the cluster autoscaler does about them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.aio.kubernetes.diagnosis.verdict import Seen
from kinetic.job_status import Reason
from tests.kubernetes.situations import (
    BLOCKED,
    FINAL,
    OPEN,
    PENDING,
    Json,
    Situation,
    a_job,
    a_node,
    a_pod,
    check_any_order,
    event,
    not_placed,
    told_of,
)

GPU = {"nvidia.com/gpu": "1"}
TPU = {"pool": "tpu"}
HELPLESS = " no new claims to deallocate, preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
NO_VICTIM = " no new claims to deallocate, preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod, 1 Preemption is not helpful for scheduling."


def waits(said: str, *, nodes: list[Json] | None = None, events: Any = (), **more: Any) -> Seen:
    return Seen(job=a_job(), pods=[not_placed(said, **more)], nodes=nodes, events=events)


told = partial(told_of, reason=Reason.UNSCHEDULABLE, outlook=BLOCKED)

CLAIMS = [
    Situation(
        name="a volume is made for its first pod: the scheduler waits, and says nothing",
        seen=Seen(
            job=a_job(),
            pods=[
                a_pod(
                    node=None,
                    volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "datasets"}}],
                )
            ],
            events=[
                event(
                    "ExternalProvisioning",
                    "Waiting for a volume to be created either by the external provisioner 'pd.csi.storage.gke.io' or manually by the system administrator.",
                    kind="PersistentVolumeClaim",
                    name="datasets",
                )
            ],
        ),
        status=PENDING,
        reason=None,
        outlook=OPEN,
        words=("waits for a volume to be made for PersistentVolumeClaim 'datasets'", "pd.csi"),
    ),
    told(
        "a claim that is not bound is named, with what its provisioner says",
        waits(
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            nodes=[a_node("a")],
            volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "datasets"}}],
            events=[
                event(
                    "ProvisioningFailed",
                    'storageclass.storage.k8s.io "fast" not found',
                    kind="PersistentVolumeClaim",
                    name="datasets",
                )
            ],
        ),
        "'datasets'",
        'storageclass.storage.k8s.io "fast" not found',
        reason=Reason.SETUP,
    ),
    told(
        "a claim of its own is not bound; the events of another's are not its",
        waits(
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            nodes=[a_node("a")],
            volumes=[{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {}}}],
            events=[
                event(
                    "ProvisioningFailed",
                    'storageclass.storage.k8s.io "fast" not found',
                    kind="PersistentVolumeClaim",
                    name="another",
                )
            ],
        ),
        "'tune-1-abcde-scratch' is not bound",
        reason=Reason.SETUP,
        never=("fast",),
    ),
    told(
        "no volume for a claim that waits for its first pod",
        waits(
            "0/2 nodes are available: 1 node(s) had untolerated taint(s), 1 node(s) didn't find available persistent volumes to bind.",
            nodes=[a_node("a")],
            volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "datasets"}}],
        ),
        "there is no volume for the pod's PersistentVolumeClaim 'datasets'",
        reason=Reason.SETUP,
    ),
    told(
        "a claim that Kubernetes makes for the pod",
        waits(
            '0/1 nodes are available: waiting for ephemeral volume controller to create the persistentvolumeclaim "tune-1-abcde-scratch".',
            nodes=[a_node("a")],
        ),
        "'tune-1-abcde-scratch', of an ephemeral volume, is not made yet",
        reason=Reason.SETUP,
    ),
    told(
        "a claim that is being deleted",
        waits(
            '0/1 nodes are available: persistentvolumeclaim "datasets" is being deleted.',
            nodes=[a_node("a")],
        ),
        "'datasets' is being deleted",
        reason=Reason.SETUP,
    ),
    told(
        "a claim whose volume is gone",
        waits(
            '0/1 nodes are available: persistentvolumeclaim "datasets" bound to non-existent persistentvolume "pv-7".',
            nodes=[a_node("a")],
        ),
        "'datasets' is bound to volume 'pv-7', which does not exist",
        reason=Reason.SETUP,
    ),
    told(
        "a template of a resource claim that is missing",
        Seen(
            job=a_job(),
            pods=[
                a_pod(
                    node=None,
                    resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
                )
            ],
            events=[
                event(
                    "FailedResourceClaimCreation",
                    'PodResourceClaim gpu: resource claim template "one-gpu": resourceclaimtemplate.resource.k8s.io "one-gpu" not found',
                )
            ],
        ),
        "'one-gpu'",
        "not found",
        reason=Reason.SETUP,
    ),
]

LARGE = "0/1 nodes are available: 1 Insufficient google.com/tpu." + HELPLESS
FULL = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu." + NO_VICTIM


def scaled(*events: Json, said: str = LARGE, **more: Any) -> Seen:
    asks = more.pop("asks", {"google.com/tpu": "16"})
    nodes = more.pop("nodes", [a_node("a", TPU, tpu="8")])
    return waits(said, asks=asks, nodes=nodes, events=events, **more)


NO_POOL = "pod didn't trigger scale-up: 2 node(s) didn't match Pod's node affinity/selector"
FAILED_UP = "Node scale up in zones us-central1-a associated with this pod failed: {}. Pod is at risk of not being scheduled."

GROWTH = [
    told(
        "which group grows, and how far",
        scaled(
            event(
                "TriggeredScaleUp",
                "pod triggered scale-up: [{https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-a/instanceGroups/gke-c-tpu-16-grp 0->1 (max: 4)}]",
            )
        ),
        "a node is being added",
        "gke-c-tpu-16-grp 0->1",
        outlook=OPEN,
    ),
    told(
        "the cloud is out of this machine",
        scaled(event("FailedScaleUp", FAILED_UP.format("GCE out of resources"))),
        "in us-central1-a (out of resources)",
        "16 TPU chips",
        outlook=OPEN,
    ),
    told(
        "the cloud is out of this machine, by its code",
        scaled(event("FailedScaleUp", FAILED_UP.format("ZONE_RESOURCE_POOL_EXHAUSTED"))),
        "none of this machine left",
        outlook=OPEN,
    ),
    told(
        "the project's quota is used up",
        scaled(event("FailedScaleUp", FAILED_UP.format("GCE quota exceeded"))),
        "the project's quota is used up",
        "us-central1-a",
        reason=Reason.QUOTA,
        outlook=OPEN,
        never=("none of this machine",),
    ),
    told(
        "the network has no address left: that is no want of machines",
        scaled(event("FailedScaleUp", FAILED_UP.format("IP space exhausted"))),
        "no address left",
        "subnet",
        outlook=OPEN,
        never=("none of this machine",),
    ),
    told(
        "a scale-up that follows a failed one counts",
        scaled(
            event(
                "FailedScaleUp",
                FAILED_UP.format("GCE out of resources"),
                lastTimestamp="2026-01-01T00:01:00Z",
            ),
            event(
                "TriggeredScaleUp",
                "pod triggered scale-up: [{x/grp-b 0->1 (max: 4)}]",
                lastTimestamp="2026-01-01T00:02:00Z",
            ),
        ),
        "a node is being added",
        "grp-b",
        outlook=OPEN,
    ),
    told(
        "some pools do not match, another is at its limit: it may free up",
        scaled(event("NotTriggerScaleUp", NO_POOL + ", 1 max node group size reached")),
        "max node group size reached",
        outlook=OPEN,
    ),
    told(
        "a pool that failed to grow is tried again",
        scaled(event("NotTriggerScaleUp", NO_POOL + ", 1 in backoff after failed scale-up")),
        "in backoff after failed scale-up",
        outlook=OPEN,
    ),
    told(
        "no pool could hold it",
        scaled(event("NotTriggerScaleUp", NO_POOL)),
        "asked for 16 TPU chips",
        "it can never start as asked",
        outlook=FINAL,
    ),
    told(
        "told many times over, in the words of a collected event",
        scaled(event("NotTriggerScaleUp", "(combined from similar events): " + NO_POOL, count=40)),
        "it can never start as asked",
        outlook=FINAL,
    ),
    told(
        "no pool can grow, but the matching node is only cordoned",
        scaled(
            event("NotTriggerScaleUp", NO_POOL), nodes=[a_node("a", TPU, cordoned=True, tpu="16")]
        ),
        "(a) is cordoned",
        "no node is added now",
        never=("it can never start",),
    ),
    told(
        "no pool can grow, but the GPU is only in use",
        scaled(
            event("NotTriggerScaleUp", NO_POOL), said=FULL, asks=GPU, nodes=[a_node("a", gpu="1")]
        ),
        "in use",
        outlook=OPEN,
    ),
]


@pytest.mark.parametrize("case", [*CLAIMS, *GROWTH], ids=lambda case: case.name)
def test_what_is_done_about_a_pod_without_a_node_is_told(case: Situation) -> None:
    case.check(judge(case.seen))
    check_any_order(case.seen)
