"""Which adapters make up a backend: the one table, and the one place that opens them.

Backends are named as strings, so that choosing one loads no other.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from kinetic import configuration
from kinetic.errors import ConfigurationError

if TYPE_CHECKING:
    from kinetic.accelerators import Accelerator
    from kinetic.aio.ports import Cluster, Images, Store

__all__ = ["BACKENDS", "Backend", "Capacity", "Platform", "lifetime", "open_platform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """All there is on a platform that is one machine; more can be given to no job."""

    cpus: int
    gpus: int
    memory_bytes: int


def lifetime() -> float:
    """Return seconds on a clock that counts sleep; Linux has one beside the monotonic clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


async def _usual(accelerator: Accelerator) -> Accelerator:
    return accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Three adapters that belong together.

    ``restarts`` says whether the platform itself replaces an attempt that was
    disrupted, ``relaunches`` whether that of a job of its own is left to whoever has
    submitted it; ``marker`` is what tells its job ids from those of others, and ``app``
    is the label ``app`` of its jobs.
    ``clock`` is in seconds and counts those in which the machine sleeps: by it
    leases are kept and seen to stand still. ``capacity`` is None where machines
    come and go. ``layout`` chooses the machines of an accelerator by what is there. ``builds``
    is where images keep what they are built of; whoever closes the images closes it.
    """

    store: Store
    images: Images
    cluster: Cluster
    restarts: bool = False
    relaunches: bool = False
    marker: str = ""
    app: str = "kinetic"
    clock: Callable[[], float] = field(default=lifetime, repr=False)
    capacity: Capacity | None = None
    layout: Callable[[Accelerator], Awaitable[Accelerator]] = field(default=_usual, repr=False)
    builds: Store | None = None

    async def aclose(self) -> None:
        """Close the three, also when one fails; the store last: the others may write to it."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.store.aclose)
            closing.push_async_callback(self.images.aclose)
            closing.push_async_callback(self.cluster.aclose)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The module whose ``open_backend`` composes it, and what tells its job ids from others.

    ``beside`` are the backends whose jobs are in the same place: whoever asks for all there
    is there wants theirs as well.
    """

    module: str
    marker: str = ""
    beside: tuple[str, ...] = ()


BACKENDS: Mapping[str, Backend] = {
    "gke": Backend(module="kinetic.aio.backends.gke", beside=("pathways",)),
    "local": Backend(module="kinetic.aio.backends.local", marker="local-"),
    "pathways": Backend(
        module="kinetic.aio.backends.pathways", marker="pathways-", beside=("gke",)
    ),
}


async def open_platform(
    target: configuration.Target, environ: Mapping[str, str] = os.environ
) -> Platform:
    """Import and open the adapters of *target*, without holding the event loop up.

    Raises:
        ConfigurationError: The backend is not part of this version, or cannot
            be opened with these settings.
        BackendError: A service does not answer, or refuses.
    """
    backend = BACKENDS.get(target.backend)
    if backend is None:
        raise ConfigurationError(
            f"the backend {target.backend!r} is not part of this version of kinetic "
            f'({", ".join(BACKENDS)} are); pass backend="local" or set KINETIC_BACKEND=local '
            "to run on this machine"
        )
    module: Any = await anyio.to_thread.run_sync(importlib.import_module, backend.module)
    platform: Platform = await module.open_backend(target, environ)
    return platform
