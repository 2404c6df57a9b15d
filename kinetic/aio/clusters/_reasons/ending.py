"""How a pod ended: by its own program, by a limit, or by what was done to it."""

from __future__ import annotations

import re
from dataclasses import replace

from kinetic._words import one_line
from kinetic.aio.clusters._reasons.containers import (
    Container,
    Exit,
    containers,
    failed_container,
    tell_exit,
)
from kinetic.aio.clusters._reasons.documents import Document, condition, part, parts, uid
from kinetic.aio.clusters._reasons.verdict import Outlook, Seen, Verdict
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["disrupted", "ending", "has_ended", "ran", "removal"]

_BLAMELESS = "it is not the program's fault"
_SHUTDOWN = re.compile(r"node ?shut(ting)? ?down|imminent node shutdown", re.IGNORECASE)
_NODE_REFUSALS = frozenset(
    {"UnexpectedAdmissionError", "NodeAffinity", "TaintToleration", "PodOSNotSupported"}
)
_LOST_TAINTS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")


def has_ended(pod: Document) -> bool:
    """Whether none of its programs runs, or will run, any more."""
    status = part(pod, "status")
    if status.get("phase") in ("Succeeded", "Failed"):
        return True
    if not status.get("containerStatuses"):
        return False  # by far the most, and this is asked often
    if part(pod, "spec").get("restartPolicy", "Always") != "Never":
        return False
    programs = [one for one in containers(pod) if not one.init]
    return bool(programs) and all(one.state("terminated") is not None for one in programs)


def ran(pod: Document) -> bool:
    """Whether a program of it was ever started."""
    return any(
        one.state("running") is not None
        or (one.ended or {}).get("reason") not in (None, "StartError")
        for one in containers(pod)
        if not one.init
    )


def ending(seen: Seen, pod: Document) -> Verdict:
    """Judge a pod that has ended."""
    bad = failed_container(pod)
    phase = part(pod, "status").get("phase")
    if phase == "Succeeded" or (bad is None and phase != "Failed"):
        return Verdict(
            status=JobStatus.SUCCEEDED,
            phase=Phase.ENDED,
            exit_code=0,
            executor=uid(pod),
            message=_well(pod),
            outlook=Outlook.FINAL,
        )
    why = _why(seen, pod)
    code = (bad.ended or {}).get("exitCode") if bad is not None else None
    return Verdict(
        status=JobStatus.FAILED,
        phase=Phase.ENDED,
        reason=why.reason,
        exit_code=code,
        executor=uid(pod),
        message=why.message,
        advice=why.advice,
        outlook=Outlook.FINAL,
    )


def _well(pod: Document) -> str:
    """Success, with what about it might worry somebody who looks at the pod."""
    if disrupted(pod):
        return "its program ended with exit code 0 while the platform stopped it"
    listed = [(one, one.ended or {}) for one in containers(pod)]
    if any(end.get("reason") == "OOMKilled" for one, end in listed if not one.sidecar):
        return "succeeded, though a child process was killed for want of memory"
    stopped = [one.name for one, end in listed if one.sidecar and end.get("exitCode")]
    if stopped:
        return f"succeeded; sidecar {stopped[0]!r} was stopped then (its exit code means nothing)"
    return "succeeded"


def _why(seen: Seen, pod: Document) -> Exit:
    removed = removal(seen, pod)
    bad = failed_container(pod)
    if removed is not None and (removed.reason is not Reason.LOST or _stopped(bad)):
        return removed
    if bad is None:
        return Exit(
            reason=Reason.LOST,
            message="the pod failed, and does not say how its program ended",
            advice="run it again",
        )
    ended = bad.ended or {}
    if bad.init:
        told = tell_exit(bad, ended)
        return Exit(
            reason=Reason.OUT_OF_MEMORY if told.reason is Reason.OUT_OF_MEMORY else Reason.SETUP,
            message=f"init container {bad.name!r} failed with exit code {ended.get('exitCode')}; "
            "the program never started",
            advice=f"see the log of container {bad.name!r}",
        )
    if ended.get("exitCode") in (137, 143) and (probed := _probed(seen, pod)):
        return probed
    told = tell_exit(bad, ended)
    programs = [one.name for one in containers(pod) if not one.init]
    if programs[:1] not in ([], [bad.name]):
        return replace(told, message=f"container {bad.name!r}: {told.message}")
    return told


