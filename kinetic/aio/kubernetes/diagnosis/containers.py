"""The containers of a pod: which of them counts, and what its exit code says."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.advice import next_step
from kinetic.aio.kubernetes.diagnosis.documents import Document, part, parts
from kinetic.aio.kubernetes.diagnosis.rules import Finding, Rule, first
from kinetic.job_status import Reason

__all__ = [
    "START_ERRORS",
    "Container",
    "containers",
    "failed_container",
    "informative_end",
    "start_failure",
    "tell_exit",
]


START_ERRORS = frozenset({"StartError", "ContainerCannotRun", "RunContainerError"})
"""Reasons of a container's end that say that its program never began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container: its part of the pod's spec beside its status."""

    name: str
    spec: Document
    status: Document
    init: bool = False
    pod_limits: Document = field(default_factory=dict[str, Any])

    @property
    def sidecar(self) -> bool:
        """Whether it stays beside the program and its own end means nothing."""
        return self.init and self.spec.get("restartPolicy") == "Always"

    def state(self, kind: str) -> Document | None:
        """What is said of the state *kind*, if it is in it now."""
        found: Any = part(self.status, "state").get(kind)
        return found if found is not None else None

    @property
    def last(self) -> Document | None:
        """How it ended the last time, if it was started again since."""
        found: Any = part(self.status, "lastState").get("terminated")
        return found if found is not None else None

    @property
    def ended(self) -> Document | None:
        """How it ended: now, or the time before if it waits to be started again."""
        return self.state("terminated") or (
            self.last if self.state("waiting") is not None else None
        )

    def limit(self, resource: str) -> str:
        """Its limit of *resource* as it was written; empty if there is none."""
        return str((part(part(self.spec, "resources"), "limits")).get(resource, ""))

    def pod_limit(self, resource: str) -> str:
        """The limit of *resource* that all containers of the pod share, if it has one."""
        return str(self.pod_limits.get(resource, ""))


def containers(pod: Document) -> list[Container]:
    """All containers of *pod*, init containers first."""
    return [*_listed(pod, "initContainers", True), *_listed(pod, "containers", False)]


def _listed(pod: Document, field: str, init: bool) -> Iterator[Container]:
    wanted = parts(part(pod, "spec"), field)
    told = parts(part(pod, "status"), "initContainerStatuses" if init else "containerStatuses")
    if not (wanted or told):
        return
    statuses = {one.get("name"): one for one in told}
    named = {one.get("name"): one for one in wanted}
    limits = part(part(part(pod, "spec"), "resources"), "limits")
    for name in {**named, **statuses}:
        yield Container(
            name=str(name),
            spec=named.get(name) or {},
            status=statuses.get(name) or {},
            init=init,
            pod_limits=limits,
        )


def failed_container(pod: Document) -> Container | None:
    """The one that made the pod fail: the first program to end badly, else an init container."""
    bad = [one for one in containers(pod) if not one.sidecar and (one.ended or {}).get("exitCode")]
    bad.sort(key=lambda one: str((one.ended or {}).get("finishedAt") or "~"))
    return bad[0] if bad else None


def tell_exit(container: Container, ended: Document) -> Finding:
    """What the end of a process means, by what its container's status says of it."""
    code, reason = int(ended.get("exitCode") or 0), ended.get("reason")
    said = one_line(str(ended.get("message") or ""), 400)
    if reason == "OOMKilled":
        return _out_of_memory(container, code)
    if reason == "ContainerStatusUnknown":
        return Finding(
            reason=Reason.NODE_LOST,
            message="the node was restarted under the program; the exit code is only a guess",
            advice="nothing is known to be wrong with the program: run it again",
        )
    if reason == "Unknown":  # containerd's word for what ended while it was not running itself
        return Finding(
            reason=Reason.NODE_LOST,
            message="the node or its container runtime was restarted under the program; the exit "
            f"code {code} is only a guess",
            advice="nothing is known to be wrong with the program: run it again",
        )
    if reason in START_ERRORS or _FORMAT.search(said):
        return start_failure(container, str(ended.get("message") or ""))
    found = _by_code(code)
    if not said:
        return found
    if _DENIED.search(said):
        who = re.search(r"[\w.-]+@[\w.-]+gserviceaccount\.com", said)
        return Finding(
            reason=Reason.SETUP,
            message=f"the pod may not use Cloud Storage (403): {said}",
            advice=f"give {who[0] if who else 'the service account of the pod'} "
            "roles/storage.objectUser on the bucket, and see that workload identity is set up",
        )
    if _NO_IDENTITY.search(said):
        return Finding(
            reason=Reason.SETUP,
            message=f"the pod has no Google identity, the metadata server gives no token: {said}",
            advice="bind the pod's Kubernetes service account to a Google one (workload identity, "
            "roles/iam.workloadIdentityUser), and see that its node pool has GKE_METADATA",
        )
    if code > 128 and found.reason is not Reason.USER_ERROR:
        return replace(found, message=f"{found.message}; its last words: {said}")
    if code > 128 and "signal" in found.message:
        return replace(found, message=f"{found.message} and said: {said}")
    return Finding(
        reason=Reason.USER_ERROR,
        message=f"the program ended with exit code {code} and said: {said}",
        advice="see its log",
    )


