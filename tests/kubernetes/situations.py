"""Jobs, pods, events and nodes as the API tells them, in few words: built from documents.

What recordings do not have: two causes at once, other versions' words, rare
ends. A `Situation` is what there is and what a person should be told of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kinetic.aio.kubernetes.diagnosis.causes import Diagnosis, Outlook
from kinetic.aio.kubernetes.diagnosis.facts import Seen
from kinetic.aio.kubernetes.diagnosis.judge import judge
from kinetic.job_status import JobStatus, Reason

Json = dict[str, Any]
BORN = "2026-01-01T00:00:00Z"
NAME = "tune-1"

PENDING, RUNNING = JobStatus.PENDING, JobStatus.RUNNING
FAILED, SUCCEEDED = JobStatus.FAILED, JobStatus.SUCCEEDED
OPEN, BLOCKED, FINAL = Outlook.OPEN, Outlook.BLOCKED, Outlook.FINAL


@dataclass(frozen=True, kw_only=True)
class Situation:
    """``words`` must be in what is told, ``never`` must not."""

    name: str
    seen: Seen
    status: JobStatus
    reason: Reason | None
    outlook: Outlook
    words: Sequence[str] = ()
    never: Sequence[str] = ()

    def check(self, verdict: Diagnosis) -> None:
        found = (verdict.status, verdict.reason, verdict.outlook)
        assert found == (self.status, self.reason, self.outlook), verdict.text
        for one in self.words:
            assert one in verdict.text, verdict.text
        for one in self.never:
            assert one not in verdict.text, verdict.text


def told_of(
    name: str,
    seen: Seen,
    *words: str,
    reason: Reason | None,
    outlook: Outlook,
    status: JobStatus = PENDING,
    never: Sequence[str] = (),
) -> Situation:
    """What a person should be told of *seen*."""
    return Situation(
        name=name,
        seen=seen,
        status=status,
        reason=reason,
        outlook=outlook,
        words=words,
        never=never,
    )


def told_of_pods(
    name: str,
    pods: Json | list[Json],
    *words: str,
    job: Json | None = None,
    events: Sequence[Json] = (),
    nodes: Sequence[Json] | None = None,
    gone: Sequence[Json] = (),
    **told: Any,
) -> Situation:
    """The same, of a Job with these pods."""
    there = pods if isinstance(pods, list) else [pods]
    seen = Seen(job=job or a_job(), pods=there, events=events, nodes=nodes, gone=gone)
    return told_of(name, seen, *words, **told)


def a_job(status: Json | None = None, *, metadata: Json | None = None, **spec: Any) -> Json:
    return {
        "metadata": {
            "name": NAME,
            "namespace": "ml",
            "uid": "job-uid",
            "creationTimestamp": BORN,
            **(metadata or {}),
        },
        "spec": {"parallelism": 1, "completions": 1, "backoffLimit": 0, **spec},
        "status": {"active": 1} if status is None else status,
    }


def failed_job(reason: str = "BackoffLimitExceeded", message: str = "", **spec: Any) -> Json:
    told = {"type": "Failed", "status": "True", "reason": reason, "message": message}
    return a_job({"failed": 1, "conditions": [told]}, **spec)


def a_container(name: str = "main", **more: Any) -> Json:
    return {"name": name, "image": "reg.example/team/train:1", "command": ["python3", "-c"], **more}


def a_pod(
    *states: Json,
    phase: str = "Pending",
    status: Json | None = None,
    metadata: Json | None = None,
    containers: Sequence[Json] = (),
    init: Sequence[tuple[Json, Json]] = (),
    node: str | None = "n1",
    **spec: Any,
) -> Json:
    """A pod whose containers are in *states*; *init* are init containers, each with its state."""
    listed = list(containers) or [a_container()]
    told: Json = {"phase": phase}
    if states:
        told["containerStatuses"] = [
            {"name": one["name"], "restartCount": 0, "ready": "running" in state, **_state(state)}
            for one, state in zip(listed, states, strict=False)
        ]
    if init:
        spec["initContainers"] = [one for one, _ in init]
        told["initContainerStatuses"] = [
            {"name": one["name"], "restartCount": 0, **_state(state)} for one, state in init
        ]
    about = {"name": f"{NAME}-abcde", "uid": "pod-uid", "creationTimestamp": BORN}
    if node:
        spec["nodeName"] = node
    return {
        "metadata": {**about, **(metadata or {})},
        "spec": {"restartPolicy": "Never", "containers": listed, **spec},
        "status": {**told, **(status or {})},
    }


def _state(state: Json) -> Json:
    """``state``, and what of it belongs beside it."""
    beside = {key: state[key] for key in ("lastState", "restartCount", "started") if key in state}
    kinds = {key: state[key] for key in ("waiting", "running", "terminated") if key in state}
    return {"state": kinds, **beside}


RUNS: Json = {"running": {"startedAt": "2026-01-01T00:00:02Z"}}
CREATING: Json = {"waiting": {"reason": "ContainerCreating"}}


def waiting(reason: str, message: str = "", **beside: Any) -> Json:
    return {"waiting": {"reason": reason, "message": message}, **beside}


def ended(code: int, reason: str = "", message: str = "", **beside: Any) -> Json:
    told = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "startedAt": "2026-01-01T00:00:02Z",
        "finishedAt": "2026-01-01T00:00:09Z",
    }
    return {"terminated": {**told, **({"message": message} if message else {})}, **beside}


def failed_pod(code: int, reason: str = "", message: str = "", **more: Any) -> Json:
    return a_pod(ended(code, reason, message), phase="Failed", **more)


def disrupted(reason: str, message: str = "") -> Json:
    told = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return {"conditions": [told]}


def event(reason: str, message: str, *, kind: str = "Pod", **more: Any) -> Json:
    name = more.pop("name", f"{NAME}-abcde" if kind == "Pod" else NAME)
    return {
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": name},
        **more,
    }


def not_placed(
    said: str, *, reason: str = "Unschedulable", asks: Json | None = None, **more: Any
) -> Json:
    """A pod that the scheduler has refused, in these words."""
    told = {"type": "PodScheduled", "status": "False", "reason": reason, "message": said}
    container = a_container(resources={"limits": asks or {}})
    status = {"conditions": [told], **more.pop("status", {})}
    return a_pod(status=status, containers=[container], node=None, **more)


def a_node(
    name: str,
    labels: Mapping[str, str] | None = None,
    *taints: str,
    cordoned: bool = False,
    ready: str = "True",
    **has: str,
) -> Json:
    """*taints* as ``key=value:Effect``; ``gpu``, ``tpu`` and ``storage`` are resources."""
    names = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu", "storage": "ephemeral-storage"}
    resources = {names.get(key, key): value for key, value in has.items()}
    split = [one.rpartition(":") for one in taints]
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/arch": "amd64", **(labels or {})}},
        "spec": {
            "taints": [
                {"key": what.partition("=")[0], "value": what.partition("=")[2], "effect": effect}
                for what, _, effect in split
            ],
            **({"unschedulable": True} if cordoned else {}),
        },
        "status": {
            "allocatable": {"cpu": "8", "memory": "32Gi", **resources},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def row(verdict: Diagnosis) -> list[object]:
    reason = verdict.reason.name if verdict.reason is not None else None
    return [
        verdict.status.name,
        verdict.phase.name,
        reason,
        verdict.exit_code,
        verdict.outlook.name,
    ]


def changed(seen: Seen, **fields: Any) -> Seen:
    names = (
        "job",
        "pods",
        "events",
        "nodes",
        "workload",
        "gone",
        "earlier",
        "scenes",
        "name",
        "absent",
    )
    return Seen(**{**{name: getattr(seen, name) for name in names}, **fields})


def check_any_order(seen: Seen) -> None:
    """Neither order nor repetition, nor the words of a newer API, change what is told."""
    verdict = judge(seen)
    nodes = seen.nodes and [*reversed(seen.nodes)]
    twice = [one for event in seen.events for one in (event, copy.deepcopy(event))]
    newer = [
        {
            **{
                key: value for key, value in one.items() if key not in ("involvedObject", "message")
            },
            "regarding": one["involvedObject"],
            "note": one.get("message"),
        }
        for one in seen.events
        if "involvedObject" in one
    ]
    for other in (
        changed(seen, pods=[*reversed(seen.pods)], gone=[*reversed(seen.gone)]),
        changed(seen, events=twice),
        changed(seen, events=newer or seen.events),
    ):
        again = judge(other)
        assert (row(again), again.executor) == (row(verdict), verdict.executor), again.text
    assert row(judge(changed(seen, nodes=nodes))) == row(verdict)
