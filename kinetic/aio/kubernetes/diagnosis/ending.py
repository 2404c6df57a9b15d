"""Why a pod ended: its own program, a limit, or what was done to it."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from functools import partial

from kinetic._messages import both_ends, one_line
from kinetic.aio.kubernetes.diagnosis.causes import LONGEST, Cause, Outlook, Rule, known
from kinetic.aio.kubernetes.diagnosis.documents import condition, part
from kinetic.aio.kubernetes.diagnosis.facts import OUTCOME, START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.quantities import readable
from kinetic.aio.kubernetes.diagnosis.starting import FORMAT, start_failure
from kinetic.job_status import Reason

UNSEEN = Cause(what="the pod is gone, and how its program ended was not seen", reason=Reason.LOST)


def failure(pod: Pod) -> Cause | None:
    """Return why *pod*, which ended or is gone, failed; None if it succeeded."""
    phase, bad = pod.status.get("phase"), pod.bad
    if pod.ended and (phase == "Succeeded" or (bad is None and phase != "Failed")):
        return None
    told = str(pod.end.get(OUTCOME) or "")
    if told == Reason.DEADLINE:
        return Cause(what="the function ran longer than its timeout", reason=Reason.DEADLINE)
    cause = _failure(pod, bad)
    return replace(cause, reason=Reason(told)) if told in {*Reason} else cause


def _failure(pod: Pod, bad: Container | None) -> Cause:
    done = removal(pod)
    if done is not None and (done.reason is not Reason.LOST or pod.stopped or not pod.ended):
        return done
    if not pod.ended:
        return UNSEEN
    if bad is not None:
        cause, beside = exit_cause(bad), sidecar_memory(pod)
        more = beside.clauses if beside is not None and cause.reason is Reason.USER_ERROR else ()
        return replace(cause, more=(*cause.more, *more))
    said = one_line(str(pod.status.get("message") or pod.status.get("reason") or ""))
    why = f" ({said})" if said else ""
    what = f"the pod failed{why}, and does not say how its program ended"
    return Cause(what=what, reason=Reason.LOST)


def sidecar_memory(pod: Pod) -> Cause | None:
    """Return that the sidecar which mounts buckets ran out of memory, if it did."""
    for one in pod.containers if pod.ran else ():
        ends = (part(part(one.status, key), "terminated") for key in ("state", "lastState"))
        if one.init and any(end.get("reason") == "OOMKilled" for end in ends):
            return _out_of_memory(one, 137)
    return None


# --- what was done to it ------------------------------------------------------------------

_PREEMPTED = Cause(
    what="preempted by a pod of higher priority",
    advice="it is not the program's fault: run it again if it isn't retried by itself, or use a "
    "higher priority class",
    reason=Reason.PREEMPTED,
)


def removal(pod: Pod) -> Cause | None:
    """Return what was done to a pod from outside; None when nothing was."""
    why = str((pod.disruption or {}).get("reason") or "")
    said = _readable(str((pod.disruption or {}).get("message") or why))
    state, words = str(pod.status.get("reason") or ""), str(pod.status.get("message") or "")
    if why == "PreemptionByScheduler":
        return _PREEMPTED
    if why == "EvictionByEvictionAPI":
        if pod.events("ScaleDown"):
            return _evicted("evicted, because the autoscaler removed its node")
        return _evicted("evicted by an administrator or by a drain of its node")
    if why == "DeletionByTaintManager" or state == "NodeLost":
        return _tainted(pod, state)
    if (found := _by_node(pod, f"{state}: {words}", said)) is not None:
        return found
    if why == "DeletionByPodGC" and "node" not in said:
        return Cause(what=f"the pod was removed: {said}", reason=Reason.NODE_LOST)
    if why == "DeletionByPodGC" or (pod.node_removed and not pod.ended):
        spot = " (a spot machine, which the cloud may have taken back)" if pod.on_spot else ""
        return _lost(f"the node was removed from the cluster under the pod{spot}")
    if why:
        return _evicted(f"the platform ended it: {said}")
    return _deleted(pod) if pod.leaving else None


def _evicted(what: str) -> Cause:
    return Cause(what=what, reason=Reason.EVICTED)


def _lost(what: str) -> Cause:
    return Cause(what=f"{what}; what the program did is unknown", reason=Reason.NODE_LOST)


def _tainted(pod: Pod, state: str) -> Cause:
    closing = [str(one.get("key")) for one in pod.taints if one.get("effect") == "NoExecute"]
    silent = any(key.endswith(("/unreachable", "/not-ready")) for key in closing)
    unready = condition(pod.node, "Ready", "Unknown") or pod.events("NodeNotReady")
    if silent or unready or state == "NodeLost":
        name = pod.spec.get("nodeName")
        return _lost(f"the node {name} was lost with the pod on it (it does not answer)")
    taints = "".join(f" {key!r}" for key in closing)
    return _evicted(f"the node was closed with taint{taints} (NoExecute), and evicted the pod")


_node = partial(Rule, outlook=Outlook.OPEN)

# Of ``REASON: message`` in a pod's status: a kubelet's words.
_BY_NODE = (
    _node(
        "low on resource: memory.*request is 0",
        "the node ran short of memory and evicted the pod, which had no memory request{usage}",
        "state what it needs (memory=), or use a larger machine",
        Reason.EVICTED,
    ),
    _node(
        "low on resource: memory",
        "the node ran short of memory and evicted the pod{usage}",
        "state what it needs (memory=), or use a larger machine",
        Reason.EVICTED,
    ),
    _node(
        "low on resource: (ephemeral-storage|inodes|nodefs|imagefs)",
        "the node ran short of disk and evicted the pod, which may have written too much{usage}",
        "write less, ask for ephemeral-storage, or write to a bucket",
        Reason.EVICTED,
    ),
    _node(
        r"low on resource: (?P<resource>[\w.-]*\w)",
        "the node ran short of {resource} and evicted the pod",
        "use a larger machine",
        Reason.EVICTED,
    ),
    _node(
        "critical pod|^Preempting",
        "preempted: the node needed its place for a critical pod of the system",
        reason=Reason.PREEMPTED,
    ),
    _node("^DeadlineExceeded", "the pod's time limit{limit} passed", reason=Reason.DEADLINE),
    _node(
        '^Evicted: .*volume "(?P<name>[^"]+)" exceeds the limit "(?P<size>[^"]+)"',
        "evicted: volume {name!r} passed its sizeLimit of {size}",
        "write less there, or raise its sizeLimit (for /dev/shm: memory=)",
        Reason.OUT_OF_DISK,
    ),
    _node(
        r'^Evicted: .*(ephemeral|storage).*?(?:limit|containers) "?(?P<most>\d[\w.]*\w)',
        "evicted: it used more than its ephemeral-storage limit of {most}",
        reason=Reason.OUT_OF_DISK,
    ),
    _node("^Evicted: (?P<said>.*)", "evicted: {said}", reason=Reason.EVICTED),
    _node(
        "^(Terminated|Shutdown|NodeShutdown):|node ?shut(ting)? ?down|^TerminationByKubelet",
        "{shut_down}",
        "it is not the program's fault: run it again if it isn't retried by itself, or ask for no "
        "spot machine",
        Reason.PREEMPTED,
    ),
    _node(  # kubelets set no other reason than those above and their refusals
        r"^(?P<why>\w+): (?P<said>.*)",
        "the node refused the pod ({why}): {said}",
        reason=Reason.UNSCHEDULABLE,
    ),
)


def _by_node(pod: Pod, text: str, disrupted: str) -> Cause | None:
    after, spot = pod.spec.get("activeDeadlineSeconds"), pod.on_spot
    shut_down = "its node was shut down (a spot machine taken back, or maintenance)"
    used = re.findall(r"(Container|Pod) (\S+) was using ([\w.]+), request is ([\w.]*\w)", text)
    usage = "; ".join(
        dict.fromkeys(
            f"{kind.lower()} {name} used {readable(has)}, its request is {readable(asked)}"
            for kind, name, has, asked in used
        )
    )
    why = (pod.disruption or {}).get("reason")
    if text == ": " and not (pod.taken_back and pod.stopped) and why != "TerminationByKubelet":
        return None
    if text == ": ":
        text = f"TerminationByKubelet: {disrupted}"
    return known(
        _BY_NODE,
        text,
        limit=f" of {after} s" if after else "",
        usage=f" ({usage})" if usage else "",
        shut_down="the cloud took its spot machine back" if spot else shut_down,
    )


def _readable(said: str) -> str:
    """Return *said* with amounts of bytes in the largest units that fit."""
    return re.sub(
        r"\b(\d{4,}[KM]i|\d{7,})\b", lambda one: readable(one[0]), one_line(said, LONGEST)
    )


def _deleted(pod: Pod) -> Cause:
    code, then = pod.end.get("exitCode"), " while it ran"
    if not pod.ran:
        then = " before it ever ran"
    elif code == 137:
        then = "; its program did not react to SIGTERM and was killed after its grace"
    elif code not in (None, 143) and pod.answered:
        then = f" while it ran, and its program ended with exit code {code}"
    what = f"somebody deleted the pod{then} (its Job counts a failure)"
    advice = "run it again; the cluster's audit log tells who deleted it"
    return Cause(what=what, advice=advice, reason=Reason.LOST)


# --- how its program ended ----------------------------------------------------------------

_NATIVE = "the fault is in native code: see its log, or set PYTHONFAULTHANDLER=1"
_SEE_LOG = "see its log"


def _exit(
    pattern: str, what: str, advice: str | None = None, reason: Reason = Reason.USER_ERROR
) -> Rule:
    return Rule(pattern, what, advice, reason, Outlook.OPEN)


# Of ``REASON CODE: last words``.
_EXITS = (
    _exit(  # containerd says Unknown of what ended while containerd itself did not run
        "^(ContainerStatusUnknown|Unknown) ",
        "the node, or its container runtime, was restarted under the program; the exit code {code} "
        "is only a guess",
        reason=Reason.NODE_LOST,
    ),
    # Documents: Cloud Storage, 'Troubleshooting'; GKE, 'Workload Identity Federation'.
    _exit(
        r"does not have storage\.\w+\.\w+ access|Permission 'storage\.\w+\.\w+' denied"
        r"|403[^;]*storage\.googleapis",
        "the pod may not use Cloud Storage (403): {said}",
        "give {who} roles/storage.objectUser on the bucket, and see that workload identity is set "
        "up",
        Reason.SETUP,
    ),
    _exit(  # the runner's own words
        "no credentials for Cloud Storage here",
        "the pod has no credentials for Cloud Storage",
        "let {who} act as one of Google's (workload identity); where STORAGE_EMULATOR_HOST names a "
        "server that needs none, capture that variable (capture_env_vars=)",
        Reason.SETUP,
    ),
    # Documents: GKE, 'Troubleshoot Workload Identity Federation'; what google-auth raises then.
    _exit(
        r"unable to generate access token|from the (\w+ )*metadata service"
        r"|compute metadata service|iam\.serviceAccounts\.getAccessToken|getOpenIdToken",
        "the pod has no Google identity, the metadata server gives no token: {said}",
        "bind the pod's Kubernetes service account to a Google one (workload identity, "
        "roles/iam.workloadIdentityUser), and see that its node pool has GKE_METADATA",
        Reason.SETUP,
    ),
    _exit(
        "can't open file '[^']*remote_runner",
        "the image was not made for kinetic, its runner is not in it: {said}",
        "copy what `python -m kinetic.images runner FOLDER` writes to /app, make one with "
        "kinetic build-image, or leave container_image out to have one built",
        Reason.SETUP,
    ),
    _exit(
        r"exec (?P<file>\S+): no such file or directory",
        "{file!r} could not be started (exit code {code}): it, or the interpreter that its first "
        "line names, is not in the image",
        "correct the image, that line (#!), or its line ends",
        Reason.SETUP,
    ),
    _exit(
        "^[^:]* 137:",
        "the program was killed, but not by its memory limit: signal 9 (SIGKILL){saying}",
        "see its log; the program, one of its children, or a user on the node sent the signal",
        Reason.LOST,
    ),
    _exit(  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
        "^[^:]* (132|134|135|136|139):", "the program crashed by signal {signal}{saying}", _NATIVE
    ),
    _exit(
        "^[^:]* (129|1[3-8][0-9]|19[0-2]):",
        "signal {signal} ended the program{saying}",
        _SEE_LOG,
        Reason.LOST,
    ),
    _exit(
        "^[^:]* 126:", "the program called a file that may not be executed (exit code 126){saying}"
    ),
    _exit(
        "^[^:]* 127:", "the program called a command that does not exist (exit code 127){saying}"
    ),
    _exit("", "{whose} ended with exit code {code}{saying}"),
)


def exit_cause(one: Container) -> Cause:
    """Return why container *one*, which ended badly, did."""
    end = one.ended or {}
    code, reason = int(end.get("exitCode") or 0), end.get("reason")
    words = str(end.get("message") or "")
    if reason == "OOMKilled":
        return _out_of_memory(one, code)
    if reason in START_ERRORS or FORMAT.search(words):
        return start_failure(one, words)
    said = both_ends(words, 400)
    who = re.search(r"[\w.-]+@[\w.-]+gserviceaccount\.com", said)
    found = known(
        _EXITS,
        f"{reason} {code}: {said}",
        code=str(code),
        said=said,
        saying=f" and said: {said}" if said else "",
        signal=_signal(code - 128),
        who=who[0] if who else "the service account of the pod",
        whose=f"container {one.name!r}" if one.init else "the program",
    )
    assert found is not None  # the last rule takes anything
    if not one.init:
        return found
    return replace(found, more=["the program never started"], reason=Reason.SETUP)


def _signal(number: int) -> str:
    """Return a signal's number, with its name and meaning where it has them."""
    try:
        meaning = signal.strsignal(number) or ""
        return f"{number} ({signal.Signals(number).name}, {meaning.lower()})"
    except ValueError:
        return str(number)


def _out_of_memory(one: Container, code: int) -> Cause:
    child = "" if code == 137 else f" in a child process (the program's own exit code is {code})"
    what = f"out of memory{child}: the container passed its memory limit of {one.memory}"
    advice: str | None = None
    if not one.memory:
        what = f"out of memory{child}: the container has no memory limit, and its node ran out"
        advice = "state how much memory it needs (memory=), or use a larger machine"
    elif one.init:
        what = f"container {one.name!r} ran out of memory: it passed its limit of {one.memory}"
        advice = "raise the pod's annotation gke-gcsfuse/memory-limit"
    return Cause(what=what, advice=advice, reason=Reason.OUT_OF_MEMORY)