def _stopped(bad: Container | None) -> bool:
    """Whether its end may be the answer to a request to stop."""
    ended = (bad.ended if bad is not None else None) or {}
    return bad is None or (
        ended.get("exitCode") in (137, 143) and ended.get("reason") in (None, "Error")
    )


def disrupted(pod: Document) -> bool:
    """Whether Kubernetes itself says that the platform ended it."""
    return condition(pod, "DisruptionTarget") is not None


def removal(seen: Seen, pod: Document) -> Exit | None:
    """What was done to a pod from outside, or None when nothing was."""
    status: Document = part(pod, "status")
    reason, said = str(status.get("reason") or ""), str(status.get("message") or "")
    target = condition(pod, "DisruptionTarget")
    if target is not None:
        return _disruption(seen, pod, target)
    if reason == "DeadlineExceeded":
        limit = part(pod, "spec").get("activeDeadlineSeconds")
        return Exit(
            reason=Reason.DEADLINE,
            message=f"the pod's time limit of {limit} s passed"
            if limit
            else "the pod's time limit passed",
            advice="give it more time (timeout=)",
        )
    if reason == "Evicted":
        return _over_its_limit(said)
    if reason in ("Terminated", "Shutdown", "NodeShutdown") or _SHUTDOWN.search(said):
        return _shut_down(pod, seen)
    if reason == "Preempting":
        return Exit(
            reason=Reason.PREEMPTED,
            message="preempted: the node needed its place for a system pod",
            advice=_BLAMELESS,
        )
    if reason == "NodeLost":
        return _lost_node("the node was lost with the pod on it")
    if refused := _refused_by_node(reason, said):
        return refused
    if part(pod, "metadata").get("deletionTimestamp"):
        return Exit(
            reason=Reason.LOST,
            message=f"somebody deleted the pod{_as_it_ran(pod)} (its Job counts a failure)",
            advice="run it again",
        )
    return None


def _as_it_ran(pod: Document) -> str:
    bad = failed_container(pod)
    if bad is not None and (bad.ended or {}).get("exitCode") == 137:
        return "; its program did not react to SIGTERM and was killed after its grace"
    return " while it ran" if ran(pod) else " before it ever ran"


def _disruption(seen: Seen, pod: Document, target: Document) -> Exit:
    said = str(target.get("message") or "")
    match target.get("reason"):
        case "PreemptionByScheduler":
            return Exit(
                reason=Reason.PREEMPTED,
                message="preempted by a pod of higher priority",
                advice=_BLAMELESS,
            )
        case "EvictionByEvictionAPI":
            return Exit(
                reason=Reason.EVICTED,
                message="evicted by an administrator or by a drain of its node",
                advice=_BLAMELESS,
            )
        case "DeletionByPodGC":
            gone = "no longer exists" in said or "node" in said.lower()
            words = "the node was removed from the cluster under the pod"
            return _lost_node(
                f"{words}; what the program did is unknown"
                if gone
                else f"the pod was removed: {said}"
            )
        case "DeletionByTaintManager":
            return _thrown_out(seen, pod)
        case "TerminationByKubelet":
            if part(pod, "status").get("reason") == "Evicted" or "low on resource" in said:
                return _pressure(said)
            return _shut_down(pod, seen)
        case other:
            words = one_line(said or str(other or "by the platform"))
            return Exit(
                reason=Reason.EVICTED, message=f"ended by the platform: {words}", advice=_BLAMELESS
            )


def _lost_node(words: str) -> Exit:
    return Exit(reason=Reason.NODE_LOST, message=words, advice=_BLAMELESS)


def _node(seen: Seen, pod: Document) -> Document | None:
    if scene := seen.scenes.get(uid(pod)):
        return scene
    name = part(pod, "spec").get("nodeName")
    found = (one for one in seen.nodes or () if part(one, "metadata").get("name") == name)
    return next(found, None)


def _thrown_out(seen: Seen, pod: Document) -> Exit:
    """By a NoExecute taint: that of an operator, or that of a node which does not answer."""
    node = _node(seen, pod)
    taints = [
        one for one in parts(part(node, "spec"), "taints")
        if one.get("effect") == "NoExecute"
    ]  # fmt: skip
    keys = [str(one.get("key", "")) for one in taints]
    silent = seen.about(pod, "NodeNotReady") or condition(node, "Ready", "Unknown")
    if silent or any(key in _LOST_TAINTS for key in keys):
        return _lost_node(
            "the node was lost with the pod on it (it does not answer any more); what the program "
            "did is unknown"
        )
    named = f" {', '.join(repr(key) for key in keys)}" if keys else ""
    return Exit(
        reason=Reason.EVICTED,
        message=f"the node was closed with taint{named} (NoExecute) and the pod thrown out",
        advice=_BLAMELESS,
    )


