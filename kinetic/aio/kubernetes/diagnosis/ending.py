"""Find why a pod ended: its program, a limit, or the platform."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from functools import partial

from kinetic._messages import both_ends, one_line
from kinetic.aio.kubernetes.diagnosis.causes import (
    ADVICE,
    LONGEST,
    Cause,
    Outlook,
    Rule,
    known,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, part
from kinetic.aio.kubernetes.diagnosis.facts import OUTCOME, START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.starting import FORMAT, start_failure
from kinetic.job_status import Reason


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
    """Return a cause if the sidecar that mounts buckets ran out of memory, else None."""
    for one in pod.containers if pod.ran else ():
        ends = (part(part(one.status, key), "terminated") for key in ("state", "lastState"))
        if one.init and any(end.get("reason") == "OOMKilled" for end in ends):
            return _out_of_memory(one, 137)
    return None


# --- what the platform did ------------------------------------------------------------------

_LARGER = "state the memory that it needs (memory=), or use a larger machine"
_SHUTDOWN = ("Terminated", "Shutdown", "NodeShutdown")


def removal(pod: Pod) -> Cause | None:
    """Return what the platform or a user did to end *pod*; None if they did nothing."""
    disruption: Document = pod.disruption or {}
    why, state = str(disruption.get("reason") or ""), str(pod.status.get("reason") or "")
    message = one_line(str(pod.status.get("message") or disruption.get("message") or ""), LONGEST)
    quote = message.rstrip(".")
    if why == "PreemptionByScheduler":
        advice = f"{ADVICE[Reason.PREEMPTED]}, or use a higher priority class"
        return _removed(Reason.PREEMPTED, "preempted by a pod of higher priority", advice)
    if why == "EvictionByEvictionAPI":
        what = "evicted by a drain of its node, an administrator, or the autoscaler"
        return _removed(Reason.EVICTED, what)
    if why == "DeletionByTaintManager" and pod.node_silent:
        what = f"node {pod.spec.get('nodeName')}, which ran it, does not answer"
        return _removed(Reason.NODE_LOST, what)
    if why == "DeletionByTaintManager":
        return _removed(Reason.EVICTED, "evicted: its node got a taint with the effect NoExecute")
    if state == "Evicted":
        return _evicted(quote)
    if state == "Preempting" or "critical pod" in quote:
        return _removed(Reason.PREEMPTED, "preempted by a critical pod of the system")
    if state == "DeadlineExceeded":
        limit = pod.spec.get("activeDeadlineSeconds")
        return _removed(Reason.DEADLINE, f"the pod's time limit of {limit} s passed")
    announced = pod.node_ending and pod.may_be_stopped and not (why or state)
    if why == "TerminationByKubelet" or state in _SHUTDOWN or announced:
        how = "the cloud took its spot machine back" if pod.on_spot else "maintenance"
        advice = f"{ADVICE[Reason.PREEMPTED]}, or request no spot machine"
        return _removed(Reason.PREEMPTED, f"its node was shut down ({how})", advice)
    collected = why == "DeletionByPodGC" and "node" in str(disruption.get("message"))
    if collected or (pod.node_removed and not pod.ended):
        spot = " (a spot machine, which the cloud may have taken back)" if pod.on_spot else ""
        return _removed(Reason.NODE_LOST, f"its node was removed from the cluster{spot}")
    if why:
        return _removed(Reason.NODE_LOST, f"the platform ended it: {quote}")
    if state:  # a kubelet has no other reasons than those above and its refusals
        return _removed(Reason.UNSCHEDULABLE, f"the node refused the pod ({state}): {quote}")
    if pod.terminating:
        when = "while it ran" if pod.ran else "before it ran"
        advice = "run it again; the cluster's audit log names the user who deleted it"
        return _removed(Reason.LOST, f"a user or a controller deleted the pod {when}", advice)
    return None


def _removed(reason: Reason, what: str, advice: str | None = None) -> Cause:
    return Cause(what=what, advice=advice, reason=reason)


def _evicted(quote: str) -> Cause:
    """Return why a kubelet evicted a pod: its node lacked a resource, or it passed a limit."""
    what = f"evicted by its node: {quote}"
    short = re.search(r"low on resource: (\S+?)(\.|$| )", quote)
    if short is not None:
        advice = _LARGER if short[1] == "memory" else "write less, or write to a bucket"
        return _removed(Reason.EVICTED, what, advice if short[1] != "pids" else None)
    if "exceeds the limit" in quote and "olume" in quote:
        advice = "write less there, or raise its sizeLimit (for /dev/shm: memory=)"
        return _removed(Reason.OUT_OF_DISK, what, advice)
    return _removed(Reason.OUT_OF_DISK if "storage" in quote else Reason.EVICTED, what)


# --- how the program ended ------------------------------------------------------------------

_open = partial(Rule, outlook=Outlook.OPEN)

_LAST_WORDS = (
    # Cloud Storage, "Troubleshooting"; GKE, "Troubleshoot Workload Identity Federation".
    _open(
        r"does not have storage\.\w+\.\w+ access|Permission 'storage\.\w+\.\w+' denied"
        r"|403[^;]*storage\.googleapis|unable to generate access token"
        r"|from the (\w+ )*metadata service|compute metadata service"
        r"|iam\.serviceAccounts\.getAccessToken|getOpenIdToken",
        "give {who} roles/storage.objectUser on the bucket, and check workload identity: its "
        "binding (roles/iam.workloadIdentityUser), and GKE_METADATA on the node pool",
    ),
    _open(  # a message of the runner
        "no credentials for Cloud Storage here",
        "bind {who} to a Google service account (workload identity). If STORAGE_EMULATOR_HOST "
        "names a server that needs none, capture that variable (capture_env_vars=)",
    ),
    _open(
        "can't open file '[^']*remote_runner",
        "the image doesn't contain kinetic's runner: copy what `python -m kinetic.images runner "
        "FOLDER` writes to /app, build the image with kinetic build-image, or omit container_image",
    ),
)
"""Advice for the last lines of a program's output."""

