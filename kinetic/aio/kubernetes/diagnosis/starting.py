"""A pod that has not ended: is it running, starting, held back, or on its way out?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.ending import removal
from kinetic.aio.kubernetes.diagnosis.exits import tell_end, tell_exit
from kinetic.aio.kubernetes.diagnosis.held import is_gated, queued
from kinetic.aio.kubernetes.diagnosis.images import IMAGE_REASONS, pull_failure
from kinetic.aio.kubernetes.diagnosis.pods import START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.preparing import (
    configuration,
    misconfigured,
    preparing,
    start_failure,
)
from kinetic.aio.kubernetes.diagnosis.scheduling import awaited_volume, placing
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending, running
from kinetic.aio.ports import Phase
from kinetic.job_status import Reason

__all__ = ["obstacle", "present"]

_BLOCKED = Outlook.BLOCKED
_START_REASONS = START_ERRORS | {"CreateContainerError"}
_SLOW = re.compile(r"failed to sync \w+ cache|context deadline exceeded|is reserved for")


def present(pod: Pod) -> Diagnosis:
    """Judge a pod that has not ended."""
    return replace(_judged(pod), executor=str(pod.metadata.get("uid") or ""))


def obstacle(pod: Pod) -> Diagnosis:
    """What kept a pod from running that never ran and is on its way out."""
    metadata = {**pod.metadata, "deletionTimestamp": None}
    return present(Pod({**pod.document, "metadata": metadata}, pod.seen))


def _judged(pod: Pod) -> Diagnosis:
    if pod.leaving:
        why = removal(pod)
        told = f"is being stopped: {why.message}" if why is not None else "is being stopped"
        verdict = running if pod.ran else pending
        return verdict(told, why.advice if why else "", why.reason if why else None)
    if not pod.spec.get("nodeName"):
        return _unplaced(pod)
    found = [(one, held) for one in pod.containers if (held := _held(pod, one)) is not None]
    if found and not (found[0][1].phase is Phase.RUNNING and _silent(pod)):
        return _besides(_beside(pod, *found[0]), found[1:])
    return _running(pod) if pod.ran else _starting(pod)


def _unplaced(pod: Pod) -> Diagnosis:
    scheduled = [one for one in conditions(pod.document) if one.get("type") == "PodScheduled"]
    if is_gated(pod.document):
        return queued(pod.seen)
    gates = [str(one.get("name")) for one in parts(pod.spec, "schedulingGates")]
    if gates or any(one.get("reason") == "SchedulingGated" for one in scheduled):
        names = ", ".join(repr(gate) for gate in gates) or "that it does not name"
        return pending(
            f"the pod is held by scheduling gate {names}",
            "the controller that owns the gate must release it",
            Reason.QUEUED,
            _BLOCKED,
        )
    refused = any(one.get("status") == "False" for one in scheduled)
    if refused or pod.events("FailedScheduling"):
        return placing(pod)
    return _unlooked(pod)


def _unlooked(pod: Pod) -> Diagnosis:
    """No scheduler has said a word about it: whose silence is that?"""
    scheduler = str(pod.spec.get("schedulerName") or "default-scheduler")
    silence = "no scheduler has looked at the pod yet"
    if scheduler != "default-scheduler":
        return pending(
            f"no scheduler called {scheduler!r} has looked at the pod: there is no condition and "
            "no event",
            "correct schedulerName, or start that scheduler",
            Reason.UNSCHEDULABLE,
            _BLOCKED,
        )
    if claims := parts(pod.spec, "resourceClaims"):
        fields = ("resourceClaimName", "resourceClaimTemplateName", "name")
        named = (next((one[key] for key in fields if one.get(key)), None) for one in claims)
        names = ", ".join(repr(str(name)) for name in named)
        if said := pod.last_said("FailedResourceClaimCreation"):
            words = f"ResourceClaim {names} cannot be made: {one_line(said)}"
            advice = "create what it names, or correct the name"
            return pending(words, advice, Reason.SETUP, _BLOCKED)
        words = f"{silence}: it waits for ResourceClaim {names}, which may not exist"
        return pending(words, "create it or correct the name", Reason.SETUP, _BLOCKED)
    if volume := awaited_volume(pod):
        silence += f", or it waits for a volume to be made for PersistentVolumeClaim {volume}"
    return pending(silence)


def _held(pod: Pod, one: Container) -> Diagnosis | None:
    """What keeps this container from running, if anything does."""
    waiting, ended = one.state("waiting"), one.state("terminated")
    if one.sidecar and any(other.state("running") is not None for other in pod.programs):
        return None  # the program goes on beside it
    again = pod.spec.get("restartPolicy") != "Never" or one.sidecar
    done = one.sidecar and all(other.state("terminated") is not None for other in pod.programs)
    if again and ended is not None and ended.get("exitCode") and not done:
        return _looping(pod, one, ended)
    if waiting is None:
        return None
    reason, said = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason == "CrashLoopBackOff":
        return _looping(pod, one, one.last or {})
    if reason in IMAGE_REASONS:
        return _image(pod, one, reason, said)
    if reason.startswith("CreateContainer") and _SLOW.search(said):
        return pending(
            f"the node has not made container {one.name!r} yet: {one_line(said)}",
            "it is tried again; tell the cluster's administrator if it stays",
        )
    if reason == "CreateContainerConfigError":
        return configuration(said)
    if reason in _START_REASONS or reason.endswith("HookError"):
        return start_failure(one, said)
    return None


def _besides(first: Diagnosis, others: Sequence[tuple[Container, Diagnosis]]) -> Diagnosis:
    """The *first* obstacle, with what stands in the way of the next container."""
    for one, held in others:
        if held.message not in first.message:
            words = f"{first.message}; besides, container {one.name!r}: {held.message}"
            return replace(first, message=words)
    return first


def _beside(pod: Pod, one: Container, held: Diagnosis) -> Diagnosis:
    """*held*, which is about container *one*: the program may run in spite of it."""
    program = next(iter(pod.programs), one)
    if one.init or one.name == program.name or held.phase is Phase.RUNNING:
        return held
    done = program.state("terminated")
    if done is None and program.state("running") is not None:
        words = f"running, but container {one.name!r} cannot start: {held.message}"
        return running(words, held.advice, held.reason)
    if done is None or done.get("reason") in START_ERRORS:
        return held
    return running(
        f"container {program.name!r} {_ended(program, done)}, but container {one.name!r} cannot "
        f"start, so the Job never completes: {held.message}",
        held.advice,
        held.reason,
        _BLOCKED,
    )


def _looping(pod: Pod, one: Container, ended: Document) -> Diagnosis:
    code, told = ended.get("exitCode"), tell_end(pod, one, ended)
    kind = f"exit code {code}" if code is not None else "how it ended is not known"
    if one.init:
        killed = told.reason is Reason.OUT_OF_MEMORY
        return pending(
            f"container {one.name!r} fails each time it is started ({kind}), and the program waits "
            f"for it: {told.message}",
            told.advice if killed else f"see the log of container {one.name!r}",
            told.reason if killed else Reason.SETUP,
            _BLOCKED,
        )
    if ended.get("reason") in START_ERRORS:
        return told
    if code == 0:
        return running(
            "the program ends well and is started again each time, by the pod's restartPolicy"
        )
    whose = "the program" if pod.programs[0] is one else f"container {one.name!r}"
    words = f": {told.message}" if code is not None else ""
    return running(
        f"{whose} fails each time it is started ({kind}) and is restarted with growing delays"
        f"{words}",
        told.advice,
        told.reason,
        exit_code=code,
    )


def _image(pod: Pod, one: Container, reason: str, said: str) -> Diagnosis:
    image = str(one.spec.get("image") or one.status.get("image") or "")
    if not said or (said.startswith("Back-off") and ": " not in said):
        earlier = [str(event.get("message") or "") for event in pod.events("Failed")]
        said = next((text for text in reversed(earlier) if image in text), said)
    names = re.search(r"\(([^)]*)\)", pod.last_said("FailedToRetrieveImagePullSecret"))
    arch = part(pod.spec, "nodeSelector").get("kubernetes.io/arch")
    arch = arch or part(part(pod.node, "metadata"), "labels").get("kubernetes.io/arch") or "amd64"
    return pull_failure(reason, said, image, secret=names[1] if names else "", arch=str(arch))


def _running(pod: Pod) -> Diagnosis:
    programs = pod.programs
    done = [one for one in programs if one.state("terminated") is not None]
    left = [one for one in programs if one.state("running") is not None]
    bad = [one for one in done if one.exit_code]
    message, advice = _restarted(pod, left)
    if done and left and done[0].name == programs[0].name:
        names = ", ".join(repr(one.name) for one in left)
        ended = done[0].state("terminated") or {}
        return running(
            f"container {done[0].name!r} {_ended(done[0], ended)}, but container {names} still "
            "runs, so the Job never completes",
            "make it a native sidecar (an init container with restartPolicy Always)",
            tell_exit(done[0], ended).reason if ended.get("exitCode") else None,
            _BLOCKED,
        )
    if _silent(pod):
        return running(
            "its node does not answer; whether the program still runs is unknown",
            "wait: Kubernetes replaces the pod when the node stays away",
            Reason.NODE_LOST,
        )
    if bad:
        told = _ended(bad[0], bad[0].ended or {})
        return running(
            f"{message}, but container {bad[0].name!r} {told}: the pod will have failed",
            f"see the log of container {bad[0].name!r}",
        )
    if _failing(pod, left, "readiness"):
        return running(
            "running, but never Ready: the readiness probe fails",
            "see why the program does not answer the probe",
        )
    if _failing(pod, left, "startup"):
        return running(
            "running, but its startup probe fails so far",
            "the node stops it when that goes on: see why it does not answer the probe",
        )
    if pod.taken_back:
        return running(
            "running, but the cloud takes its spot machine back within 30 s",
            "it is not the program's fault: let it save what it has; it counts on its own budget",
            Reason.PREEMPTED,
        )
    falls = [(one, end) for one in pod.containers if one.sidecar and (end := one.ended or one.last)]
    for one, end in falls:
        if end.get("exitCode"):
            told_of = tell_exit(one, end)
            words = f"{message}, but sidecar {one.name!r} beside it fails: {told_of.message}"
            return running(words, told_of.advice)
    return running(message, advice)


def _ended(one: Container, ended: Document) -> str:
    """How a container ended, as the rest of a sentence about it."""
    words, told = f"ended with exit code {ended.get('exitCode')}", tell_exit(one, ended)
    return f"{words} ({told.message})" if told.reason is Reason.OUT_OF_MEMORY else words


def _restarted(pod: Pod, left: Sequence[Container]) -> tuple[str, str]:
    """``running``; after how many starts and why, and what to do about that."""
    again = max(left, key=lambda one: one.restarts, default=None)
    if again is None or not again.restarts:
        return "running", ""
    starts = "1 failed start" if again.restarts == 1 else f"{again.restarts} failed starts"
    last = again.last or {}
    if not last.get("exitCode"):
        return f"running, after {starts}", ""
    told = tell_end(pod, again, last)
    return f"running, after {starts} (the last: {told.message})", told.advice


def _failing(pod: Pod, programs: Sequence[Container], kind: str) -> bool:
    """A probe of this kind has failed, and the program is not ready now."""
    return not all(one.status.get("ready", True) for one in programs) and any(
        str(event.get("message") or "").lower().startswith(kind)
        for event in pod.events("Unhealthy")
    )


def _silent(pod: Pod) -> bool:
    """The node's controller set Ready to False by itself: the containers still say ready."""
    unready = any(
        one.get("type") == "Ready" and one.get("status") == "False" and not one.get("reason")
        for one in conditions(pod.document)
    )
    away = condition(pod.node, "Ready", "Unknown") is not None
    if pod.status.get("phase") == "Unknown" or away:
        return True
    return unready and bool(pod.events("NodeNotReady"))


