"""Open the platform ``local``: a directory as store, this interpreter, and the supervisor."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from kinetic import configuration
from kinetic._devices import count_cpus, gpu_ids, memory_bytes
from kinetic._runner.protocol import private
from kinetic._supervisor.protocol import SupervisorPaths
from kinetic.aio.images.current import CurrentInterpreter
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import BACKENDS, Capacity, Platform
from kinetic.errors import AuthError, BackendError, ConfigurationError


async def open_backend(target: configuration.Target, environ: Mapping[str, str]) -> Platform:
    """Open the platform of *target*; start no process yet.

    Raises:
        ConfigurationError: The target's store isn't a directory.
        AuthError: Other users can write to a folder of kinetic, or read its key.
        BackendError: kinetic's folder can't be made, or the store can't be used.
    """
    if target.store and "://" in target.store:
        raise ConfigurationError(
            f"the local backend keeps its jobs in a directory, not in {target.store!r}: "
            "set KINETIC_STORE, or the store= of the client, to an absolute path"
        )
    return await anyio.to_thread.run_sync(
        _build_platform, target.store, configuration.home(environ), environ
    )


def _build_platform(store: str | None, home: Path, environ: Mapping[str, str]) -> Platform:
    """Check and make the folders, and return the platform. Blocks."""
    root = Path(store).expanduser() if store else home / "store"
    paths = SupervisorPaths(home)
    for path, secret in {home: False, root: False, paths.state: False, home / "key": True}.items():
        if objection := private.objection(path, secret=secret):
            raise AuthError(objection)
    try:
        private.make_folder(home)
    except OSError as exc:
        is_refused = exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        raise (AuthError if is_refused else BackendError)(
            f"{home} cannot be made: {exc.strerror}; set KINETIC_HOME to another folder"
        ) from exc
    cpus, gpus = count_cpus(environ), len(gpu_ids(environ))
    return Platform(
        store=DirectoryStore(root),
        images=CurrentInterpreter(home, environ),
        cluster=LocalCluster(home, environ),
        id_marker=BACKENDS["local"].id_marker,
        capacity=Capacity(cpus=cpus, gpus=gpus, memory_bytes=memory_bytes()),
    )
