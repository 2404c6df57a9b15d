"""Tables of what Kubernetes says, and what it means: the first row that matches counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kinetic._messages import both_ends
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

LONGEST = 600
"""Characters of Kubernetes' own words: their end is what says most."""

_KINDS = ("ConfigMap", "Secret", "PersistentVolumeClaim", "ServiceAccount", "StorageClass")


_FLAGS = re.DOTALL | re.IGNORECASE | re.MULTILINE


@dataclass(frozen=True, slots=True)
class Rule:
    """What to tell of words that *pattern* finds, as a verdict on what waits because of them.

    In message and advice ``{name}`` stands for the group of that name, ``{all}`` for all that was
    found; ``{name!r}`` puts it in quotes. A *judge* is there for what takes more than a sentence.
    """

    pattern: str
    message: str = ""
    advice: str = ""
    reason: Reason | None = Reason.SETUP
    outlook: Outlook = Outlook.BLOCKED
    judge: Callable[[re.Match[str]], Diagnosis] | None = None

    def apply(self, text: str, facts: Mapping[str, str]) -> Diagnosis | None:
        """What it says of *text*, with *facts* for further names; None where it does not match."""
        found = re.search(self.pattern, text, _FLAGS)
        if found is None or self.judge is not None:
            return self.judge(found) if found and self.judge else None
        words = {name: _clean(name, one) for name, one in found.groupdict().items()}
        words |= {"all": _clean("", found[0]), **facts}
        message, advice = self.message.format(**words), self.advice.format(**words)
        return pending(message, advice, self.reason, self.outlook)


def _clean(name: str, words: str | None) -> str:
    said = both_ends(words or "", LONGEST).strip('"')
    if name == "kind":  # as Kubernetes spells it
        return next((kind for kind in _KINDS if kind.lower() == said.lower()), said)
    return said


def first(rules: Iterable[Rule], text: str, **facts: str) -> Diagnosis | None:
    """What the first rule that matches says of *text*; see `Rule.apply`."""
    return next((found for rule in rules if (found := rule.apply(text, facts)) is not None), None)


_HOST = re.compile(
    r"https?://(?P<url>[^/\s\"]+)|(?P<address>\b\d{1,3}(?:\.\d{1,3}){3}\b)"
    r"|(?:lookup|host:?) (?P<name>[\w-]+(?:\.[\w-]+)+)"
)
_WHO = re.compile(r"[\w.-]+@[\w.-]+\.iam\.gserviceaccount\.com|system:[\w:.-]*\w")

_REACH = "see whether {host} is right and can be reached from the nodes"

# What passes by itself comes before what sounds like a lack of rights.
_STEPS = (
    (
        r"no relationship found between node|not registered|failed to sync|not synced",
        "it is tried again by itself; tell the cluster's administrator if it stays",
    ),
    (
        r"too ?many ?requests|\b429\b|rate.?limit|throttl",
        "it is tried again by itself; start fewer at once if it stays",
    ),
    (
        r"signature|attestation|not signed",
        "sign or attest the image as the policy wants, or use one that is signed",
    ),
    (
        r"no longer supported|unsupported|not implemented|rebuild",
        "rebuild it in a form that is supported",
    ),
    (r"x509|certificate|\btls\b", "have the nodes trust the certificate of {host}"),
    (r"timed? ?out|deadline exceeded|connection (refused|reset)|unreachable", _REACH),
    (r"no (route|such host)|could not resolve|server misbehaving|\bdial\b", _REACH),
    (
        r"\b40[13]\b|unauthori[sz]ed|unauthenticated|forbidden|denied|permission|not permitted",
        "give {who} the right that the message names",
    ),
    (r"no space left|disk quota|disk full", "free some space there, or use a larger disk"),
    (
        r"no .*addresses (are )?(available|left)|exhausted|out of (capacity|stock)",
        "have the cluster's administrator add some, or wait for other work to end",
    ),
    (r"quota|exceed|at most|maximum", "ask for less, or have the limit raised"),
    (
        r"\b404\b|not ?found|no such|does not exist|doesn't exist|non-existent|unknown",
        "create it, or correct the name",
    ),
    (r"invalid|malformed|cannot parse|bad option|wrong fs type", "correct what it names"),
)


def next_step(said: str, otherwise: str) -> str:
    """What to do about words that stand in no table, by what errors of all kinds have in common.

    *otherwise* where they say too little.
    """
    host, who = _HOST.search(said), _WHO.search(said)
    named = next((one for one in host.groups() if one), "") if host else ""
    for pattern, advice in _STEPS:
        if re.search(pattern, said, re.DOTALL | re.IGNORECASE):
            return advice.format(
                host=repr(named.partition(":")[0]) if named else "the server",
                who=who[0] if who else "whoever asks",
            )
    return otherwise
