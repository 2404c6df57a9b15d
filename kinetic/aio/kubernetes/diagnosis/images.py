"""Why an image cannot be pulled, from what kubelet and container runtime say of it."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from kinetic.aio.kubernetes.diagnosis.causes import cause, explained
from kinetic.aio.kubernetes.diagnosis.documents import part, parts
from kinetic.aio.kubernetes.diagnosis.pods import Container, Pod
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

_READER = "give the nodes' service account the reader role there (roles/artifactregistry.reader)"
_UNREAD = (f"{_READER}; the image itself may exist", f"correct the name, or {_READER}")
_blocked = partial(Rule, reason=Reason.IMAGE_PULL)
_final = partial(_blocked, outlook=Outlook.FINAL)
_open = partial(_blocked, outlook=Outlook.OPEN)

# Of ``REASON: words``, such as registries and runtimes share, for their sentences differ; what
# stands in quotes, and the image's own name, is left out before.
_CAUSES = (
    _final(
        "^InvalidImageName:",
        "{image!r} is not a valid image name: {end}",
        "correct the name; it never resolves by waiting",
    ),
    _blocked(
        "^ErrImageNeverPull:",
        "the image {image} is not on the node, and imagePullPolicy Never forbids to pull it",
        "put the image on the nodes, or let it be pulled",
    ),
    _final(
        r"no match for platform|no matching manifest|exec format error",
        "the image {image} has no variant for linux/{arch}",
        "build it for the node's architecture (linux/{arch})",
    ),
    _open(
        r"\bqps exceeded",
        "the node pulls as many images as it may just now, and {image} later",
        "it is tried again; this is not an error",
    ),
    _open(
        r"too ?many ?requests|\b429\b|rate limit",
        "the registry {registry} limits how often {image} may be pulled",
        "it is tried again; a copy in a registry of your own avoids it",
    ),
    _blocked(
        r"does not exist or may require|requested access to the resource is denied"
        r"|or it may not exist",
        "the image {image} does not exist, or the nodes may not read it",
        _UNREAD[1],
    ),
    _final(
        r"fetch oauth token: .*\b404\b",
        "the image {image} does not exist: its repository is not in {registry}",
        "make the repository and push the image, or correct the name",
    ),
    _blocked(
        r"unauthori[sz]ed|\b40[13]\b|forbidden|failed to authorize: .*\b4\d\d\b|denied"
        r"|no basic auth|insufficient_scope|authentication required|authorization failed"
        r"|permission",
        "the nodes may not read the image {image} from {registry}",
        _UNREAD[0],
    ),
    _blocked(
        "no space left",
        "the node has no space left for the image {image}",
        "use a smaller image or a node with a larger boot disk",
    ),
    _blocked(
        "x509|certificate",
        "{failed}: the registry {registry} cannot be reached safely, for the nodes do not trust "
        "its certificate: {end}",
        "use a registry with a public certificate, or have the nodes trust it",
    ),
    _blocked(
        "server gave http response|first record does not look like a tls handshake",
        "{failed}: the registry {registry} speaks plain HTTP, and the nodes want HTTPS",
        "give the registry a certificate, or have the nodes allow plain HTTP for it",
    ),
    _blocked(
        r"connection (refused|reset)|no such host|i/o timeout|timed? ?out|\btls\b"
        r"|network is unreachable|no route|server misbehaving|deadline exceeded|\bdial\b"
        r"|registry is unavailable",
        "{failed}: the registry {registry} cannot be reached from the nodes: {end}",
        "check that the name {registry!r} is right and reachable from the nodes",
    ),
    _open(
        r"\beof\b|connection closed|broken pipe",
        "{failed}: the registry {registry}, or the network, breaks off the download: {end}",
        "it is tried again; see how the registry works, or push the image again",
    ),
    _open(
        r"\b50[0-9]\b|internal server error|bad gateway|service unavailable",
        "{failed}: the registry {registry} answers with an error of its own: {end}",
        "it is tried again; see whether the registry works",
    ),
    _final(
        r"not ?found|manifest[ _]?unknown|name[ _]?unknown|does not exist|repository .* unknown"
        r"|\b404\b",
        "the image {image} does not exist in its registry ({registry})",
        "build and push it, or correct the name or tag",
    ),
)


def unpulled(pod: Pod, one: Container, reason: str, said: str) -> Diagnosis:
    """Judge what *said* tells of the image of a container, or else the events on its *pod*."""
    image = str(one.spec.get("image") or one.status.get("image") or "")
    if not said or (said.startswith("Back-off") and ": " not in said):
        earlier = [str(event.get("message") or "") for event in pod.events("Failed")]
        said = next((text for text in reversed(earlier) if image in text), said or reason)
    names = re.search(r"\(([^)]*)\)", pod.last_said("FailedToRetrieveImagePullSecret"))
    chosen, given = part(pod.spec, "nodeSelector"), part(part(pod.node, "metadata"), "labels")
    arch = str({**given, **chosen}.get("kubernetes.io/arch") or "amd64")
    found = pull_failure(reason, said, image, secret=names[1] if names else "", arch=arch)
    shown = ", ".join(repr(str(one.get("name"))) for one in parts(pod.spec, "imagePullSecrets"))
    if shown and found.advice in _UNREAD:
        advice = f"correct the credentials in pull Secret {shown}; the image itself may exist"
        return replace(found, advice=advice)
    return found


def pull_failure(
    reason: str, text: str, image: str, *, secret: str = "", arch: str = "amd64"
) -> Diagnosis:
    """Judge the failed pull of *image*, by its container's *reason* and the runtime's words.

    *secret* are pull Secrets that could not be read, *arch* is that of the node.
    """
    host, slash, _ = image.partition("/")  # a name without a host is of Docker Hub
    registry = host if slash and (set(host) & set(".:") or host == "localhost") else "docker.io"
    failed, bare = f"the image {image} cannot be pulled", re.sub(r'"[^"]*"', " ", text)
    facts = {"image": image, "registry": registry, "arch": arch, "failed": failed}
    found = first(_CAUSES, f"{reason}: {bare.replace(image, ' ')}", end=cause(text), **facts)
    if secret and (found is None or found.advice in _UNREAD):
        return pending(
            f"the pull Secret {secret!r} does not exist, and the registry of {image} refuses "
            "without it",
            f"create the Secret {secret!r} in the job's namespace, or correct its name",
            Reason.IMAGE_PULL,
            Outlook.BLOCKED,
        )
    otherwise = "correct the image's name, let the nodes read it, or see what the registry says"
    return found or explained((), text, failed, otherwise, Reason.IMAGE_PULL)
