"""Build jobs, pods, events, and nodes as the API returns them, for causes without a recording."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kinetic.aio.kubernetes.diagnosis.causes import Diagnosis, Outlook
from kinetic.aio.kubernetes.diagnosis.facts import Seen
from kinetic.aio.kubernetes.diagnosis.judge import judge

Json = dict[str, Any]
BORN = "2026-01-01T00:00:00Z"
NAME = "tune-1"

OPEN, BLOCKED, FINAL = Outlook.OPEN, Outlook.BLOCKED, Outlook.FINAL


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


def check_any_order(seen: Seen) -> None:
    """Check that order, repetition, and the events of a newer API don't change the verdict."""
    verdict = judge(seen)
    twice = [one for event in seen.events for one in (event, copy.deepcopy(event))]
    newer = [
        {
            **{key: one[key] for key in one.keys() - {"involvedObject", "message"}},
            "regarding": one["involvedObject"],
            "note": one.get("message"),
        }
        for one in seen.events
        if "involvedObject" in one
    ]
    for other in (
        replace(seen, pods=[*reversed(seen.pods)], gone=[*reversed(seen.gone)]),
        replace(seen, events=twice),
        replace(seen, events=newer or seen.events),
        replace(seen, nodes=seen.nodes and [*reversed(seen.nodes)]),
    ):
        again = judge(other)
        assert (row(again), again.executor) == (row(verdict), verdict.executor), again.text
