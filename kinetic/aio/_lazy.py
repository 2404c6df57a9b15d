"""The modules that a client and its handles import on first use.

Imports take most of a first call's time, and one job needs few modules. So the client and its
handles reach these modules as attributes of this one, which imports each at its first use.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kinetic.aio._debugging import attaching as attaching
    from kinetic.aio._engine import batches as batches
    from kinetic.aio._engine import beginning as beginning
    from kinetic.aio._engine import removal as removal
    from kinetic.aio._engine import session as session
    from kinetic.aio._engine import workers as workers
    from kinetic.aio._engine.session import JobRef
    from kinetic.aio._preparing import calls as calls
    from kinetic.aio._preparing import scratch as scratch
    from kinetic.aio._reading import listing as listing
    from kinetic.aio._reading import metrics as metrics
    from kinetic.aio._reading import progress as progress
    from kinetic.aio._reading import records as records
    from kinetic.aio._reading import report as report
    from kinetic.aio._submissions import ids as ids
    from kinetic.aio._submissions import manifest as manifest
    from kinetic.aio._submissions import submission as submission
    from kinetic.job_record import JobRecord

_PACKAGES = {
    "attaching": "_debugging",
    **dict.fromkeys(("batches", "beginning", "removal", "session", "workers"), "_engine"),
    **dict.fromkeys(("calls", "scratch"), "_preparing"),
    **dict.fromkeys(("listing", "metrics", "progress", "records", "report"), "_reading"),
    **dict.fromkeys(("ids", "manifest", "submission"), "_submissions"),
}


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
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = globals()[name] = import_module(f"kinetic.aio.{_PACKAGES[name]}.{name}")
    return module
