"""The causes of a job's state, and `Diagnosis`, which turns a state into sentences."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

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

    @property
    def text(self) -> str:
        """Clauses and advice as one paragraph."""
        return "; ".join(clause for clause in (*self.clauses, self.next_step) if clause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The state of a job or a pod as its user sees it.

    ``phase`` is about processes: it isn't ENDED while a process may run, whatever the Job's
    conditions say. The clauses in ``lead`` come before the cause. ``earlier_cause`` is why an
    earlier pod ended. ``executor`` is the pod's uid. For a job on several hosts, ``host`` is the
    host that failed first.
    """

    status: JobStatus
    phase: Phase
    cause: Cause = Cause()
    lead: Sequence[str] = ()
    earlier_cause: Cause | None = None
    exit_code: int | None = None
    executor: str = ""
    host: int = 0

    @property
    def is_over(self) -> bool:
        """Whether no process of the job or pod can run any more."""
        return self.phase in (Phase.ENDED, Phase.GONE)

    @property
    def reason(self) -> Reason | None:
        """The reason of the cause; while the job continues, else that of the earlier cause."""
        earlier = None if self.is_over else self.earlier_cause
        return self.cause.reason or (earlier.reason if earlier is not None else None)

    @property
    def outlook(self) -> Outlook:
        """Whether the job can still start or succeed."""
        return Outlook.FINAL if self.is_over else self.cause.outlook

    @property
    def message(self) -> str:
        """The sentence that says what happened; empty if the cause has no clauses."""
        first, *more = [*self.cause.clauses, ""]
        clauses = [": ".join(clause for clause in (*self.lead, first) if clause), *more]
        if self.earlier_cause is not None:
            clauses.append(f"before that: {'; '.join(self.earlier_cause.clauses)}")
        return "; ".join(dict.fromkeys(clause for clause in clauses if clause))

    @property
    def advice(self) -> str:
        """The next step, and whether the user must submit again; empty if nothing is wrong."""
        advice, outlook = self.cause.next_step, self.cause.outlook
        if not advice or outlook is Outlook.OPEN:
            return advice
        if self.is_over:
            return f"{advice}, then submit it again"
        starts_by_itself = outlook is Outlook.BLOCKED and self.cause.reason is Reason.SETUP
        return f"{advice}; then it starts automatically" if starts_by_itself else advice

    @property
    def text(self) -> str:
        """Message and advice as one paragraph."""
        return f"{self.message}; {self.advice}" if self.advice else self.message


waiting_state = partial(Diagnosis, status=JobStatus.PENDING, phase=Phase.PENDING)
running_state = partial(Diagnosis, status=JobStatus.RUNNING, phase=Phase.RUNNING)
ended_state = partial(Diagnosis, status=JobStatus.FAILED, phase=Phase.ENDED)


# --- messages of Kubernetes -----------------------------------------------------------------

_FLAGS = re.DOTALL | re.IGNORECASE | re.MULTILINE


@dataclass(frozen=True, slots=True)
class Rule:
    """The advice, reason, and outlook for a message of Kubernetes that matches *pattern*.

    *advice* may contain fields such as ``{arch}``, which `quote_message` fills with its facts. A
    group ``secret`` of the pattern matches the name of a missing Secret.
    """

    pattern: str
    advice: str | None = None
    reason: Reason | None = Reason.SETUP
    outlook: Outlook = Outlook.BLOCKED


def quote_message(
    summary: str,
    text: str,
    rules: Iterable[Rule] = (),
    otherwise: Rule = Rule(""),
    *,
    quote: str = "",
    **facts: str,
) -> Cause:
    """Return the cause by the first of *rules* that matches *text*, or by *otherwise*.

    The first clause of the cause is *summary* with *quote*, which is by default the informative
    part of *text*.
    """
    matches = ((rule, re.search(rule.pattern, text, _FLAGS)) for rule in (*rules, otherwise))
    rule, match = next((rule, match) for rule, match in matches if match is not None)
    quote = quote or gist(text)
    return Cause(
        summary=f"{summary}: {quote}" if quote else summary,
        advice=None if rule.advice is None else rule.advice.format(**facts),
        reason=rule.reason,
        outlook=rule.outlook,
        secret=match.groupdict().get("secret") or "",
    )


# Prefixes that components add when they pass on an error: the informative part comes last.
_PREFIXES = re.compile(
    r"^(?:.*(?:OCI runtime create failed|unable to start container process): "
    r"|rpc error: code = \w+ desc = |Err\w+: |Error creating: |Internal error occurred: "
    r'|Back-off pulling image "[^"]*": '
    r"|create Pod \S+ in StatefulSet \S+ failed error: |\S+ nodes are available: "
    r"|failed to (?:pull|resolve|do|copy|create|generate|start)"
    r' (?:[^:"]|"[^"]*")*: |(?:Get|Head|Post) "[^"]*": )+'
    r"|(?:: unknown|\. not found|\. no new claims.*)$",
    re.DOTALL | re.IGNORECASE,
)


def gist(text: str) -> str:
    """Return an error message without its prefixes, in at most 400 characters."""
    return shorten_middle(_PREFIXES.sub("", text), 400).rstrip(".")
