"""Find why a pod ended: its program, a limit, or the platform."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from functools import partial

from kinetic._messages import one_line, shorten_middle
from kinetic.aio.kubernetes.diagnosis.causes import (
    ADVICE,
    LONGEST,
    Cause,
    Outlook,
    Rule,
    quote_message,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, get_dict, get_list
from kinetic.aio.kubernetes.diagnosis.facts import OUTCOME, START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.starting import EXEC_FORMAT_ERROR, start_failure
from kinetic.job_status import Reason


def failure(pod: Pod) -> Cause | None:
    """Return why *pod*, which ended or no longer exists, failed; None if it succeeded."""
    if pod.succeeded:
        return None
    failed = pod.failed_container
    committed_reason = str(pod.end.get(OUTCOME) or "")
    if committed_reason == Reason.DEADLINE:
        return Cause(summary="the function ran longer than its timeout", reason=Reason.DEADLINE)
    cause = _failure_cause(pod, failed)
    # The job reports any request to stop as a preemption, also the deletion of its pod.
    if committed_reason not in {*Reason} or (committed_reason == Reason.PREEMPTED and pod.deleted):
        return cause
    return replace(cause, reason=Reason(committed_reason))


def _failure_cause(pod: Pod, failed: Container | None) -> Cause:
    """Return why *pod* failed: what the platform did to it, or how container *failed* ended."""
    cause = removal(pod)
    # A deletion explains only an end that a request to stop may have caused.
    if cause is not None and (
        cause.reason is not Reason.LOST or pod.may_have_been_stopped or not pod.ended
    ):
        return cause
    if failed is None or not pod.ended:
        return Cause(summary="the pod is lost: it left no exit code", reason=Reason.LOST)
    cause, sidecar_cause = exit_cause(failed), sidecar_failure(pod)
    if sidecar_cause is None or cause.reason is not Reason.USER_ERROR:
        return cause
    return replace(cause, more=sidecar_cause.clauses)


def sidecar_failure(pod: Pod) -> Cause | None:
    """Return why a sidecar, such as the one that mounts buckets, failed; None if none did."""
    stopped = pod.ended or pod.terminating
    for container in pod.containers:
        current = container.state("terminated") or {}
        # Kubernetes stops a sidecar after the program. An earlier end counts, and the kernel's.
        if stopped and current.get("reason") != "OOMKilled":
            current = {}
        end = current or get_dict(get_dict(container.status, "lastState"), "terminated")
        is_back = container.state("running") is not None and not pod.ran
        if not (container.is_sidecar and end) or is_back:
            continue
        log = f"its log (kubectl logs {pod.metadata.get('name')} -c {container.name})"
        cause = exit_cause(replace(container, status={"state": {"terminated": end}}), log)
        if pod.ran:
            return cause
        more = [f"restarts so far: {container.status.get('restartCount') or 0}"]
        summary = f"the program waits for a sidecar that fails: {cause.summary}"
        return replace(cause, summary=summary, more=more, outlook=Outlook.BLOCKED)
    return None


# --- what the platform did ------------------------------------------------------------------

_MORE_MEMORY = "state the memory that it needs (memory=), or use a larger machine"
_SHUTDOWN_REASONS = ("Terminated", "Shutdown", "NodeShutdown")

_DISRUPTIONS = {
    "PreemptionByScheduler": Cause(
        summary="preempted by a pod of higher priority",
        advice=f"{ADVICE[Reason.PREEMPTED]}, or use a higher priority class",
        reason=Reason.PREEMPTED,
    ),
    "EvictionByEvictionAPI": Cause(
        summary="evicted by a drain of its node, an administrator, or the autoscaler",
        reason=Reason.EVICTED,
    ),
    "DeletionByTaintManager": Cause(
        summary="evicted: its node got a taint with the effect NoExecute", reason=Reason.EVICTED
    ),
}
"""The causes that the reason of a pod's condition ``DisruptionTarget`` names."""


