"""How a pod ended: by its own program, by a limit, or by what was done to it."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.containers import (
    START_ERRORS,
    Container,
    containers,
    failed_container,
    tell_exit,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.quantities import readable
from kinetic.aio.kubernetes.diagnosis.rules import Finding
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = [
    "answered",
    "disrupted",
    "ending",
    "has_ended",
    "lost_node",
    "probed",
    "ran",
    "removal",
    "taken_back",
]

_BLAMELESS = "it is not the program's fault: run it again"
_SHUTDOWN = re.compile(r"node ?shut(ting)? ?down|imminent node shutdown", re.IGNORECASE)
_NODE_REFUSALS = frozenset(
    {"UnexpectedAdmissionError", "NodeAffinity", "TaintToleration", "PodOSNotSupported"}
)
_PROBE = re.compile(r"failed (liveness|startup) probe")
_LOST_TAINTS = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")


def has_ended(pod: Document) -> bool:
    """Whether none of its programs runs, or will run, any more."""
    status = part(pod, "status")
    if status.get("phase") in ("Succeeded", "Failed"):
        return True
    if not status.get("containerStatuses"):
        return False  # by far the most, and this is asked often
    policy = part(pod, "spec").get("restartPolicy", "Always")
    if policy not in ("Never", "OnFailure"):
        return False
    ends = [one.state("terminated") for one in containers(pod) if not one.init]
    return bool(ends) and all(
        end is not None and (policy == "Never" or not end.get("exitCode")) for end in ends
    )


def ran(pod: Document) -> bool:
    """Whether a program of it was ever started."""
    return any(
        one.state("running") is not None
        or (one.ended or {}).get("reason") not in (None, *START_ERRORS)
        for one in containers(pod)
        if not one.init
    )


def ending(seen: Seen, pod: Document) -> Diagnosis:
    """Judge a pod that has ended."""
    bad = failed_container(pod)
    phase = part(pod, "status").get("phase")
    if phase == "Succeeded" or (bad is None and phase != "Failed"):
        return Diagnosis(
            status=JobStatus.SUCCEEDED,
            phase=Phase.ENDED,
            exit_code=0,
            executor=uid(pod),
            message=_well(pod),
            outlook=Outlook.FINAL,
        )
    why = _why(seen, pod)
    code = (bad.ended or {}).get("exitCode") if bad is not None else None
    return Diagnosis(
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
    if answered(pod):
        return "its program ended with exit code 0 while the pod was being deleted"
    listed = [(one, one.ended or {}) for one in containers(pod)]
    if any(end.get("reason") == "OOMKilled" for one, end in listed if not one.sidecar):
        return "succeeded, though a child process was killed for want of memory"
    stopped = [one.name for one, end in listed if one.sidecar and end.get("exitCode")]
    if stopped:
        return f"succeeded; sidecar {stopped[0]!r} was stopped then (its exit code means nothing)"
    return "succeeded"


def _why(seen: Seen, pod: Document) -> Finding:
    removed = removal(seen, pod)
    bad = failed_container(pod)
    if removed is not None and (
        removed.reason is not Reason.LOST or _stopped(bad) or answered(pod)
    ):
        return removed
    if bad is None:
        return Finding(
            reason=Reason.LOST,
            message="the pod failed, and does not say how its program ended",
            advice="run it again",
        )
    ended = bad.ended or {}
    told = probed(seen, pod, ended.get("exitCode")) or tell_exit(bad, ended)
    if bad.init:
        return _never_began(bad, ended, told)
    programs = [one.name for one in containers(pod) if not one.init]
    if programs[:1] not in ([], [bad.name]):
        told = replace(told, message=f"container {bad.name!r}: {told.message}")
    starved = [one.name for one in containers(pod) if one.sidecar and _starved(one)]
    if starved and told.reason is not Reason.OUT_OF_MEMORY:
        words = f"sidecar {starved[0]!r} beside it was killed for want of memory"
        return replace(told, message=f"{told.message}; {words}")
    return told


def _starved(one: Container) -> bool:
    return any((end or {}).get("reason") == "OOMKilled" for end in (one.ended, one.last))


def _never_began(bad: Container, ended: Document, told: Finding) -> Finding:
    """An init container failed: what is told of it is so of what comes before the program."""
    code = ended.get("exitCode")
    plain = told.message == f"the program ended with exit code {code}"
    more = "" if plain else f" ({told.message.replace('the program', 'it', 1)})"
    kept = told.reason is not Reason.USER_ERROR and told.reason is not Reason.LOST
    return Finding(
        reason=told.reason if kept else Reason.SETUP,
        message=f"init container {bad.name!r} failed with exit code {code}{more}; "
        "the program never started",
        advice=told.advice if kept else f"see the log of container {bad.name!r}",
    )


def _stopped(bad: Container | None) -> bool:
    """Whether its end may be the answer to a request to stop."""
    ended = (bad.ended if bad is not None else None) or {}
    return bad is None or (
        ended.get("exitCode") in (137, 143) and ended.get("reason") in (None, "Error")
    )


def answered(pod: Document) -> bool:
    """Whether its program ended after somebody had the pod deleted: by its handler, in its way."""
    metadata = part(pod, "metadata")
    grace, until = metadata.get("deletionGracePeriodSeconds"), metadata.get("deletionTimestamp")
    bad = failed_container(pod)
    programs = [one for one in containers(pod) if not one.init]
    one = bad if bad is not None else next(iter(programs), None)
    ended = (one.ended if one is not None else None) or {}
    if grace is None or not until or not ended.get("finishedAt"):
        return False
    try:
        asked = datetime.fromisoformat(str(until)) - timedelta(seconds=int(grace))
        own = ended.get("reason") in ("OOMKilled", *START_ERRORS)
        return not own and datetime.fromisoformat(str(ended["finishedAt"])) >= asked
    except (ValueError, TypeError):
        return False


def disrupted(pod: Document) -> bool:
    """Whether Kubernetes itself says that the platform ended it."""
    return condition(pod, "DisruptionTarget") is not None


def removal(seen: Seen, pod: Document) -> Finding | None:
    """What was done to a pod from outside, or None when nothing was."""
    status: Document = part(pod, "status")
    reason, said = str(status.get("reason") or ""), str(status.get("message") or "")
    target = condition(pod, "DisruptionTarget")
    if target is not None:
        return _disruption(seen, pod, target)
    if reason == "DeadlineExceeded":
        limit = part(pod, "spec").get("activeDeadlineSeconds")
        return Finding(
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
        return _for_the_system()
    if reason == "NodeLost":
        return lost_node("the node was lost with the pod on it")
    if refused := _refused_by_node(reason, said):
        return refused
    if taken_back(seen, pod):
        return _shut_down(pod, seen)
    if part(pod, "metadata").get("deletionTimestamp"):
        return Finding(
            reason=Reason.LOST,
            message=f"somebody deleted the pod{_as_it_ran(pod)} (its Job counts a failure)",
            advice="run it again; the cluster's audit log tells who deleted it",
        )
    return None


def taken_back(seen: Seen, pod: Document) -> bool:
    """Whether the cloud has given notice of the end of its node (documents: GKE, Spot VMs)."""
    taints = parts(part(_node(seen, pod), "spec"), "taints")
    return any(one.get("key") == "cloud.google.com/impending-node-termination" for one in taints)


def _for_the_system() -> Finding:
    return Finding(
        reason=Reason.PREEMPTED,
        message="preempted: the node needed its place for a critical pod of the system",
        advice=_BLAMELESS,
    )


def _as_it_ran(pod: Document) -> str:
    bad = failed_container(pod)
    code = (bad.ended or {}).get("exitCode") if bad is not None else None
    if code == 137:
        return "; its program did not react to SIGTERM and was killed after its grace"
    code = 0 if code is None and part(pod, "status").get("phase") == "Succeeded" else code
    if code not in (None, 143) and answered(pod):
        return f" while it ran, and its program ended with exit code {code} then"
    return " while it ran" if ran(pod) else " before it ever ran"


def _disruption(seen: Seen, pod: Document, target: Document) -> Finding:
    said = str(target.get("message") or "")
    match target.get("reason"):
        case "PreemptionByScheduler":
            return Finding(
                reason=Reason.PREEMPTED,
                message="preempted by a pod of higher priority",
                advice=f"{_BLAMELESS} when there is place, or with a higher priority class",
            )
        case "EvictionByEvictionAPI":
            return Finding(
                reason=Reason.EVICTED,
                message="evicted, for the autoscaler removed its node"
                if seen.about(pod, "ScaleDown")
                else "evicted by an administrator or by a drain of its node",
                advice=_BLAMELESS,
            )
        case "DeletionByPodGC":
            gone = "no longer exists" in said or "node" in said.lower()
            spot = " (a spot machine: was it taken back?)" if _on_spot(seen, pod) else ""
            words = f"the node was removed from the cluster under the pod{spot}"
            return lost_node(
                f"{words}; what the program did is unknown"
                if gone
                else f"the pod was removed: {said}"
            )
        case "DeletionByTaintManager":
            return _thrown_out(seen, pod)
        case "TerminationByKubelet":
            if part(pod, "status").get("reason") == "Evicted" or "low on resource" in said:
                return _pressure(said)
            if part(pod, "status").get("reason") == "Preempting" or "critical pod" in said:
                return _for_the_system()
            return _shut_down(pod, seen)
        case other:
            words = one_line(said or str(other or "by the platform"))
            return Finding(
                reason=Reason.EVICTED, message=f"ended by the platform: {words}", advice=_BLAMELESS
            )


def lost_node(words: str) -> Finding:
    """The end that a node's own end brings."""
    return Finding(reason=Reason.NODE_LOST, message=words, advice=_BLAMELESS)


