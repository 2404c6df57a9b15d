"""The containers of a pod: which of them counts, and what its exit code says."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kinetic._words import one_line
from kinetic.aio.clusters._reasons.documents import Document, part, parts
from kinetic.job_status import Reason

__all__ = [
    "Container",
    "Exit",
    "containers",
    "failed_container",
    "start_failure",
    "tell_exit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container: its part of the pod's spec beside its status."""

    name: str
    spec: Document
    status: Document
    init: bool = False

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Why a process ended."""

    reason: Reason
    message: str
    advice: str = ""


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
    for name in {**named, **statuses}:
        yield Container(
            name=str(name), spec=named.get(name) or {}, status=statuses.get(name) or {}, init=init
        )


def failed_container(pod: Document) -> Container | None:
    """The one that made the pod fail: the first program to end badly, else an init container."""
    bad = [one for one in containers(pod) if not one.sidecar and (one.ended or {}).get("exitCode")]
    bad.sort(key=lambda one: str((one.ended or {}).get("finishedAt") or "~"))
    return bad[0] if bad else None


def tell_exit(container: Container, ended: Document) -> Exit:
    """What the end of a process means, by what its container's status says of it."""
    code, reason = int(ended.get("exitCode") or 0), ended.get("reason")
    if reason == "OOMKilled":
        limit = container.limit("memory")
        passed = f"passed its memory limit of {limit}" if limit else "took more memory than allowed"
        child = (
            "" if code == 137 else f" in a child process (the program's own exit code is {code})"
        )
        return Exit(
            reason=Reason.OUT_OF_MEMORY,
            message=f"out of memory{child}: the container {passed}",
            advice="ask for more memory (memory=), or use less",
        )
    if reason == "ContainerStatusUnknown":
        return Exit(
            reason=Reason.NODE_LOST,
            message="the node was restarted under the program; the exit code is only a guess",
            advice="nothing is known to be wrong with the program: run it again",
        )
    if reason in ("StartError", "ContainerCannotRun", "RunContainerError"):
        return start_failure(container, str(ended.get("message") or ""))
    if said := one_line(str(ended.get("message") or ""), 400):
        return Exit(
            reason=Reason.USER_ERROR,
            message=f"the program ended with exit code {code} and said: {said}",
            advice="see its log",
        )
    return _by_code(code)


def _by_code(code: int) -> Exit:
    if code == 137:
        return Exit(
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
        return Exit(
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
    return Exit(
        reason=Reason.USER_ERROR,
        message=f"{message} (exit code {code})" if words else message,
        advice="see its log",
    )


_EXEC = re.compile(r'exec: "(?P<file>[^"]+)"')


def start_failure(container: Container, text: str) -> Exit:
    """Why a container's process could not be started."""
    called = _EXEC.search(text)
    command = next(iter(parts(container.spec, "command")), "")
    file = called["file"] if called else str(command)
    if re.search(r"not found in \$?PATH|no such file or directory", text):
        message = f"command {file!r} is not in the image"
        advice = "correct the command or the image"
    elif "permission denied" in text:
        message = f"{file!r} is in the image but may not be executed (permission denied)"
        advice = "make it executable, or call its interpreter"
    elif "exec format error" in text:
        message = f"{file!r} is built for another processor than the node has"
        advice = "build the image for the node's architecture"
    else:
        message = f"container {container.name!r} could not be started: {one_line(text[-200:])}"
        advice = "see the message of the container runtime"
    return Exit(reason=Reason.SETUP, message=message, advice=advice)
