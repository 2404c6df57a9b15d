"""How a job is found whose handle no client made, but a record: by its loop's own client.

The package sets it when it is loaded, which is before any module of it. So a handle need not
import the client, which makes handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kinetic.aio._engine.session import JobRef
    from kinetic.job_record import JobRecord

    Follow = Callable[[JobRecord], Awaitable[JobRef]]

follow: Follow
"""Follows the job of a record."""