def _node(seen: Seen, pod: Document) -> Document | None:
    if scene := seen.scenes.get(uid(pod)):
        return scene
    name = part(pod, "spec").get("nodeName")
    found = (one for one in seen.nodes or () if part(one, "metadata").get("name") == name)
    return next(found, None)


def _thrown_out(seen: Seen, pod: Document) -> Finding:
    """By a NoExecute taint: that of an operator, or that of a node which does not answer."""
    node = _node(seen, pod)
    taints = [
        one for one in parts(part(node, "spec"), "taints")
        if one.get("effect") == "NoExecute"
    ]  # fmt: skip
    keys = [str(one.get("key", "")) for one in taints]
    silent = seen.about(pod, "NodeNotReady") or condition(node, "Ready", "Unknown")
    if silent or any(key in _LOST_TAINTS for key in keys):
        return lost_node(
            "the node was lost with the pod on it (it does not answer any more); what the program "
            "did is unknown"
        )
    named = f" {', '.join(repr(key) for key in keys)}" if keys else ""
    return Finding(
        reason=Reason.EVICTED,
        message=f"the node was closed with taint{named} (NoExecute) and the pod thrown out",
        advice=_BLAMELESS,
    )


def _pressure(said: str) -> Finding:
    found = re.search(r"low on resource: ([\w.-]+?)[.\s]", f"{said} ")
    resource = found[1] if found else "something"
    if resource == "memory":
        unset = "request is 0" in said
        return Finding(
            reason=Reason.EVICTED,
            message="the node ran short of memory and the pod"
            + (", which had no memory request," if unset else "")
            + f" was evicted{_usage(said)}",
            advice="state what it needs (memory=), or use a larger machine",
        )
    if resource in ("ephemeral-storage", "inodes", "nodefs", "imagefs"):
        return Finding(
            reason=Reason.EVICTED,
            message="the node ran short of disk and the pod was evicted: it may have written too "
            f"much{_usage(said)}",
            advice="ask for ephemeral-storage, or write to a bucket",
        )
    return Finding(
        reason=Reason.EVICTED,
        message=f"the node ran short of {resource} and the pod was evicted",
        advice="use a larger machine",
    )


