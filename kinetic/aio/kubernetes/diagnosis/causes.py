"""From facts to one sentence: a `Cause` says what and why, `tell` words it once."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kinetic._messages import both_ends
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

LONGEST = 600
"""Characters of Kubernetes' own words in a message; the middle of longer ones is left out."""


class Outlook(enum.Enum):
    """What may still become of a job."""

    OPEN = "open"
    """It runs, or time alone may let it start."""
    BLOCKED = "blocked"
    """Nothing happens until somebody changes something else: a pool, a Secret, a permission."""
    FINAL = "final"
    """It has ended, or can never start as it was asked for."""


PLATFORM = (Reason.PREEMPTED, Reason.EVICTED, Reason.NODE_LOST)
_FAULT = "it is not the program's fault"

ADVICE = {
    **dict.fromkeys(PLATFORM, f"{_FAULT}: run it again if it isn't retried by itself"),
    Reason.USER_ERROR: "see its log",
    Reason.SETUP: "correct what the message names, or ask the cluster's administrator",
    Reason.OUT_OF_MEMORY: "ask for more memory (memory=), or use less",
    Reason.OUT_OF_DISK: "write less, write to a bucket, or raise that limit",
    Reason.IMAGE_PULL: "correct the image's name, let the nodes read it, or see its registry",
    Reason.UNSCHEDULABLE: "ask for what a node pool has, or add a node pool that has it",
    Reason.QUOTA: "ask for less, or have the quota raised",
    Reason.QUEUED: "wait; this is not an error",
    Reason.REFUSED: "change what the message names, or ask the cluster's administrator",
    Reason.DEADLINE: "give it more time (timeout=)",
    Reason.CANCELLED: "submit again if that was not meant",
    Reason.LOST: "run it again",
}
"""What to do next, by reason, where a cause has no better advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a job is as it is: *what* happened, in one clause, and what is *more* to say of it.

    Without ``advice``, its reason's counts. ``secret`` names a Secret that does not exist.
    """

    what: str = ""
    more: Sequence[str] = ()
    advice: str | None = None
    reason: Reason | None = None
    outlook: Outlook = Outlook.OPEN
    secret: str = ""

    @property
    def clauses(self) -> list[str]:
        """All that it says."""
        return [one for one in (self.what, *self.more) if one]

    @property
    def next_step(self) -> str:
        """What to do about it; empty where nothing is wrong."""
        if self.advice is None and self.reason is not None:
            return ADVICE[self.reason]
        return self.advice or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a user sees of a job.

    ``phase`` is about processes: while one of them may still run it is never ENDED,
    whatever the Job's conditions say. ``executor`` is the uid of the pod it is about.
    ``message`` says what happened and ``advice`` what to do next; each may be empty.
    ``secret`` names a Secret that the job waits for. ``host`` is the host that failed first, of
    a job on several.
    """

    status: JobStatus = JobStatus.PENDING
    phase: Phase = Phase.PENDING
    reason: Reason | None = None
    exit_code: int | None = None
    executor: str = ""
    message: str = ""
    advice: str = ""
    outlook: Outlook = Outlook.OPEN
    secret: str = ""
    host: int = 0

    @property
    def text(self) -> str:
        """Message and advice as one paragraph."""
        return f"{self.message}; {self.advice}" if self.advice else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that a sentence about a job is made of.

    ``lead`` are clauses that come before the cause, the outermost first. ``before`` is why an
    earlier pod ended, ``held`` what holds a deleted object.
    """

    status: JobStatus
    phase: Phase
    cause: Cause
    lead: Sequence[str] = ()
    before: Cause | None = None
    held: Cause | None = None
    exit_code: int | None = None
    executor: str = ""
    host: int = 0

    @property
    def over(self) -> bool:
        """Whether no process of it can run."""
        return self.phase in (Phase.ENDED, Phase.GONE)


def waiting(cause: Cause, *lead: str, executor: str = "") -> State:
    """Return the state of a job that waits because of *cause*."""
    return State(
        status=JobStatus.PENDING, phase=Phase.PENDING, cause=cause, lead=lead, executor=executor
    )


def running(cause: Cause, *lead: str, executor: str = "") -> State:
    """Return the state of a job that runs; *cause* is what may yet end it."""
    return replace(
        waiting(cause, *lead, executor=executor), status=JobStatus.RUNNING, phase=Phase.RUNNING
    )


def ended(
    cause: Cause,
    *lead: str,
    executor: str = "",
    exit_code: int | None = None,
    status: JobStatus = JobStatus.FAILED,
) -> State:
    """Return the state of a job that *cause* ended."""
    return State(
        status=status,
        phase=Phase.ENDED,
        cause=cause,
        lead=lead,
        exit_code=exit_code,
        executor=executor,
    )


