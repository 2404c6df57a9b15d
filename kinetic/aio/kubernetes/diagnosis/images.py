"""Why an image cannot be pulled, in the words of kubelet and container runtime."""

from __future__ import annotations

import re
from functools import partial

from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook, Rule, gist, known, quoted
from kinetic.aio.kubernetes.diagnosis.documents import part
from kinetic.aio.kubernetes.diagnosis.facts import Container, Pod
from kinetic.job_status import Reason

_READER = "give the nodes' service account the reader role there (roles/artifactregistry.reader)"
_blocked = partial(Rule, reason=Reason.IMAGE_PULL)
_final = partial(_blocked, outlook=Outlook.FINAL)
_open = partial(_blocked, outlook=Outlook.OPEN)

_UNREADABLE = (
    _blocked(
        r"does not exist or may require|requested access to the resource is denied"
        r"|or it may not exist",
        "the image {image} does not exist, or the nodes may not read it",
        f"correct the name, or {_READER}",
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
        f"{_READER}; the image itself may exist",
    ),
)

# Of ``REASON: words``. Quoted text and the image's own name are left out before.
_CAUSES = (
    _final(
        "^InvalidImageName:",
        "{image!r} is not a valid image name: {end}",
        "correct the name; it never resolves by waiting",
    ),
    _final(
        r"no match for platform|no matching manifest|exec format error",
        "the image {image} has no variant for linux/{arch}",
        "build it for the node's architecture (linux/{arch})",
    ),
    _open(
        r"too ?many ?requests|\b429\b|rate limit",
        "the registry {registry} limits how often {image} may be pulled",
        "it is tried again; a copy in a registry of your own avoids it",
    ),
    *_UNREADABLE,
    _blocked(
        r"connection (refused|reset)|no such host|i/o timeout|timed? ?out"
        r"|network is unreachable|no route|server misbehaving|deadline exceeded|\bdial\b"
        r"|registry is unavailable",
        "{failed}: the registry {registry} cannot be reached from the nodes: {end}",
        "check that the name {registry!r} is right and reachable from the nodes",
    ),
    _final(
        r"not ?found|manifest[ _]?unknown|name[ _]?unknown|does not exist|repository .* unknown"
        r"|\b404\b",
        "the image {image} does not exist in its registry ({registry})",
        "build and push it, or correct the name or tag",
    ),
)


def unpulled(pod: Pod, one: Container, reason: str, said: str) -> Cause:
    """Return why *one* of *pod* has no image: *said* tells, or else the events on its pod."""
    image = str(one.spec.get("image") or one.status.get("image") or "")
    if not said or (said.startswith("Back-off") and ": " not in said):
        earlier = [str(event.get("message") or "") for event in pod.events("Failed")]
        said = next((text for text in reversed(earlier) if image in text), said or reason)
    names = re.search(r"\(([^)]*)\)", pod.last_said("FailedToRetrieveImagePullSecret"))
    chosen, given = part(pod.spec, "nodeSelector"), part(part(pod.node, "metadata"), "labels")
    arch = str({**given, **chosen}.get("kubernetes.io/arch") or "amd64")
    return pull_failure(reason, said, image, secret=names[1] if names else "", arch=arch)


def pull_failure(
    reason: str, text: str, image: str, *, secret: str = "", arch: str = "amd64"
) -> Cause:
    """Return why *image* was not pulled, from its container's *reason* and the runtime's words.

    *secret* are pull Secrets that could not be read, *arch* is the node's architecture.
    """
    host, slash, _ = image.partition("/")  # a name without a host is of Docker Hub
    registry = host if slash and (set(host) & set(".:") or host == "localhost") else "docker.io"
    failed, bare = f"the image {image} cannot be pulled", re.sub(r'"[^"]*"', " ", text)
    said = f"{reason}: {bare.replace(image, ' ')}"
    facts = {"image": image, "registry": registry, "arch": arch, "failed": failed}
    found = known(_CAUSES, said, end=gist(text), **facts)
    if secret and (found is None or found == known(_UNREADABLE, said, **facts)):
        return Cause(
            what=f"the pull Secret {secret!r} does not exist, and the registry of {image} refuses "
            "without it",
            advice=f"create the Secret {secret!r} in the job's namespace, or correct its name",
            reason=Reason.IMAGE_PULL,
            outlook=Outlook.BLOCKED,
        )
    return found or quoted(failed, text, Reason.IMAGE_PULL)
