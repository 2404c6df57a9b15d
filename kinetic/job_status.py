"""The states of a job that users see, and the reasons for them."""

from __future__ import annotations

import enum

__all__ = ["JobStatus", "Reason"]


class JobStatus(enum.Enum):
    """Observable status of a job; the last three are terminal."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    NOT_FOUND = "NOT_FOUND"

    @property
    def terminal(self) -> bool:
        """Whether the status is final unless the job is retried."""
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.NOT_FOUND)


class Reason(enum.StrEnum):
    """Why an attempt ended without a value, or does not start."""

    USER_ERROR = "user error"
    SETUP = "setup"
    OUT_OF_MEMORY = "out of memory"
    PREEMPTED = "preempted"
    NODE_LOST = "node lost"
    EVICTED = "evicted"
    IMAGE_PULL = "image pull"
    UNSCHEDULABLE = "unschedulable"
    QUOTA = "quota"
    QUEUED = "queued"
    REFUSED = "refused"
    OUT_OF_DISK = "out of disk"
    STORE_FULL = "store full"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    LOST = "lost"
