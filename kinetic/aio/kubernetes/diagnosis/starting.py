"""Why a node does not start a pod's containers: volumes, sandbox, configuration, first process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.causes import ABSENT, Cause, Outlook, Rule, known, quoted
from kinetic.aio.kubernetes.diagnosis.documents import conditions
from kinetic.aio.kubernetes.diagnosis.facts import START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.images import unpulled
from kinetic.aio.kubernetes.diagnosis.quantities import number
from kinetic.job_status import Reason

_final = partial(Rule, outlook=Outlook.FINAL)
_STAYS = "it is tried again; tell the cluster's administrator if it stays"

_CONFIGURATION = (
    *ABSENT,
    _final(
        "breaks non-root policy|runAsNonRoot",
        "the pod must not run as root, and the image's user is root or cannot be verified",
        "set KINETIC_RUN_AS_USER (runAsUser), or a numeric USER in the image",
    ),
)

_PROGRESS = ("Pulling", "Pulled", "Created", "Started")
"""Events after which an earlier failure is over: volumes and sandbox come first."""

_OF_VOLUMES = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")


def unstarted(pod: Pod) -> Cause | None:
    """Return why a pod that has a node does not run."""
    if found := _unattended(pod):
        return found
    for one in pod.containers:
        if (found := hindrance(pod, one)) is not None:
            return found
    return _prepared(pod)


_REPLACED = "wait: Kubernetes replaces the pod when the node stays away"


def _unattended(pod: Pod) -> Cause | None:
    name = pod.spec.get("nodeName")
    if pod.node_removed and not conditions(pod.document):
        what = f"there is no node {name!r}, which the pod names, so nothing starts it"
        return Cause(what=what, reason=Reason.UNSCHEDULABLE, outlook=Outlook.BLOCKED)
    if pod.node_silent:
        what = f"its node {name} does not answer, so nothing starts it"
        return Cause(what=what, reason=Reason.NODE_LOST, advice=_REPLACED)
    return None


_OF_IMAGES = re.compile("Image|Registry|Signature")
"""What container reasons have in common that are about an image."""

_SLOW = re.compile(r"failed to sync \w+ cache|context deadline exceeded|is reserved for")


def hindrance(pod: Pod, one: Container) -> Cause | None:
    """Return what keeps container *one* from starting, by its own state."""
    waits = one.state("waiting") or {}
    reason, said = str(waits.get("reason") or ""), str(waits.get("message") or "")
    if reason == "CrashLoopBackOff" and (end := one.ended or {}).get("reason") in START_ERRORS:
        return start_failure(one, str(end.get("message") or ""))
    if reason in ("", "ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
        return None
    if _OF_IMAGES.search(reason):
        return unpulled(pod, one, reason, said)
    if reason.startswith("CreateContainer") and _SLOW.search(said):
        what = f"the node has not made container {one.name!r} yet: {one_line(said)}"
        return Cause(what=what, advice=_STAYS)
    return start_failure(one, said or reason)


def _prepared(pod: Pod) -> Cause | None:
    """Return what keeps the node from making containers, by the events on the pod."""
    left: list[tuple[str, str]] = []
    for event in pod.events():
        left = [] if event.get("reason") in _PROGRESS else left
        left.append((str(event.get("reason")), str(event.get("message") or "")))
    if volumes := [said for reason, said in left if reason in _OF_VOLUMES]:
        return _unmounted(pod, volumes)
    for reason, said in reversed(left):
        if reason == "FailedCreatePodSandBox" and (found := _starved(pod)):
            return found
        if reason.startswith(("FailedCreatePod", "FailedPrepare", "FailedSync")):
            what = "make the pod's sandbox" if reason.endswith("SandBox") else "prepare the pod"
            return known(_SURROUNDINGS, said) or quoted(f"the node cannot {what}", said)
        if reason == "NetworkNotReady":
            what = f"the node's network is not ready yet: {one_line(said)}"
            return Cause(what=what, advice=_STAYS)
        if reason == "Failed" and (found := known(_CONFIGURATION, said)):
            return found
    return _pulling(pod, left)


_LEAST = 6 << 20
"""Bytes of memory below which container runtimes cannot start a process."""


def _starved(pod: Pod) -> Cause | None:
    """Return a memory limit that is too low: the runtime's words name everything but the limit."""
    for one in pod.containers:
        if 0 < number(one.memory) < _LEAST:
            what = f"the memory limit of container {one.name!r}, {one.memory}, is too low to start"
            advice = "ask for more memory (memory=), such as 512Mi"
            return Cause(what=what, advice=advice, reason=Reason.SETUP, outlook=Outlook.BLOCKED)
    return None