def _usage(said: str) -> str:
    """Who used how much, as the node tells it, in units that people read."""
    used = re.findall(
        r"(Container|Pod) (\S+) was using ([\w.]+), request is ([\w.]*\w)", _in_units(said)
    )
    told = [
        f"{kind.lower()} {name} used {much}, its request is {asked}"
        for kind, name, much, asked in used
    ]
    return f" ({'; '.join(told)})" if told else ""


def _in_units(said: str) -> str:
    """With amounts of bytes in the largest units that fit."""
    return re.sub(r"\b\d{4,}(Ki|Mi)?\b", lambda one: readable(one[0]), said)


def _over_its_limit(said: str) -> Finding:
    """Evicted without a word about the node: the pod passed a limit of its own."""
    if "low on resource" in said:
        return _pressure(said)
    volume = re.search(r'volume "(?P<name>[^"]+)" exceeds the limit "(?P<limit>[^"]+)"', said)
    if volume:
        return Finding(
            reason=Reason.OUT_OF_DISK,
            message=f"evicted: volume {volume['name']!r} passed its sizeLimit of {volume['limit']}",
            advice="raise it, or write less",
        )
    if re.search(r"ephemeral|storage", said):
        limit = re.search(r'(?:limit|containers)[^\d"]*"?(\d[\w.]*\w)', said)
        of = f" of {readable(limit[1].rstrip('.'))}" if limit else ""
        return Finding(
            reason=Reason.OUT_OF_DISK,
            message=f"evicted: it used more than its ephemeral-storage limit{of}",
            advice="raise it, or write to a bucket",
        )
    if had := re.search(r"The node had condition: \[(.+?)\]", said):
        return Finding(
            reason=Reason.EVICTED,
            message=f"the node refused the pod, for it was short itself ({had[1]})",
            advice=_BLAMELESS,
        )
    return Finding(
        reason=Reason.EVICTED, message=f"evicted: {one_line(said) or 'no cause'}", advice=_BLAMELESS
    )


