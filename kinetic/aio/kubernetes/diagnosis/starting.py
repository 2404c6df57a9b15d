"""A pod that has not ended: is it running, starting, held back, or on its way out?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, conditions, part, parts
from kinetic.aio.kubernetes.diagnosis.ending import removal
from kinetic.aio.kubernetes.diagnosis.exits import tell_end, tell_exit
from kinetic.aio.kubernetes.diagnosis.images import unpulled
from kinetic.aio.kubernetes.diagnosis.pods import START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.preparing import preparing, start_failure
from kinetic.aio.kubernetes.diagnosis.scheduling import placing
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending, running
from kinetic.aio.ports import Phase
from kinetic.job_status import Reason

NATIVE = "make it a native sidecar (an init container with restartPolicy Always)"
"""What to do about a container that goes on beside a program which has ended."""

_BLOCKED = Outlook.BLOCKED
_OF_IMAGES = re.compile("Image|Registry|Signature")
"""What the reasons of containers have in common that wait for their image."""
_SLOW = re.compile(r"failed to sync \w+ cache|context deadline exceeded|is reserved for")


def present(pod: Pod) -> Diagnosis:
    """Judge a pod that has not ended."""
    return replace(_judged(pod), executor=str(pod.metadata.get("uid") or ""))


def obstacle(pod: Pod) -> Diagnosis:
    """What kept a pod from running that never ran and is on its way out."""
    metadata = {**pod.metadata, "deletionTimestamp": None}
    return present(Pod({**pod.document, "metadata": metadata}, pod.seen))


def _judged(pod: Pod) -> Diagnosis:
    if pod.leaving:
        why = removal(pod) or pending("")
        told = f"is being stopped: {why.message}" if why.message else "is being stopped"
        return (running if pod.ran else pending)(told, why.advice, why.reason)
    if not pod.spec.get("nodeName"):
        return placing(pod)
    found = [(one, held) for one in pod.containers if (held := _held(pod, one)) is not None]
    if found and not (found[0][1].phase is Phase.RUNNING and _silent(pod)):
        return _hindered(pod, found)
    return _running(pod) if pod.ran else _starting(pod)


def _held(pod: Pod, one: Container) -> Diagnosis | None:
    """What keeps this container from running, if anything does."""
    waiting, ended = one.state("waiting"), one.state("terminated")
    if one.sidecar and any(other.state("running") is not None for other in pod.programs):
        return None  # the program goes on beside it
    again = pod.spec.get("restartPolicy") != "Never" or one.sidecar
    done = one.sidecar and all(other.state("terminated") is not None for other in pod.programs)
    if again and ended is not None and ended.get("exitCode") and not done:
        return _looping(pod, one, ended)
    if waiting is None:
        return None
    reason, said = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    if reason == "CrashLoopBackOff":
        return _looping(pod, one, one.last or {})
    if _OF_IMAGES.search(reason):
        return unpulled(pod, one, reason, said)
    if reason.startswith("CreateContainer") and _SLOW.search(said):
        words = f"the node has not made container {one.name!r} yet: {one_line(said)}"
        return pending(words, "it is tried again; tell the cluster's administrator if it stays")
    if reason in ("", "ContainerCreating", "PodInitializing"):
        return None
    return start_failure(one, said or reason)


def _hindered(pod: Pod, found: Sequence[tuple[Container, Diagnosis]]) -> Diagnosis:
    """What stands in the way of the first container, and of the next ones."""
    one, held = found[0]
    program = next(iter(pod.programs), one)
    beside = not one.init and one.name != program.name and held.phase is not Phase.RUNNING
    done = program.state("terminated")
    if beside and program.state("running") is not None:
        words = f"running, but container {one.name!r} cannot start: {held.message}"
        held = running(words, held.advice, held.reason)
    elif beside and done is not None and done.get("reason") not in START_ERRORS:
        words = f"{_incomplete(program, done, f'{one.name!r} cannot start')}: {held.message}"
        held = running(words, held.advice, held.reason, _BLOCKED)
    for other, more in found[1:]:
        if more.message not in held.message:
            words = f"{held.message}; besides, container {other.name!r}: {more.message}"
            held = replace(held, message=words)
    return held


def _incomplete(program: Container, done: Document, other: str) -> str:
    """The program is *done*, and what the *other* container does keeps the pod from ending."""
    ended = f"container {program.name!r} {_ended(program, done)}"
    return f"{ended}, but container {other}, so the Job never completes"


def _ended(one: Container, ended: Document) -> str:
    """How a container ended, as the rest of a sentence about it."""
    words, told = f"ended with exit code {ended.get('exitCode')}", tell_exit(one, ended)
    return f"{words} ({told.message})" if told.reason is Reason.OUT_OF_MEMORY else words


def _looping(pod: Pod, one: Container, ended: Document) -> Diagnosis:
    code, told = ended.get("exitCode"), tell_end(pod, one, ended)
    kind = f"exit code {code}" if code is not None else "how it ended is not known"
    fails = f"fails each time it is started ({kind}) and"
    if one.init:
        words = f"container {one.name!r} {fails} the program waits for it: {told.message}"
        if told.reason is Reason.OUT_OF_MEMORY:
            return pending(words, told.advice, told.reason, _BLOCKED)
        return pending(words, f"see the log of container {one.name!r}", Reason.SETUP, _BLOCKED)
    if ended.get("reason") in START_ERRORS:
        return told
    if code == 0:
        return running(
            "the program ends well and is started again each time, by the pod's restartPolicy"
        )
    whose = "the program" if pod.programs[0] is one else f"container {one.name!r}"
    words = f"{whose} {fails} is restarted with growing delays"
    words += f": {told.message}" if code is not None else ""
    return running(words, told.advice, told.reason, exit_code=code)


def _running(pod: Pod) -> Diagnosis:
    done = [(one, end) for one in pod.programs if (end := one.state("terminated")) is not None]
    left = [one for one in pod.programs if one.state("running") is not None]
    if done and left and done[0][0] is pod.programs[0]:
        one, end = done[0]
        others = f"{', '.join(repr(other.name) for other in left)} still runs"
        told = tell_exit(one, end) if end.get("exitCode") else pending("")
        advice = f"{told.advice}; {NATIVE}" if told.advice else NATIVE
        return running(_incomplete(one, end, others), advice, told.reason, _BLOCKED)
    if _silent(pod):
        name = pod.spec.get("nodeName")
        words = f"its node {name} does not answer; whether the program still runs is unknown"
        return running(words, _REPLACED, Reason.NODE_LOST)
    again, advice = max(left, key=lambda one: one.restarts, default=None), ""
    words = "running"
    if again is not None and again.restarts:
        words += f", after {again.restarts} failed start{'s' if again.restarts > 1 else ''}"
        if again.last and again.last.get("exitCode"):
            told = tell_end(pod, again, again.last)
            words, advice = f"{words} (the last: {told.message})", told.advice
            advice = "" if "run it again" in advice else advice  # it runs
    worries = [*_worries(pod, done, left)]
    if not worries:
        return running(words, advice)
    told_all = "; ".join(one.message for one in worries)
    return replace(worries[0], message=f"{words}, but {told_all}")


def _worries(
    pod: Pod, done: Sequence[tuple[Container, Document]], left: Sequence[Container]
) -> Iterator[Diagnosis]:
    """What may yet end or delay a program that runs, the worst first."""
    for one, end in done:
        if end.get("exitCode"):
            words = f"container {one.name!r} {_ended(one, end)}: the pod will have failed"
            yield running(words, f"see the log of container {one.name!r}")
    said = [str(event.get("message") or "").lower() for event in pod.events("Unhealthy")]
    for probe, then in _PROBES.items():
        unready = not all(one.status.get("ready", True) for one in left)
        if unready and any(one.startswith(probe) for one in said):
            words = f"never Ready: its {probe} probe fails so far{then}"
            yield running(words, "see why the program does not answer the probe")
    if pod.taken_back:  # documents: GKE, 'Spot VMs', and 'Manage disruption in GPU nodes'
        ends = "shuts its machine down soon, for maintenance"
        yield running(
            f"the cloud {'takes its spot machine back within 30 s' if pod.on_spot else ends}",
            "it is not the program's fault: let it save what it has; it counts on its own budget",
            Reason.PREEMPTED,
        )
    closing = {one.get("key") for one in parts(part(pod.node, "spec"), "taints") if _throws(one)}
    for one in parts(pod.spec, "tolerations"):
        if one.get("key") in closing and one.get("tolerationSeconds"):
            words = f"its node has taint {one['key']} (NoExecute), which it may bear for "
            words += f"{one['tolerationSeconds']} s: then it is thrown out"
            yield running(words, "let it save what it has; it may start again elsewhere")
    for one in pod.containers:
        last = (one.ended or one.last or {}) if one.sidecar else {}
        if last.get("exitCode"):
            told = tell_exit(one, last)
            yield running(f"sidecar {one.name!r} beside it fails: {told.message}", told.advice)


def _throws(taint: Document) -> bool:
    return taint.get("effect") == "NoExecute"


_REPLACED = "wait: Kubernetes replaces the pod when the node stays away"
_PROBES = {"readiness": "", "startup": ", and the node stops it when that goes on"}


def _silent(pod: Pod) -> bool:
    """The node's controller set Ready to False by itself: the containers still say ready."""
    if pod.status.get("phase") == "Unknown" or condition(pod.node, "Ready", "Unknown") is not None:
        return True
    unready = condition(pod.document, "Ready", "False") or {"reason": "there is no such condition"}
    return not unready.get("reason") and bool(pod.events("NodeNotReady"))