def _pulling(pod: Pod, left: Sequence[tuple[str, str]]) -> Cause | None:
    """Return that an image is being pulled or was not, where its container doesn't say so yet."""
    pulls = [one for one in left if one[0] in ("Pulling", "Failed") and "pull" in one[1].lower()]
    images = re.findall(r'[Pp]ull(?:ing)? image "([^"]+)"', " ".join(said for _, said in pulls))
    if not images:
        return None
    if pulls[-1][0] == "Pulling":
        return Cause(what=f"pulling the image {images[-1]}")
    failing = next((one for one in pod.containers if one.spec.get("image") == images[-1]), None)
    return unpulled(pod, failing, "ErrImagePull", "") if failing is not None else None


LACKS_DRIVER = re.compile(r"driver name (\S+) not found")
"""What a node says of the storage driver that a volume needs."""

_BUCKET = "the bucket of a volume cannot be mounted: "
_ENABLE = "enable its add-on on the cluster (for a bucket: Cloud Storage FUSE CSI)"

_SURROUNDINGS = (
    *ABSENT,
    Rule(
        LACKS_DRIVER.pattern.replace("(", "(?P<name>"),
        "the node has no storage driver {name}, so a volume cannot be mounted",
        _ENABLE,
    ),
    Rule(
        "sidecar container failed with error: signal: killed",
        f"{_BUCKET}its gcsfuse sidecar was killed, because it ran out of memory",
        "raise the pod's annotation gke-gcsfuse/memory-limit",
    ),
    Rule(
        r"failed to (find|inject) the sidecar container|sidecar container \S* ?not found",
        f"{_BUCKET}the pod has no gcsfuse sidecar, which GKE puts into annotated pods",
        f"{_ENABLE}, which also puts the sidecar into the pod",
    ),
    Rule(
        r"bucket (doesn't|does not) exist.*|NotFound desc = .*bucket.*|bucket not found.*",
        "the bucket of a volume does not exist: {all}",
        "create it or correct the name",
    ),
    Rule(
        r"(PermissionDenied|Unauthenticated|Error 40[13]|\b403 Forbidden).*",
        "the pod may not read a volume, so it cannot be mounted: {all}",
        "give the pod's service account the right to read it (for a bucket: "
        "roles/storage.objectUser)",
    ),
    Rule(
        r"failed to sync (configmap|secret) cache.*|object \S+ not registered",
        "the node has not read the pod's Secrets yet ({all})",
        "it is tried again; this is not an error",
        None,
        Outlook.OPEN,
    ),
)


def _unmounted(pod: Pod, told: Sequence[str]) -> Cause:
    """Return the most that is said of volumes: one event has the cause, the next repeats it."""
    for name in (name for said in told for name in LACKS_DRIVER.findall(said)):
        if name in pod.seen.absent:
            what = f"the cluster has no storage driver {name}, so a volume cannot be mounted"
            advice = f"{_ENABLE}, or leave out fuse=True"
            return Cause(what=what, advice=advice, reason=Reason.SETUP, outlook=Outlook.FINAL)
    told = [said for said in told if "unmounted volumes=" not in said] or told
    causes = [found for said in told if (found := known(_SURROUNDINGS, said)) is not None]
    if not causes:
        return quoted("a volume cannot be mounted", told[-1])
    return next((one for one in causes if one.secret), causes[-1])


_EXEC = re.compile(r'exec: "(?P<file>[^"]+)"')
FORMAT = re.compile(r"exec (?P<file>[^\s:]+): exec format error")

_STARTS = (
    *_CONFIGURATION,
    Rule(
        r'error mounting "[^"]*" to rootfs at "(?P<place>[^"]+)"',
        "a volume cannot be mounted at {place!r} in this image: {said}",
        "choose another path for this volume",
    ),
    Rule(
        "OOM-killed|/memory.max",  # which the runtime could not set so low
        "out of memory before the program began: its memory limit{limit} is too low",
        reason=Reason.OUT_OF_MEMORY,
    ),
    Rule(
        r"unable to find (?P<kind>user|group) (?P<name>[^\s:]+)",
        "{kind} {name!r} is not in the image",
        "correct KINETIC_RUN_AS_USER, or the USER of the image",
    ),
    Rule(
        "nvidia-container|nvml",
        "the node's GPU driver is not ready: {said}",
        "run it again; tell the cluster's administrator if it stays",
    ),
    Rule(
        "exec format error",
        "{file!r} is built for another processor than the node has",
        "build the image for the node's architecture",
    ),
    Rule(
        r'exec: "[^"]+".*(not found in \$?PATH|no such file or directory)',
        "command {file!r} is not in the image",
        "correct the command or the image",
    ),
    Rule(
        r'exec: "[^"]+".*permission denied',
        "{file!r} is in the image but may not be executed (permission denied)",
        "make the command executable, or call its interpreter",
    ),
)


def start_failure(one: Container, text: str) -> Cause:
    """Return why a container could not be made, or its process not be started."""
    called = _EXEC.search(text) or FORMAT.search(text)
    facts = {
        "file": called["file"] if called else "the command",
        "limit": f" of {one.memory}" if one.memory else "",
        "said": one_line(text),
    }
    what = f"container {one.name!r} could not be started"
    return known(_STARTS, text, **facts) or quoted(what, text)
