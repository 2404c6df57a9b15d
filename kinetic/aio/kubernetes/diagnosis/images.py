"""Find why an image can't be pulled, from messages of the kubelet and the container runtime."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook, Rule, gist, quote_message
from kinetic.aio.kubernetes.diagnosis.documents import get_dict
from kinetic.aio.kubernetes.diagnosis.facts import Container, Pod
from kinetic.job_status import Reason

_GRANT = "give the nodes' service account the reader role there (roles/artifactregistry.reader)"
_blocked_rule = partial(Rule, reason=Reason.IMAGE_PULL)
_final_rule = partial(_blocked_rule, outlook=Outlook.FINAL)

_RULES = (
    _final_rule("^InvalidImageName:", "correct the name; waiting does not help"),
    _final_rule(
        r"no match for platform|no matching manifest|exec format error",
        "build it for the node's architecture (linux/{arch})",
    ),
    _blocked_rule(
        r"too ?many ?requests|\b429\b|rate limit",
        "wait, or use a copy in your own registry: this one limits how often it may be pulled",
        outlook=Outlook.OPEN,
    ),
    _blocked_rule(
        r"does not exist or may require|requested access to the resource is denied"
        r"|or it may not exist",
        f"correct the name, or {_GRANT}",
    ),
    _final_rule(
        r"fetch oauth token: .*\b404\b",
        "create the repository and push the image, or correct the name",
    ),
    _blocked_rule(
        r"unauthori[sz]ed|\b40[13]\b|forbidden|failed to authorize: .*\b4\d\d\b|denied"
        r"|no basic auth|insufficient_scope|authentication required|authorization failed"
        r"|permission",
        f"{_GRANT}; the image itself may exist",
    ),
    _blocked_rule(
        r"connection (refused|reset)|no such host|i/o timeout|timed? ?out"
        r"|network is unreachable|no route|server misbehaving|deadline exceeded|\bdial\b"
        r"|registry is unavailable",
        "check that the registry's name is right and that the nodes can reach it",
    ),
    _final_rule(
        r"not ?found|manifest[ _]?unknown|name[ _]?unknown|does not exist|repository .* unknown"
        r"|\b404\b",
        "build and push it, or correct the name or tag",
    ),
)
"""Rules for a text "REASON: message" without quoted parts and without the image's name."""


def pull_failure(pod: Pod, container: Container, reason: str, message: str) -> Cause:
    """Return why *container* has no image, by its state's *reason* and *message*."""
    image = str(container.spec.get("image") or container.status.get("image") or "")
    # If the message only says that the node waits, an earlier event has the cause.
    if not message or (message.startswith("Back-off") and ": " not in message):
        earlier = [str(event.get("message") or "") for event in pod.events("Failed")]
        message = next((text for text in reversed(earlier) if image in text), message or reason)
    selector = get_dict(pod.spec, "nodeSelector")
    arch = str(selector.get("kubernetes.io/arch") or "amd64")
    summary = f"the image {image} cannot be pulled"
    unquoted = re.sub(r'"[^"]*"', " ", message).replace(image, " ")
    text, quote = f"{reason}: {unquoted}", gist(message)
    cause = quote_message(summary, text, _RULES, _blocked_rule(""), quote=quote, arch=arch)
    cause = replace(cause, more=[gist(pod.last_message("FailedToRetrieveImagePullSecret"))])
    if container in pod.programs:
        return cause
    # The user didn't choose this image, and an administrator may fix it while the pod waits.
    summary = f"container {container.name!r}, which the cluster added to the pod: {cause.summary}"
    advice = (
        f"tell the cluster's administrator ({cause.next_step}), or set KINETIC_POD_ANNOTATIONS to "
        "the annotation that keeps that container out of kinetic's pods"
    )
    outlook = Outlook.BLOCKED
    return replace(cause, summary=summary, advice=advice, reason=Reason.SETUP, outlook=outlook)
