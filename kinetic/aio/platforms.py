"""Find a backend by its name, and open its adapters.

The table of backends names their modules as strings, so that only the chosen module is loaded.
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

if TYPE_CHECKING:
    from kinetic.accelerators import Accelerator
    from kinetic.aio.ports import Cluster, Images, Store

__all__ = ["BACKENDS", "Backend", "Capacity", "Platform", "open_platform", "seconds_since_boot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The resources of a platform that is one machine; no job can have more."""

    cpus: int
    gpus: int
    memory_bytes: int


def seconds_since_boot() -> float:
    """Return seconds of a clock that, if possible, also runs while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


async def _keep_layout(accelerator: Accelerator) -> Accelerator:
    return accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A backend's three adapters: store, images, and cluster.

    Attributes:
        id_marker: The part of the IDs of jobs and batches that names the platform: ``local-`` in
            ``job-local-0123…``; empty for most.
        app: The value of the label ``app`` on its jobs.
        clock: Measures leases, in seconds; it also runs while the machine sleeps.
        capacity: The machine's resources; None for a cluster, whose machines come and go.
        layout: Returns the accelerator in a layout that this platform has.
        builds: The store of build contexts; ``images`` closes it.
    """

    store: Store
    images: Images
    cluster: Cluster
    id_marker: str = ""
    app: str = "kinetic"
    clock: Callable[[], float] = field(default=seconds_since_boot, repr=False)
    capacity: Capacity | None = None
    layout: Callable[[Accelerator], Awaitable[Accelerator]] = field(
        default=_keep_layout, repr=False
    )
    builds: Store | None = None

    async def aclose(self) -> None:
        """Close all adapters, even if one fails; the store last, because the others write to it."""
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self.store.aclose)
            closing.push_async_callback(self.images.aclose)
            closing.push_async_callback(self.cluster.aclose)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A backend: the module with its ``open_backend``, and its `Platform.id_marker`.

    ``same_cluster`` names the other backends that run jobs in the same cluster; `Client.list_jobs`
    lists their jobs too.
    """

    module: str
    id_marker: str = ""
    same_cluster: tuple[str, ...] = ()


BACKENDS: Mapping[str, Backend] = {
    "gke": Backend(module="kinetic.aio.backends.gke", same_cluster=("pathways",)),
    "local": Backend(module="kinetic.aio.backends.local", id_marker="local-"),
    "pathways": Backend(
        module="kinetic.aio.backends.pathways", id_marker="pathways-", same_cluster=("gke",)
    ),
}
"""The backends by name."""


def backend_named_in(name: str) -> str | None:
    """Return the backend that *name* names, an ID or the name of an attempt; None for most."""
    for backend, candidate in BACKENDS.items():
        if candidate.id_marker and f"-{candidate.id_marker}" in name:
            return backend
    return None


async def open_platform(
    target: configuration.Target, environ: Mapping[str, str] = os.environ
) -> Platform:
    """Import and open the adapters of *target*, without blocking the event loop.

    Raises:
        ConfigurationError: The backend can't be opened with these settings.
        BackendError: A service does not answer, or refuses.
    """
    name = BACKENDS[target.backend].module
    module: Any = await anyio.to_thread.run_sync(importlib.import_module, name)
    platform: Platform = await module.open_backend(target, environ)
    return platform
