"""A store in a directory of this machine, or on a volume that a cluster's nodes also mount."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from anyio import to_thread

from kinetic import errors
from kinetic._runner.protocol.private import make_folder
from kinetic._runner.stores.directory import DirectoryObjects, Stored
from kinetic._tasks import in_thread
from kinetic.aio.ports import RECORD_BYTES, Object, ObjectInfo

T = TypeVar("T")

FIRST_GENERATION = 1
"""The generation of an object that was never replaced."""

SMALL_BYTES = 256 * 1024
"""Bodies up to this size are read and written on the event loop, which is faster than a thread.

A shared volume may be slow, so requests to it always run in a thread.
"""


class DirectoryStore:
    """`kinetic.aio.ports.Store` over a directory, private to the user.

    With *shared*, pods of a cluster mount the directory at the same path.

    If a method that changes the store is cancelled, it finishes the change before it returns, so
    the caller can undo the change.
    """

    def __init__(self, root: Path, *, shared: bool = False) -> None:
        if not root.is_absolute():
            raise errors.ConfigurationError(f"the store directory {root} must be an absolute path")
        self._objects = DirectoryObjects(root, shared=shared)
        self._shared = shared
        with _translating(self._objects, "open"):
            make_folder(root)

    @property
    def url(self) -> str:
        return self._objects.url

    def plain(self) -> DirectoryStore:
        return self

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
        check: Callable[[], object] | None = None,
    ) -> bool:
        with _translating(self._objects, name):
            if isinstance(body, bytes) and len(body) <= SMALL_BYTES and not self._shared:
                return self._objects.create(name, body, metadata, check=check)
            return await in_thread(self._objects.create, name, body, metadata, check=check)

    async def begin(self, name: str, body: bytes) -> int | None:
        return FIRST_GENERATION if await self.create(name, body) else None

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        with _translating(self._objects, name):
            replaced = await in_thread(self._objects.replace, name, body, generation)
        if replaced is None:
            raise errors.Conflict(f"{name} is no longer of generation {generation}")
        return replaced

    async def get(self, name: str, *, limit: int | None = RECORD_BYTES, start: int = 0) -> Object:
        with _translating(self._objects, name):
            read = partial(self._objects.read, name, SMALL_BYTES)
            info, content = await self._read_quickly(read)
            if content is not None:
                body = content[start:]
            elif limit is not None and info.size - start > limit:
                body = b""
            else:
                body, _ = await to_thread.run_sync(self._objects.get, name, start, info.size)
        return Object(name=name, body=body, metadata=info.metadata, generation=info.generation)

    async def get_many(self, names: Collection[str]) -> dict[str, Object]:
        found = dict[str, Object]()
        for name in names:
            with contextlib.suppress(errors.NotFound):
                found[name] = await self.get(name)
        return found

    async def fetch(self, name: str, path: Path) -> None:
        def fetch() -> None:
            source = self._objects.path(name)
            try:
                if source is not None:
                    # This is safe: an object never changes, and readers don't write to it.
                    os.link(source, path)
                    return
            except OSError as exc:
                if exc.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                    raise
            self._objects.fetch(name, path)

        with _translating(self._objects, name):
            await to_thread.run_sync(fetch)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        with _translating(self._objects, prefix):
            is_small = prefix.endswith(".")  # a listing of one item is too short for a thread
            run = self._read_quickly if is_small else to_thread.run_sync
            found = await run(partial(self._objects.list, prefix))
        return [_object_info(stored) for stored in found]

    async def look(self, name: str) -> ObjectInfo | None:
        with _translating(self._objects, name):
            found = await self._read_quickly(partial(self._objects.look_up, [name]))
        return _object_info(found[0]) if found else None

    async def renew(self, names: Collection[str]) -> set[str]:
        with _translating(self._objects, "renew"):
            return await in_thread(self._objects.renew, names)

    async def collect(self, objects: Sequence[ObjectInfo]) -> bool:
        used = {info.name: info.used for info in objects}
        with _translating(self._objects, "collect"):
            return await in_thread(self._objects.collect, used)

    async def delete(self, names: Collection[str]) -> None:
        with _translating(self._objects, "delete"):
            await in_thread(self._objects.delete, names)

    async def aclose(self) -> None:
        await asyncio.sleep(0)

    async def _read_quickly(self, work: Callable[[], T]) -> T:
        """Run a short read: in a thread if the volume is shared, else on the event loop.

        A cancelled caller of a read doesn't wait for its thread.
        """
        return await to_thread.run_sync(work) if self._shared else work()


@contextlib.contextmanager
def _translating(objects: DirectoryObjects, name: str) -> Generator[None]:
    """Translate errors of the file system into errors of kinetic that say what to do.

    *name* is the object or the operation that fails.
    """
    try:
        yield
    except KeyError:
        raise errors.NotFound(f"there is no {name} in {objects.root}") from None
    except OSError as exc:
        raise _failure(objects.root, name, exc) from exc


def _failure(root: Path, name: str, exc: OSError) -> errors.BackendError:
    """Return kinetic's error for *exc*."""
    if exc.filename2 is not None and exc.errno in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
        return errors.BackendError(
            f"the file system of {root} makes no hard links, which a store needs "
            f"({exc.strerror}); use a directory on another file system"
        )
    if exc.errno == errno.EROFS:
        return errors.AuthError(f"the store {root} is read-only; mount it writable on this machine")
    if isinstance(exc, PermissionError):
        return errors.AuthError(
            f"{exc.filename or root} can't be used: {exc.strerror}; make it writable, or set "
            "KINETIC_HOME or KINETIC_STORE to a directory that is"
        )
    problem = f"the store {root} failed at {name}: {exc.strerror or exc}"
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return errors.StoreFull(f"{problem}; free some space, or set KINETIC_STORE to another disk")
    return errors.BackendError(f"{problem}; check the directory")


def _object_info(stored: Stored) -> ObjectInfo:
    return ObjectInfo(
        name=stored.name,
        size=stored.size,
        metadata=stored.metadata,
        generation=stored.generation,
        used=stored.used,
    )
