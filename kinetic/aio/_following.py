"""Where a handle's job is followed."""

from __future__ import annotations

from dataclasses import dataclass

from kinetic.aio._session import Session
from kinetic.aio._submission import Submission

__all__ = ["Following"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """One item of a submission, on an opened platform."""

    session: Session
    submission: Submission
    index: int
    output_dir: str