def removal(pod: Pod) -> Cause | None:
    """Return what the platform or a user did to end *pod*; None if they did nothing."""
    disruption: Document = pod.disruption or {}
    disruptor, pod_reason = str(disruption.get("reason") or ""), str(pod.status.get("reason") or "")
    message = str(pod.status.get("message") or disruption.get("message") or "")
    quote = one_line(message, LONGEST).rstrip(".")
    by_taint = disruptor == "DeletionByTaintManager"
    lost_node = (disruptor == "DeletionByPodGC" and "node" in message) or (
        pod.node_removed and not pod.ended
    )
    if pod.node_silent and (by_taint or (pod.terminating and not disruptor)):
        summary = f"its node {pod.spec.get('nodeName')} does not answer"
        return Cause(summary=summary, reason=Reason.NODE_LOST)
    if disruptor in _DISRUPTIONS and not (by_taint and lost_node):
        taints = get_list(get_dict(pod.node, "spec"), "taints")
        names = [str(taint.get("key")) for taint in taints if taint.get("effect") == "NoExecute"]
        if not (by_taint and names):
            return _DISRUPTIONS[disruptor]
        summary = f"evicted: its node got the taint {' and '.join(names)} (NoExecute)"
        return replace(_DISRUPTIONS[disruptor], summary=summary)
    if pod_reason == "Evicted":
        return _eviction_cause(quote)
    if condition(pod.document, "TerminationTarget"):
        summary = ": ".join(filter(None, ("stopped by Kueue", quote)))
        return Cause(summary=summary, reason=Reason.PREEMPTED)
    if pod_reason == "Preempting" or "critical pod" in quote:
        summary = "preempted by a critical pod of the system"
        return Cause(summary=summary, reason=Reason.PREEMPTED)
    if pod_reason == "DeadlineExceeded":
        summary = f"the pod's time limit of {pod.spec.get('activeDeadlineSeconds')} s passed"
        return Cause(summary=summary, reason=Reason.DEADLINE)
    by_node = not (disruptor or pod_reason or pod.terminating)  # a deletion has another cause
    announced = by_node and pod.node_ending and pod.may_have_been_stopped
    if disruptor == "TerminationByKubelet" or pod_reason in _SHUTDOWN_REASONS or announced:
        why = "the cloud took its spot machine back" if pod.on_spot else "maintenance"
        return Cause(
            summary=f"its node was shut down ({why})",
            advice=f"{ADVICE[Reason.PREEMPTED]}, or request no spot machine",
            reason=Reason.PREEMPTED,
        )
    if lost_node:
        spot = " (a spot machine, which the cloud may have taken back)" if pod.on_spot else ""
        summary = f"its node was removed from the cluster{spot}"
        return Cause(summary=summary, reason=Reason.NODE_LOST)
    if disruptor:
        return Cause(summary=f"the platform ended it: {quote}", reason=Reason.NODE_LOST)
    if pod.gone and not pod.ended and pod.was_disrupted:  # while this client didn't watch
        return Cause(summary="the platform ended it", reason=Reason.PREEMPTED)
    if pod_reason:  # a kubelet gives any other reason when it refuses a pod
        summary = f"the node refused the pod ({pod_reason}): {quote}"
        advice = (
            f"{ADVICE[Reason.EVICTED]}; if nodes refuse it again, correct what the message names"
        )
        return Cause(summary=summary, advice=advice, reason=Reason.EVICTED)
    if pod.terminating and pod.was_suspended:
        summary = "its queue, or another who suspended its Job, stopped it"
        return Cause(summary=summary, reason=Reason.PREEMPTED)
    if pod.terminating:
        when = "while it ran" if pod.ran else "before it ran"
        return Cause(
            summary=f"a user or a controller deleted the pod {when}",
            advice="run it again; the cluster's audit log names the user who deleted it",
            reason=Reason.LOST,
        )
    return None


def _eviction_cause(quote: str) -> Cause:
    """Return why a kubelet evicted a pod: its node lacked a resource, or it passed a limit."""
    reason, advice = Reason.EVICTED, None
    if (match := re.search(r"low on resource: (\S+?)(\.|$| )", quote)) is not None:
        if match[1] != "pids":
            advice = _MORE_MEMORY if match[1] == "memory" else "write less, or write to a bucket"
    elif "exceeds the limit" in quote and "olume" in quote:
        advice = "write less there, or raise its sizeLimit (for /dev/shm: memory=)"
        reason = Reason.OUT_OF_DISK
    elif "storage" in quote:
        reason = Reason.OUT_OF_DISK
    return Cause(summary=f"evicted by its node: {quote}", advice=advice, reason=reason)


# --- how the program ended ------------------------------------------------------------------

_open_rule = partial(Rule, outlook=Outlook.OPEN)