def _out_of_memory(container: Container, code: int) -> Finding:
    own, shared = container.limit("memory"), container.pod_limit("memory")
    child = "" if code == 137 else f" in a child process (the program's own exit code is {code})"
    if own or shared:
        passed = (
            f"passed its memory limit of {own}"
            if own
            else (f"passed the memory limit of its pod ({shared})")
        )
        advice = "ask for more memory (memory=), or use less"
        if container.name == "gke-gcsfuse-sidecar":
            advice = "raise the pod's annotation gke-gcsfuse/memory-limit"
        elif container.sidecar:
            advice = f"raise the memory limit of container {container.name!r}, or use less in it"
    else:
        passed = "has no memory limit, so its node had no memory left"
        advice = "state what it needs (memory=), or use a larger machine"
    return Finding(
        reason=Reason.OUT_OF_MEMORY,
        message=f"out of memory{child}: the container {passed}",
        advice=advice,
    )


def _by_code(code: int) -> Finding:
    if code == 137:
        return Finding(
            reason=Reason.LOST,
            message="the program was killed by signal 9 (SIGKILL), but not by its memory limit",
            advice="see its log: the program, a child of it or somebody on the node did it",
        )
    if 128 < code <= 128 + signal.SIGRTMAX:
        number = code - 128
        known = number in signal.valid_signals() and number < signal.SIGRTMIN
        name = signal.Signals(number).name if known else f"signal {number}"
        native = number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
        detail = (signal.strsignal(number) or name).lower() if known else name
        crashed = native or number == signal.SIGABRT
        return Finding(
            reason=Reason.USER_ERROR if crashed else Reason.LOST,
            message=f"the program {'crashed' if crashed else 'was ended'} by signal {number} "
            f"({name}, {detail})",
            advice="the fault is in native code: see its log, or set PYTHONFAULTHANDLER=1"
            if crashed
            else "see its log",
        )
    words = {
        126: "called a file that may not be executed",
        127: "called a command that does not exist",
    }.get(code)
    message = f"the program ended with exit code {code}" if not words else f"the program {words}"
    return Finding(
        reason=Reason.USER_ERROR,
        message=f"{message} (exit code {code})" if words else message,
        advice="see its log",
    )


_DENIED = re.compile(
    r"(does not have storage\.\w+\.\w+ access|Permission 'storage\.\w+\.\w+' denied"
    r"|403[^;]*storage\.googleapis)",
    re.IGNORECASE,
)
"""Documents: Cloud Storage, 'Troubleshooting'; GKE, 'Workload Identity Federation'."""

_NO_IDENTITY = re.compile(
    r"unable to generate access token|from the (\w+ )*metadata service|compute metadata service"
    r"|(iam\.serviceAccounts\.getAccessToken|getOpenIdToken)",
    re.IGNORECASE,
)
"""Documents: GKE, 'Troubleshoot Workload Identity Federation'; what google-auth raises then."""

_EXEC = re.compile(r'exec: "(?P<file>[^"]+)"')
_FORMAT = re.compile(r"exec (?P<file>[^\s:]+): exec format error")


def informative_end(text: str) -> str:
    """The runtime's own words, without the layers that passed them on."""
    words = re.split(r"OCI runtime create failed: |unable to start container process: ", text)[-1]
    words = re.sub(
        r"(^(rpc error: code = \w+ desc = |failed to \w+ [\w ]+: )+|: unknown$)", "", words
    )
    return one_line(words, 400)


_IMAGE = "correct the command or the image"
_PLACE = "correct workingDir or the image"
_CWD = r'chdir to cwd \("(?P<folder>[^"]+)"\)'

_STARTS = (
    Rule(
        "OOM-killed|/memory.max",  # which the runtime could not set so low
        "out of memory before the program began: its memory limit of {limit} is too low",
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
        "no space left",
        "the node has no space left to make container {container!r}",
        "use a smaller image or a node with a larger boot disk",
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
        _IMAGE,
    ),
    Rule(
        r'exec: "[^"]+".*permission denied',
        "{file!r} is in the image but may not be executed (permission denied)",
        "make it executable, or call its interpreter",
    ),
)


def start_failure(container: Container, text: str) -> Finding:
    """Why a container's process could not be started."""
    called = _EXEC.search(text) or _FORMAT.search(text)
    place, end = str(container.spec.get("workingDir") or ""), informative_end(text)
    if place and f"mkdir {place}" in text:
        return Finding(
            message=f"the working directory {place!r} cannot be made: {end}", advice=_PLACE
        )
    facts = {
        "container": container.name,
        "end": end,
        "file": called["file"] if called else str(next(iter(parts(container.spec, "command")), "")),
        "limit": container.limit("memory") or container.pod_limit("memory"),
    }
    return first(_STARTS, text, **facts) or Finding(
        message=f"container {container.name!r} could not be started: {end}",
        advice=next_step(end, "see the message of the container runtime"),
    )
