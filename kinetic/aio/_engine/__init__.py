"""A submission of one item or many, from the call to its outcomes.

These modules may import the ports, the lease, `_net.retry`, packing, the values, and the runner's
protocol. They may not import an adapter.

A client and its handles reach these modules as attributes of this package. The package imports a
module at its first use: imports take most of a first call's time, and one job needs few modules.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kinetic.aio._engine.session import JobRef
    from kinetic.job_record import JobRecord

    # isort: off
    from kinetic.aio._engine import (
        batches as batches,
        beginning as beginning,
        debugging as debugging,
        ids as ids,
        job_spec as job_spec,
        listing as listing,
        manifest as manifest,
        metrics as metrics,
        prepare as prepare,
        progress as progress,
        removal as removal,
        scratch as scratch,
        session as session,
        submission as submission,
        workers as workers,
    )
    # isort: on


class Follow(Protocol):
    """Find the job of a record; *whole* also reads and follows the rest of its batch."""

    async def __call__(self, record: JobRecord, *, whole: bool) -> JobRef:
        """Return a reference to the job."""
        ...


follow: Follow
"""Finds the job of a handle that no client has made, by the client of the running event loop.

The package `kinetic.aio` sets it. So the handles needn't import the client, which imports them.
"""


def __getattr__(name: str) -> ModuleType:
    module = f"{__name__}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != module:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
