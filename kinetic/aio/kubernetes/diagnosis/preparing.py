"""What a node does before a program runs: volumes, sandbox, configuration, the first process."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.causes import ABSENT, cause, explained
from kinetic.aio.kubernetes.diagnosis.documents import Document, part, parts
from kinetic.aio.kubernetes.diagnosis.images import unpulled
from kinetic.aio.kubernetes.diagnosis.pods import Container, Pod
from kinetic.aio.kubernetes.diagnosis.quantities import number
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

_passing = partial(Rule, outlook=Outlook.OPEN)
_final = partial(Rule, outlook=Outlook.FINAL)
_STAYS = "it is tried again; tell the cluster's administrator if it stays"
_ADD = "add it or correct the name; the pod starts by itself then"

_CONFIGURATION = (
    *ABSENT,
    Rule(
        r"couldn't find key (?P<key>\S+) in (?P<kind>ConfigMap|Secret) (\S+/)?(?P<name>\S+)",
        "{kind} {name!r} has no key {key!r}",
        _ADD,
    ),
    _final(
        "breaks non-root policy",
        "the pod must not run as root, and its runAsUser is root",
        "set another runAsUser",
    ),
    _final(
        "runAsNonRoot",
        "the pod must not run as root, and the image's user is root or cannot be verified",
        "set runAsUser, or a numeric USER in the image",
    ),
)


# Once one of these is told, what went wrong before is over: volumes and sandbox come first.
_PROGRESS = ("Pulling", "Pulled", "Created", "Started")
_OF_VOLUMES = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")


def preparing(pod: Pod) -> Diagnosis | None:
    """What keeps the containers of *pod* from being made, by the events on it."""
    left: list[tuple[str, str]] = []
    for event in pod.events():
        reason, said = str(event.get("reason")), str(event.get("message") or "")
        if reason in _PROGRESS:
            left = []
        elif reason == "SuccessfulAttachVolume":
            left = [one for one in left if one[0] != "FailedAttachVolume"]
        left.append((reason, said))
    if volumes := [said for reason, said in left if reason in _OF_VOLUMES]:
        return _undriven(volumes, pod.seen.absent) or _volumes(volumes, pod.spec)
    for reason, said in reversed(left):
        if reason == "FailedCreatePodSandBox" and (found := _starved(pod)):
            return found
        if reason.startswith(("FailedCreatePod", "FailedPrepare", "FailedSync")):
            what = "make the pod's sandbox" if reason.endswith("SandBox") else "prepare the pod"
            words = f"the node cannot {what}: {cause(said)}"
            return first(_SURROUNDINGS, said) or pending(words, _STAYS, Reason.SETUP)
        if reason == "NetworkNotReady":
            return pending(f"the node's network is not ready yet: {one_line(said)}", _STAYS)
        if reason == "Failed" and (found := first(_CONFIGURATION, said)):
            return found
    return _pulling(pod, left)


_LEAST = 6 << 20
"""Bytes of memory below which container runtimes cannot even start a process."""


def _starved(pod: Pod) -> Diagnosis | None:
    """What the runtime says of a limit that nothing fits into names everything but the limit."""
    for one in pod.containers:
        if 0 < number(limit := one.limit("memory")) < _LEAST:
            words = f"the memory limit of container {one.name!r}, {limit}, is too low to start it"
            slip = f"; {limit} are thousandths of a byte" if limit.endswith("m") else ""
            advice = "ask for more memory (memory=), such as 512Mi"
            return pending(words + slip, advice, Reason.SETUP, Outlook.BLOCKED)
    return None


def _pulling(pod: Pod, left: Sequence[tuple[str, str]]) -> Diagnosis | None:
    """An image is on its way, or did not come: its container does not say so yet."""
    pulls = [one for one in left if one[0] in ("Pulling", "Failed") and "pull" in one[1].lower()]
    images = re.findall(r'[Pp]ull(?:ing)? image "([^"]+)"', " ".join(said for _, said in pulls))
    if not images:
        return None
    if pulls[-1][0] == "Pulling":
        return pending(f"pulling the image {images[-1]}")
    # Of a pod that nobody saw, events alone tell.
    known = pod.containers or [Container(name="", spec={"image": images[-1]}, status={})]
    failing = next((one for one in known if one.spec.get("image") == images[-1]), None)
    return unpulled(pod, failing, "ErrImagePull", "") if failing is not None else None


_WAIT = "wait for the other pod to end, or use a volume that many nodes may have"
_ONE_NODE = "can be attached to one node only: it waits for that"

# What a node says of volumes and of the sandbox, in which all containers of a pod are.
_SURROUNDINGS = (
    Rule(
        r'no runtime for "?(?P<name>[^"\s]+)"? is configured',
        "the node cannot make the pod's sandbox: runtime {name!r} is not configured on it",
        "use a node pool that has it, or no RuntimeClass",
    ),
    _passing(
        r'Multi-Attach error for volume "(?P<name>[^"]+)".*?used by pod\(s\) '
        r"(?P<pods>[^,]+(?:, [^,]+)*)",
        f"volume {{name!r}} is in use by pod {{pods}} on another node, and {_ONE_NODE}",
        _WAIT,
    ),
    _passing(
        r'Multi-Attach error for volume "(?P<name>[^"]+)"',
        f"volume {{name!r}} is in use on another node, and {_ONE_NODE}",
        _WAIT,
    ),
    _passing(
        r"(being used by|resourceInUseBy)\W*(?P<what>(instance )?[\w/.-]+)",
        f"a disk is in use by {{what}}, and {_ONE_NODE}",
        _WAIT,
    ),
    Rule(
        r"driver name (?P<name>\S+) not found",
        "the node has no storage driver {name}: its volume cannot be mounted",
        "enable the add-on on the cluster",
    ),
    Rule(
        r"unknown filesystem type '(?P<name>[^']+)'|helper program.*mount\.(?P<kind>\w+)"
        r"|bad option.*mount\.(?P<of>\w+) helper",
        "a volume cannot be mounted: the node has no program that mounts {name}{kind}{of}",
        "have it installed on the nodes, or use another kind of volume",
    ),
    Rule(
        "sidecar container failed with error: signal: killed",
        "a bucket cannot be mounted: its gcsfuse sidecar was killed, for want of memory",
        "raise the pod's annotation gke-gcsfuse/memory-limit",
    ),
    Rule(
        r"failed to (find|inject) the sidecar container|sidecar container \S* ?not found",
        "a bucket cannot be mounted: the pod has no gcsfuse sidecar, which GKE puts beside pods "
        "that are annotated",
        'set the annotation gke-gcsfuse/volumes: "true" on the pod',
    ),
    Rule(
        r"(?P<kind>configmap|secret) (references non-existent config )?key: (?P<key>\S+)",
        "the {kind} of a volume has no key {key!r}: it cannot be mounted",
        _ADD,
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
    Rule(
        r"unmounted volumes=\[(?P<names>[^\]]*)\]",
        "the volumes {names!r} are not mounted after a long time, and no cause is told",
        "see the events of the pod and of the volume's claim",
    ),
)

LACKS_DRIVER = re.compile(r"driver name (\S+) not found")
"""What a node says of the storage driver that a volume needs."""

_VOLUME = re.compile(r'failed for volume "(?P<name>[^"]+)" ?: (?P<why>.*)', re.DOTALL)
_NAMED_BY = ("secretName", "claimName", "server", "path", "driver", "name")
"""Fields that name what a volume is made from, whatever its kind."""


def _undriven(told: Sequence[str], absent: Collection[str]) -> Diagnosis | None:
    """Judge a volume whose driver the cluster doesn't have: no node will ever mount it."""
    for name in (name for said in told for name in LACKS_DRIVER.findall(said)):
        if name in absent:
            words = f"the cluster has no storage driver {name}, so a volume cannot be mounted"
            advice = "enable its add-on on the cluster (for a bucket: Cloud Storage FUSE CSI), or "
            return pending(words, f"{advice}leave out fuse=True", Reason.SETUP, Outlook.FINAL)
    return None


