"""How a pod ended: by its own program, by a limit, or by what was done to it."""

from __future__ import annotations

import re
from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.documents import condition, part, parts
from kinetic.aio.kubernetes.diagnosis.exits import tell_end
from kinetic.aio.kubernetes.diagnosis.pods import Container, Pod
from kinetic.aio.kubernetes.diagnosis.quantities import readable
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["ending", "lost_node", "removal"]

_AGAIN = "it is not the program's fault: run it again"
_SHUT_DOWN = (
    "^(disruption TerminationByKubelet|status (Terminated|Shutdown|NodeShutdown):"
    "|status [^\n]*node ?shut(ting)? ?down|notice$)"
)

# Of the lines of evidence that `_evidence` writes, of which the strongest comes first.
_DONE_TO_IT = (
    Rule(
        "^disruption PreemptionByScheduler",
        "preempted by a pod of higher priority",
        f"{_AGAIN} when there is place, or with a higher priority class",
        Reason.PREEMPTED,
    ),
    Rule(
        "^disruption EvictionByEvictionAPI.*^event ScaleDown",
        "evicted, for the autoscaler removed its node",
        _AGAIN,
        Reason.EVICTED,
    ),
    Rule(
        "^disruption EvictionByEvictionAPI",
        "evicted by an administrator or by a drain of its node",
        _AGAIN,
        Reason.EVICTED,
    ),
    Rule(
        "^disruption DeletionByPodGC: [^\n]*node",
        "the node was removed from the cluster under the pod{spot}; what the program did is "
        "unknown",
        _AGAIN,
        Reason.NODE_LOST,
    ),
    Rule(
        "^disruption DeletionByPodGC: (?P<said>[^\n]*)",
        "the pod was removed: {said}",
        _AGAIN,
        Reason.NODE_LOST,
    ),
    Rule(
        r"^disruption DeletionByTaintManager.*^(taint node\.kubernetes\.io/(unreachable|not-ready)"
        "|event NodeNotReady|silent)",
        "the node was lost with the pod on it (it does not answer any more); what the program did "
        "is unknown",
        _AGAIN,
        Reason.NODE_LOST,
    ),
    Rule(
        "^disruption DeletionByTaintManager",
        "the node was closed with taint{taints} (NoExecute) and the pod thrown out",
        _AGAIN,
        Reason.EVICTED,
    ),
    Rule(
        "low on resource: memory.*request is 0",
        "the node ran short of memory and the pod, which had no memory request, was evicted{usage}",
        "state what it needs (memory=), or use a larger machine",
        Reason.EVICTED,
    ),
    Rule(
        "low on resource: memory",
        "the node ran short of memory and the pod was evicted{usage}",
        "state what it needs (memory=), or use a larger machine",
        Reason.EVICTED,
    ),
    Rule(
        "low on resource: (ephemeral-storage|inodes|nodefs|imagefs)",
        "the node ran short of disk and the pod was evicted: it may have written too much{usage}",
        "ask for ephemeral-storage, or write to a bucket",
        Reason.EVICTED,
    ),
    Rule(
        r"low on resource: (?P<resource>[\w.-]+?)[.\s]",
        "the node ran short of {resource} and the pod was evicted",
        "use a larger machine",
        Reason.EVICTED,
    ),
    Rule(
        "^disruption TerminationByKubelet[^\n]*critical pod|^status Preempting",
        "preempted: the node needed its place for a critical pod of the system",
        _AGAIN,
        Reason.PREEMPTED,
    ),
    Rule(
        "^status DeadlineExceeded",
        "the pod's time limit{deadline} passed",
        "give it more time (timeout=)",
        Reason.DEADLINE,
    ),
    Rule(
        '^status Evicted: [^\n]*volume "(?P<name>[^"]+)" exceeds the limit "(?P<size>[^"]+)"',
        "evicted: volume {name!r} passed its sizeLimit of {size}",
        "raise it, or write less",
        Reason.OUT_OF_DISK,
    ),
    Rule(
        "^status Evicted: [^\n]*(ephemeral|storage)",
        "evicted: it used more than its ephemeral-storage limit{limit}",
        "raise it, or write to a bucket",
        Reason.OUT_OF_DISK,
    ),
    Rule(
        r"^status Evicted: [^\n]*The node had condition: \[(?P<had>.+?)\]",
        "the node refused the pod, for it was short itself ({had})",
        _AGAIN,
        Reason.EVICTED,
    ),
    Rule("^status Evicted: (?P<said>[^\n]+)", "evicted: {said}", _AGAIN, Reason.EVICTED),
    Rule("^status Evicted", "evicted: no cause", _AGAIN, Reason.EVICTED),
    Rule(
        _SHUT_DOWN + ".*^spot",
        "the spot machine was taken back by the cloud",
        f"{_AGAIN} (it is retried on its own budget), or ask for no spot machine",
        Reason.PREEMPTED,
    ),
    Rule(
        _SHUT_DOWN,
        "its node was shut down (a spot machine taken back, or maintenance)",
        _AGAIN,
        Reason.PREEMPTED,
    ),
    Rule(
        r"^disruption (?P<kind>[^:\n]*): (?P<said>[^\n]*)",
        "ended by the platform: {platform}",
        _AGAIN,
        Reason.EVICTED,
    ),
    Rule("^status NodeLost", "the node was lost with the pod on it", _AGAIN, Reason.NODE_LOST),
    Rule(
        r"^status OutOf\S+:",
        "the node refused the pod: it has too {lack}",
        "leave the choice of the node to the scheduler, or ask for less",
        Reason.UNSCHEDULABLE,
    ),
    Rule(
        "^status (?P<why>UnexpectedAdmissionError|NodeAffinity|TaintToleration|PodOSNotSupported"
        "|[^:\n]*(?=: Pod was rejected)): (?P<said>[^\n]*)",
        "the node refused the pod ({why}): {said}",
        "run it again: the scheduler chooses another node",
        Reason.UNSCHEDULABLE,
    ),
    Rule(
        "^deleted",
        "somebody deleted the pod{then} (its Job counts a failure)",
        "run it again; the cluster's audit log tells who deleted it",
        Reason.LOST,
    ),
)


