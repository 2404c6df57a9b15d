"""How a container ended, by its exit code, the runtime's reason and its last words."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.documents import Document, part
from kinetic.aio.kubernetes.diagnosis.pods import START_ERRORS, Container, Pod
from kinetic.aio.kubernetes.diagnosis.preparing import FORMAT, start_failure
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, pending, subject
from kinetic.job_status import Reason

_AGAIN = "nothing is known to be wrong with the program: run it again"
_LOG = "see its log"
_NATIVE = "the fault is in native code: see its log, or set PYTHONFAULTHANDLER=1"


def _exit(
    pattern: str, message: str, advice: str = _LOG, reason: Reason = Reason.USER_ERROR
) -> Rule:
    return Rule(pattern, message, advice, reason)


# Of ``REASON CODE: last words``.
_EXITS = (
    _exit(  # the second is containerd's word for what ended while it was not running itself
        "^(ContainerStatusUnknown|Unknown) ",
        "the node was restarted under the program, or its container runtime was; the exit code "
        "{code} is only a guess",
        _AGAIN,
        Reason.NODE_LOST,
    ),
    # Documents: Cloud Storage, 'Troubleshooting'; GKE, 'Workload Identity Federation'.
    _exit(
        r"does not have storage\.\w+\.\w+ access|Permission 'storage\.\w+\.\w+' denied"
        r"|403[^;]*storage\.googleapis",
        "the pod may not use Cloud Storage (403): {said}",
        "give {who} roles/storage.objectUser on the bucket, and see that workload identity is set "
        "up",
        Reason.SETUP,
    ),
    _exit(  # the runner's own words
        "no credentials for Cloud Storage here",
        "the pod has no credentials for Cloud Storage",
        "let {who} act as one of Google's (workload identity), or, where STORAGE_EMULATOR_HOST "
        "names a server that needs none, give the job that variable, too (capture_env_vars=)",
        Reason.SETUP,
    ),
    # Documents: GKE, 'Troubleshoot Workload Identity Federation'; what google-auth raises then.
    _exit(
        r"unable to generate access token|from the (\w+ )*metadata service"
        r"|compute metadata service|iam\.serviceAccounts\.getAccessToken|getOpenIdToken",
        "the pod has no Google identity, the metadata server gives no token: {said}",
        "bind the pod's Kubernetes service account to a Google one (workload identity, "
        "roles/iam.workloadIdentityUser), and see that its node pool has GKE_METADATA",
        Reason.SETUP,
    ),
    _exit(
        "can't open file '[^']*remote_runner",
        "the image was not made for kinetic, its runner is not in it: {said}",
        "copy what `python -m kinetic.images runner FOLDER` writes to /app, make one with "
        "kinetic build-image, or leave container_image out to have one built",
        Reason.SETUP,
    ),
    _exit(
        r"exec (?P<file>\S+): no such file or directory",
        "{file!r} could not be started (exit code {code}): it is not in the image, or the "
        "interpreter that its first line names is not",
        "correct that line (#!), its line ends (are they those of Windows?), or the image",
        Reason.SETUP,
    ),
    _exit(
        "^[^:]* 137:",
        "the program was killed, but not by its memory limit: signal 9 (SIGKILL){saying}",
        "see its log: the program, a child of it or somebody on the node did it",
        Reason.LOST,
    ),
    _exit(  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
        "^[^:]* (132|134|135|136|139):", "the program crashed by signal {signal}{saying}", _NATIVE
    ),
    _exit(
        "^[^:]* (129|1[3-8][0-9]|19[0-2]):",
        "the program was ended by signal {signal}{saying}",
        reason=Reason.LOST,
    ),
    _exit(
        "^[^:]* 126:", "the program called a file that may not be executed (exit code 126){saying}"
    ),
    _exit(
        "^[^:]* 127:", "the program called a command that does not exist (exit code 127){saying}"
    ),
    _exit("", "the program ended with exit code {code}{saying}"),
)


def tell_exit(container: Container, ended: Document) -> Diagnosis:
    """What the end of a process means, by what its container's status says of it."""
    code, reason = int(ended.get("exitCode") or 0), ended.get("reason")
    words = str(ended.get("message") or "")
    if reason == "OOMKilled":
        return _out_of_memory(container, code)
    if reason in START_ERRORS or FORMAT.search(words):
        return start_failure(container, words)
    said = both_ends(words, 400)
    who = re.search(r"[\w.-]+@[\w.-]+gserviceaccount\.com", said)
    found = first(
        _EXITS,
        f"{reason} {code}: {said}",
        code=str(code),
        said=said,
        saying=f" and said: {said}" if said else "",
        signal=_signal(code - 128),
        who=who[0] if who else "the service account of the pod",
    )
    return found or pending("")


def _signal(number: int) -> str:
    """Its number, with its name and what it means where it has them."""
    try:
        meaning = signal.strsignal(number) or ""
        return f"{number} ({signal.Signals(number).name}, {meaning.lower()})"
    except ValueError:
        return str(number)


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
    told = _probed(pod, one, ended.get("exitCode")) or tell_exit(one, ended)
    if [program.name for program in pod.programs][:1] == [one.name]:
        return told
    return replace(told, message=told.message.replace("the program", "it", 1))


def _probed(pod: Pod, one: Container, code: object) -> Diagnosis | None:
    """A probe or a hook failed and the node stopped the container: only events say so."""

    def said(reason: str) -> list[tuple[str, int]]:
        """The words of events about it, and how often each was seen."""
        return [
            (
                str(event["message"]),
                int(part(event, "series").get("count") or event.get("count") or 1),
            )
            for event in pod.events(reason)
            if one.name in str(subject(event).get("fieldPath") or one.name)
        ]

    stopped, hooks = code in (137, 143), said("FailedPostStartHook")
    if stopped and hooks:
        words = f"the container's postStart hook failed, so the node stopped it: {hooks[-1][0]}"
        return pending(both_ends(words, 400), "correct the hook", Reason.SETUP)
    kills = " ".join(words for words, _ in said("Killing"))
    kinds = sorted(("liveness", "startup"), key=lambda kind: f"failed {kind} probe" not in kills)
    for kind in kinds if kills and code else ():
        fails = (often for words, often in said("Unhealthy") if words.lower().startswith(kind))
        times = sum(fails)
        if f"failed {kind} probe" in kills or (stopped and times):
            often = f" {times} times" if times else ""
            return pending(
                f"the {kind} probe failed{often}, so the node stopped the container: the exit "
                "code is not the program's own",
                "give the probe more patience, or see why the program did not answer",
                Reason.USER_ERROR,
            )
    return None
