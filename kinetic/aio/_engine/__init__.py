"""A submission of one item or many, from the call to its outcomes.

May import the ports, the lease, `_net.retry`, packing, the values and the runner's
protocol; nothing of an adapter.

A client and its handles reach these modules as attributes of this package, which imports each at
its first use: most of a first call's time is imports, and one job needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinetic.aio._engine import (
        batches as batches,
    )
    from kinetic.aio._engine import (
        beginning as beginning,
    )
    from kinetic.aio._engine import (
        cleanup as cleanup,
    )
    from kinetic.aio._engine import (
        debugging as debugging,
    )
    from kinetic.aio._engine import (
        ids as ids,
    )
    from kinetic.aio._engine import (
        job_spec as job_spec,
    )
    from kinetic.aio._engine import (
        listing as listing,
    )
    from kinetic.aio._engine import (
        manifest as manifest,
    )
    from kinetic.aio._engine import (
        notebook as notebook,
    )
    from kinetic.aio._engine import (
        prepare as prepare,
    )
    from kinetic.aio._engine import (
        removal as removal,
    )
    from kinetic.aio._engine import (
        scratch as scratch,
    )
    from kinetic.aio._engine import (
        session as session,
    )
    from kinetic.aio._engine import (
        submission as submission,
    )

_MODULES = (
    "batches",
    "beginning",
    "cleanup",
    "debugging",
    "ids",
    "job_spec",
    "listing",
    "manifest",
    "notebook",
    "prepare",
    "removal",
    "scratch",
    "session",
    "submission",
)


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