_OUTPUT_RULES = (
    # Cloud Storage, "Troubleshooting", and GKE, "Troubleshoot Workload Identity Federation".
    _open_rule(
        r"does not have storage\.\w+\.\w+ access|Permission 'storage\.\w+\.\w+' denied"
        r"|403[^;]*storage\.googleapis|unable to generate access token"
        r"|from the (\w+ )*metadata service|compute metadata service"
        r"|iam\.serviceAccounts\.getAccessToken|getOpenIdToken",
        "give {who} roles/storage.objectUser on the bucket, and check workload identity: its "
        "binding (roles/iam.workloadIdentityUser), and GKE_METADATA on the node pool",
    ),
    _open_rule(  # the runner prints this message
        "no credentials for Cloud Storage here",
        "bind {who} to a Google service account (workload identity). If STORAGE_EMULATOR_HOST "
        "names a server that needs none, capture that variable (capture_env_vars=)",
    ),
    _open_rule(
        "can't open file '[^']*remote_runner",
        "the image doesn't contain kinetic's runner: copy what `python -m kinetic.images runner "
        "FOLDER` writes to /app, build the image with kinetic build-image, or omit container_image",
    ),
)
"""Advice for the last lines of a program's output."""

_REFUSAL = re.compile(r"^kinetic: (this job cannot be run: .+)$", re.MULTILINE)
"""The line with which the runner, or `kinetic._runner.pod.bootstrap`, refuses a job.

It says what to do.
"""

_CRASHES = (132, 133, 134, 135, 136, 139)
"""Exit codes after SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, and SIGSEGV: a program crashed."""


def exit_cause(container: Container, log: str = "its log") -> Cause:
    """Return why *container* failed; the advice says to read *log*."""
    end = container.end or {}
    code, reason = int(end.get("exitCode") or 0), end.get("reason")
    message = str(end.get("message") or "")
    if reason == "OOMKilled":
        return _out_of_memory(container, code)
    if reason in START_ERRORS or EXEC_FORMAT_ERROR.search(message):
        return start_failure(container, message)
    if reason in ("ContainerStatusUnknown", "Unknown"):
        # containerd reports Unknown for a container that ended while containerd was stopped.
        summary = "the node, or its container runtime, restarted while the program ran; exit code "
        return Cause(summary=f"{summary}{code} is a guess", reason=Reason.NODE_LOST)
    output = shorten_middle(message, 400)
    subject = f"container {container.name!r}" if container.init else "the program"
    summary = f"{subject} ended with exit code {code}"
    reason, advice = Reason.SETUP if container.init else Reason.USER_ERROR, f"see {log}"
    if code == 137:
        reason = Reason.LOST
        summary = f"signal 9 (SIGKILL) killed {subject}, but not because of its memory limit"
        advice += "; the program, one of its children, or a user on the node sent the signal"
    elif code in _CRASHES:
        summary = f"{subject} crashed with signal {_describe_signal(code - 128)}"
        advice = f"the fault is in native code: see {log}, or set PYTHONFAULTHANDLER=1"
    elif 129 <= code <= 192:
        reason = Reason.LOST
        summary = f"signal {_describe_signal(code - 128)} ended {subject}"
    if (refusal := _REFUSAL.search(message)) is not None:
        reason, output, advice = Reason.SETUP, shorten_middle(refusal[1], 800), ""
    email = re.search(r"[\w.-]+@[\w.-]+gserviceaccount\.com", output)
    account = email[0] if email else "the service account of the pod"
    otherwise = _open_rule("", advice, reason)
    return quote_message(summary, output, _OUTPUT_RULES, otherwise, quote=output, who=account)


def _describe_signal(number: int) -> str:
    """Return a signal's number, with its name and meaning if it has them."""
    try:
        meaning = signal.strsignal(number) or ""
        return f"{number} ({signal.Signals(number).name}, {meaning.lower()})"
    except ValueError:
        return str(number)


def _out_of_memory(container: Container, code: int) -> Cause:
    """Return the cause for *container*, which ran out of memory and ended with exit *code*."""
    child = "" if code == 137 else f" in a child process (the program's own exit code is {code})"
    summary = f"out of memory{child}: the container passed its memory limit of {container.memory}"
    advice: str | None = None
    if not container.memory:
        summary = f"out of memory{child}: the container has no memory limit, and its node ran out"
        advice = _MORE_MEMORY
    elif container.init:
        subject, limit = f"container {container.name!r}", container.memory
        summary = f"{subject} ran out of memory: it passed its limit of {limit}"
        advice = "raise the pod's annotation gke-gcsfuse/memory-limit"
    return Cause(summary=summary, advice=advice, reason=Reason.OUT_OF_MEMORY)
