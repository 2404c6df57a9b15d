"""Why an image cannot be pulled, from what kubelet and container runtime say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.advice import next_step
from kinetic.aio.kubernetes.diagnosis.verdict import Outlook

__all__ = ["IMAGE_REASONS", "PullFailure", "pull_failure"]

IMAGE_REASONS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
        "ErrImagePullBackOff",
    }
)

_QUOTED = re.compile(r'"[^"]*"')
# The first that matches is the cause. Words that registries and runtimes share, not sentences;
# what stands in quotes, and the image's own name, is left out before.
_CAUSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(pattern, re.IGNORECASE))
    for cause, pattern in (
        ("platform", r"no match for platform|no matching manifest|exec format error"),
        ("crowded", r"\bqps exceeded"),
        ("throttled", r"too ?many ?requests|\b429\b|rate limit"),
        (
            "either",
            (
                r"does not exist or may require|requested access to the resource is denied"
                r"|or it may not exist"
            ),
        ),
        (
            "refused",
            (
                r"unauthori[sz]ed|\b40[13]\b|forbidden|failed to authorize: .*\b4\d\d\b|denied"
                r"|no basic auth|insufficient_scope|authentication required"
                r"|authorization failed|permission"
            ),
        ),
        ("full", r"no space left"),
        ("untrusted", r"x509|certificate"),
        ("plain", r"server gave http response"),
        (
            "unreachable",
            (
                r"connection (refused|reset)|no such host|i/o timeout|timed? ?out|\btls\b"
                r"|network is unreachable|no route|server misbehaving|\beof\b"
                r"|deadline exceeded|\bdial\b|registry is unavailable"
            ),
        ),
        ("failing", r"\b50[0-9]\b|internal server error|bad gateway|service unavailable"),
        (
            "absent",
            (
                r"not ?found|manifest[ _]?unknown|name[ _]?unknown|does not exist"
                r"|repository .* unknown|\b404\b"
            ),
        ),
        ("refused", r"failed to authorize|denied"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullFailure:
    """What is wrong with an image, and whether waiting may help."""

    message: str
    advice: str
    outlook: Outlook


def pull_failure(
    reason: str, text: str, image: str, *, secret: str = "", arch: str = "amd64"
) -> PullFailure:
    """Judge the failed pull of *image*.

    Args:
        reason: The waiting container's reason, such as ``ImagePullBackOff``.
        text: What the runtime says.
        image: The image's name as it was asked for.
        secret: Pull Secrets that could not be read, if any.
        arch: The architecture of the node.
    """
    if reason == "InvalidImageName":
        return PullFailure(
            message=f"{image!r} is not a valid image name: {_tail(text)}",
            advice="correct the name; it never resolves by waiting",
            outlook=Outlook.FINAL,
        )
    if reason == "ErrImageNeverPull":
        return PullFailure(
            message=f"the image {image} is not on the node, and imagePullPolicy Never forbids "
            "to pull it",
            advice="put the image on the nodes, or let it be pulled",
            outlook=Outlook.BLOCKED,
        )
    cause = _cause(text, image)
    if secret and cause in ("refused", "either", ""):
        return PullFailure(
            message=f"the pull Secret {secret!r} does not exist, and the registry of {image} "
            "refuses without it",
            advice=f"create the Secret {secret!r} in the job's namespace, or correct its name",
            outlook=Outlook.BLOCKED,
        )
    return _told(cause, image, text, arch)


def _told(cause: str, image: str, text: str, arch: str) -> PullFailure:
    registry = _registry(image)
    match cause:
        case "platform":
            words = f"the image {image} has no variant for linux/{arch}"
            advice = f"build it for the node's architecture (linux/{arch})"
            return PullFailure(message=words, advice=advice, outlook=Outlook.FINAL)
        case "absent":
            words = f"the image {image} does not exist in its registry ({registry})"
            advice = "build and push it, or correct the name or tag"
            return PullFailure(message=words, advice=advice, outlook=Outlook.FINAL)
        case "either":
            words = f"the image {image} does not exist, or the nodes may not read it"
            advice = "correct the name, or give the nodes' service account the reader role"
        case "refused":
            words = f"the nodes may not read the image {image} from {registry}"
            advice = (
                "give the nodes' service account the reader role there "
                "(roles/artifactregistry.reader); the image itself may exist"
            )
        case "throttled":
            words = f"the registry {registry} limits how often {image} may be pulled"
            advice = "it is tried again; a copy in a registry of your own avoids it"
            return PullFailure(message=words, advice=advice, outlook=Outlook.OPEN)
        case "crowded":
            words = f"the node pulls as many images as it may just now, and {image} later"
            advice = "it is tried again; this is not an error"
            return PullFailure(message=words, advice=advice, outlook=Outlook.OPEN)
        case "full":
            words = f"the node has no space left for the image {image}"
            advice = "use a smaller image or a node with a larger boot disk"
        case "untrusted":
            words = (
                f"the registry {registry} cannot be reached safely, for the nodes do not trust "
                f"its certificate: {_tail(text)}"
            )
            advice = "use a registry with a public certificate, or have the nodes trust it"
        case "plain":
            words = f"the registry {registry} speaks plain HTTP, and the nodes want HTTPS"
            advice = "give the registry a certificate, or have the nodes allow plain HTTP for it"
        case "failing":
            words = f"the registry {registry} answers with an error of its own: {_tail(text)}"
            advice = "it is tried again; see whether the registry works"
            return PullFailure(message=words, advice=advice, outlook=Outlook.OPEN)
        case "unreachable":
            words = f"the registry {registry} cannot be reached from the nodes: {_tail(text)}"
            advice = f"check that the name {registry!r} is right and reachable from the nodes"
        case _:
            words = f"the image {image} cannot be pulled: {_tail(text)}"
            advice = next_step(text, "correct the image's name, or see what the registry says")
    return PullFailure(message=words, advice=advice, outlook=Outlook.BLOCKED)


def _registry(image: str) -> str:
    """The host part of an image's name; one without a host is of Docker Hub."""
    first, slash, _ = image.partition("/")
    is_host = slash and (set(first) & set(".:") or first == "localhost")
    return first if is_host else "docker.io"


def _cause(text: str, image: str) -> str:
    bare = _QUOTED.sub(" ", text).replace(image, " ")
    return next((cause for cause, pattern in _CAUSES if pattern.search(bare)), "")


def _tail(text: str) -> str:
    """The end of a chain of wrapped errors, which is its cause."""
    parts = [part.strip() for part in text.split(": ") if part.strip()]
    return one_line(": ".join(parts[-2:]), 400)
