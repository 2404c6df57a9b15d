"""Find why a node doesn't start a pod's containers: volumes, sandbox, configuration, process."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook, Rule, quote_message
from kinetic.aio.kubernetes.diagnosis.facts import Container, Pod
from kinetic.aio.kubernetes.diagnosis.images import pull_failure
from kinetic.job_status import Reason

REPLACED = "wait: Kubernetes replaces the pod if the node does not come back"


def why_not_started(pod: Pod) -> Cause | None:
    """Return why a pod that has a node does not run; None if neither state nor events say why."""
    if pod.node_silent or pod.node_removed:
        problem = "does not exist" if pod.node_removed else "does not answer"
        summary = f"its node {pod.spec.get('nodeName')} {problem}, so nothing starts it"
        return Cause(summary=summary, reason=Reason.NODE_LOST, advice=REPLACED)
    containers = sorted(pod.containers, key=lambda container: container not in pod.programs)
    causes = (container_obstacle(pod, container) for container in containers)
    cause = next((cause for cause in causes if cause is not None), None) or _preparation_cause(pod)
    return cause or _predecessor_cause(pod)


def _predecessor_cause(pod: Pod) -> Cause | None:
    """Return which container the program waits for, because that one starts first; else None."""
    for container in pod.containers:
        is_ready = container.is_sidecar and container.status.get("started")
        if container.init and container.state("running") is not None and not is_ready:
            summary = f"container {container.name!r} runs, and the program starts after it"
            if container.is_sidecar:
                summary = f"the program waits for container {container.name!r}, which isn't ready"
            log = f"kubectl logs {pod.metadata.get('name')} -c {container.name}"
            return Cause(summary=summary, advice=f"wait, or see that container's log ({log})")
    return None


_IMAGE_REASONS = re.compile("Image|Registry|Signature")
"""The words in a container's reasons that are about its image."""

_SLOW = re.compile(r"failed to sync \w+ cache|context deadline exceeded|is reserved for")
"""Messages about a delay that ends by itself."""


