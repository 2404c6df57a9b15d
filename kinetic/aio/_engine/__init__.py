"""A submission of one item or many, from the call to its outcomes.

These modules may import the ports, the lease, `_net.retry`, packing, the values, and the runner's
protocol. They may not import an adapter.

A client and its handles reach these modules as attributes of this package. The package imports a
module at its first use: imports take most of a first call's time, and one job needs few modules.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        notebook as notebook,
        prepare as prepare,
        removal as removal,
        scratch as scratch,
        session as session,
        submission as submission,
        workers as workers,
    )
    # isort: on


def __getattr__(name: str) -> ModuleType:
    module = f"{__name__}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != module:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
