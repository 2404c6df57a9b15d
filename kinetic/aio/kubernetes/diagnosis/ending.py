"""Find why a pod ended: its program, a limit, or the platform."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kinetic._messages import both_ends, one_line
from kinetic.aio.kubernetes.diagnosis.causes import (
    LONGEST,
    NOT_THE_PROGRAM,
    Cause,
    Outlook,
    Rule,
    known,
    quoted,
)
from kinetic.aio.kubernetes.diagnosis.documents import part
from kinetic.aio.kubernetes.diagnosis.facts import OUTCOME, START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.starting import FORMAT, start_failure
from kinetic.job_status import Reason

_open = partial(Rule, outlook=Outlook.OPEN)


def failure(pod: Pod) -> Cause | None:
    """Return why *pod*, which ended or no longer exists, failed; None if it succeeded."""
    phase, bad = pod.status.get("phase"), pod.failed_container
    if pod.ended and (phase == "Succeeded" or (bad is None and phase != "Failed")):
        return None
    committed = str(pod.end.get(OUTCOME) or "")
    if committed == Reason.DEADLINE:
        return Cause(what="the function ran longer than its timeout", reason=Reason.DEADLINE)
    cause = _failure(pod, bad)
    return replace(cause, reason=Reason(committed)) if committed in {*Reason} else cause


def _failure(pod: Pod, bad: Container | None) -> Cause:
    done = removal(pod)
    if done is not None and (done.reason is not Reason.LOST or pod.may_be_stopped or not pod.ended):
        return done
    if bad is None or not pod.ended:
        return Cause(what="the pod is lost: it left no exit code", reason=Reason.LOST)
    cause, beside = exit_cause(bad), sidecar_memory(pod)
    more = beside.clauses if beside is not None and cause.reason is Reason.USER_ERROR else ()
    return replace(cause, more=more)


def sidecar_memory(pod: Pod) -> Cause | None:
    """Return that the sidecar which mounts buckets ran out of memory, if it did."""
    for one in pod.containers if pod.ran else ():
        ends = (part(part(one.status, key), "terminated") for key in ("state", "lastState"))
        if one.init and any(end.get("reason") == "OOMKilled" for end in ends):
            return _out_of_memory(one, 137)
    return None


# --- what the platform did ------------------------------------------------------------------

_AGAIN = f"{NOT_THE_PROGRAM}: submit it again unless kinetic retries it"
_LARGER = "state the memory that it needs (memory=), or use a larger machine"
_evicted = partial(_open, reason=Reason.EVICTED)
_lost = partial(_open, reason=Reason.NODE_LOST)
_preempted = partial(_open, reason=Reason.PREEMPTED)

# The lines of `_removal_facts`: "Disruption", "Node", or "Status", a reason, and a message.
_REMOVALS = (
    _preempted(
        "^Disruption PreemptionByScheduler",
        f"{_AGAIN}, or use a higher priority class",
        "preempted by a pod of higher priority",
    ),
    _evicted(
        "^Disruption EvictionByEvictionAPI",
        what="evicted by a drain of its node, an administrator, or the autoscaler",
    ),
    _lost("^(Node silent|Status NodeLost)", what="node {node}, which ran it, does not answer"),
    _evicted(
        "^Disruption DeletionByTaintManager",
        what="evicted, because its node got a taint with the effect NoExecute",
    ),
    _evicted("^Status Evicted: .*low on resource: memory", _LARGER),
    _evicted(
        "^Status Evicted: .*low on resource: (ephemeral-storage|inodes|nodefs|imagefs)",
        "write less, or write to a bucket",
    ),
    _open(
        '^Status Evicted: .*volume ".*" exceeds the limit',
        "write less there, or raise its sizeLimit (for /dev/shm: memory=)",
        reason=Reason.OUT_OF_DISK,
    ),
    _open("^Status Evicted: .*(ephemeral|storage)", reason=Reason.OUT_OF_DISK),
    _preempted("^Status Preempting|critical pod", what="preempted by a critical pod of the system"),
    _evicted("^Status Evicted"),
    _open(
        "^Status DeadlineExceeded",
        what="the pod's time limit of {limit} s passed",
        reason=Reason.DEADLINE,
    ),
    _preempted(
        "^(Status (Terminated|Shutdown|NodeShutdown)|Disruption TerminationByKubelet|Node going)"
        "|node ?shut(ting)? ?down",
        f"{_AGAIN}, or request no spot machine",
        "its node was shut down ({shut_down})",
    ),
    _lost(
        "^(Disruption DeletionByPodGC.* node|Node removed)",
        what="its node was removed from the cluster{spot}",
    ),
    _lost("^Disruption", what="the platform ended it: {said}"),
    _open(  # a kubelet has no other reasons than those above and its refusals
        "^Status", what="the node refused the pod ({why}): {said}", reason=Reason.UNSCHEDULABLE
    ),
)


def removal(pod: Pod) -> Cause | None:
    """Return what the platform or a user did to end *pod*; None if nothing."""
    said = pod.status.get("message") or (pod.disruption or {}).get("message") or ""
    found = known(
        _REMOVALS,
        "evicted by its node",
        "\n".join(_removal_facts(pod)),
        said=one_line(str(said), LONGEST).rstrip("."),
        why=str(pod.status.get("reason")),
        node=str(pod.spec.get("nodeName")),
        limit=str(pod.spec.get("activeDeadlineSeconds")),
        shut_down="the cloud took its spot machine back" if pod.on_spot else "maintenance",
        spot=" (a spot machine, which the cloud may have taken back)" if pod.on_spot else "",
    )
    if found is None and pod.terminating:
        when = "while it ran" if pod.ran else "before it ran"
        return Cause(
            what=f"a user or a controller deleted the pod {when}",
            advice="run it again; the cluster's audit log names the user who deleted it",
            reason=Reason.LOST,
        )
    return found


def _removal_facts(pod: Pod) -> Iterator[str]:
    """Yield a line for each fact about what ended *pod*."""
    disruption, state = pod.disruption or {}, str(pod.status.get("reason") or "")
    why = str(disruption.get("reason") or "")
    if why:
        yield f"Disruption {why}: {disruption.get('message')}"
    if why == "DeletionByTaintManager" and pod.node_silent:
        yield "Node silent"
    if state:
        yield f"Status {state}: {pod.status.get('message')}"
    elif pod.node_ending and pod.may_be_stopped and not why:
        yield "Node going"
    if pod.node_removed and not pod.ended:
        yield "Node removed"


# --- how the program ended ------------------------------------------------------------------

_user = partial(_open, reason=Reason.USER_ERROR)

# "REASON CODE: last words" of a container.
_EXITS = (
    _lost(  # containerd says Unknown of a container that ended while containerd was stopped
        "^(ContainerStatusUnknown|Unknown) ",
        what="the node, or its container runtime, restarted while the program ran; exit code "
        "{code} is a guess",
    ),
    # Cloud Storage, "Troubleshooting"; GKE, "Troubleshoot Workload Identity Federation".
    _open(
        r"does not have storage\.\w+\.\w+ access|Permission 'storage\.\w+\.\w+' denied"
        r"|403[^;]*storage\.googleapis|unable to generate access token"
        r"|from the (\w+ )*metadata service|compute metadata service"
        r"|iam\.serviceAccounts\.getAccessToken|getOpenIdToken",
        "give {who} roles/storage.objectUser on the bucket, and check workload identity: its "
        "binding (roles/iam.workloadIdentityUser), and GKE_METADATA on the node pool",
    ),
    _open(  # the runner's own words
        "no credentials for Cloud Storage here",
        "bind {who} to a Google service account (workload identity). If STORAGE_EMULATOR_HOST "
        "names a server that needs none, capture that variable (capture_env_vars=)",
    ),
    _open(
        "can't open file '[^']*remote_runner",
        "copy what `python -m kinetic.images runner FOLDER` writes to /app, build the image with "
        "kinetic build-image, or omit container_image",
        "the image doesn't contain kinetic's runner: {said}",
    ),
    _open(
        "^[^:]* 137:",
        "see its log; the program, one of its children, or a user on the node sent the signal",
        "signal 9 (SIGKILL) killed the program, but not because of its memory limit{saying}",
        Reason.LOST,
    ),
    _user(  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
        "^[^:]* (132|134|135|136|139):",
        "the fault is in native code: see its log, or set PYTHONFAULTHANDLER=1",
        "the program crashed with signal {signal}{saying}",
    ),
    _open(
        "^[^:]* (129|1[3-8][0-9]|19[0-2]):",
        "see its log",
        "signal {signal} ended the program{saying}",
        Reason.LOST,
    ),
    _user("", what="{what}{saying}"),
)


def exit_cause(one: Container) -> Cause:
    """Return why container *one* failed."""
    end = one.ended or {}
    code, reason = int(end.get("exitCode") or 0), end.get("reason")
    words = str(end.get("message") or "")
    if reason == "OOMKilled":
        return _out_of_memory(one, code)
    if reason in START_ERRORS or FORMAT.search(words):
        return start_failure(one, words)
    said = both_ends(words, 400)
    who = re.search(r"[\w.-]+@[\w.-]+gserviceaccount\.com", said)
    whose = f"container {one.name!r}" if one.init else "the program"
    found = quoted(
        f"{whose} ended with exit code {code}",
        f"{reason} {code}: {said}",
        _EXITS,
        code=str(code),
        said=said,
        saying=f": {said}" if said else "",
        signal=_signal(code - 128),
        who=who[0] if who else "the service account of the pod",
    )
    return replace(found, reason=Reason.SETUP) if one.init else found


def _signal(number: int) -> str:
    """Return a signal's number, with its name and meaning if it has them."""
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
        advice = _LARGER
    elif one.init:
        what = f"container {one.name!r} ran out of memory: it passed its limit of {one.memory}"
        advice = "raise the pod's annotation gke-gcsfuse/memory-limit"
    return Cause(what=what, advice=advice, reason=Reason.OUT_OF_MEMORY)
