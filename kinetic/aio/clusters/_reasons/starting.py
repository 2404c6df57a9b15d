"""A pod that has not ended: is it running, starting, held back, or on its way out?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kinetic._words import one_line
from kinetic.aio.clusters._reasons.containers import Container, containers, start_failure, tell_exit
from kinetic.aio.clusters._reasons.documents import Document, condition, conditions, part, parts
from kinetic.aio.clusters._reasons.ending import ran, removal
from kinetic.aio.clusters._reasons.images import IMAGE_REASONS, pull_failure
from kinetic.aio.clusters._reasons.scheduling import placing
from kinetic.aio.clusters._reasons.verdict import Outlook, Seen, Verdict
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

__all__ = ["obstacle", "present"]

_MISSING = re.compile(
    r"(?P<kind>configmap|secret|persistentvolumeclaim|serviceaccount)"
    r' "?(?P<name>[^\s"]+)"? not found',
    re.IGNORECASE,
)
_KEY_MISSING = re.compile(
    r"couldn't find key (?P<key>\S+) in (?P<kind>ConfigMap|Secret) (?P<name>\S+)", re.IGNORECASE
)
_DRIVER = re.compile(r"driver name (?P<name>\S+) not found")
_RUNTIME = re.compile(r'no runtime for "?(?P<name>[^"\s]+)"? is configured')
_KINDS = {
    "configmap": "ConfigMap",
    "secret": "Secret",
    "persistentvolumeclaim": "PersistentVolumeClaim",
    "serviceaccount": "ServiceAccount",
}
_START_REASONS = frozenset(
    {"RunContainerError", "StartError", "ContainerCannotRun", "CreateContainerError"}
)


def present(seen: Seen, pod: Document) -> Verdict:
    """Judge a pod that has not ended."""
    return replace(_judged(seen, pod), executor=str(part(pod, "metadata").get("uid") or ""))


def obstacle(seen: Seen, pod: Document) -> Verdict:
    """What kept a pod from running that never ran and is on its way out."""
    metadata = {**part(pod, "metadata"), "deletionTimestamp": None}
    return present(seen, {**pod, "metadata": metadata})


def _judged(seen: Seen, pod: Document) -> Verdict:
    if part(pod, "metadata").get("deletionTimestamp"):
        return _leaving(seen, pod)
    if not part(pod, "spec").get("nodeName"):
        return _unplaced(seen, pod)
    for one in containers(pod):
        if (held := _held(seen, pod, one)) is not None:
            return held
    if ran(pod):
        return _running(seen, pod)
    return _starting(seen, pod)


def _leaving(seen: Seen, pod: Document) -> Verdict:
    why = removal(seen, pod)
    alive = ran(pod)
    return Verdict(
        status=JobStatus.RUNNING if alive else JobStatus.PENDING,
        phase=Phase.RUNNING if alive else Phase.PENDING,
        reason=why.reason if why is not None else None,
        message=f"is being stopped: {why.message}" if why is not None else "is being stopped",
        advice=why.advice if why is not None else "",
    )


def _pending(
    message: str,
    *,
    reason: Reason | None = None,
    advice: str = "",
    outlook: Outlook = Outlook.OPEN,
) -> Verdict:
    return Verdict(
        status=JobStatus.PENDING,
        phase=Phase.PENDING,
        reason=reason,
        message=message,
        advice=advice,
        outlook=outlook,
    )


def _unplaced(seen: Seen, pod: Document) -> Verdict:
    spec: Document = part(pod, "spec")
    scheduled = [one for one in conditions(pod) if one.get("type") == "PodScheduled"]
    gates = [str(one.get("name")) for one in parts(spec, "schedulingGates")]
    if gates or any(one.get("reason") == "SchedulingGated" for one in scheduled):
        names = ", ".join(repr(gate) for gate in gates) or "that it does not name"
        return _pending(
            f"the pod is held by scheduling gate {names}",
            reason=Reason.QUEUED,
            advice="the controller that owns the gate must release it",
            outlook=Outlook.BLOCKED,
        )
    refused = any(one.get("status") == "False" for one in scheduled)
    if refused:
        found = placing(seen, pod)
        return _pending(
            found.message,
            reason=found.reason,
            advice=found.advice,
            outlook=found.outlook,
        )
    scheduler = str(spec.get("schedulerName") or "default-scheduler")
    if scheduler != "default-scheduler":
        return _pending(
            f"no scheduler called {scheduler!r} has looked at the pod: there is no condition and "
            "no event",
            reason=Reason.UNSCHEDULABLE,
            advice="correct schedulerName, or start that scheduler",
            outlook=Outlook.BLOCKED,
        )
    if claims := parts(spec, "resourceClaims"):
        names = ", ".join(_claim(one) for one in claims)
        return _pending(
            f"no scheduler has looked at the pod yet: it waits for ResourceClaim {names}, which "
            "may not exist",
            reason=Reason.SETUP,
            advice="create it or correct the name",
            outlook=Outlook.BLOCKED,
        )
    return _pending("no scheduler has looked at the pod yet")


def _claim(one: Document) -> str:
    name = one.get("resourceClaimName") or one.get("resourceClaimTemplateName") or one.get("name")
    return repr(str(name))


def _held(seen: Seen, pod: Document, one: Container) -> Verdict | None:
    """What keeps this container from running, if anything does."""
    waiting = one.state("waiting")
    if one.sidecar and _beside_program(pod):
        return None  # the program goes on beside it
    again = part(pod, "spec").get("restartPolicy") != "Never" or one.sidecar
    ended = one.state("terminated")
    if again and ended is not None and (ended.get("exitCode") or 0) and not _program_done(pod, one):
        return _looping(one, ended)
    if waiting is None:
        return None
    reason, said = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason == "CrashLoopBackOff":
        return _looping(one, one.last or {})
    if reason in IMAGE_REASONS:
        return _image(seen, pod, one, reason, said)
    if reason == "CreateContainerConfigError":
        return _configuration(said)
    if reason in _START_REASONS or reason.endswith("HookError"):
        why = start_failure(one, said)
        return _pending(why.message, reason=why.reason, advice=why.advice, outlook=Outlook.BLOCKED)
    return None


def _beside_program(pod: Document) -> bool:
    return any(one.state("running") is not None for one in containers(pod) if not one.init)


def _program_done(pod: Document, one: Container) -> bool:
    """Whether *one* is a sidecar that was stopped because the program has ended."""
    programs = [other for other in containers(pod) if not other.init]
    return one.sidecar and all(other.state("terminated") is not None for other in programs)


def _looping(one: Container, ended: Document) -> Verdict:
    code = ended.get("exitCode")
    told = tell_exit(one, ended)
    if one.sidecar or one.init:
        return _pending(
            f"container {one.name!r} fails each time it is started (exit code {code}), and the "
            "program waits for it",
            reason=Reason.SETUP,
            advice=f"see the log of container {one.name!r}",
            outlook=Outlook.BLOCKED,
        )
    return Verdict(
        status=JobStatus.RUNNING,
        phase=Phase.RUNNING,
        reason=told.reason,
        exit_code=code,
        message=f"the program fails each time it is started (exit code {code}) and is restarted "
        f"with growing delays: {told.message}",
        advice=told.advice,
    )


def _image(
    seen: Seen, pod: Document, one: Container, reason: str, said: str
) -> Verdict:  # fmt: skip
    image = str(one.spec.get("image") or one.status.get("image") or "")
    if not said or (said.startswith("Back-off") and ": " not in said):
        earlier = [str(event.get("message") or "") for event in seen.about(pod, "Failed")]
        said = next((text for text in reversed(earlier) if image in text), said)
    missing = seen.about(pod, "FailedToRetrieveImagePullSecret")
    names = re.search(r"\(([^)]*)\)", str(missing[-1].get("message"))) if missing else None
    arch = part(part(pod, "spec"), "nodeSelector")
    found = pull_failure(
        reason,
        said,
        image,
        secret=names[1] if names else "",
        arch=arch.get("kubernetes.io/arch") or _arch(seen, pod),
    )
    return _pending(
        found.message, reason=Reason.IMAGE_PULL, advice=found.advice, outlook=found.outlook
    )


def _arch(seen: Seen, pod: Document) -> str:
    name = part(pod, "spec").get("nodeName")
    for node in seen.nodes or ():
        metadata: Document = part(node, "metadata")
        if metadata.get("name") == name:
            return str(part(metadata, "labels").get("kubernetes.io/arch") or "amd64")
    return "amd64"


def _missing(said: str) -> tuple[str, str] | None:
    """What does not exist, and what to do about it."""
    if found := _MISSING.search(said):
        kind = _KINDS[found["kind"].lower()]
        return (
            f"{kind} {found['name']!r} does not exist in the namespace",
            "create it or correct the name; the pod starts by itself then",
        )
    if found := _KEY_MISSING.search(said):
        kind, name = _KINDS[found["kind"].lower()], found["name"].rsplit("/", 1)[-1]
        return (
            f"{kind} {name!r} has no key {found['key']!r}",
            "add it or correct the name; the pod starts by itself then",
        )
    return None


def _configuration(said: str) -> Verdict:
    if missing := _missing(said):
        message, advice = missing
        return _pending(
            message, reason=Reason.SETUP, advice=advice, outlook=Outlook.BLOCKED
        )  # fmt: skip
    if "runAsNonRoot" in said:
        return _pending(
            "the pod must not run as root, and the image's user is root"
            if "root" in said.replace("runAsNonRoot", "")
            else "the pod must not run as root, and the image's user cannot be verified",
            reason=Reason.SETUP,
            advice="set runAsUser, or a numeric USER in the image",
            outlook=Outlook.FINAL,
        )
    return _pending(
        f"the container cannot be configured: {one_line(said)}",
        reason=Reason.SETUP,
        advice="correct what the message names",
        outlook=Outlook.BLOCKED,
    )


def _running(seen: Seen, pod: Document) -> Verdict:
    programs = [one for one in containers(pod) if not one.init]
    done = [one for one in programs if one.state("terminated") is not None]
    left = [one for one in programs if one.state("running") is not None]
    reason: Reason | None = None
    starts = 1 + max((int(one.status.get("restartCount") or 0) for one in left), default=0)
    message = "running" if starts == 1 else f"running, after {starts - 1} failed starts"
    advice, outlook = "", Outlook.OPEN
    if done and left:
        code = (done[0].state("terminated") or {}).get("exitCode")
        names = ", ".join(repr(one.name) for one in left)
        message = (
            f"container {done[0].name!r} ended with exit code {code}, but container {names} still "
            "runs, so the Job never completes"
        )
        advice = "make it a native sidecar (an init container with restartPolicy Always)"
        outlook = Outlook.BLOCKED
    elif _silent(seen, pod):
        reason = Reason.NODE_LOST
        message = "its node does not answer; whether the program still runs is unknown"
        advice = "wait: Kubernetes replaces the pod when the node stays away"
    elif _unready(seen, pod, left):
        message = "running, but never Ready: the readiness probe fails"
        advice = "see why the program does not answer the probe"
    return Verdict(
        status=JobStatus.RUNNING,
        phase=Phase.RUNNING,
        reason=reason,
        message=message,
        advice=advice,
        outlook=outlook,
    )


def _unready(seen: Seen, pod: Document, programs: Sequence[Container]) -> bool:
    """A readiness probe has failed, and the program is not ready now."""
    unready = [one for one in programs if not one.status.get("ready", True)]
    failing = [
        event
        for event in seen.about(pod, "Unhealthy")
        if str(event.get("message") or "").lower().startswith("readiness")
    ]
    return bool(unready and failing)


def _silent(seen: Seen, pod: Document) -> bool:
    """The node's controller set Ready to False by itself: the containers still say ready."""
    unready = any(one.get("type") == "Ready" and one.get("status") == "False"
                  and not one.get("reason") for one in conditions(pod))  # fmt: skip
    name = part(pod, "spec").get("nodeName")
    node = [one for one in seen.nodes or () if part(one, "metadata").get("name") == name]
    away = bool(node) and condition(node[0], "Ready", "Unknown") is not None
    return away or (unready and bool(seen.about(pod, "NodeNotReady")))