def tell(state: State) -> Diagnosis:
    """Put *state* into words: the only place that makes a sentence of causes."""
    cause, before, held = state.cause, state.before, state.held
    first, *more = [*cause.clauses, ""]
    clauses = [": ".join([one for one in (*state.lead, first) if one]), *more]
    reason, advice = cause.reason, [_step(state)]
    if before is not None:
        if not state.over and before.reason not in (*PLATFORM, Reason.LOST):
            advice = [advice[0] or before.next_step]
        fault = f" ({_FAULT})" if before.reason in PLATFORM and not state.over else ""
        clauses.append(f"before that: {'; '.join(before.clauses)}{fault}")
        unfit = reason in (None, Reason.UNSCHEDULABLE) and cause.outlook is not Outlook.FINAL
        reason = before.reason if unfit and not state.over else reason
    if held is not None:
        clauses += held.clauses
        advice.append(held.next_step)
    return Diagnosis(
        status=state.status,
        phase=state.phase,
        reason=reason,
        exit_code=state.exit_code,
        executor=state.executor,
        message="; ".join(dict.fromkeys(one for one in clauses if one)),
        advice="; ".join(dict.fromkeys(one for one in advice if one)),
        outlook=Outlook.FINAL if state.over else cause.outlook,
        secret=cause.secret,
        host=state.host,
    )


def _step(state: State) -> str:
    """Return what to do next, and what happens then."""
    step, outlook = state.cause.next_step, state.cause.outlook
    if not step or outlook is Outlook.OPEN:
        return step
    if state.over:
        return f"{step}, then submit it again"
    by_itself = outlook is Outlook.BLOCKED and state.cause.reason is Reason.SETUP
    return f"{step}; it starts by itself then" if by_itself else step


_FLAGS = re.DOTALL | re.IGNORECASE | re.MULTILINE


@dataclass(frozen=True, slots=True)
class Rule:
    """What words mean that *pattern* finds.

    In *what* and *advice*, ``{name}`` stands for the group of that name and ``{all}`` for
    everything that was found.
    """

    pattern: str
    what: str
    advice: str | None = None
    reason: Reason | None = Reason.SETUP
    outlook: Outlook = Outlook.BLOCKED

    def apply(self, text: str, **facts: str) -> Cause | None:
        """Return what *text* means, with *facts* for further names; None if it doesn't match."""
        if (found := re.search(self.pattern, text, _FLAGS)) is None:
            return None
        words = {key: both_ends(one or "", LONGEST) for key, one in _groups(found)}
        words |= facts
        return Cause(
            what=self.what.format(**words),
            advice=None if self.advice is None else self.advice.format(**words),
            reason=self.reason,
            outlook=self.outlook,
            secret=words.get("secret", ""),
        )


def _groups(found: re.Match[str]) -> list[tuple[str, str | None]]:
    return [*found.groupdict().items(), ("all", found[0])]


def known(rules: Iterable[Rule], text: str, **facts: str) -> Cause | None:
    """Return what the first of *rules* that matches says of *text*."""
    return next((one for rule in rules if (one := rule.apply(text, **facts)) is not None), None)


_PASSED_ON = re.compile(
    r"^(?:.*(?:OCI runtime create failed|unable to start container process): "
    r"|rpc error: code = \w+ desc = |Err\w+: |Error creating: |Internal error occurred: "
    r'|Back-off pulling image "[^"]*": '
    r"|create Pod \S+ in StatefulSet \S+ failed error: |\S+ nodes are available: "
    r"|failed (?:to (?:pull|resolve|do|copy|create|generate|start|call)|calling)"
    r' (?:[^:"]|"[^"]*")*: |(?:Get|Head|Post) "[^"]*": )+'
    r"|(?:: unknown|\. no new claims.*)$",
    re.DOTALL | re.IGNORECASE,
)


def gist(said: str) -> str:
    """Return the informative end of an error, without the words of those who passed it on."""
    return both_ends(_PASSED_ON.sub("", said), 400).rstrip(".")


def quoted(
    what: str, said: str, reason: Reason = Reason.SETUP, outlook: Outlook = Outlook.BLOCKED
) -> Cause:
    """Return a cause in Kubernetes' own words, with the advice that its *reason* has."""
    end = gist(said)
    return Cause(what=f"{what}: {end}" if end else what, reason=reason, outlook=outlook)


_CREATE = "create it or correct the name"

ABSENT = (
    Rule(
        r"(?P<kind>namespace|\w+ ?class)(?:es|s)?(?:\.[\w.]+)?(?: with name)? "
        r'"?(?P<name>[^\s"]+)"? (?:(?:was|not) found|does not exist)',
        "{kind} {name!r} does not exist in this cluster",
        "create it, have an administrator create it, or correct the name",
    ),
    Rule(
        r'secrets? "?(?P<secret>[^\s"]+)"? not found',
        "Secret {secret!r} does not exist in the namespace",
        _CREATE,
    ),
    Rule(
        r"(?P<kind>configmap|persistentvolumeclaim|service ?account|resourceclaim\w*?)s?"
        r'(?:\.[\w.]+| \S+: \w+)? "?(?P<name>[^\s"]+)"? not found',
        "{kind} {name!r} does not exist in the namespace",
        _CREATE,
    ),
)
"""Objects that are named and don't exist, whatever looks for them."""
