"""A client's connection to one platform: its adapters, the keys of submissions, and its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kinetic._packing.archive import Packer
from kinetic._runner.protocol import signing
from kinetic._tasks import await_shared, end_all
from kinetic.aio.platforms import Platform
from kinetic.configuration import Target
from kinetic.errors import ConfigurationError

T = TypeVar("T")


class Connection:
    """The open platform of *target*, with what lasts as long as it is open."""

    def __init__(self, target: Target, platform: Platform) -> None:
        self.target = target
        self.platform = platform
        self.packer = Packer()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._root_key: asyncio.Task[bytes] | None = None
        self._closed = False

    async def key(self, scope: str) -> bytes:
        """Return the key that signs the objects under *scope*."""
        key_task = self._root_key
        if key_task is None or (key_task.done() and (key_task.cancelled() or key_task.exception())):
            key_task = self._root_key = self.spawn(
                self.platform.cluster.root_key(), name="root key"
            )
        return signing.submission_key(await await_shared(key_task, "the client"), scope)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task that is cancelled when the connection closes."""
        if self._closed:
            work.close()
            raise ConfigurationError("this client is closed; open another one")
        task = asyncio.get_running_loop().create_task(work, name=f"kinetic {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Cancel the tasks, and close the platform; running jobs continue."""
        self._closed = True
        await end_all(self._tasks)
        self.packer.close()
        await self.platform.aclose()
