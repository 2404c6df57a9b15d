"""A pod that has not ended: is it running, starting, held back, or on its way out?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.advice import next_step
from kinetic.aio.kubernetes.diagnosis.containers import (
    START_ERRORS,
    Container,
    containers,
    start_failure,
    tell_exit,
)
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.ending import probed, ran, removal, taken_back
from kinetic.aio.kubernetes.diagnosis.held import is_gated, queued
from kinetic.aio.kubernetes.diagnosis.images import IMAGE_REASONS, pull_failure
from kinetic.aio.kubernetes.diagnosis.preparing import missing, preparing
from kinetic.aio.kubernetes.diagnosis.scheduling import awaited_volume, placing
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, Seen, pending
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["obstacle", "present"]

_START_REASONS = frozenset(
    {"RunContainerError", "StartError", "ContainerCannotRun", "CreateContainerError"}
)


_SLOW = re.compile(r"failed to sync \w+ cache|context deadline exceeded|is reserved for")


def present(seen: Seen, pod: Document) -> Diagnosis:
    """Judge a pod that has not ended."""
    return replace(_judged(seen, pod), executor=str(part(pod, "metadata").get("uid") or ""))


def obstacle(seen: Seen, pod: Document) -> Diagnosis:
    """What kept a pod from running that never ran and is on its way out."""
    metadata = {**part(pod, "metadata"), "deletionTimestamp": None}
    return present(seen, {**pod, "metadata": metadata})


def _judged(seen: Seen, pod: Document) -> Diagnosis:
    if part(pod, "metadata").get("deletionTimestamp"):
        return _leaving(seen, pod)
    if not part(pod, "spec").get("nodeName"):
        return _unplaced(seen, pod)
    found = [(one, held) for one in containers(pod) if (held := _held(seen, pod, one)) is not None]
    if found and not (found[0][1].phase is Phase.RUNNING and _silent(seen, pod)):
        return _besides(_beside(pod, *found[0]), found[1:])
    if ran(pod):
        return _running(seen, pod)
    return _starting(seen, pod)


def _leaving(seen: Seen, pod: Document) -> Diagnosis:
    why = removal(seen, pod)
    alive = ran(pod)
    return Diagnosis(
        status=JobStatus.RUNNING if alive else JobStatus.PENDING,
        phase=Phase.RUNNING if alive else Phase.PENDING,
        reason=why.reason if why is not None else None,
        message=f"is being stopped: {why.message}" if why is not None else "is being stopped",
        advice=why.advice if why is not None else "",
    )


def _unplaced(seen: Seen, pod: Document) -> Diagnosis:
    spec: Document = part(pod, "spec")
    scheduled = [one for one in conditions(pod) if one.get("type") == "PodScheduled"]
    if is_gated(pod):
        return queued(seen)
    gates = [str(one.get("name")) for one in parts(spec, "schedulingGates")]
    if gates or any(one.get("reason") == "SchedulingGated" for one in scheduled):
        names = ", ".join(repr(gate) for gate in gates) or "that it does not name"
        return pending(
            f"the pod is held by scheduling gate {names}",
            reason=Reason.QUEUED,
            advice="the controller that owns the gate must release it",
            outlook=Outlook.BLOCKED,
        )
    refused = any(one.get("status") == "False" for one in scheduled)
    if refused or seen.about(pod, "FailedScheduling"):
        found = placing(seen, pod)
        return found.pending
    return _unlooked(seen, pod)


def _unlooked(seen: Seen, pod: Document) -> Diagnosis:
    """No scheduler has said a word about it: whose silence is that?"""
    spec: Document = part(pod, "spec")
    scheduler = str(spec.get("schedulerName") or "default-scheduler")
    if scheduler != "default-scheduler":
        return pending(
            f"no scheduler called {scheduler!r} has looked at the pod: there is no condition and "
            "no event",
            reason=Reason.UNSCHEDULABLE,
            advice="correct schedulerName, or start that scheduler",
            outlook=Outlook.BLOCKED,
        )
    if claims := parts(spec, "resourceClaims"):
        names = ", ".join(_claim(one) for one in claims)
        if failures := seen.about(pod, "FailedResourceClaimCreation"):
            return pending(
                f"ResourceClaim {names} cannot be made: {one_line(failures[-1]['message'])}",
                reason=Reason.SETUP,
                advice="create what it names, or correct the name",
                outlook=Outlook.BLOCKED,
            )
        return pending(
            f"no scheduler has looked at the pod yet: it waits for ResourceClaim {names}, which "
            "may not exist",
            reason=Reason.SETUP,
            advice="create it or correct the name",
            outlook=Outlook.BLOCKED,
        )
    if volume := awaited_volume(seen, pod):
        return pending(
            "no scheduler has looked at the pod yet, or it waits for a volume to be made for "
            f"PersistentVolumeClaim {volume}"
        )
    return pending("no scheduler has looked at the pod yet")


def _claim(one: Document) -> str:
    name = one.get("resourceClaimName") or one.get("resourceClaimTemplateName") or one.get("name")
    return repr(str(name))


def _held(seen: Seen, pod: Document, one: Container) -> Diagnosis | None:
    """What keeps this container from running, if anything does."""
    waiting = one.state("waiting")
    if one.sidecar and _beside_program(pod):
        return None  # the program goes on beside it
    again = part(pod, "spec").get("restartPolicy") != "Never" or one.sidecar
    ended = one.state("terminated")
    if again and ended is not None and (ended.get("exitCode") or 0) and not _program_done(pod, one):
        return _looping(seen, pod, one, ended)
    if waiting is None:
        return None
    reason, said = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason == "CrashLoopBackOff":
        return _looping(seen, pod, one, one.last or {})
    if reason in IMAGE_REASONS:
        return _image(seen, pod, one, reason, said)
    if reason.startswith("CreateContainer") and _SLOW.search(said):
        return pending(
            f"the node has not made container {one.name!r} yet: {one_line(said)}",
            advice="it is tried again; tell the cluster's administrator if it stays",
        )
    if reason == "CreateContainerConfigError":
        return _configuration(said)
    if reason in _START_REASONS or reason.endswith("HookError"):
        why = start_failure(one, said)
        return why.pending
    return None


def _besides(first: Diagnosis, others: Sequence[tuple[Container, Diagnosis]]) -> Diagnosis:
    """The *first* obstacle, with what stands in the way of the next container."""
    more = [(one, held) for one, held in others if held.message not in first.message]
    if not more:
        return first
    one, held = more[0]
    return replace(
        first, message=f"{first.message}; besides, container {one.name!r}: {held.message}"
    )


def _beside(pod: Document, one: Container, held: Diagnosis) -> Diagnosis:
    """*held*, which is about container *one*: the program may run in spite of it."""
    first = next((other for other in containers(pod) if not other.init), one)
    if one.init or one is first or one.name == first.name or held.phase is Phase.RUNNING:
        return held
    done = first.state("terminated")
    if first.state("running") is None and (done is None or not _was_started(done)):
        return held
    words = "running" if done is None else f"container {first.name!r} {_ended(first, done)}"
    so = "" if done is None else ", so the Job never completes"
    return replace(
        held,
        status=JobStatus.RUNNING,
        phase=Phase.RUNNING,
        message=f"{words}, but container {one.name!r} cannot start{so}: {held.message}",
        outlook=Outlook.OPEN if done is None else Outlook.BLOCKED,
    )


def _was_started(ended: Document) -> bool:
    return ended.get("reason") not in START_ERRORS


def _beside_program(pod: Document) -> bool:
    return any(one.state("running") is not None for one in containers(pod) if not one.init)


def _program_done(pod: Document, one: Container) -> bool:
    """Whether *one* is a sidecar that was stopped because the program has ended."""
    programs = [other for other in containers(pod) if not other.init]
    return one.sidecar and all(other.state("terminated") is not None for other in programs)


def _looping(seen: Seen, pod: Document, one: Container, ended: Document) -> Diagnosis:
    code = ended.get("exitCode")
    told = probed(seen, pod, code) or tell_exit(one, ended)
    kind = f"exit code {code}" if code is not None else "how it ended is not known"
    if one.sidecar or one.init:
        killed = told.reason is Reason.OUT_OF_MEMORY
        return pending(
            f"container {one.name!r} fails each time it is started ({kind}), and the "
            f"program waits for it: {told.message}",
            reason=Reason.OUT_OF_MEMORY if killed else Reason.SETUP,
            advice=told.advice if killed else f"see the log of container {one.name!r}",
            outlook=Outlook.BLOCKED,
        )
    if not _was_started(ended):
        return told.pending
    if code == 0:
        return Diagnosis(
            status=JobStatus.RUNNING,
            phase=Phase.RUNNING,
            message="the program ends well and is started again each time, by the pod's "
            "restartPolicy",
        )
    words = f": {told.message}" if code is not None else ""
    return Diagnosis(
        status=JobStatus.RUNNING,
        phase=Phase.RUNNING,
        reason=told.reason,
        exit_code=code,
        message=f"{_whose(pod, one)} fails each time it is started ({kind}) and is restarted "
        f"with growing delays{words}",
        advice=told.advice,
    )


def _whose(pod: Document, one: Container) -> str:
    first = next((other.name for other in containers(pod) if not other.init), one.name)
    return "the program" if first == one.name else f"container {one.name!r}"


def _image(
    seen: Seen, pod: Document, one: Container, reason: str, said: str
) -> Diagnosis:  # fmt: skip
    image = str(one.spec.get("image") or one.status.get("image") or "")
    if not said or (said.startswith("Back-off") and ": " not in said):
        earlier = [str(event.get("message") or "") for event in seen.about(pod, "Failed")]
        said = next((text for text in reversed(earlier) if image in text), said)
    unread = seen.about(pod, "FailedToRetrieveImagePullSecret")
    names = re.search(r"\(([^)]*)\)", str(unread[-1].get("message"))) if unread else None
    arch = part(part(pod, "spec"), "nodeSelector")
    found = pull_failure(
        reason,
        said,
        image,
        secret=names[1] if names else "",
        arch=arch.get("kubernetes.io/arch") or _arch(seen, pod),
    )
    return pending(
        found.message, reason=Reason.IMAGE_PULL, advice=found.advice, outlook=found.outlook
    )


def _arch(seen: Seen, pod: Document) -> str:
    name = part(pod, "spec").get("nodeName")
    for node in seen.nodes or ():
        metadata: Document = part(node, "metadata")
        if metadata.get("name") == name:
            return str(part(metadata, "labels").get("kubernetes.io/arch") or "amd64")
    return "amd64"


def _configuration(said: str) -> Diagnosis:
    if absent := missing(said):
        message, advice = absent
        return pending(
            message, reason=Reason.SETUP, advice=advice, outlook=Outlook.BLOCKED
        )  # fmt: skip
    if "breaks non-root policy" in said:
        return pending(
            "the pod must not run as root, and its runAsUser is root",
            reason=Reason.SETUP,
            advice="set another runAsUser",
            outlook=Outlook.FINAL,
        )
    if "runAsNonRoot" in said:
        return pending(
            "the pod must not run as root, and the image's user is root"
            if "root" in said.replace("runAsNonRoot", "")
            else "the pod must not run as root, and the image's user cannot be verified",
            reason=Reason.SETUP,
            advice="set runAsUser, or a numeric USER in the image",
            outlook=Outlook.FINAL,
        )
    return pending(
        f"the container cannot be configured: {one_line(said)}",
        reason=Reason.SETUP,
        advice=next_step(said, "correct what the message names"),
        outlook=Outlook.BLOCKED,
    )


def _running(seen: Seen, pod: Document) -> Diagnosis:
    programs = [one for one in containers(pod) if not one.init]
    done = [one for one in programs if one.state("terminated") is not None]
    left = [one for one in programs if one.state("running") is not None]
    reason: Reason | None = None
    message, advice = _restarted(seen, pod, left)
    outlook = Outlook.OPEN
    if done and left and done[0].name == programs[0].name:
        names = ", ".join(repr(one.name) for one in left)
        ended = done[0].state("terminated") or {}
        message = (
            f"container {done[0].name!r} {_ended(done[0], ended)}, but container {names} still "
            "runs, so the Job never completes"
        )
        advice = "make it a native sidecar (an init container with restartPolicy Always)"
        outlook = Outlook.BLOCKED
        reason = tell_exit(done[0], ended).reason if ended.get("exitCode") else None
    elif _silent(seen, pod):
        reason = Reason.NODE_LOST
        message = "its node does not answer; whether the program still runs is unknown"
        advice = "wait: Kubernetes replaces the pod when the node stays away"
    elif bad := [one for one in done if (one.state("terminated") or {}).get("exitCode")]:
        told = _ended(bad[0], bad[0].state("terminated") or {})
        message = f"{message}, but container {bad[0].name!r} {told}: the pod will have failed"
        advice = f"see the log of container {bad[0].name!r}"
    elif _failing(seen, pod, left, "readiness"):
        message = "running, but never Ready: the readiness probe fails"
        advice = "see why the program does not answer the probe"
    elif _failing(seen, pod, left, "startup"):
        message = "running, but its startup probe fails so far"
        advice = "the node stops it when that goes on: see why it does not answer the probe"
    elif taken_back(seen, pod):
        reason = Reason.PREEMPTED
        message = "running, but the cloud takes its spot machine back within 30 s"
        advice = (
            "it is not the program's fault: let it save what it has; it counts on its own budget"
        )
    elif side := [one for one in containers(pod) if one.sidecar and _falls(one)]:
        told_of = tell_exit(side[0], side[0].ended or side[0].last or {})
        message = f"{message}, but sidecar {side[0].name!r} beside it fails: {told_of.message}"
        advice = told_of.advice
    return Diagnosis(
        status=JobStatus.RUNNING,
        phase=Phase.RUNNING,
        reason=reason,
        message=message,
        advice=advice,
        outlook=outlook,
    )


def _falls(one: Container) -> bool:
    """Whether a sidecar ended badly that should run as long as the program does."""
    return bool((one.ended or one.last or {}).get("exitCode"))


def _ended(one: Container, ended: Document) -> str:
    """How a container ended, as the rest of a sentence about it."""
    code = ended.get("exitCode")
    words = f"ended with exit code {code}"
    told = tell_exit(one, ended)
    return f"{words} ({told.message})" if told.reason is Reason.OUT_OF_MEMORY else words


def _restarted(seen: Seen, pod: Document, left: Sequence[Container]) -> tuple[str, str]:
    """``running``; after how many starts and why, and what to do about that."""
    again = max(left, key=lambda one: int(one.status.get("restartCount") or 0), default=None)
    count = int(again.status.get("restartCount") or 0) if again is not None else 0
    if again is None or not count:
        return "running", ""
    last = again.last or {}
    told = probed(seen, pod, last.get("exitCode")) or tell_exit(again, last)
    why = f" (the last: {told.message})" if last.get("exitCode") else ""
    starts = "1 failed start" if count == 1 else f"{count} failed starts"
    return f"running, after {starts}{why}", told.advice if why else ""


def _failing(seen: Seen, pod: Document, programs: Sequence[Container], kind: str) -> bool:
    """A probe of this kind has failed, and the program is not ready now."""
    unready = [one for one in programs if not one.status.get("ready", True)]
    return bool(unready) and any(
        str(event.get("message") or "").lower().startswith(kind)
        for event in seen.about(pod, "Unhealthy")
    )


def _silent(seen: Seen, pod: Document) -> bool:
    """The node's controller set Ready to False by itself: the containers still say ready."""
    unready = any(one.get("type") == "Ready" and one.get("status") == "False"
                  and not one.get("reason") for one in conditions(pod))  # fmt: skip
    name = part(pod, "spec").get("nodeName")
    node = [one for one in seen.nodes or () if part(one, "metadata").get("name") == name]
    if part(pod, "status").get("phase") == "Unknown":
        return True
    away = bool(node) and condition(node[0], "Ready", "Unknown") is not None
    return away or (unready and bool(seen.about(pod, "NodeNotReady")))


