"""How a pod ended: by its own program, by a limit, or by what was done to it."""

from __future__ import annotations

import re
from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.documents import condition, part, parts
from kinetic.aio.kubernetes.diagnosis.exits import tell_end
from kinetic.aio.kubernetes.diagnosis.pods import Container, Pod
from kinetic.aio.kubernetes.diagnosis.quantities import readable
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first, next_step
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, pending
from kinetic.job_status import JobStatus, Reason

_AGAIN = "it is not the program's fault: run it again"
_SHUT_DOWN = (
    "^(disruption TerminationByKubelet|status (Terminated|Shutdown|NodeShutdown):"
    "|status [^\n]*node ?shut(ting)? ?down|notice$)"
)


def _done(
    pattern: str, message: str, reason: Reason = Reason.EVICTED, advice: str = _AGAIN
) -> Rule:
    return Rule(pattern, message, advice, reason)


# Of the lines of evidence that `_evidence` writes, of which the strongest comes first.
_DONE_TO_IT = (
    _done(
        "^disruption PreemptionByScheduler",
        "preempted by a pod of higher priority",
        Reason.PREEMPTED,
        f"{_AGAIN}, or use a higher priority class",
    ),
    _done(
        "^disruption EvictionByEvictionAPI.*^event ScaleDown",
        "evicted, for the autoscaler removed its node",
    ),
    _done(
        "^disruption EvictionByEvictionAPI", "evicted by an administrator or by a drain of its node"
    ),
    _done(
        r"^disruption DeletionByTaintManager.*^(taint node\.kubernetes\.io/(unreachable|not-ready)"
        "|event NodeNotReady|silent)|^status NodeLost",
        "the node was lost with the pod on it (it does not answer any more); what the program did "
        "is unknown",
        Reason.NODE_LOST,
    ),
    _done(
        "^disruption DeletionByTaintManager",
        "the node was closed with taint{taints} (NoExecute) and the pod thrown out",
    ),
    _done(
        "low on resource: memory",
        "the node ran short of memory and the pod{unasked} was evicted{usage}",
        advice="state what it needs (memory=), or use a larger machine",
    ),
    _done(
        "low on resource: (ephemeral-storage|inodes|nodefs|imagefs)",
        "the node ran short of disk and the pod was evicted: it may have written too much{usage}",
        advice="ask for ephemeral-storage, or write to a bucket",
    ),
    _done(
        r"low on resource: (?P<resource>[\w.-]*\w)",
        "the node ran short of {resource} and the pod was evicted",
        advice="use a larger machine",
    ),
    _done(
        "^disruption TerminationByKubelet[^\n]*critical pod|^status Preempting",
        "preempted: the node needed its place for a critical pod of the system",
        Reason.PREEMPTED,
    ),
    _done(
        "^status DeadlineExceeded",
        "the pod's time limit{deadline} passed",
        Reason.DEADLINE,
        "give it more time (timeout=)",
    ),
    _done(
        '^status Evicted: [^\n]*volume "(?P<name>[^"]+)" exceeds the limit "(?P<size>[^"]+)"',
        "evicted: volume {name!r} passed its sizeLimit of {size}",
        Reason.OUT_OF_DISK,
        "raise its sizeLimit, or write less",
    ),
    _done(
        "^status Evicted: [^\n]*(ephemeral|storage)",
        "evicted: it used more than its ephemeral-storage limit{limit}",
        Reason.OUT_OF_DISK,
        "raise that limit, or write to a bucket",
    ),
    _done(
        r"^status Evicted: [^\n]*The node had condition: \[(?P<had>.+?)\]",
        "the node refused the pod, for it was short itself ({had})",
    ),
    _done("^status Evicted: (?P<said>[^\n]*)", "evicted: {said}"),
    _done(
        _SHUT_DOWN + ".*^spot",
        "the spot machine was taken back by the cloud",
        Reason.PREEMPTED,
        f"{_AGAIN} (it is retried on its own budget), or ask for no spot machine",
    ),
    _done(
        _SHUT_DOWN,
        "its node was shut down (a spot machine taken back, or maintenance)",
        Reason.PREEMPTED,
    ),
    _done(
        "^disruption DeletionByPodGC: [^\n]*node|^without node",
        "the node was removed from the cluster under the pod{spot}; what the program did is "
        "unknown",
        Reason.NODE_LOST,
    ),
    _done(
        "^disruption DeletionByPodGC: (?P<said>[^\n]*)",
        "the pod was removed: {said}",
        Reason.NODE_LOST,
    ),
    _done("^disruption [^:\n]*: (?P<said>[^\n]*)", "ended by the platform: {said}"),
    _done(
        "^status OutOf[^:\n]*: (?P<said>[^\n]*)",
        "the node refused the pod: it has too {lack} ({said})",
        Reason.UNSCHEDULABLE,
        "leave the choice of the node to the scheduler, or ask for less",
    ),
    _done(
        r"^status (?P<why>SysctlForbidden|PodOS\w+|AppArmor|Seccomp\w*|ProcMount\w*): "
        "(?P<said>[^\n]*)",
        "the node refused the pod ({why}), as others of its kind would: {said}",
        Reason.UNSCHEDULABLE,
        "correct what it names, or have the nodes allow it or use others",
    ),
    _done(
        "^status (?P<why>[^:\n]*): (?P<said>[^\n]*).*^named$",
        "the node {node!r}, which the pod names, refused it ({why}): {said}",
        Reason.UNSCHEDULABLE,
        "leave the choice of the node to the scheduler (no nodeName), or correct what it names",
    ),
    _done(
        "^status (?P<why>UnexpectedAdmissionError|NodeAffinity|TaintToleration|PodOSNotSupported"
        "|[^:\n]*(?=: Pod was rejected)): (?P<said>[^\n]*)",
        "the node refused the pod ({why}): {said}",
        Reason.UNSCHEDULABLE,
        "run it again: the scheduler chooses another node",
    ),
    _done(
        "^status BackOff",
        "the program failed each time it was started; the pod is gone, and its exit code with it",
        Reason.USER_ERROR,
        "see its log, if one was kept",
    ),
    _done(
        "^deleted",
        "somebody deleted the pod{then} (its Job counts a failure)",
        Reason.LOST,
        "run it again; the cluster's audit log tells who deleted it",
    ),
)


