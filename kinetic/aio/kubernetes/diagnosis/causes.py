"""From the words of what refused something to a verdict: by a table, else in these words."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.rules import Rule, first, next_step
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

ABSENT = (
    Rule(
        r"(?P<kind>namespace|\w+ ?class)(?:es|s)?(?:\.[\w.]+)?(?: with name)? "
        r'"?(?P<name>[^\s"]+)"? (?:(?:was|not) found|does not exist)',
        "{kind} {name!r} does not exist in this cluster",
        "create it, have an administrator create it, or correct the name",
    ),
    Rule(
        r"(?P<kind>configmap|secret|persistentvolumeclaim|service ?account|resourceclaim\w*?)s?"
        r'(?:\.[\w.]+| \S+: \w+)? "?(?P<name>[^\s"]+)"? not found',
        "{kind} {name!r} does not exist in the namespace",
        "create it or correct the name; it starts by itself then",
    ),
)
"""Things that are named and not there, whoever looks for them."""

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


def cause(said: str) -> str:
    """The informative end of an error, without the words of those who only passed it on."""
    return both_ends(_PASSED_ON.sub("", said), 400).rstrip(".")


def explained(
    rules: Iterable[Rule],
    said: str,
    what: str,
    otherwise: str,
    reason: Reason = Reason.SETUP,
    unknown: Outlook = Outlook.BLOCKED,
    **facts: str,
) -> Diagnosis:
    """Why *what* is so, by the first of *rules* that knows the words *said*.

    Words that stand in no table are told as they are, with the next step that
    errors of their kind have in common, or *otherwise*.
    """
    end = cause(said)
    found = first(rules, said, end=end, **facts)
    words = f"{what}: {end}" if end else what
    advice = next_step(said.removesuffix(": unknown"), otherwise)
    return found or pending(words, advice, reason, unknown)
