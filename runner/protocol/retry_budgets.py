"""Decide whether a failed item is retried: one budget for each kind of reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INFRASTRUCTURE = frozenset({"preempted", "node lost", "evicted"})
"""Reasons that the function didn't cause; all others use the user's budget."""

SUBMISSION = "submission"
"""The reason of an item that was not submitted; no budget covers it, because nothing ran."""

UNVERIFIED = "unverified"
"""The reason of an attempt whose outcome has no valid signature: forged, damaged, or emptied by a
power cut. Its content doesn't count, and no budget covers it; `retry_failed()` makes another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBudgets:
    """How many failed attempts an item may have beyond the first."""

    user: int = 0
    infrastructure: int = 3

    def cover(self, failures: Sequence[str]) -> bool:
        """Return whether an item that has failed for these reasons, in order, is retried."""
        if failures and failures[-1] in (SUBMISSION, UNVERIFIED):
            return False
        platform = sum(reason in INFRASTRUCTURE for reason in failures)
        return platform <= self.infrastructure and len(failures) - platform <= self.user