def _volumes(told: Sequence[str], spec: Document) -> Diagnosis:
    """The most that is said of volumes: one event names the cause, the next only that it lasts."""
    if absent := [found for said in told if (found := first(ABSENT, said))]:
        words = ", ".join(dict.fromkeys(one.message for one in absent))
        return replace(absent[0], message=f"{words}: what needs it cannot be mounted")
    told = [said for said in told if "unmounted volumes=" not in said] or told
    known = [(said, found) for said in told if (found := first(_SURROUNDINGS, said))]
    said, found = known[-1] if known else (told[-1], None)
    named, advice = _VOLUME.search(said), "correct the volume, or the right to read it"
    if named is None:
        return found or explained((), said, "a volume cannot be mounted", advice)
    name, why = named.groups()
    source = _source(spec, name)
    if re.search(r"path .* does not exist", why) and not source.startswith("HostPath"):  # a node's
        words = f"volume {name!r} cannot be mounted: {cause(why)}"
        advice = "tell the cluster's administrator, whose volume that is, or use another one"
        return pending(words, advice, Reason.SETUP, Outlook.BLOCKED)
    if source.startswith("HostPath"):
        advice = "correct the path or its type: every node that may run it must have it"
    elif source:
        advice = f"see whether {source} is right and can be reached from the nodes"
    if found is None:
        return explained((), why, f"volume {name!r} cannot be mounted", advice)
    of = f" (volume {name!r}{f', of {source}' if source else ''})"
    return found if repr(name) in found.message else replace(found, message=found.message + of)


