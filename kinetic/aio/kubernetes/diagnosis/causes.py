"""The causes of a job's state, and `describe`, which turns a state into sentences."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kinetic._messages import shorten_middle
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason

LONGEST = 600
"""The most characters of a Kubernetes message to quote; a longer quote is cut in the middle."""


class Outlook(enum.Enum):
    """Whether a job can still start or succeed."""

    OPEN = "open"
    """The job runs, or may start without any change by a user."""
    BLOCKED = "blocked"
    """The job can't start until a user changes the cluster: a node pool, a Secret, a permission."""
    FINAL = "final"
    """The job has ended, or can never start as requested."""


PLATFORM_REASONS = (Reason.PREEMPTED, Reason.EVICTED, Reason.NODE_LOST)
NOT_THE_PROGRAM = "the program isn't at fault"

ADVICE = {
    **dict.fromkeys(
        PLATFORM_REASONS, f"{NOT_THE_PROGRAM}: submit it again unless kinetic retries it"
    ),
    Reason.USER_ERROR: "see its log",
    Reason.SETUP: "correct what the message names, or ask the cluster's administrator",
    Reason.OUT_OF_MEMORY: "request more memory (memory=), or use less",
    Reason.OUT_OF_DISK: "write less, write to a bucket, or raise that limit",
    Reason.IMAGE_PULL: "correct the image's name, let the nodes read it, or check its registry",
    Reason.UNSCHEDULABLE: "request what a node pool has, or add a node pool that has it",
    Reason.QUOTA: "request less, or have the quota raised",
    Reason.QUEUED: "wait; this isn't an error",
    Reason.REFUSED: "change what the message names, or ask the cluster's administrator",
    Reason.DEADLINE: "give it more time (timeout=)",
    Reason.CANCELLED: "submit it again if you didn't intend that",
    Reason.LOST: "run it again",
}
"""The next step for each reason, for causes that have no more specific advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a job is in its state: ``summary`` is the first clause, ``more`` has the others.

    If ``advice`` is None, `ADVICE` has the advice for the reason. ``secret`` names a Secret that
    doesn't exist.
    """

    summary: str = ""
    more: Sequence[str] = ()
    advice: str | None = None
    reason: Reason | None = None
    outlook: Outlook = Outlook.OPEN
    secret: str = ""

    @property
    def clauses(self) -> list[str]:
        """All clauses in order."""
        return [clause for clause in (self.summary, *self.more) if clause]

    @property
    def next_step(self) -> str:
        """The advice; empty if nothing is wrong."""
        if self.advice is None and self.reason is not None:
            return ADVICE[self.reason]
        return self.advice or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The state of a job as its user sees it.

    ``phase`` is about processes: it isn't ENDED while a process may run, whatever the Job's
    conditions say. ``executor`` is the pod's uid. ``message`` says what happened and
    ``advice`` what to do next; both may be empty. ``secret`` names a Secret that the job
    waits for. For a job on several hosts, ``host`` is the host that failed first.
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
    """The facts from which `describe` makes a `Diagnosis`.

    The clauses in ``lead`` come before the cause. ``earlier_cause`` is why an earlier pod ended.
    """

    status: JobStatus
    phase: Phase
    cause: Cause
    lead: Sequence[str] = ()
    earlier_cause: Cause | None = None
    exit_code: int | None = None
    executor: str = ""
    host: int = 0

    @property
    def is_over(self) -> bool:
        """Whether no process of the job or pod can run any more."""
        return self.phase in (Phase.ENDED, Phase.GONE)


def waiting_state(cause: Cause, *lead: str, executor: str = "") -> State:
    """Return the state of a job that waits because of *cause*."""
    return State(
        status=JobStatus.PENDING, phase=Phase.PENDING, cause=cause, lead=lead, executor=executor
    )


def running_state(cause: Cause, *lead: str, executor: str = "") -> State:
    """Return the state of a running job; *cause* is what may delay or end the job."""
    return replace(
        waiting_state(cause, *lead, executor=executor),
        status=JobStatus.RUNNING,
        phase=Phase.RUNNING,
    )


def ended_state(
    cause: Cause,
    *lead: str,
    executor: str = "",
    exit_code: int | None = None,
    status: JobStatus = JobStatus.FAILED,
) -> State:
    """Return the state of a job that *cause* ended; *cause* is empty if the job succeeded."""
    state = waiting_state(cause, *lead, executor=executor)
    return replace(state, status=status, phase=Phase.ENDED, exit_code=exit_code)


