"""Give handles that no client made the client of their event loop.

The package sets it when it is loaded, which is before any module of it. So a handle need not
import the client, which makes handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kinetic.aio._engine.session import JobRef
    from kinetic.job_record import JobRecord


class Follow(Protocol):
    """Find the job of a record; *whole* also reads and follows the rest of its batch."""

    async def __call__(self, record: JobRecord, *, whole: bool) -> JobRef:
        """Return where the job is followed, or where one look at it is possible."""
        ...


follow: Follow
"""Finds the job of a record that no client's handle has."""
