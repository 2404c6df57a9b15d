"""The asyncio API: coroutines with the same names as the sync functions.

The functions of this module share one client per event loop; kinetic closes it when the loop ends.
Use `Client` to control a client's lifetime.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from kinetic._tracebacks import own_frames_left_out
from kinetic.aio._engine import implicit_client

if TYPE_CHECKING:
    from kinetic._packing.archive import Archive
    from kinetic.aio._engine.session import JobRef
    from kinetic.aio.backends.image_plans import Plan
    from kinetic.aio.batch import BatchHandle as BatchHandle
    from kinetic.aio.client import Client as Client
    from kinetic.aio.client import run_async_map as run_async_map
    from kinetic.aio.job import JobHandle as JobHandle
    from kinetic.collection import Collection
    from kinetic.data import Data
    from kinetic.job_record import JobRecord

__all__ = [
    "BatchHandle",
    "Client",
    "JobHandle",
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
]

P = ParamSpec("P")
T = TypeVar("T")

_LAZY = {
    "BatchHandle": "kinetic.aio.batch",
    "Client": "kinetic.aio.client",
    "JobHandle": "kinetic.aio.job",
    "run_async_map": "kinetic.aio.client",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


async def _client() -> Client:
    from kinetic.aio.client import implicit_client

    return await implicit_client()


async def _follow(record: JobRecord, *, whole: bool) -> JobRef:
    return await (await _client()).follow_record(record, whole=whole)


implicit_client.follow = _follow


@overload
async def submit(
    function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
) -> JobHandle[T]: ...


@overload
async def submit(
    function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> JobHandle[T]: ...


async def submit(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> JobHandle[Any]:
    """Start ``function(*args, **kwargs)`` and return the job's handle, from asyncio.

    Returns once the platform has accepted the job; it may start later.

    Args:
        function: The function to run, plain or decorated.
        args, kwargs: Its arguments; kinetic pickles them.

    Raises:
        TypeError: The function doesn't take these arguments; nothing was sent.
        ConfigurationError: A setting is wrong.
        PackError: The function or an argument can't be shipped.
        DataError: A `Data` can't be shipped.
        LaunchError: The platform refused the job.
        BackendError: The store or the platform doesn't answer.

    Cancelled: the job and its objects are removed, within 30 s; shared content stays.

    Example::

        job = await kinetic.submit(train, 0.1)
        loss = await job
    """
    return await (await _client()).submit(function, *args, **kwargs)


@overload
async def run(
    function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
) -> T: ...


@overload
async def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


@own_frames_left_out
async def run(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Submit, wait, and return the value; see `Client.run`."""
    return await (await _client()).run(function, *args, **kwargs)


async def attach(
    job_id: str, project: str | None = None, cluster: str | None = None
) -> JobHandle[Any]:
    """Return the handle of a job that any process submitted; see `Client.attach`."""
    return await (await _client()).attach(job_id, project, cluster)


async def attach_batch(
    group_id: str,
    project: str | None = None,
    cluster: str | None = None,
    poll_interval: float = 10.0,
    poll_timeout: float | None = None,
) -> BatchHandle[Any]:
    """Return the handle of a batch that any process submitted; see `Client.attach_batch`."""
    return await (await _client()).attach_batch(
        group_id, project, cluster, poll_interval, poll_timeout
    )


async def cleanup(submission: str, project: str | None = None, cluster: str | None = None) -> None:
    """Remove a batch or a single job by its ID; see `Client.cleanup`."""
    await (await _client()).cleanup(submission, project, cluster)


async def list_batches(
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
    project: str | None = None,
    cluster: str | None = None,
    limit: int | None = None,
) -> list[BatchHandle[Any]]:
    """List the batches in the store, the newest first; see `Client.list_batches`."""
    return await (await _client()).list_batches(name, tags, project, cluster, limit)


async def list_jobs(
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
    limit: int | None = None,
) -> list[JobHandle[Any]]:
    """List the jobs that the platform knows; see `Client.list_jobs`."""
    return await (await _client()).list_jobs(project, zone, cluster, namespace, limit)


async def load_result(path: str | os.PathLike[str]) -> Any:
    """Read a value from a file that `JobHandle.save_result` wrote; unpickling may run code.

    Args:
        path: The file.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is damaged, or isn't such a file.
        Exception: The classes of the value raise it while it is rebuilt.
    """
    from kinetic._runner.protocol import pickles
    from kinetic._tasks import in_thread

    return await in_thread(pickles.load_file, path)


async def collect() -> Collection:
    """Remove unused contents from the store and caches; see `Client.collect`."""
    return await (await _client()).collect()


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
    from kinetic.aio._engine.data_upload import snapshot_of

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

    Cancelled: the thread finishes first; the archive stays in the cache.

    The cache keeps an archive for at least an hour after its last use. If it can't be written, the
    archive lasts until this process ends.

    Example::

        archive = await kinetic.aio.pack(train)
        print(archive.files, archive.size)
    """
    from pathlib import Path

    from kinetic import configuration
    from kinetic._packing import archive, discover
    from kinetic._tasks import in_thread
    from kinetic.options import settings_of

    def pack_project() -> Archive | None:
        environ = dict(os.environ)
        plain = settings_of(function)[0]
        project = discover.find_project(plain, environ=environ, cwd=Path.cwd())
        if project.root is None:
            return None
        cache = configuration.home(environ) / "cache" / "pack"
        return archive.pack(project.root, exclude=[], cache=cache, environ=environ)

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
