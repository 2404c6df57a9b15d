"""Pods that nobody saw, as far as the events tell that outlive them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from kinetic.aio.kubernetes.diagnosis.documents import Document, part
from kinetic.aio.kubernetes.diagnosis.pods import Pod
from kinetic.aio.kubernetes.diagnosis.verdict import Seen

__all__ = ["ended_unseen", "fell_again", "never_began"]

_LAST = 2
"""So many of the pods that the Job made last count: the one that is there, and its elder."""


def ended_unseen(seen: Seen, known: Collection[str] = ()) -> Pod | None:
    """The last pod of the Job that an event tells an end of; none of those *known* by name."""
    for pod, event in _told(seen):
        status = _status(event)
        if status is not None and pod["metadata"]["name"] not in known:
            return Pod({**pod, "status": status}, seen)
    return None


def never_began(seen: Seen) -> Pod | None:
    """The last pod of the Job that events tell of, if its program was never started."""
    last = next((pod for pod, _ in _told(seen)), None)
    if last is None or seen.about(last, "Started"):
        return None
    node = {"nodeName": "?"} if seen.about(last, "Scheduled") else {}
    pod = {**last, "spec": {**last["spec"], **node}, "status": {"phase": "Pending"}}
    asked = last["spec"].get("containers")  # else the nodes do not tell either
    return Pod(pod, seen if asked else replace(seen, nodes=None))


def fell_again(seen: Seen) -> bool:
    """Whether an event tells that the program of some pod was started again and again."""
    return any(
        event.get("reason") == "BackOff" and "restarting failed" in str(event.get("message"))
        for _, event in _told(seen)
    )


def _told(seen: Seen) -> Iterator[tuple[dict[str, Any], Document]]:
    """What is told of pods of the Job, the last first, each with as much as is known of its pod."""
    born = part(seen.any_job, "metadata").get("creationTimestamp")
    template = part(part(seen.any_job, "spec"), "template")
    for name in _names(seen):
        about = [one for one in seen.events if _pod_of(one) == name]
        uids = {(one.get("involvedObject") or part(one, "regarding")).get("uid") for one in about}
        own = next((one for one in uids if one), None)
        pod: dict[str, Any] = {
            "metadata": {"name": name, "uid": own, "creationTimestamp": born},  # or a bit later
            "spec": {**part(template, "spec"), "restartPolicy": "Never"},
            "status": {},
        }
        for event in reversed(replace(seen, events=about).about(pod)):
            yield pod, event


def _names(seen: Seen) -> list[str]:
    """The pods that events tell of, the last first: by their making, if that is told."""
    made = [str(one["message"]).rpartition(" ")[2] for one in seen.about(None, "SuccessfulCreate")]
    if made:
        return [*dict.fromkeys(reversed(made))][:_LAST]
    prefix = f"{seen.job_name}-"
    named = dict.fromkeys(_pod_of(one) for one in reversed(seen.events))
    # Those of a Job whose name begins alike have more parts in theirs.
    return [one for one in named if one.startswith(prefix) and "-" not in one.removeprefix(prefix)]


def _pod_of(event: Document) -> str:
    target: Document = event.get("involvedObject") or part(event, "regarding")
    return str(target.get("name") or "") if target.get("kind") == "Pod" else ""


def _status(event: Document) -> dict[str, Any] | None:
    """What the pod's status must have been."""
    reason, said = event.get("reason"), str(event.get("message") or "")
    disrupted = {"Preempted": "PreemptionByScheduler"}
    if said.startswith("Marking for deletion"):
        disrupted["TaintManagerEviction"] = "DeletionByTaintManager"
    if reason in ("Evicted", "Preempting"):
        return {"phase": "Failed", "reason": reason, "message": said}
    if reason not in disrupted:
        return None
    condition = {"type": "DisruptionTarget", "status": "True", "reason": disrupted[reason]}
    return {"phase": "Failed", "conditions": [condition]}