def describe(state: State) -> Diagnosis:
    """Turn *state* into the sentences of a `Diagnosis`."""
    cause, earlier = state.cause, state.earlier_cause
    first_clause, *more = [*cause.clauses, ""]
    clauses = [": ".join(clause for clause in (*state.lead, first_clause) if clause), *more]
    if earlier is not None:
        clauses.append(f"before that: {'; '.join(earlier.clauses)}")
    earlier_reason = earlier.reason if earlier is not None and not state.is_over else None
    return Diagnosis(
        status=state.status,
        phase=state.phase,
        reason=cause.reason or earlier_reason,
        exit_code=state.exit_code,
        executor=state.executor,
        message="; ".join(dict.fromkeys(clause for clause in clauses if clause)),
        advice=_complete_advice(state),
        outlook=Outlook.FINAL if state.is_over else cause.outlook,
        secret=cause.secret,
        host=state.host,
    )


def _complete_advice(state: State) -> str:
    """Return the cause's advice and, if so, that the user must resubmit, or that the job starts."""
    advice, outlook = state.cause.next_step, state.cause.outlook
    if not advice or outlook is Outlook.OPEN:
        return advice
    if state.is_over:
        return f"{advice}, then submit it again"
    starts_by_itself = outlook is Outlook.BLOCKED and state.cause.reason is Reason.SETUP
    return f"{advice}; then it starts automatically" if starts_by_itself else advice


# --- messages of Kubernetes -----------------------------------------------------------------

_FLAGS = re.DOTALL | re.IGNORECASE | re.MULTILINE


@dataclass(frozen=True, slots=True)
class Rule:
    """The advice, reason, and outlook for a message of Kubernetes that matches *pattern*.

    *advice* may contain fields such as ``{arch}``, which `match_rule` fills with its facts. A group
    ``secret`` of the pattern matches the name of a missing Secret.
    """

    pattern: str
    advice: str | None = None
    reason: Reason | None = Reason.SETUP
    outlook: Outlook = Outlook.BLOCKED


def match_rule(
    rules: Iterable[Rule], summary: str, text: str, quote: str = "", **facts: str
) -> Cause | None:
    """Return the cause by the first of *rules* that matches *text*; None if no rule matches.

    The first clause of the cause is *summary* with *quote*, which is by default the informative
    part of *text*.
    """
    for rule in rules:
        if (match := re.search(rule.pattern, text, _FLAGS)) is not None:
            return Cause(
                summary=f"{summary}: {quote or gist(text)}",
                advice=None if rule.advice is None else rule.advice.format(**facts),
                reason=rule.reason,
                outlook=rule.outlook,
                secret=match.groupdict().get("secret") or "",
            )
    return None


def quote_message(
    summary: str,
    text: str,
    rules: Iterable[Rule] = (),
    *,
    reason: Reason = Reason.SETUP,
    outlook: Outlook = Outlook.BLOCKED,
) -> Cause:
    """Return the cause that `match_rule` finds, else one that quotes *text* for *reason*."""
    if (found := match_rule(rules, summary, text)) is not None:
        return found
    quote = gist(text)
    return Cause(
        summary=f"{summary}: {quote}" if quote else summary, reason=reason, outlook=outlook
    )


# Prefixes that components add when they pass on an error: the informative part comes last.
_PREFIXES = re.compile(
    r"^(?:.*(?:OCI runtime create failed|unable to start container process): "
    r"|rpc error: code = \w+ desc = |Err\w+: |Error creating: |Internal error occurred: "
    r'|Back-off pulling image "[^"]*": '
    r"|create Pod \S+ in StatefulSet \S+ failed error: |\S+ nodes are available: "
    r"|failed to (?:pull|resolve|do|copy|create|generate|start)"
    r' (?:[^:"]|"[^"]*")*: |(?:Get|Head|Post) "[^"]*": )+'
    r"|(?:: unknown|\. no new claims.*)$",
    re.DOTALL | re.IGNORECASE,
)


def gist(text: str) -> str:
    """Return an error message without its prefixes, in at most 400 characters."""
    return shorten_middle(_PREFIXES.sub("", text), 400).rstrip(".")


NO_SECRET = Rule(
    r'secrets? "?(?P<secret>[^\s"]+)"? not found', "create the Secret or correct its name"
)