def _evidence(pod: Pod) -> str:
    """What was done to it, by whom, and how its node is: a line each."""
    said = [("disruption", pod.disruption), ("status", pod.status)]
    said += [("event", one) for one in pod.events("ScaleDown", "NodeNotReady")]
    lines = [
        f"{kind} {one.get('reason') or ''}: {one.get('message') or one.get('reason') or ''}"
        for kind, one in said
        if one
    ]
    taints = parts(part(pod.node, "spec"), "taints")
    lines += [f"taint {one.get('key')}" for one in taints if one.get("effect") == "NoExecute"]
    marks = {
        "silent": condition(pod.node, "Ready", "Unknown") is not None,
        "notice": pod.taken_back and pod.stopped,
        "spot": pod.on_spot,
        "without node": pod.without_node and not pod.ended,
        "deleted": pod.leaving,
        "named": bool(part(part(pod.seen.spec, "template"), "spec").get("nodeName"))
        and not pod.ran,
    }
    lines += [name for name, so in marks.items() if so]
    text = "\n".join(" ".join(line.split()) for line in lines)
    # Amounts of bytes in the largest units that fit.
    return re.sub(r"\b(\d{4,}[KM]i|\d{7,})\b", lambda one: readable(one[0]), text)


def removal(pod: Pod) -> Diagnosis | None:
    """What was done to a pod from outside, or None when nothing was."""
    text = _evidence(pod)
    after = pod.spec.get("activeDeadlineSeconds")
    what = str(pod.status.get("reason")).removeprefix("OutOf")
    taints = ", ".join(map(repr, re.findall("^taint (.*)$", text, re.MULTILINE)))
    limit = re.search(r'(?:limit|containers) "?(\d[\w.]*\w)', text)
    used = re.findall(r"(Container|Pod) (\S+) was using ([\w.]+), request is ([\w.]*\w)", text)
    usage = (
        f"{kind.lower()} {name} used {has}, its request is {asked}"
        for kind, name, has, asked in used
    )
    return first(
        _DONE_TO_IT,
        text,
        deadline=f" of {after} s" if after else "",
        node=str(pod.spec.get("nodeName")),
        lack={"cpu": "few CPUs", "pods": "few places for pods"}.get(what, f"little {what}"),
        limit=f" of {limit[1]}" if limit else "",
        spot=" (a spot machine: was it taken back?)" if pod.on_spot else "",
        taints=f" {taints}" if taints else "",
        then=_as_it_ran(pod),
        unasked=", which had no memory request," if "request is 0" in text else "",
        usage=f" ({'; '.join(dict.fromkeys(usage))})" if used else "",
    )