_CRASHES = (132, 134, 135, 136, 139)
"""Exit codes of a program that crashed: by SIGILL, SIGABRT, SIGBUS, SIGFPE, or SIGSEGV."""


def exit_cause(one: Container) -> Cause:
    """Return why container *one* failed."""
    end = one.ended or {}
    code, reason = int(end.get("exitCode") or 0), end.get("reason")
    message = str(end.get("message") or "")
    if reason == "OOMKilled":
        return _out_of_memory(one, code)
    if reason in START_ERRORS or FORMAT.search(message):
        return start_failure(one, message)
    if reason in ("ContainerStatusUnknown", "Unknown"):
        # containerd says Unknown of a container that ended while containerd was stopped.
        what = "the node, or its container runtime, restarted while the program ran; exit code "
        return _removed(Reason.NODE_LOST, f"{what}{code} is a guess")
    last = both_ends(message, 400)
    whose = f"container {one.name!r}" if one.init else "the program"
    what = f"{whose} ended with exit code {code}"
    email = re.search(r"[\w.-]+@[\w.-]+gserviceaccount\.com", last)
    who = email[0] if email else "the service account of the pod"
    if (found := known(_LAST_WORDS, what, last, who=who)) is not None:
        return found
    reason, advice = Reason.SETUP if one.init else Reason.USER_ERROR, "see its log"
    if code == 137:
        reason = Reason.LOST
        what = "signal 9 (SIGKILL) killed the program, but not because of its memory limit"
        advice += "; the program, one of its children, or a user on the node sent the signal"
    elif code in _CRASHES:
        what = f"the program crashed with signal {_signal(code - 128)}"
        advice = "the fault is in native code: see its log, or set PYTHONFAULTHANDLER=1"
    elif 129 <= code <= 192:
        reason = Reason.LOST
        what = f"signal {_signal(code - 128)} ended the program"
    return Cause(what=f"{what}: {last}" if last else what, advice=advice, reason=reason)


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
