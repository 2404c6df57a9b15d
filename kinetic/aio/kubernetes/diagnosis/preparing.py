"""A pod that has a node and no container yet: its volumes, its sandbox, its image."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.advice import next_step
from kinetic.aio.kubernetes.diagnosis.containers import informative_end
from kinetic.aio.kubernetes.diagnosis.documents import Document, part, parts
from kinetic.aio.kubernetes.diagnosis.verdict import Outlook
from kinetic.job_status import Reason

__all__ = ["Obstacle", "missing", "preparing"]

_MISSING = re.compile(
    r"(?P<kind>configmap|secret|persistentvolumeclaim|serviceaccount)s?"
    r' "?(?P<name>[^\s"]+)"? not found',
    re.IGNORECASE,
)
_KEY_MISSING = re.compile(
    r"couldn't find key (?P<key>\S+) in (?P<kind>ConfigMap|Secret) (?P<name>\S+)", re.IGNORECASE
)
_KINDS = {
    "configmap": "ConfigMap",
    "secret": "Secret",
    "persistentvolumeclaim": "PersistentVolumeClaim",
    "serviceaccount": "ServiceAccount",
}
_VOLUME = re.compile(r'failed for volume "(?P<name>[^"]+)" ?: (?P<why>.*)', re.DOTALL)
_VOLUMES = re.compile(r"unmounted volumes=\[(?P<names>[^\]]*)\]")
_RUNTIME = re.compile(r'no runtime for "?(?P<name>[^"\s]+)"? is configured')

# Once one of these is told, what went wrong before is over: volumes and sandbox come first.
_PROGRESS = ("Pulling", "Pulled", "Created", "Started")


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """What keeps a container from being made, and whether waiting may help."""

    message: str
    reason: Reason | None = None
    advice: str = ""
    outlook: Outlook = Outlook.OPEN


def preparing(events: Sequence[Document], spec: Document) -> Obstacle | None:
    """What keeps a pod of this *spec* from being made, by the *events* on it, oldest first."""
    left: list[Document] = []
    for event in events:
        if event.get("reason") in _PROGRESS:
            left = []
        elif event.get("reason") == "SuccessfulAttachVolume":
            left = [one for one in left if one.get("reason") != "FailedAttachVolume"]
        else:
            left.append(event)
    told = [_said(one) for one in left if one.get("reason") in _VOLUME_EVENTS]
    if found := _volumes(told, spec):
        return found
    for event in reversed(left):
        if event.get("reason") == "FailedCreatePodSandBox":
            return _sandbox(_said(event))
        if event.get("reason") == "NetworkNotReady":
            return Obstacle(
                message=f"the node's network is not ready yet: {one_line(_said(event))}",
                advice="it is tried again; tell the cluster's administrator if it stays",
            )
    return None


_VOLUME_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")


def _said(event: Document) -> str:
    return str(event.get("message") or "")


def missing(said: str) -> tuple[str, str] | None:
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


def _volumes(told: Sequence[str], spec: Document) -> Obstacle | None:
    """The most that is said of volumes: one event names the cause, the next only that it lasts."""
    if not told:
        return None
    absent = list(dict.fromkeys(one[0] for said in told if (one := missing(said))))
    if absent:
        volume = "its volume" if len(absent) == 1 else "their volumes"
        advice = next(one[1] for said in told if (one := missing(said)))
        return Obstacle(
            message=f"{', '.join(absent)}: {volume} cannot be mounted",
            reason=Reason.SETUP,
            advice=advice,
            outlook=Outlook.BLOCKED,
        )
    for said in reversed(told):
        for pattern, judge in _CAUSES:
            if found := pattern.search(said):
                return _of(said, judge(found), spec)
    specific = [said for said in told if not _VOLUMES.search(said)]
    return _vague((specific or told)[-1], spec)


def _of(said: str, found: Obstacle, spec: Document) -> Obstacle:
    """*found*, with the name of the volume and of what it is made from."""
    volume = _VOLUME.search(said)
    if volume is None or repr(volume["name"]) in found.message:
        return found
    source = _source(spec, volume["name"])
    of = f" (volume {volume['name']!r}{f', of {source}' if source else ''})"
    return replace(found, message=f"{found.message}{of}")


def _source(spec: Document, volume: str) -> str:
    """What a volume of the pod is made from, by its own words."""
    named = [one for one in parts(spec, "volumes") if one.get("name") == volume]
    for kind, field in _SOURCES.items():
        if named and (name := part(named[0], kind).get(field)):
            return f"{kind[0].upper()}{kind[1:]} {str(name)!r}"
    return ""


_SOURCES = {
    "secret": "secretName",
    "configMap": "name",
    "persistentVolumeClaim": "claimName",
    "hostPath": "path",
    "nfs": "server",
    "csi": "driver",
}


def _vague(said: str, spec: Document) -> Obstacle:
    advice = "correct the volume, or the permission to read it"
    if volume := _VOLUME.search(said):
        source = _source(spec, volume["name"])
        if source.startswith("HostPath"):
            advice = "correct the path or its type: every node that may run it must have it"
        elif source:
            advice = f"see whether {source} is right and can be reached from the nodes"
        words = f"volume {volume['name']!r} cannot be mounted: {one_line(volume['why'], 600)}"
        advice = next_step(volume["why"], advice)
    elif volumes := _VOLUMES.search(said):
        names = ", ".join(repr(name) for name in volumes["names"].split())
        words = f"the volumes {names} are not mounted after a long time, and no cause is told"
        advice = "see the events of the pod and of the volume's claim"
    else:
        words = f"a volume cannot be mounted: {one_line(said, 600)}"
        advice = next_step(said, advice)
    return Obstacle(message=words, reason=Reason.SETUP, advice=advice, outlook=Outlook.BLOCKED)


def _used_elsewhere(found: re.Match[str]) -> Obstacle:
    by = f" by pod {found['pods']}" if found["pods"] else ""
    return Obstacle(
        message=f"volume {found['name']!r} is in use{by} on another node, and can be attached to "
        "one node only: it waits for that",
        reason=Reason.SETUP,
        advice="wait for the other pod to end, or use a volume that many nodes may have",
    )


def _attached_elsewhere(found: re.Match[str]) -> Obstacle:
    by = f" by instance {found['instance']}" if found["instance"] else ""
    return Obstacle(
        message=f"a disk is in use{by}, and can be attached to one node only: it waits for that",
        reason=Reason.SETUP,
        advice="wait for the other pod to end, or use a volume that many nodes may have",
    )


def _no_key(found: re.Match[str]) -> Obstacle:
    kind = "ConfigMap" if found["kind"] == "config" else "Secret"
    return Obstacle(
        message=f"the {kind} of a volume has no key {found['key']!r}: it cannot be mounted",
        reason=Reason.SETUP,
        advice="add it or correct the name; the pod starts by itself then",
        outlook=Outlook.BLOCKED,
    )


def _no_driver(found: re.Match[str]) -> Obstacle:
    return Obstacle(
        message=f"the node has no storage driver {found['name']}: its volume cannot be mounted",
        reason=Reason.SETUP,
        advice="enable the add-on on the cluster",
        outlook=Outlook.BLOCKED,
    )


def _forbidden(found: re.Match[str]) -> Obstacle:
    return Obstacle(
        message=f"a volume cannot be mounted, for it may not be read: {one_line(found[0], 300)}",
        reason=Reason.SETUP,
        advice="give the pod's service account the right to read it (for a bucket: "
        "roles/storage.objectUser)",
        outlook=Outlook.BLOCKED,
    )


def _no_bucket(found: re.Match[str]) -> Obstacle:
    return Obstacle(
        message=f"the bucket of a volume does not exist: {one_line(found[0], 300)}",
        reason=Reason.SETUP,
        advice="create it or correct the name",
        outlook=Outlook.BLOCKED,
    )


def _no_sidecar(found: re.Match[str]) -> Obstacle:
    return Obstacle(
        message="a bucket cannot be mounted: the pod has no gcsfuse sidecar, which GKE puts beside "
        "pods that are annotated",
        reason=Reason.SETUP,
        advice='set the annotation gke-gcsfuse/volumes: "true" on the pod',
        outlook=Outlook.BLOCKED,
    )


def _not_told_yet(found: re.Match[str]) -> Obstacle:
    return Obstacle(
        message="the node has not read the ConfigMaps and Secrets of the pod's volumes yet "
        f"({one_line(found[0])})",
        advice="it is tried again; this is not an error",
    )


_CAUSES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Obstacle]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), judge)
    for pattern, judge in (
        (
            (
                r'Multi-Attach error for volume "(?P<name>[^"]+)"'
                r"(?:.*?used by pod\(s\) (?P<pods>[^,]+(?:, [^,]+)*))?"
            ),
            _used_elsewhere,
        ),
        (
            (
                r"already being used by instance '?(?P<instance>[\w-]+)"
                r"|resourceInUseByAnotherResource"
            ),
            _attached_elsewhere,
        ),
        (r"driver name (?P<name>\S+) not found", _no_driver),
        (r"failed to find the sidecar container|sidecar container \S* ?not found", _no_sidecar),
        (r"references non-existent (?P<kind>config|secret) key: (?P<key>\S+)", _no_key),
        (
            r"bucket (doesn't|does not) exist.*|NotFound desc = .*bucket.*|bucket not found.*",
            _no_bucket,
        ),
        (r"(PermissionDenied|Unauthenticated|Error 40[13]|\b403 Forbidden).*", _forbidden),
        (r"failed to sync (configmap|secret) cache.*|object \S+ not registered", _not_told_yet),
    )
)


def _sandbox(said: str) -> Obstacle:
    if runtime := _RUNTIME.search(said):
        return Obstacle(
            message=f"the node cannot make the pod's sandbox: runtime {runtime['name']!r} is not "
            "configured on it",
            reason=Reason.SETUP,
            advice="use a node pool that has it, or no RuntimeClass",
            outlook=Outlook.BLOCKED,
        )
    return Obstacle(
        message=f"the node cannot make the pod's sandbox: {informative_end(said)}",
        reason=Reason.SETUP,
        advice="it is tried again; tell the cluster's administrator if it stays",
    )