def _pressure(said: str) -> Exit:
    found = re.search(r"low on resource: ([\w.-]+?)[.\s]", f"{said} ")
    resource = found[1] if found else "something"
    if resource == "memory":
        unset = "request is 0" in said
        return Exit(
            reason=Reason.EVICTED,
            message="the node ran short of memory and the pod"
            + (", which had no memory request," if unset else "")
            + " was evicted",
            advice="state what it needs (memory=), or use a larger machine",
        )
    if resource in ("ephemeral-storage", "inodes", "nodefs", "imagefs"):
        return Exit(
            reason=Reason.EVICTED,
            message="the node ran short of disk and the pod was evicted: it may have written too "
            "much",
            advice="ask for ephemeral-storage, or write to a bucket",
        )
    return Exit(
        reason=Reason.EVICTED,
        message=f"the node ran short of {resource} and the pod was evicted",
        advice="use a larger machine",
    )


def _over_its_limit(said: str) -> Exit:
    """Evicted without a word about the node: the pod passed a limit of its own."""
    volume = re.search(r'volume "(?P<name>[^"]+)" exceeds the limit "(?P<limit>[^"]+)"', said)
    if volume:
        return Exit(
            reason=Reason.OUT_OF_DISK,
            message=f"evicted: volume {volume['name']!r} passed its sizeLimit of {volume['limit']}",
            advice="raise it, or write less",
        )
    if re.search(r"ephemeral|storage", said):
        limit = re.search(r'(?:limit|containers)[^\d"]*"?(\d[\w.]*\w)', said)
        of = f" of {limit[1].rstrip('.')}" if limit else ""
        return Exit(
            reason=Reason.OUT_OF_DISK,
            message=f"evicted: it used more than its ephemeral-storage limit{of}",
            advice="raise it, or write to a bucket",
        )
    if "low on resource" in said:
        return _pressure(said)
    return Exit(
        reason=Reason.EVICTED, message=f"evicted: {one_line(said) or 'no cause'}", advice=_BLAMELESS
    )


def _shut_down(pod: Document, seen: Seen) -> Exit:
    """Its node was shut down: a spot machine was taken back, or an operator did it."""
    spec: Document = part(pod, "spec")
    labels = part(part(_node(seen, pod), "metadata"), "labels")
    spot = any(
        key in (*part(spec, "nodeSelector"), *labels)
        for key in ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")
    )
    if spot:
        return Exit(
            reason=Reason.PREEMPTED,
            message="the spot machine was taken back by the cloud",
            advice=f"{_BLAMELESS}: it is retried on its own budget",
        )
    return Exit(
        reason=Reason.PREEMPTED,
        message="its node was shut down (a spot machine taken back, or maintenance)",
        advice=_BLAMELESS,
    )


def _refused_by_node(reason: str, said: str) -> Exit | None:
    """A node that was named, or chosen on old facts, did not take the pod."""
    if reason.startswith("OutOf"):
        resource = {"cpu": "CPUs", "pods": "places for pods"}.get(reason[5:], reason[5:])
        return Exit(
            reason=Reason.UNSCHEDULABLE,
            message=f"the node refused the pod: it has too few {resource} ({one_line(said)})",
            advice="leave the choice of the node to the scheduler, or ask for less",
        )
    if reason in _NODE_REFUSALS:
        return Exit(
            reason=Reason.UNSCHEDULABLE,
            message=f"the node refused the pod ({reason}): {one_line(said)}",
            advice="run it again: the scheduler chooses another node",
        )
    return None


def _probed(seen: Seen, pod: Document) -> Exit | None:
    """A probe failed and the node stopped the container: only events say so."""
    for event in reversed(seen.about(pod, "Unhealthy")):
        kind = str(event.get("message") or "").split(" ")[0].lower()
        if kind in ("liveness", "startup") and seen.about(pod, "Killing"):
            times = event.get("count") or part(event, "series").get("count") or 1
            return Exit(
                reason=Reason.USER_ERROR,
                message=f"the {kind} probe failed {times} times, so the node stopped the "
                "container: the exit code is not the program's own",
                advice="give the probe more patience, or see why the program did not answer",
            )
    return None