def container_obstacle(pod: Pod, container: Container) -> Cause | None:
    """Return what keeps *container* from starting, by its state; None for no obstacle."""
    waiting = container.state("waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason in ("", "ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
        return None
    if _IMAGE_REASONS.search(reason):
        return pull_failure(pod, container, reason, message)
    if reason.startswith("CreateContainer") and _SLOW.search(message):
        summary = f"the node has not created container {container.name!r} yet: {one_line(message)}"
        advice = "wait; tell the cluster's administrator if this persists"
        return Cause(summary=summary, advice=advice)
    return start_failure(container, message or reason)


# --- before there are containers ------------------------------------------------------------

_PROGRESS = ("Pulling", "Pulled", "Created", "Started")
"""Events after which earlier failures are over: volumes are mounted and the sandbox exists."""

_VOLUME_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")


def _preparation_cause(pod: Pod) -> Cause | None:
    """Return what keeps the node from creating the pod's containers; None if no event says so."""
    unresolved: list[tuple[str, str]] = []
    for event in pod.events():
        reason, message = str(event.get("reason")), str(event.get("message") or "")
        unresolved = [] if reason in _PROGRESS else unresolved
        unresolved.append((reason, message))
    if volumes := [message for reason, message in unresolved if reason in _VOLUME_EVENTS]:
        return _mount_cause(pod, volumes)
    for reason, message in reversed(unresolved):
        if reason.startswith(("FailedCreatePod", "FailedPrepare", "FailedSync", "NetworkNot")):
            summary = f"the node cannot prepare the pod ({reason})"
            return quote_message(summary, message, _PREPARATION_RULES)
        if reason == "Failed" and re.search("(secret|map) .* not found|runAsNonRoot", message):
            return quote_message("its container cannot be created", message, _START_RULES)
    return _pull_cause(pod, unresolved)


def _pull_cause(pod: Pod, events: Sequence[tuple[str, str]]) -> Cause | None:
    """Return the cause if *events* show that an image is being pulled, or can't be; else None."""
    pulls = [
        (reason, match[1])
        for reason, message in events
        if reason in ("Pulling", "Failed")
        and (match := re.search(r'[Pp]ull(?:ing)? image "([^"]+)"', message))
    ]
    if not pulls:
        return None
    reason, image = pulls[-1]
    if reason == "Pulling":
        return Cause(summary=f"pulling the image {image}")
    failing = (found for found in pod.containers if found.spec.get("image") == image)
    return next((pull_failure(pod, found, "ErrImagePull", "") for found in failing), None)


LACKS_DRIVER = re.compile(r"driver name (\S+) not found")
"""The message of a node that lacks the storage driver of a volume."""

_ENABLE = "enable the Cloud Storage FUSE CSI driver on the cluster, which also adds the sidecar"

_NO_SECRET = Rule(
    r'secrets? "?(?P<secret>[^\s"]+)"? not found', "create the Secret or correct its name"
)

_PREPARATION_RULES = (
    _NO_SECRET,
    Rule(f"{LACKS_DRIVER.pattern}|find the sidecar container", _ENABLE),
    Rule(
        "Multi-Attach error",
        "wait until no other node uses the volume, or use a claim with the access mode "
        "ReadWriteMany (KINETIC_STORE_CLAIM)",
        outlook=Outlook.OPEN,
    ),
    Rule(
        "hostPath type check failed",
        "mount the store's volume on that node, at the same path; or use a claim: "
        "KINETIC_STORE_CLAIM",
    ),
    Rule(
        r"bucket (doesn't|does not) exist|NotFound desc = .*bucket|bucket not found",
        "create the bucket or correct its name",
    ),
    Rule(
        r"PermissionDenied|Unauthenticated|Error 40[13]|\b403 Forbidden",
        "give the pod's service account roles/storage.objectUser on the bucket",
    ),
    Rule(
        r"failed to sync (configmap|secret) cache|object \S+ not registered",
        "wait; this isn't an error",
        reason=None,
        outlook=Outlook.OPEN,
    ),
)


def _mount_cause(pod: Pod, messages: Sequence[str]) -> Cause:
    """Return why volumes aren't mounted, by the *messages* of events, which may name no cause."""
    messages = [message for message in messages if "unmounted volumes=" not in message] or messages
    lacking = [name for message in messages for name in LACKS_DRIVER.findall(message)]
    if any(name in pod.facts.absent for name in lacking):
        summary = f"a volume cannot be mounted: the cluster has no storage driver {lacking[0]}"
        advice = f"{_ENABLE}, or omit fuse=True"
        return Cause(summary=summary, advice=advice, reason=Reason.SETUP, outlook=Outlook.FINAL)
    summary = "a volume cannot be mounted"
    causes = [quote_message(summary, message, _PREPARATION_RULES) for message in messages]
    return next((cause for cause in causes if cause.secret), causes[-1])


# --- the first process ----------------------------------------------------------------------

EXEC_FORMAT_ERROR = re.compile(r"exec \S+: exec format error")

_START_RULES = (
    _NO_SECRET,
    Rule(
        "breaks non-root policy|runAsNonRoot",
        "set KINETIC_RUN_AS_USER (runAsUser), or a numeric USER in the image",
        outlook=Outlook.FINAL,
    ),
    Rule(  # the limit is below the memory that the runtime itself needs
        "OOM-killed|/memory.max",
        "it ran out of memory before the program began: raise memory=",
        reason=Reason.OUT_OF_MEMORY,
    ),
    Rule("unable to find (user|group)", "correct KINETIC_RUN_AS_USER, or the USER of the image"),
    Rule("exec format error", "build the image for the architecture of the node"),
    Rule(
        'exec: "python3": executable file not found',
        "the image has no python3 on its PATH: choose one with Python, such as python:3.12-slim",
    ),
    Rule(r'exec: "[^"]+"|exec \S+: ', "correct the command or the image"),
)


def start_failure(container: Container, text: str) -> Cause:
    """Return why *container* wasn't created, or why its process wasn't started."""
    return quote_message(f"container {container.name!r} could not be started", text, _START_RULES)
