# ruff: noqa: E501 - what the scheduler says is one line each
"""Pods without a node: several causes at once, and what recordings do not have."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.aio.kubernetes.diagnosis.verdict import Seen
from kinetic.job_status import Reason
from tests.kubernetes.situations import (
    BLOCKED,
    OPEN,
    Json,
    Situation,
    a_container,
    a_job,
    a_node,
    a_pod,
    check_any_order,
    event,
    not_placed,
    told_of,
)

GPU = {"nvidia.com/gpu": "1"}
L4 = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
TPU = {"pool": "tpu"}
SLICE = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    "cloud.google.com/gke-tpu-topology": "2x4",
}
TOLERANT = [{"operator": "Exists"}]
TAINT = "nvidia.com/gpu=present:NoSchedule"
HELPLESS = " no new claims to deallocate, preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling."
NO_VICTIM = " no new claims to deallocate, preemption: 0/2 nodes are available: 1 No preemption victims found for incoming pod, 1 Preemption is not helpful for scheduling."


def waits(said: str, *, nodes: list[Json] | None = None, events: Any = (), **more: Any) -> Seen:
    return Seen(job=a_job(), pods=[not_placed(said, **more)], nodes=nodes, events=events)


def affinity(key: str, *values: str) -> Json:
    wanted = {"key": key, "operator": "In", "values": list(values)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


told = partial(told_of, reason=Reason.UNSCHEDULABLE, outlook=BLOCKED)

REFUSED = "0/2 nodes are available: 2 node(s) had untolerated taint(s)." + HELPLESS
UNMATCHED = (
    "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector." + HELPLESS
)
SHORT = "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node affinity/selector."

NODES = [
    told(
        "one matching node is unwell, the other has a taint: it is waited for",
        waits(
            REFUSED,
            nodes=[
                a_node("a", L4, "node.kubernetes.io/not-ready=:NoSchedule", gpu="1"),
                a_node("b", L4, "team=other:NoSchedule", gpu="1"),
            ],
            asks=GPU,
            nodeSelector=L4,
        ),
        "(a) is closed for now (not-ready)",
        outlook=OPEN,
        never=("add the toleration",),
    ),
    told(
        "one matching node is cordoned, the other has a taint: both are named",
        waits(
            REFUSED,
            nodes=[a_node("a", L4, cordoned=True, gpu="1"), a_node("b", L4, TAINT, gpu="1")],
            asks=GPU,
            nodeSelector=L4,
        ),
        "(b) is kept for others by taint nvidia.com/gpu=present",
        "a would fit, but is cordoned",
    ),
    told(
        "a new node that the cloud has not set up yet is waited for",
        waits(
            REFUSED,
            nodes=[
                a_node("a", {}, "node.cloudprovider.kubernetes.io/uninitialized=true:NoSchedule")
            ],
        ),
        "closed for now (uninitialized)",
        outlook=OPEN,
    ),
    told(
        "a node without a network is waited for",
        waits(
            REFUSED, nodes=[a_node("a", {}, "node.kubernetes.io/network-unavailable=:NoSchedule")]
        ),
        "closed for now (network-unavailable)",
        outlook=OPEN,
    ),
    told(
        "a node that the autoscaler removes is waited for",
        waits(
            REFUSED, nodes=[a_node("a", {}, "ToBeDeletedByClusterAutoscaler=1767225600:NoSchedule")]
        ),
        "closed for now (ToBeDeletedByClusterAutoscaler)",
        outlook=OPEN,
    ),
    told(
        "there is only the control plane's own node",
        waits(
            REFUSED, nodes=[a_node("cp", {}, "node-role.kubernetes.io/control-plane=:NoSchedule")]
        ),
        "node-role.kubernetes.io/control-plane",
        "add a node pool for work",
        never=("add the toleration",),
    ),
    told(
        "a taint that is no accelerator's is not said to be added by GKE",
        waits(REFUSED, nodes=[a_node("a", {}, "team=vision:NoSchedule")]),
        "taint team=vision",
        never=("GKE adds it",),
    ),
    told(
        "too many GPUs for the matching node, which has a taint besides",
        waits(
            REFUSED,
            nodes=[a_node("a", L4, TAINT, gpu="1")],
            asks={"nvidia.com/gpu": "4"},
            nodeSelector=L4,
        ),
        "asked for 4 GPUs, the largest matching node has 1",
        "besides, it is closed to the pod (taint nvidia.com/gpu=present)",
    ),
    told(
        "GPUs and CPUs are both too many",
        waits(SHORT, nodes=[a_node("a", gpu="8")], asks={"nvidia.com/gpu": "16", "cpu": "64"}),
        "asked for 16 GPUs and 64 CPUs",
        "has 8 and 8",
    ),
    told(
        "more memory than the open node has; the larger one has a taint",
        waits(
            REFUSED,
            nodes=[
                a_node("a"),
                a_node("b", {}, "google.com/tpu=present:NoSchedule", memory="192Gi"),
            ],
            asks={"memory": "100Gi"},
        ),
        "asked for 100Gi of memory, the largest matching node has 32Gi of memory",
        "192Gi of memory",
        "google.com/tpu=present",
    ),
    told(
        "ephemeral storage that no node has",
        waits(
            "0/1 nodes are available: 1 Insufficient ephemeral-storage.",
            nodes=[a_node("a", storage="90Gi")],
            asks={"ephemeral-storage": "900Gi"},
        ),
        "asked for 900Gi of ephemeral storage",
        "has 90Gi of ephemeral storage",
    ),
    told(
        "huge pages that no node has",
        waits(
            "0/1 nodes are available: 1 Insufficient hugepages-2Mi.",
            nodes=[a_node("a")],
            asks={"hugepages-2Mi": "64Mi"},
        ),
        "64Mi hugepages-2Mi",
        "has none",
    ),
    told(
        "the selector matches, the affinity does not",
        waits(
            UNMATCHED,
            nodes=[a_node("a", {"pool": "tpu", "topology": "2x4"}, tpu="8")],
            asks={"google.com/tpu": "8"},
            nodeSelector={"pool": "tpu", "topology": "2x4"},
            affinity=affinity("topology.kubernetes.io/zone", "us-east5-b"),
        ),
        "the pod's affinity asks for",
        "topology.kubernetes.io/zone In us-east5-b",
    ),
    told(
        "an affinity to a node by its name",
        waits(
            UNMATCHED,
            nodes=[a_node("a")],
            affinity={
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {
                                "matchFields": [
                                    {"key": "metadata.name", "operator": "In", "values": ["gone"]}
                                ]
                            }
                        ]
                    }
                }
            },
        ),
        "metadata.name In gone",
    ),
    told(
        "each label is there, but not on one node",
        waits(
            UNMATCHED,
            nodes=[
                a_node("a", {"pool": "x", "zone": "a"}),
                a_node("b", {"pool": "y", "zone": "b"}),
            ],
            nodeSelector={"pool": "x", "zone": "b"},
        ),
        "no node has zone=b together with pool=x",
    ),
    told(
        "of many values of a label a few are named",
        waits(
            UNMATCHED,
            nodes=[a_node(f"n{one:02}", {"host": f"n{one:02}"}) for one in range(40)],
            nodeSelector={"host": "gone"},
        ),
        "no node has host=gone",
        "and 35 others",
        never=("n30",),
    ),
    told(
        "the GPU is in use, while other nodes have none at all",
        waits(
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu." + NO_VICTIM,
            nodes=[a_node("a", gpu="1"), a_node("b"), a_node("c")],
            asks=GPU,
        ),
        "1 GPU, but it is in use",
        outlook=OPEN,
    ),
    told(
        "CPUs are in use where the GPU is free: it is the CPUs that are waited for",
        waits(
            "0/1 nodes are available: 1 Insufficient cpu." + NO_VICTIM,
            nodes=[a_node("a", gpu="1")],
            asks={"nvidia.com/gpu": "1", "cpu": "6"},
        ),
        "a node has room for 6 CPUs, but it is in use",
        outlook=OPEN,
    ),
    told(
        "the only node with room is refused by an anti-affinity, the others lack a GPU",
        waits(
            "0/3 nodes are available: 1 node(s) didn't match pod anti-affinity rules, 2 Insufficient nvidia.com/gpu.",
            nodes=[a_node("a", gpu="1"), a_node("b"), a_node("c")],
            asks=GPU,
        ),
        "didn't match pod anti-affinity rules",
        outlook=OPEN,
        never=("in use",),
    ),
    told(
        "a node has as many pods as it may",
        waits("0/1 nodes are available: 1 Too many pods." + NO_VICTIM, nodes=[a_node("a")]),
        "Too many pods",
        "may hold more pods",
        outlook=OPEN,
    ),
    told(
        "a host port is taken",
        waits(
            "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.",
            nodes=[a_node("a")],
        ),
        "didn't have free ports",
        "host port",
        outlook=OPEN,
    ),
    told(
        "a topology spread that cannot be kept",
        waits(
            "0/1 nodes are available: 1 node(s) didn't match pod topology spread constraints (missing required label).",
            nodes=[a_node("a")],
        ),
        "topology spread constraints (missing required label)",
        "label the nodes",
    ),
    told(
        "nothing runs that the pod wants to be beside",
        waits(
            "0/1 nodes are available: 1 node(s) didn't match pod affinity rules." + HELPLESS,
            nodes=[a_node("a")],
        ),
        "didn't match pod affinity rules",
        "does not run there",
    ),
    told(
        "a GPU without a toleration: other nodes are open, and have none",
        waits(
            "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint(s)."
            + HELPLESS,
            nodes=[a_node("a"), a_node("b", L4, TAINT, gpu="1")],
            asks=GPU,
        ),
        "(b) is kept for others by taint nvidia.com/gpu=present",
        "add the toleration",
    ),
    told(
        "two GPUs without a toleration: the only node with GPUs has one",
        waits(
            "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) had untolerated taint(s)."
            + HELPLESS,
            nodes=[a_node("a"), a_node("b", L4, TAINT, gpu="1"), a_node("c", cordoned=True)],
            asks={"nvidia.com/gpu": "2"},
        ),
        "asked for 2 GPUs, the largest matching node has 1",
        "(taint nvidia.com/gpu=present)",
    ),
    told(
        "one host of eight chips where two of four share the slice",
        waits(
            REFUSED,
            nodes=[a_node(name, SLICE, tpu="4") for name in ("a", "b")],
            asks={"google.com/tpu": "8"},
            nodeSelector=SLICE,
        ),
        "asked for 8 TPU chips, the largest matching node has 4",
        "accelerator='tpu-v6e-8:hosts=2'",
        never=("ask for 4",),
    ),
    told(
        "too many chips for a node that is cordoned besides",
        waits(
            REFUSED,
            nodes=[
                a_node(
                    "a", {}, "node.kubernetes.io/unschedulable=:NoSchedule", cordoned=True, tpu="4"
                )
            ],
            asks={"google.com/tpu": "8"},
        ),
        "asked for 8 TPU chips, the largest matching node has 4",
        "(cordoned)",
        never=("tolerat",),
    ),
    told(
        "a volume that lies in another zone, as 1.35 says it",
        waits(
            "0/1 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity.",
            nodes=[a_node("a")],
        ),
        "didn't match PersistentVolume's node affinity",
        "nodes of its zone",
    ),
    told(
        "a node has as many volumes as it may",
        waits("0/1 nodes are available: 1 node(s) exceed max volume count.", nodes=[a_node("a")]),
        "exceed max volume count",
        outlook=OPEN,
    ),
    told(
        "place is being made by preemption",
        waits(
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            nodes=[a_node("a", gpu="1")],
            asks=GPU,
            status={"nominatedNodeName": "a"},
        ),
        "place is being made for it on node a",
        outlook=OPEN,
    ),
    told(
        "the scheduler refused what fits by now: its words are not kept back",
        waits("0/1 nodes are available: 1 node(s) had untolerated taint(s).", nodes=[a_node("a")]),
        "a node that fits (a) is there now",
        "1 node(s) had untolerated taint(s)",
        outlook=OPEN,
    ),
    told(
        "the scheduler failed itself",
        waits(
            'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded',
            reason="SchedulerError",
            nodes=[a_node("a")],
        ),
        "binding volumes: context deadline exceeded",
        never=("that fits",),
    ),
]

WORDS = [
    told(
        "too much is asked for, which preemption cannot help",
        waits(
            "0/6 nodes are available: 1 node(s) were unschedulable, 2 Insufficient nvidia.com/gpu, 2 Too many pods, 3 node(s) had untolerated taint(s)."
            + HELPLESS,
            asks={"nvidia.com/gpu": "2"},
        ),
        "no node can take it (it asks for 2 GPUs)",
        never=("in use",),
    ),
    told(
        "the GPU is in use, where the nodes are not known",
        waits("0/2 nodes are available: 2 Insufficient nvidia.com/gpu." + NO_VICTIM, asks=GPU),
        "what it asks for is in use (it asks for 1 GPU)",
        outlook=OPEN,
    ),
    told(
        "an anti-affinity is not called a want of room",
        waits(
            "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules. preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod.",
            asks=GPU,
        ),
        "didn't match pod anti-affinity rules",
        outlook=OPEN,
        never=("what it asks for is in use",),
    ),
    told(
        "taint and selector: nothing here goes by itself",
        waits(
            "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint(s)."
            + HELPLESS,
            asks=GPU,
            nodeSelector=L4,
        ),
        "it asks for 1 GPU, gke-accelerator=nvidia-l4",
        "1 node(s) had untolerated taint(s)",
    ),
    told(
        "the event has come, the condition has not",
        Seen(
            job=a_job(),
            pods=[a_pod(node=None, containers=[a_container(resources={"limits": {"cpu": "64"}})])],
            events=[
                event(
                    "FailedScheduling",
                    "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.",
                )
            ],
        ),
        "2 Insufficient cpu",
        "64 CPUs",
        never=("no scheduler has looked",),
    ),
]


@pytest.mark.parametrize("case", [*NODES, *WORDS], ids=lambda case: case.name)
def test_a_pod_without_a_node_is_told_as_it_should_be(case: Situation) -> None:
    case.check(judge(case.seen))
    check_any_order(case.seen)