def _starting(pod: Pod) -> Diagnosis:
    if found := _unattended(pod) or preparing(pod):
        return found
    begun = [
        one
        for one in pod.containers
        if one.state("running") is not None
        and not (one.sidecar and one.status.get("started") is not False)
    ]
    begun += [one for one in pod.containers if one.exit_code and not one.sidecar]  # when it left
    one = next(iter(begun), None)
    if one is None:
        return _hooked(pod) or pending("its container is being made")
    what = f"init container {one.name!r} runs"
    if one.sidecar:
        what = f"sidecar {one.name!r} runs and is not ready yet"
    words = f"{what}; the program starts after it"
    return pending(words, f"wait, or see the log of container {one.name!r}")


def _hooked(pod: Pod) -> Diagnosis | None:
    """A container does not count as started before its postStart hook has ended."""
    for one in pod.programs if pod.events("Started") else ():
        if part(one.spec, "lifecycle").get("postStart") and one.state("waiting") is not None:
            words = f"container {one.name!r} has begun, and its postStart hook has not ended yet"
            return pending(words, "wait, or see what the hook waits for", Reason.SETUP)
    return None


def _unattended(pod: Pod) -> Diagnosis | None:
    """Nobody makes its containers: the node does not answer, or there is no such node."""
    name = str(pod.spec.get("nodeName"))
    if pod.without_node and not conditions(pod.document):
        words = f"there is no node {name!r}, which the pod names: nobody starts it"
        advice = "leave the choice of the node to the scheduler, or correct the name"
        return pending(words, advice, Reason.UNSCHEDULABLE, _BLOCKED)
    if _silent(pod):
        words = f"its node {name} does not answer, so nobody starts it"
        return pending(words, _REPLACED, Reason.NODE_LOST)
    return None