def _evidence(pod: Pod) -> str:
    """What was done to it, by whom, and how its node is: a line each."""
    target, lines = pod.disruption, list[str]()
    if target is not None:
        lines.append(f"disruption {target.get('reason') or ''}: {target.get('message') or ''}")
    if pod.status.get("reason") or pod.status.get("message"):
        said = pod.status.get("message") or ""
        lines.append(f"status {pod.status.get('reason') or ''}: {said}")
    lines += [f"event {one['reason']}" for one in pod.events("ScaleDown", "NodeNotReady")]
    lines += [f"taint {key}" for key in _closing(pod)]
    if condition(pod.node, "Ready", "Unknown") is not None:
        lines.append("silent")
    noticed = pod.taken_back and pod.stopped
    marks = {"notice": noticed, "spot": pod.on_spot, "deleted": pod.leaving}
    lines += [name for name, so in marks.items() if so]
    return "\n".join(" ".join(line.split()) for line in lines)


def _closing(pod: Pod) -> list[str]:
    """The taints of its node that throw pods out."""
    taints = parts(part(pod.node, "spec"), "taints")
    return [str(one.get("key", "")) for one in taints if one.get("effect") == "NoExecute"]


def removal(pod: Pod) -> Diagnosis | None:
    """What was done to a pod from outside, or None when nothing was."""
    text = _evidence(pod)
    target = pod.disruption or {}
    limit = re.search(r'(?:limit|containers)[^\d"\n]*"?(\d[\w.]*\w)', text)
    after = pod.spec.get("activeDeadlineSeconds")
    taints = ", ".join(repr(key) for key in _closing(pod))
    return first(
        _DONE_TO_IT,
        text,
        deadline=f" of {after} s" if after else "",
        limit=f" of {readable(limit[1].rstrip('.'))}" if limit else "",
        platform=one_line(str(target.get("message") or target.get("reason") or "by the platform")),
        spot=" (a spot machine: was it taken back?)" if pod.on_spot else "",
        taints=f" {taints}" if taints else "",
        then=_as_it_ran(pod),
        lack=_lack(pod),
        usage=_usage(text),
    )


def _lack(pod: Pod) -> str:
    """What a node has too little of that refused the pod, in its own words and figures."""
    what = str(pod.status.get("reason") or "").removeprefix("OutOf")
    said = str(pod.status.get("message") or "")
    if what in ("memory", "ephemeral-storage"):
        return f"little {what} ({one_line(_in_units(said))})"
    names = {"cpu": "CPUs", "pods": "places for pods"}
    return f"few {names.get(what, what)} ({one_line(said)})"


