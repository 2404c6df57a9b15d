"""The asyncio API: coroutines with the same names as the sync functions.

The functions of this module share one client per event loop; kinetic closes it when the loop ends.
Use `Client` to control a client's lifetime.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kinetic.aio import _lazy

if TYPE_CHECKING:
    from kinetic._packing.archive import Archive
    from kinetic.aio._engine.session import JobRef
    from kinetic.aio.backends.image_plans import Plan
    from kinetic.aio.batch import BatchHandle as BatchHandle
    from kinetic.aio.client import Client as Client
    from kinetic.aio.client import attach as attach
    from kinetic.aio.client import attach_batch as attach_batch
    from kinetic.aio.client import cleanup as cleanup
    from kinetic.aio.client import collect as collect
    from kinetic.aio.client import list_batches as list_batches
    from kinetic.aio.client import list_jobs as list_jobs
    from kinetic.aio.client import run as run
    from kinetic.aio.client import run_async_map as run_async_map
    from kinetic.aio.client import submit as submit
    from kinetic.aio.client import sweep as sweep
    from kinetic.aio.job import JobHandle as JobHandle
    from kinetic.aio.sweeps import Sweep as Sweep
    from kinetic.data import Data
    from kinetic.job_record import JobRecord

__all__ = [
    "BatchHandle",
    "Client",
    "JobHandle",
    "Sweep",
    "attach",
    "attach_batch",
    "build_image",
    "cleanup",
    "collect",
    "content_hash",
    "image_of",
    "list_batches",
    "list_jobs",
    "load_result",
    "pack",
    "run",
    "run_async_map",
    "submit",
    "sweep",
]

_HOMES = {
    "BatchHandle": "kinetic.aio.batch",
    "JobHandle": "kinetic.aio.job",
    "Sweep": "kinetic.aio.sweeps",
}
"""Names of `__all__` → the module that defines them; by default `kinetic.aio.client`."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "kinetic.aio.client")), name)
    globals()[name] = value
    return value


async def _follow(record: JobRecord, *, whole: bool) -> JobRef:
    from kinetic.aio.client import implicit_client

    return await (await implicit_client()).follow_record(record, whole=whole)


_lazy.follow = _follow


async def load_result(path: str | os.PathLike[str]) -> Any:
    """Read a value from a file that `JobHandle.save_result` wrote; unpickling may run code.

    Args:
        path: The file.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is damaged, or `JobHandle.save_result` didn't write it.
        Exception: The classes of the value raise it while it is rebuilt.
    """
    from kinetic._runner.protocol import pickles
    from kinetic._tasks import in_thread
    from kinetic._tracebacks import of_the_caller

    try:
        return await in_thread(pickles.load_file, path)
    except (OSError, ValueError) as error:
        raise of_the_caller(error) from None


async def content_hash(data: Data) -> str:
    """Return `Data.content_hash` of *data*; a worker thread reads the files.

    Raises:
        DataError: The path isn't local, or something in it can't be read.

    Cancelled: the thread stops at the next file; nothing is left behind.

    Example::

        digest = await kinetic.aio.content_hash(kinetic.Data("corpus/"))
    """
    if data.is_gcs or data.is_hf:
        return data.content_hash()  # raises an error that says why there is none
    from kinetic.aio._preparing.data_upload import snapshot_of

    return (await snapshot_of(data)).digest


async def pack(function: Callable[..., Any]) -> Archive | None:
    """Archive the project of *function* as a job would get it; a worker thread reads the files.

    Args:
        function: A function of the project, plain or decorated. `Data` arguments of a later call
            may lie in the project; a job leaves them out, this archive contains them.

    Returns:
        A frozen value: ``path`` of the zip file, ``digest`` (SHA-256), ``size`` in bytes, and the
        number of ``files``. None if the function belongs to no project, so that nothing ships.

    Raises:
        ConfigurationError: `KINETIC_PACKAGE_ROOT` is wrong.
        PackError: The project can't be read, ``.kineticignore`` is invalid, or the disk is full.

    Cancelled: the thread stops at the next folder or MiB of a file; nothing is left behind.

    The cache keeps the archive until newer ones exceed its limit (KINETIC_CACHE_SIZE_MB). If the
    cache can't be written, the archive lasts until this process ends.

    Example::

        archive = await kinetic.aio.pack(train)
        print(archive.files, archive.size)
    """
    from kinetic import configuration
    from kinetic._packing import archive, discover
    from kinetic._tasks import in_thread, stop_point
    from kinetic.options import settings_of

    check = stop_point()

    def pack_project() -> Archive | None:
        environ = dict(os.environ)
        plain = settings_of(function)[0]
        cwd = discover.current_directory()
        project = discover.find_project(plain, environ=environ, cwd=cwd)
        if project.root is None:
            return None
        cache = configuration.home(environ) / "cache" / "pack"
        return archive.pack(
            project.root,
            exclude=[],
            cache=cache,
            environ=environ,
            progress=lambda done, total: check(),
        )

    return await in_thread(pack_project)


async def image_of(function: Callable[..., Any]) -> Plan:
    """Resolve the image that *function* gets on the configured cluster; send and build nothing.

    Args:
        function: A plain or decorated function; its ``container_image`` and accelerator decide.

    Returns:
        A frozen `kinetic.images.Plan`: the image's name, category, and what it is built from.

    Raises:
        ConfigurationError: The image's name is invalid, or ``prebuilt`` has no repository.
        PackError: The dependencies can't be read, or exist on this machine only.

    Cancelled: the thread finishes first; nothing is left behind.

    Example::

        plan = await kinetic.aio.image_of(train)
        print(plan.image)
    """
    from kinetic._tasks import in_thread
    from kinetic.aio.backends import image_plans
    from kinetic.configuration import resolve

    return await in_thread(image_plans.image_of, function, resolve())


async def build_image(plan: Plan, *, again: bool = False) -> bool:
    """Build and push *plan* with Cloud Build, in the configured project.

    A build takes some minutes.

    Args:
        plan: The plan that `image_of` or `kinetic.images.base_image` returned.
        again: Build the image even if the registry has it. Default: False.

    Returns:
        Whether the image was built; False if the registry had it already.

    Raises:
        ConfigurationError: No project is configured, or its registry isn't Google's.
        BuildError: The build failed; the message has the last lines of its log.
        BackendError: A service refused, or didn't answer.

    Cancelled: kinetic also cancels the build.

    Example::

        built = await kinetic.aio.build_image(await kinetic.aio.image_of(train))
    """
    from kinetic.aio.backends import image_plans
    from kinetic.configuration import resolve

    return await image_plans.publish(plan, resolve(), again=again)
