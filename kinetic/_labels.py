"""The labels of kinetic's jobs, on each platform."""

from __future__ import annotations

from collections.abc import Mapping

SUBMISSION = "kinetic.dev/submission"
"""The batch or the single job that an object belongs to. The names of its jobs begin with it."""

CLIENT = "kinetic.dev/client"
USER = "kinetic.dev/user"
FUNCTION = "kinetic.dev/function"

ROUND = "kinetic.dev/round"
"""The round of a worker; 0 for a single job."""

INDEX, ATTEMPT = "kinetic.dev/index", "kinetic.dev/attempt"
"""The item and the number of the attempt that a job was created for; a worker has neither."""

KIND = "kinetic.dev/kind"
"""The kind of a job: ``job``, ``item``, or ``worker``."""

WORKER = "worker"
"""The value of `KIND` on workers."""


def of_attempt(labels: Mapping[str, str], index: int, attempt: int) -> dict[str, str]:
    """Return the *labels* of a worker as those of an attempt that it runs."""
    return {**labels, INDEX: str(index), ATTEMPT: str(attempt)}


def attempt_of(labels: Mapping[str, str]) -> tuple[int, int]:
    """Return the item and the number of the attempt that *labels* name."""
    return int(labels[INDEX]), int(labels[ATTEMPT])