def _as_it_ran(pod: Pod) -> str:
    code = pod.end.get("exitCode")
    if not pod.ran:
        return " before it ever ran"
    if code == 137:
        return "; its program did not react to SIGTERM and was killed after its grace"
    if code not in (None, 143) and pod.answered:
        return f" while it ran, and its program ended with exit code {code} then"
    return " while it ran"


def ending(pod: Pod) -> Diagnosis:
    """Judge a pod that has ended."""
    phase, bad = pod.status.get("phase"), pod.bad
    if phase == "Succeeded" or (bad is None and phase != "Failed"):
        return pending(_well(pod)).ended(pod.uid, 0, JobStatus.SUCCEEDED)
    return _why(pod, bad).ended(pod.uid, bad.exit_code if bad is not None else None)


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


def _why(pod: Pod, bad: Container | None) -> Diagnosis:
    """The strongest of what was done to it, its node's word, and its own."""
    removed = removal(pod)
    if removed is not None and (removed.reason is not Reason.LOST or pod.stopped):
        return removed
    if bad is None:
        said = str(pod.status.get("message") or pod.status.get("reason") or "")
        why = f" ({one_line(said)})" if said else ""
        words = f"the pod failed{why}, and does not say how its program ended"
        return pending(words, next_step(said, "run it again"), Reason.LOST)
    told = tell_end(pod, bad, pod.end)
    if bad.init:
        return _never_began(bad, told)
    programs = [one for one in pod.programs if one.exit_code]
    if [one.name for one in pod.programs][:1] != [bad.name]:
        told = replace(told, message=f"container {bad.name!r}: {told.message}")
    for one in programs if len(programs) > 1 else ():
        if one.name != bad.name and not pod.stopped:
            words = f"{told.message}; container {one.name!r} ended with exit code {one.exit_code}"
            told = replace(told, message=words)
    for one in pod.containers if told.reason is not Reason.OUT_OF_MEMORY else ():
        ends = (one.ended or {}, one.last or {})
        if one.sidecar and any(end.get("reason") == "OOMKilled" for end in ends):
            words = f"sidecar {one.name!r} beside it was killed for want of memory"
            return replace(told, message=f"{told.message}; {words}")
    return told


def _never_began(bad: Container, told: Diagnosis) -> Diagnosis:
    """An init container failed: what is told of it is so of what comes before the program."""
    plain = told.message == f"it ended with exit code {bad.exit_code}"
    more = "" if plain else f" ({told.message})"
    kept = told.reason not in (Reason.USER_ERROR, Reason.LOST)
    return pending(
        f"init container {bad.name!r} failed with exit code {bad.exit_code}{more}; the program "
        "never started",
        told.advice if kept else f"see the log of container {bad.name!r}",
        told.reason if kept else Reason.SETUP,
    )