def _starting(seen: Seen, pod: Document) -> Diagnosis:
    if found := preparing(seen.about(pod), part(pod, "spec")):
        return found.pending
    if (away := _unattended(seen, pod)) is not None:
        return away
    if (pull := _pulling(seen, pod)) is not None:
        return pull
    if said := _refused(seen, pod):
        return _configuration(said)
    first = next((one for one in containers(pod) if one.state("running") is not None), None)
    if first is not None and first.sidecar and first.status.get("started") is not False:
        return pending("its container is being made")
    if first is not None:
        what = "sidecar" if first.sidecar else "init container"
        state = "runs and is not ready yet" if first.sidecar else "runs"
        return pending(
            f"{what} {first.name!r} {state}; the program starts after it",
            advice=f"wait, or see the log of container {first.name!r}",
        )
    return pending("its container is being made")


def _refused(seen: Seen, pod: Document) -> str:
    """Why the node did not make a container, which its status says only some of the time."""
    events = seen.about(pod, "Failed", "Created", "Started")
    said = str(events[-1].get("message") or "") if events else ""
    configured = missing(said) is not None or "runAsNonRoot" in said or "non-root" in said
    return said.removeprefix("Error: ") if configured else ""


def _unattended(seen: Seen, pod: Document) -> Diagnosis | None:
    """Nobody makes its containers: the node does not answer, or there is no such node."""
    name = str(part(pod, "spec").get("nodeName"))
    known = {part(one, "metadata").get("name") for one in seen.nodes or ()}
    if known and name not in known and not any(conditions(pod)):
        return pending(
            f"there is no node {name!r}, which the pod names: nobody starts it",
            reason=Reason.UNSCHEDULABLE,
            advice="leave the choice of the node to the scheduler, or correct the name",
            outlook=Outlook.BLOCKED,
        )
    if _silent(seen, pod):
        return pending(
            f"its node {name} does not answer, so nobody starts it",
            reason=Reason.NODE_LOST,
            advice="wait: Kubernetes replaces the pod when the node stays away",
        )
    return None


def _pulling(seen: Seen, pod: Document) -> Diagnosis | None:
    """An image is on its way, or did not come: its container does not say so yet."""
    events = [
        event
        for event in seen.about(pod, "Pulling", "Pulled", "Failed")
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
    known = containers(pod) or [Container(name="", spec={"image": image}, status={})]
    failing = next((one for one in known if one.spec.get("image") == image), None)
    return None if failing is None else _image(seen, pod, failing, "ErrImagePull", said)
