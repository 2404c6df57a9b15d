"""A pod's status in the words of the API; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.cluster.agent.container import Container, clock

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What there is to say. With a *reason* the pod has failed, whatever its exit codes are."""

    containers: Sequence[Container]
    over: bool
    reason: str
    message: str
    ip: str
    began: str


def of(view: View, known: dict[str, Json]) -> Json:
    """The status; *known* are the conditions as reported before, which are kept up to date."""
    phase = _phase(view)
    status: Json = {
        "phase": phase,
        "startTime": view.began,
        "hostIP": "127.0.0.1",
        "hostIPs": [{"ip": "127.0.0.1"}],
        "podIP": view.ip,
        "podIPs": [{"ip": view.ip}],
        "conditions": _conditions(view, phase, known),
        "containerStatuses": [_container(one) for one in view.containers],
    }
    if view.over and view.reason:
        status |= {"reason": view.reason, "message": view.message}
    return status


def _phase(view: View) -> str:
    if view.over:
        failed = view.reason or any(one.exit_code for one in view.containers)
        return "Failed" if failed else "Succeeded"
    return "Running" if any(one.started for one in view.containers) else "Pending"


def _container(one: Container) -> Json:
    identity = one.state.get("terminated", {}).get("containerID", "")
    return {
        "name": one.name,
        "image": one.spec["image"],
        "imageID": f"{one.spec['image']}@sha256:{'0' * 64}" if one.started else "",
        "containerID": identity,
        "ready": one.running,
        "started": one.running,
        "restartCount": one.restarts,
        "state": one.state,
        "lastState": one.last,
    }


def _conditions(view: View, phase: str, known: dict[str, Json]) -> list[Json]:
    unready = [one.name for one in view.containers if not one.running]
    ready: Json = {"status": "False" if unready or view.over else "True"}
    if phase in ("Succeeded", "Failed"):
        ready["reason"] = "PodCompleted" if phase == "Succeeded" else "PodFailed"
    elif unready:
        ready["reason"] = "ContainersNotReady"
        ready["message"] = f"containers with unready status: [{' '.join(unready)}]"
    wanted: dict[str, Json] = {
        "PodReadyToStartContainers": {"status": "False" if view.over else "True"},
        "Initialized": {"status": "True"},
        "Ready": ready,
        "ContainersReady": ready,
    }
    for kind, now in wanted.items():
        before = known.get(kind)
        if before is None or before["status"] != now["status"]:
            moment = clock()
        else:
            moment = before["lastTransitionTime"]
        known[kind] = {"type": kind, **now, "lastTransitionTime": moment}
    return list(known.values())
