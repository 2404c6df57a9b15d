"""What to do about words that stand in no table: by what errors of all kinds have in common."""

from __future__ import annotations

import re

__all__ = ["next_step"]

_HOST = re.compile(
    r"https?://(?P<url>[^/\s\"]+)|(?P<address>\b\d{1,3}(?:\.\d{1,3}){3}\b)"
    r"|(?:lookup|host:?) (?P<name>[\w-]+(?:\.[\w-]+)+)"
)
_WHO = re.compile(r"[\w.-]+@[\w.-]+\.iam\.gserviceaccount\.com|system:[\w:.-]*\w")

# The first that matches: what passes by itself comes before what sounds like a lack of rights.
_STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), advice)
    for pattern, advice in (
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
        (
            (
                r"timed? ?out|deadline exceeded|connection (refused|reset)|no route|unreachable"
                r"|no such host|could not resolve|server misbehaving|\bdial\b"
            ),
            "see whether {host} is right and can be reached from the nodes",
        ),
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
)


def next_step(said: str, otherwise: str) -> str:
    """What whoever reads *said* may do; *otherwise* where it says too little."""
    advice = next((words for pattern, words in _STEPS if pattern.search(said)), None)
    if advice is None:
        return otherwise
    host, who = _HOST.search(said), _WHO.search(said)
    named = next((one for one in host.groups() if one), "") if host else ""
    return advice.format(
        host=repr(named.partition(":")[0]) if named else "the server",
        who=who[0] if who else "whoever asks",
    )
