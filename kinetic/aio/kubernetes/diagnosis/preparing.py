"""A pod that has a node and no container yet: its volumes, its sandbox, its image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.advice import next_step
from kinetic.aio.kubernetes.diagnosis.containers import informative_end
from kinetic.aio.kubernetes.diagnosis.documents import Document, part, parts
from kinetic.aio.kubernetes.diagnosis.rules import Finding, Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Outlook

__all__ = ["missing", "preparing"]

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


def preparing(events: Sequence[Document], spec: Document) -> Finding | None:
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
            return Finding(
                message=f"the node's network is not ready yet: {one_line(_said(event))}",
                advice="it is tried again; tell the cluster's administrator if it stays",
                reason=None,
                outlook=Outlook.OPEN,
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


def _volumes(told: Sequence[str], spec: Document) -> Finding | None:
    """The most that is said of volumes: one event names the cause, the next only that it lasts."""
    if not told:
        return None
    absent = list(dict.fromkeys(one[0] for said in told if (one := missing(said))))
    if absent:
        volume = "its volume" if len(absent) == 1 else "their volumes"
        advice = next(one[1] for said in told if (one := missing(said)))
        return Finding(
            message=f"{', '.join(absent)}: {volume} cannot be mounted",
            advice=advice,
        )
    for said in reversed(told):
        if found := first(_CAUSES, said):
            return _of(said, found, spec)
    specific = [said for said in told if not _VOLUMES.search(said)]
    return _vague((specific or told)[-1], spec)


def _of(said: str, found: Finding, spec: Document) -> Finding:
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


def _vague(said: str, spec: Document) -> Finding:
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
    return Finding(message=words, advice=advice)


_WAIT = "wait for the other pod to end, or use a volume that many nodes may have"

_CAUSES = (
    Rule(
        r'Multi-Attach error for volume "(?P<name>[^"]+)"'
        r"(?P<by>.*?used by pod\(s\) (?P<pods>[^,]+(?:, [^,]+)*))?",
        judge=lambda found: Finding(
            message=f"volume {found['name']!r} is in use"
            f"{' by pod ' + found['pods'] if found['pods'] else ''} on another node, and can be "
            "attached to one node only: it waits for that",
            advice=_WAIT,
            outlook=Outlook.OPEN,
        ),
    ),
    Rule(
        r"already being used by instance '?(?P<instance>[\w-]+)",
        "a disk is in use by instance {instance}, and can be attached to one node only: it waits "
        "for that",
        _WAIT,
        outlook=Outlook.OPEN,
    ),
    Rule(
        "resourceInUseByAnotherResource",
        "a disk is in use, and can be attached to one node only: it waits for that",
        _WAIT,
        outlook=Outlook.OPEN,
    ),
    Rule(
        r"driver name (?P<name>\S+) not found",
        "the node has no storage driver {name}: its volume cannot be mounted",
        "enable the add-on on the cluster",
    ),
    Rule(
        r"failed to find the sidecar container|sidecar container \S* ?not found",
        "a bucket cannot be mounted: the pod has no gcsfuse sidecar, which GKE puts beside pods "
        "that are annotated",
        'set the annotation gke-gcsfuse/volumes: "true" on the pod',
    ),
    Rule(
        r"references non-existent config key: (?P<key>\S+)",
        "the ConfigMap of a volume has no key {key!r}: it cannot be mounted",
        "add it or correct the name; the pod starts by itself then",
    ),
    Rule(
        r"references non-existent secret key: (?P<key>\S+)",
        "the Secret of a volume has no key {key!r}: it cannot be mounted",
        "add it or correct the name; the pod starts by itself then",
    ),
    Rule(
        r"bucket (doesn't|does not) exist.*|NotFound desc = .*bucket.*|bucket not found.*",
        "the bucket of a volume does not exist: {all}",
        "create it or correct the name",
    ),
    Rule(
        r"(PermissionDenied|Unauthenticated|Error 40[13]|\b403 Forbidden).*",
        "a volume cannot be mounted, for it may not be read: {all}",
        "give the pod's service account the right to read it (for a bucket: "
        "roles/storage.objectUser)",
    ),
    Rule(
        r"failed to sync (configmap|secret) cache.*|object \S+ not registered",
        "the node has not read the ConfigMaps and Secrets of the pod's volumes yet ({all})",
        "it is tried again; this is not an error",
        None,
        Outlook.OPEN,
    ),
)


def _sandbox(said: str) -> Finding:
    if runtime := _RUNTIME.search(said):
        return Finding(
            message=f"the node cannot make the pod's sandbox: runtime {runtime['name']!r} is not "
            "configured on it",
            advice="use a node pool that has it, or no RuntimeClass",
        )
    return Finding(
        message=f"the node cannot make the pod's sandbox: {informative_end(said)}",
        advice="it is tried again; tell the cluster's administrator if it stays",
        outlook=Outlook.OPEN,
    )
