"""Decide whether a failed item is retried: one budget for each kind of reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INFRASTRUCTURE = frozenset({"preempted", "node lost", "evicted"})
"""Reasons of failures that the function didn't cause; all other failures use the user's budget."""

SUBMISSION = "submission"
"""The reason of an item that kinetic couldn't submit; no budget covers it, because nothing ran."""

UNVERIFIED = "unverified"
"""The reason of an attempt whose outcome has no valid signature: forged, damaged, or emptied by a
power cut. kinetic ignores the outcome's content. No budget covers this reason; `retry_failed()`
starts another attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudgets:
    """How many failures of each kind kinetic retries per item."""

    user: int = 0
    infrastructure: int = 3

    def cover(self, failures: Sequence[str]) -> bool:
        """Return whether kinetic retries an item that has failed for these reasons, in order."""
        if failures and failures[-1] in (SUBMISSION, UNVERIFIED):
            return False
        platform = sum(reason in INFRASTRUCTURE for reason in failures)
        return platform <= self.infrastructure and len(failures) - platform <= self.user
