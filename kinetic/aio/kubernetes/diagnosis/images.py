"""Why an image cannot be pulled, from what kubelet and container runtime say of it."""

from __future__ import annotations

import re

from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first, next_step
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

__all__ = ["IMAGE_REASONS", "pull_failure"]

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

_PULL, _OPEN, _FINAL = Reason.IMAGE_PULL, Outlook.OPEN, Outlook.FINAL
_READER = (
    "give the nodes' service account the reader role there (roles/artifactregistry.reader); the "
    "image itself may exist"
)

_NAME_OR_READER = "correct the name, or give the nodes' service account the reader role"

# By the waiting container's own reason.
_BY_REASON = (
    Rule(
        "^InvalidImageName$",
        "{image!r} is not a valid image name: {tail}",
        "correct the name; it never resolves by waiting",
        _PULL,
        _FINAL,
    ),
    Rule(
        "^ErrImageNeverPull$",
        "the image {image} is not on the node, and imagePullPolicy Never forbids to pull it",
        "put the image on the nodes, or let it be pulled",
        _PULL,
    ),
)

_UNREAD = "the nodes may not read the image {image} from {registry}"

# Words that registries and runtimes share, not sentences; what stands in quotes, and the image's
# own name, is left out before.
_CAUSES = (
    Rule(
        r"no match for platform|no matching manifest|exec format error",
        "the image {image} has no variant for linux/{arch}",
        "build it for the node's architecture (linux/{arch})",
        _PULL,
        _FINAL,
    ),
    Rule(
        r"\bqps exceeded",
        "the node pulls as many images as it may just now, and {image} later",
        "it is tried again; this is not an error",
        _PULL,
        _OPEN,
    ),
    Rule(
        r"too ?many ?requests|\b429\b|rate limit",
        "the registry {registry} limits how often {image} may be pulled",
        "it is tried again; a copy in a registry of your own avoids it",
        _PULL,
        _OPEN,
    ),
    Rule(
        r"does not exist or may require|requested access to the resource is denied"
        r"|or it may not exist",
        "the image {image} does not exist, or the nodes may not read it",
        _NAME_OR_READER,
        _PULL,
    ),
    Rule(
        r"unauthori[sz]ed|\b40[13]\b|forbidden|failed to authorize: .*\b4\d\d\b|denied"
        r"|no basic auth|insufficient_scope|authentication required|authorization failed"
        r"|permission",
        _UNREAD,
        _READER,
        _PULL,
    ),
    Rule(
        r"no space left",
        "the node has no space left for the image {image}",
        "use a smaller image or a node with a larger boot disk",
        _PULL,
    ),
    Rule(
        r"x509|certificate",
        "the image {image} cannot be pulled: the registry {registry} cannot be reached safely, for "
        "the nodes do not trust its certificate: {tail}",
        "use a registry with a public certificate, or have the nodes trust it",
        _PULL,
    ),
    Rule(
        r"server gave http response",
        "the image {image} cannot be pulled: the registry {registry} speaks plain HTTP, and the "
        "nodes want HTTPS",
        "give the registry a certificate, or have the nodes allow plain HTTP for it",
        _PULL,
    ),
    Rule(
        r"connection (refused|reset)|no such host|i/o timeout|timed? ?out|\btls\b"
        r"|network is unreachable|no route|server misbehaving|\beof\b|deadline exceeded|\bdial\b"
        r"|registry is unavailable",
        "the image {image} cannot be pulled: the registry {registry} cannot be reached from the "
        "nodes: {tail}",
        "check that the name {registry!r} is right and reachable from the nodes",
        _PULL,
    ),
    Rule(
        r"\b50[0-9]\b|internal server error|bad gateway|service unavailable",
        "the image {image} cannot be pulled: the registry {registry} answers with an error of its "
        "own: {tail}",
        "it is tried again; see whether the registry works",
        _PULL,
        _OPEN,
    ),
    Rule(
        r"not ?found|manifest[ _]?unknown|name[ _]?unknown|does not exist"
        r"|repository .* unknown|\b404\b",
        "the image {image} does not exist in its registry ({registry})",
        "build and push it, or correct the name or tag",
        _PULL,
        _FINAL,
    ),
    Rule(r"failed to authorize", _UNREAD, _READER, _PULL),
)


def pull_failure(
    reason: str, text: str, image: str, *, secret: str = "", arch: str = "amd64"
) -> Diagnosis:
    """Judge the failed pull of *image*.

    Args:
        reason: The waiting container's reason, such as ``ImagePullBackOff``.
        text: What the runtime says.
        image: The image's name as it was asked for.
        secret: Pull Secrets that could not be read, if any.
        arch: The architecture of the node.
    """
    facts = {"image": image, "registry": _registry(image), "arch": arch, "tail": _tail(text)}
    if found := first(_BY_REASON, reason, **facts):
        return found
    bare = re.sub(r'"[^"]*"', " ", text).replace(image, " ")
    found = first(_CAUSES, bare, **facts)
    if secret and (found is None or found.advice in (_READER, _NAME_OR_READER)):
        return pending(
            f"the pull Secret {secret!r} does not exist, and the registry of {image} refuses "
            "without it",
            f"create the Secret {secret!r} in the job's namespace, or correct its name",
            _PULL,
            Outlook.BLOCKED,
        )
    return found or pending(
        f"the image {image} cannot be pulled: {facts['tail']}",
        next_step(text, "correct the image's name, or see what the registry says"),
        _PULL,
        Outlook.BLOCKED,
    )


def _registry(image: str) -> str:
    """The host part of an image's name; one without a host is of Docker Hub."""
    host, slash, _ = image.partition("/")
    is_host = slash and (set(host) & set(".:") or host == "localhost")
    return host if is_host else "docker.io"


def _tail(text: str) -> str:
    """The end of a chain of wrapped errors, which is its cause."""
    parts = [part.strip() for part in text.split(": ") if part.strip()]
    return both_ends(": ".join(parts[-2:]), 400)
