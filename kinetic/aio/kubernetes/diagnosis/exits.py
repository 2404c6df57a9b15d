"""How a container ended, by its exit code, the runtime's reason and its last words."""

from __future__ import annotations

import signal

from kinetic._messages import both_ends, one_line
from kinetic.aio.kubernetes.diagnosis.documents import Document, part
from kinetic.aio.kubernetes.diagnosis.pods import START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.preparing import FORMAT, start_failure
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, pending
from kinetic.job_status import Reason

__all__ = ["tell_end", "tell_exit"]

_AGAIN = "nothing is known to be wrong with the program: run it again"
_LOG = "see its log"
_NATIVE = "the fault is in native code: see its log, or set PYTHONFAULTHANDLER=1"

# Of ``REASON CODE: last words``.
_EXITS = (
    Rule(
        "^ContainerStatusUnknown ",
        "the node was restarted under the program; the exit code is only a guess",
        _AGAIN,
        Reason.NODE_LOST,
    ),
    Rule(  # containerd's word for what ended while it was not running itself
        "^Unknown ",
        "the node or its container runtime was restarted under the program; the exit code {code} "
        "is only a guess",
        _AGAIN,
        Reason.NODE_LOST,
    ),
    # Documents: Cloud Storage, 'Troubleshooting'; GKE, 'Workload Identity Federation'.
    Rule(
        r"does not have storage\.\w+\.\w+ access|Permission 'storage\.\w+\.\w+' denied"
        r"|403[^;]*storage\.googleapis",
        "the pod may not use Cloud Storage (403): {said}",
        "give {who} roles/storage.objectUser on the bucket, and see that workload identity is set "
        "up",
    ),
    # Documents: GKE, 'Troubleshoot Workload Identity Federation'; what google-auth raises then.
    Rule(
        r"unable to generate access token|from the (\w+ )*metadata service"
        r"|compute metadata service|iam\.serviceAccounts\.getAccessToken|getOpenIdToken",
        "the pod has no Google identity, the metadata server gives no token: {said}",
        "bind the pod's Kubernetes service account to a Google one (workload identity, "
        "roles/iam.workloadIdentityUser), and see that its node pool has GKE_METADATA",
    ),
    Rule(
        "can't open file '[^']*remote_runner",
        "the image was not made for kinetic, its runner is not in it: {said}",
        "make one with kinetic build-image, or leave container_image out to have one built",
        Reason.SETUP,
    ),
    Rule(
        "^[^:]* 137:",
        "the program was killed by signal 9 (SIGKILL), but not by its memory limit{last}",
        "see its log: the program, a child of it or somebody on the node did it",
        Reason.LOST,
    ),
    Rule(
        "^[^:]* (132|134|135|136|139):",  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
        "the program crashed by signal {signal}{last}",
        _NATIVE,
        Reason.USER_ERROR,
    ),
    Rule(
        "^[^:]* (129|1[3-8][0-9]|19[0-2]):",
        "the program was ended by signal {signal}{last}",
        _LOG,
        Reason.LOST,
    ),
    Rule(
        "^[^:]* 126:",
        "the program called a file that may not be executed (exit code 126){last}",
        _LOG,
        Reason.USER_ERROR,
    ),
    Rule(
        "^[^:]* 127:",
        "the program called a command that does not exist (exit code 127){last}",
        _LOG,
        Reason.USER_ERROR,
    ),
    Rule("", "the program ended with exit code {code}{and}", _LOG, Reason.USER_ERROR),
)
_WHO = Rule(r"[\w.-]+@[\w.-]+gserviceaccount\.com", "{all}")


def tell_exit(container: Container, ended: Document) -> Diagnosis:
    """What the end of a process means, by what its container's status says of it."""
    code, reason = int(ended.get("exitCode") or 0), ended.get("reason")
    words = str(ended.get("message") or "")
    if reason == "OOMKilled":
        return _out_of_memory(container, code)
    if reason in START_ERRORS or FORMAT.search(words):
        return start_failure(container, words)
    said = both_ends(words, 400)
    who = _WHO.apply(said, {})
    found = first(
        _EXITS,
        f"{reason} {code}: {said}",
        code=str(code),
        said=said,
        last=f"; its last words: {said}" if said else "",
        signal=_signal(code - 128),
        who=who.message if who else "the service account of the pod",
        **{"and": f" and said: {said}" if said else ""},
    )
    return found or pending("")


def _signal(number: int) -> str:
    known = number in signal.valid_signals() and number < signal.SIGRTMIN
    if not known:
        return f"{number} (signal {number}, signal {number})"
    name = signal.Signals(number).name
    return f"{number} ({name}, {(signal.strsignal(number) or name).lower()})"


def _out_of_memory(container: Container, code: int) -> Diagnosis:
    own, shared = container.limit("memory"), container.pod_limit("memory")
    child = "" if code == 137 else f" in a child process (the program's own exit code is {code})"
    passed = "has no memory limit, so its node had no memory left"
    advice = "state what it needs (memory=), or use a larger machine"
    if own or shared:
        of = f"its memory limit of {own}" if own else f"the memory limit of its pod ({shared})"
        passed, advice = f"passed {of}", "ask for more memory (memory=), or use less"
        if container.name == "gke-gcsfuse-sidecar":
            advice = "raise the pod's annotation gke-gcsfuse/memory-limit"
        elif container.sidecar:
            advice = f"raise the memory limit of container {container.name!r}, or use less in it"
    words = f"out of memory{child}: the container {passed}"
    return pending(words, advice, Reason.OUT_OF_MEMORY)


def tell_end(pod: Pod, one: Container, ended: Document) -> Diagnosis:
    """What the end of container *one* of *pod* means: by its node's word, else by its own."""
    return _probed(pod, ended.get("exitCode")) or tell_exit(one, ended)


_PROBE = Rule("failed (?P<kind>liveness|startup) probe", "{kind}")


def _probed(pod: Pod, code: object) -> Diagnosis | None:
    """A probe or a hook failed and the node stopped the container: only events say so."""
    stopped = code in (137, 143)
    if stopped and (hook := pod.last_said("FailedPostStartHook")):
        return pending(
            f"the container's postStart hook failed, so the node stopped it: {one_line(hook)}",
            "correct the hook",
            Reason.SETUP,
        )
    killed = "\n".join(str(event.get("message") or "") for event in pod.events("Killing"))
    named = first((_PROBE,), killed)
    if not killed or not code or (named is None and not stopped):
        return None
    times: dict[str, int] = {}
    for event in pod.events("Unhealthy"):
        kind = str(event.get("message") or "").split(" ")[0].lower()
        count = part(event, "series").get("count") or event.get("count") or 1
        times[kind] = times.get(kind, 0) + int(count)
    kinds = [named.message] if named else [one for one in ("liveness", "startup") if one in times]
    if not kinds:
        return None
    often = f" {times[kinds[0]]} times" if times.get(kinds[0]) else ""
    return pending(
        f"the {kinds[0]} probe failed{often}, so the node stopped the container: the exit code is "
        "not the program's own",
        "give the probe more patience, or see why the program did not answer",
        Reason.USER_ERROR,
    )