def _starting(seen: Seen, pod: Document) -> Verdict:
    for event in reversed(seen.about(pod, "FailedMount", "FailedAttachVolume")):
        return _mount(str(event.get("message") or ""))
    for event in reversed(seen.about(pod, "FailedCreatePodSandBox")):
        said = str(event.get("message") or "")
        if runtime := _RUNTIME.search(said):
            return _pending(
                f"the node cannot make the pod's sandbox: runtime {runtime['name']!r} is not "
                "configured on it",
                reason=Reason.SETUP,
                advice="use a node pool that has it, or no RuntimeClass",
                outlook=Outlook.BLOCKED,
            )
        return _pending(
            f"the node cannot make the pod's sandbox: {one_line(said[-200:])}",
            reason=Reason.SETUP,
            advice="it is tried again; tell the cluster's administrator if it stays",
        )
    pulling = [
        event
        for event in seen.about(pod, "Pulling", "Pulled")
        if "pull" in str(event.get("message") or "").lower()
    ]
    if pulling and pulling[-1].get("reason") == "Pulling":
        quoted = re.search(r'"([^"]+)"', str(pulling[-1].get("message")))
        return _pending(f"pulling the image {quoted[1] if quoted else ''}".rstrip())
    first = next((one for one in containers(pod) if one.state("running") is not None), None)
    if first is not None and not first.sidecar:
        return _pending(f"init container {first.name!r} runs; the program starts after it")
    return _pending("its container is being made")


def _mount(said: str) -> Verdict:
    if missing := _missing(said):
        message, advice = f"{missing[0]}: its volume cannot be mounted", missing[1]
    elif driver := _DRIVER.search(said):
        message = f"the node has no storage driver {driver['name']}: its volume cannot be mounted"
        advice = "enable the add-on on the cluster"
    else:
        message = f"a volume cannot be mounted: {one_line(said[-200:])}"
        advice = "correct the volume, or the permission to read it"
    return _pending(message, reason=Reason.SETUP, advice=advice, outlook=Outlook.BLOCKED)
