"""Find the job of a handle that no client has made, by the client of the running event loop.

The package `kinetic.aio` sets `follow` when Python imports it. So the handles needn't import the
client, which imports the handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kinetic.aio._engine.session import JobRef
    from kinetic.job_record import JobRecord


class Follow(Protocol):
    """Find the job of a record; *whole* also reads and follows the rest of its batch."""

    async def __call__(self, record: JobRecord, *, whole: bool) -> JobRef:
        """Return a reference to the job."""
        ...


follow: Follow
"""Finds the job of a handle that no client has made."""