def _starting(pod: Pod) -> Diagnosis:
    found = preparing(pod) or _unattended(pod) or _pulling(pod)
    refused = pod.last_said("Failed", "Created", "Started").removeprefix("Error: ")
    if found := found or misconfigured(refused):
        return found
    begun = [one for one in pod.containers if one.state("running") is not None]
    begun += [one for one in pod.containers if one.exit_code and not one.sidecar]  # when it left
    one = next(iter(begun), None)
    if one is None or (one.sidecar and one.status.get("started") is not False):
        return pending("its container is being made")
    what = "sidecar" if one.sidecar else "init container"
    state = "runs and is not ready yet" if one.sidecar else "runs"
    return pending(
        f"{what} {one.name!r} {state}; the program starts after it",
        f"wait, or see the log of container {one.name!r}",
    )


def _unattended(pod: Pod) -> Diagnosis | None:
    """Nobody makes its containers: the node does not answer, or there is no such node."""
    name = str(pod.spec.get("nodeName"))
    if pod.without_node and not any(conditions(pod.document)):
        return pending(
            f"there is no node {name!r}, which the pod names: nobody starts it",
            "leave the choice of the node to the scheduler, or correct the name",
            Reason.UNSCHEDULABLE,
            _BLOCKED,
        )
    if _silent(pod):
        return pending(
            f"its node {name} does not answer, so nobody starts it",
            "wait: Kubernetes replaces the pod when the node stays away",
            Reason.NODE_LOST,
        )
    return None


def _pulling(pod: Pod) -> Diagnosis | None:
    """An image is on its way, or did not come: its container does not say so yet."""
    events = [
        event
        for event in pod.events("Pulling", "Pulled", "Failed")
        if "pull" in str(event.get("message") or "").lower()
    ]
    if not events or events[-1].get("reason") == "Pulled":
        return None
    since = [one for one in events if "Failed to pull" in str(one.get("message"))]
    # What says why comes before what says only that it goes on.
    told = since[-1] if since and events[-1].get("reason") == "Failed" else events[-1]
    said = str(told.get("message") or "")
    quoted = re.search(r'"([^"]+)"', said)
    image = quoted[1] if quoted else ""
    if events[-1].get("reason") == "Pulling":
        return pending(f"pulling the image {image}".rstrip())
    # Of a pod that nobody saw, events alone tell.
    known = pod.containers or [Container(name="", spec={"image": image}, status={})]
    failing = next((one for one in known if one.spec.get("image") == image), None)
    return None if failing is None else _image(pod, failing, "ErrImagePull", said)
