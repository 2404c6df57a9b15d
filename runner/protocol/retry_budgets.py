"""Which failures of an item are tried again, and how often: a budget for each kind of reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INFRASTRUCTURE = frozenset({"preempted", "node lost", "evicted"})
"""Reasons that are no fault of the function; all others count on the user's budget."""

SUBMISSION = "submission"
"""The reason of an item that could not be submitted: no budget covers it, for nothing ran."""

UNVERIFIED = "unverified"
"""The reason of an attempt whose outcome nobody signed for it: forged, damaged, or emptied by a
power cut. Nothing of what it says counts, and no budget covers it; a retry goes past it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudgets:
    """How many failed attempts an item may have beyond the first."""

    user: int = 0
    infrastructure: int = 3

    def cover(self, failures: Sequence[str]) -> bool:
        """Whether an item that has failed for these reasons, in order, is tried again."""
        if failures and failures[-1] in (SUBMISSION, UNVERIFIED):
            return False
        platform = sum(reason in INFRASTRUCTURE for reason in failures)
        return platform <= self.infrastructure and len(failures) - platform <= self.user