def _as_it_ran(pod: Pod) -> str:
    code = pod.bad.exit_code if pod.bad is not None else None
    if not pod.ran:
        return " before it ever ran"
    if code == 137:
        return "; its program did not react to SIGTERM and was killed after its grace"
    code = 0 if code is None and pod.status.get("phase") == "Succeeded" else code
    if code not in (None, 143) and pod.answered:
        return f" while it ran, and its program ended with exit code {code} then"
    return " while it ran"


def _usage(said: str) -> str:
    """Who used how much, as the node tells it, in units that people read."""
    used = re.findall(
        r"(Container|Pod) (\S+) was using ([\w.]+), request is ([\w.]*\w)", _in_units(said)
    )
    told = [
        f"{kind.lower()} {name} used {has}, its request is {asked}"
        for kind, name, has, asked in used
    ]
    return f" ({'; '.join(dict.fromkeys(told))})" if told else ""


def _in_units(said: str) -> str:
    """With amounts of bytes in the largest units that fit."""
    return re.sub(r"\b\d{4,}(Ki|Mi)?\b", lambda one: readable(one[0]), said)


def lost_node() -> Diagnosis:
    """The end that a node's own end brings."""
    words = "the node was removed from the cluster under the pod; what the program did is unknown"
    return pending(words, _AGAIN, Reason.NODE_LOST)


def ending(pod: Pod) -> Diagnosis:
    """Judge a pod that has ended."""
    phase = pod.status.get("phase")
    if phase == "Succeeded" or (pod.bad is None and phase != "Failed"):
        return Diagnosis(
            status=JobStatus.SUCCEEDED,
            phase=Phase.ENDED,
            exit_code=0,
            executor=pod.uid,
            message=_well(pod),
            outlook=Outlook.FINAL,
        )
    return _why(pod).ended(pod.uid, pod.bad.exit_code if pod.bad is not None else None)


def _well(pod: Pod) -> str:
    """Success, with what about it might worry somebody who looks at the pod."""
    if pod.disruption is not None:
        return "its program ended with exit code 0 while the platform stopped it"
    if pod.answered:
        return "its program ended with exit code 0 while the pod was being deleted"
    if any((one.ended or {}).get("reason") == "OOMKilled" for one in pod.programs):
        return "succeeded, though a child process was killed for want of memory"
    stopped = [one.name for one in pod.containers if one.sidecar and one.exit_code]
    if stopped:
        return f"succeeded; sidecar {stopped[0]!r} was stopped then (its exit code means nothing)"
    return "succeeded"


def _why(pod: Pod) -> Diagnosis:
    """The strongest of what was done to it, its node's word, and its own."""
    removed, bad = removal(pod), pod.bad
    if removed is not None and (removed.reason is not Reason.LOST or pod.stopped or pod.answered):
        return removed
    if bad is None:
        words = "the pod failed, and does not say how its program ended"
        return pending(words, "run it again", Reason.LOST)
    told = tell_end(pod, bad, bad.ended or {})
    if bad.init:
        return _never_began(bad, told)
    if [one.name for one in pod.programs][:1] != [bad.name]:
        told = replace(told, message=f"container {bad.name!r}: {told.message}")
    starved = [one.name for one in pod.containers if one.sidecar and _starved(one)]
    if starved and told.reason is not Reason.OUT_OF_MEMORY:
        words = f"sidecar {starved[0]!r} beside it was killed for want of memory"
        return replace(told, message=f"{told.message}; {words}")
    return told


def _starved(one: Container) -> bool:
    return any((end or {}).get("reason") == "OOMKilled" for end in (one.ended, one.last))


def _never_began(bad: Container, told: Diagnosis) -> Diagnosis:
    """An init container failed: what is told of it is so of what comes before the program."""
    plain = told.message == f"the program ended with exit code {bad.exit_code}"
    more = "" if plain else f" ({told.message.replace('the program', 'it', 1)})"
    kept = told.reason not in (Reason.USER_ERROR, Reason.LOST)
    return pending(
        f"init container {bad.name!r} failed with exit code {bad.exit_code}{more}; the program "
        "never started",
        told.advice if kept else f"see the log of container {bad.name!r}",
        told.reason if kept else Reason.SETUP,
    )