def _source(spec: Document, volume: str) -> str:
    """What a volume of the pod is made from, by its own words."""
    named = [one for one in parts(spec, "volumes") if one.get("name") == volume]
    kinds = [kind for one in named for kind in one if kind != "name"]
    for kind, field in itertools.product(kinds, _NAMED_BY):
        if name := part(named[0], kind).get(field):
            return f"{kind[0].upper()}{kind[1:]} {str(name)!r}"
    return ""


_EXEC = re.compile(r'exec: "(?P<file>[^"]+)"')
FORMAT = re.compile(r"exec (?P<file>[^\s:]+): exec format error")
_PLACE = "correct workingDir or the image"
_CWD = r'chdir to cwd \("(?P<folder>[^"]+)"\)'

_STARTS = (
    Rule(
        r'error mounting "[^"]*" to rootfs at "(?P<place>[^"]+)".*not a directory',
        "a volume is mounted at {place!r}, which is a file in the image",
        "correct its mountPath, or mount a single file there (subPath)",
    ),
    Rule(
        r'error mounting "[^"]*" to rootfs at "(?P<place>[^"]+)"',
        "a volume cannot be mounted at {place!r}: {end}",
        "correct its mountPath, or use another image",
    ),
    Rule(
        "OOM-killed|/memory.max",  # which the runtime could not set so low
        "out of memory before the program began: its memory limit{limit} is too low",
        "ask for more memory (memory=)",
        Reason.OUT_OF_MEMORY,
    ),
    Rule(
        _CWD + ".*permission denied",
        "the working directory {folder!r} may not be entered in the image",
        _PLACE,
    ),
    Rule(_CWD, "the working directory {folder!r} is not there in the image", _PLACE),
    Rule(
        r"unable to find (?P<kind>user|group) (?P<name>[^\s:]+)",
        "{kind} {name!r} is not in the image",
        "correct runAsUser, or the USER of the image",
    ),
    Rule(
        "nvidia-container|nvml",
        "the node's GPU driver is not ready: {end}",
        "run it again; tell the cluster's administrator if it stays",
    ),
    Rule(
        "no command specified",
        "neither the image nor the job says which command to run",
        "give a command, or an ENTRYPOINT in the image",
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
        "make it executable, or call its interpreter",
    ),
)


def start_failure(container: Container, text: str) -> Diagnosis:
    """Why a container could not be made, or its process not be started."""
    place = str(container.spec.get("workingDir") or "")
    if place and f"mkdir {place}" in text:
        words = f"the working directory {place!r} cannot be made: {cause(text)}"
        return pending(words, _PLACE, Reason.SETUP, Outlook.BLOCKED)
    limit = container.limit("memory") or container.pod_limit("memory")
    called = _EXEC.search(text) or FORMAT.search(text)
    return explained(
        (*_CONFIGURATION, *_STARTS),
        text,
        f"container {container.name!r} could not be started",
        "correct what the message names, or ask the cluster's administrator",
        file=called["file"] if called else str(next(iter(parts(container.spec, "command")), "")),
        limit=f" of {limit}" if limit else "",
    )
