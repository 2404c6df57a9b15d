"""Tables of what Kubernetes says, and what it means: the first row that matches counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kinetic._messages import one_line
from kinetic.aio.kubernetes.diagnosis.verdict import Diagnosis, Outlook, pending
from kinetic.job_status import Reason

__all__ = ["Finding", "Rule", "first"]

LONGEST = 600
"""Characters of Kubernetes' own words: their end is what says most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is amiss, what to do next, and whether waiting may help."""

    message: str
    advice: str = ""
    reason: Reason | None = Reason.SETUP
    outlook: Outlook = Outlook.BLOCKED

    @property
    def pending(self) -> Diagnosis:
        """The verdict on what waits because of it."""
        return pending(self.message, self.reason, self.advice, self.outlook)


Judge = Callable[[re.Match[str]], Finding]


@dataclass(frozen=True, slots=True)
class Rule:
    """What to tell of words that *pattern* finds.

    In message and advice ``{name}`` stands for the group of that name, ``{all}`` for all that was
    found; ``{name!r}`` puts it in quotes. *reason* and *outlook* are as in `Finding`. A *judge*
    is there for what takes more than a sentence.
    """

    pattern: str
    message: str = ""
    advice: str = ""
    reason: Reason | None = Reason.SETUP
    outlook: Outlook = Outlook.BLOCKED
    judge: Judge | None = None

    def apply(self, text: str, facts: Mapping[str, str]) -> Finding | None:
        """What it says of *text*, with *facts* for further names; None where it does not match."""
        found = re.search(self.pattern, text, re.DOTALL | re.IGNORECASE)
        if found is None:
            return None
        if self.judge is not None:
            return self.judge(found)
        words = {name: _clean(one) for name, one in found.groupdict().items()}
        words |= {"all": _clean(found[0]), **facts}
        return Finding(
            message=self.message.format(**words),
            advice=self.advice.format(**words),
            reason=self.reason,
            outlook=self.outlook,
        )


def _clean(words: str | None) -> str:
    return one_line(words or "", LONGEST).strip('"')


def first(rules: Iterable[Rule], text: str, **facts: str) -> Finding | None:
    """What the first rule that matches says of *text*; see `Rule.apply`."""
    return next((found for rule in rules if (found := rule.apply(text, facts)) is not None), None)