def _shut_down(pod: Document, seen: Seen) -> Finding:
    """Its node was shut down: a spot machine was taken back, or an operator did it."""
    if _on_spot(seen, pod):
        return Finding(
            reason=Reason.PREEMPTED,
            message="the spot machine was taken back by the cloud",
            advice=f"{_BLAMELESS} (it is retried on its own budget), or ask for no spot machine",
        )
    return Finding(
        reason=Reason.PREEMPTED,
        message="its node was shut down (a spot machine taken back, or maintenance)",
        advice=_BLAMELESS,
    )


def _on_spot(seen: Seen, pod: Document) -> bool:
    selector = part(part(pod, "spec"), "nodeSelector")
    labels = part(part(_node(seen, pod), "metadata"), "labels")
    return any(
        key in selector or key in labels
        for key in ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")
    )


def _refused_by_node(reason: str, said: str) -> Finding | None:
    """A node that was named, or chosen on old facts, did not take the pod."""
    if reason.startswith("OutOf"):
        resource = reason.removeprefix("OutOf")
        bytes_of = resource in ("memory", "ephemeral-storage")
        lacks = {"cpu": "too few CPUs", "pods": "too few places for pods"}.get(
            resource, f"too {'little' if bytes_of else 'few'} {resource}"
        )
        said = one_line(_in_units(said) if bytes_of else said)
        return Finding(
            reason=Reason.UNSCHEDULABLE,
            message=f"the node refused the pod: it has {lacks} ({said})",
            advice="leave the choice of the node to the scheduler, or ask for less",
        )
    if reason in _NODE_REFUSALS or said.startswith("Pod was rejected"):
        return Finding(
            reason=Reason.UNSCHEDULABLE,
            message=f"the node refused the pod ({reason}): {one_line(said)}",
            advice="run it again: the scheduler chooses another node",
        )
    return None


def probed(seen: Seen, pod: Document, code: object) -> Finding | None:
    """A probe or a hook failed and the node stopped the container: only events say so."""
    if code in (137, 143) and (hooks := seen.about(pod, "FailedPostStartHook")):
        return Finding(
            reason=Reason.SETUP,
            message="the container's postStart hook failed, so the node stopped it: "
            f"{one_line(str(hooks[-1].get('message') or ''))}",
            advice="correct the hook",
        )
    killed = [str(event.get("message") or "") for event in seen.about(pod, "Killing")]
    named = next((found for text in killed if (found := _PROBE.search(text))), None)
    if not killed or not code or (named is None and code not in (137, 143)):
        return None
    times: dict[str, int] = {}
    for event in seen.about(pod, "Unhealthy"):
        kind = str(event.get("message") or "").split(" ")[0].lower()
        count = part(event, "series").get("count") or event.get("count") or 1
        times[kind] = times.get(kind, 0) + int(count)
    kinds = [named[1]] if named else [one for one in ("liveness", "startup") if one in times]
    if not kinds:
        return None
    often = f" {times[kinds[0]]} times" if times.get(kinds[0]) else ""
    return Finding(
        reason=Reason.USER_ERROR,
        message=f"the {kinds[0]} probe failed{often}, so the node stopped the "
        "container: the exit code is not the program's own",
        advice="give the probe more patience, or see why the program did not answer",
    )
