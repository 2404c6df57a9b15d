"""A platform that takes no time: a job has ended, with its outcome, when its launch returns.

The rest of a batch's time is kinetic's. `bare` measures the platform alone, with the
same jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinetic._runner.protocol import frames, wire
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Image, JobSpec, Observation, Phase, Resources
from kinetic.testing import MemoryCluster, MemoryStore
from kinetic.testing.platform import MemoryImages

__all__ = ["Instant", "Recording", "bare", "platform"]

BODY = frames.pack([b"\x80\x05N."])  # None
DIGEST = hashlib.sha256(BODY).hexdigest()
OUTCOME = wire.Outcome(kind=wire.Kind.VALUE, executor="nobody", phase="execute", body=DIGEST)


class Recording(MemoryStore):
    """Says when all inputs of a batch are stored, how large they are, and when outcomes came."""

    def __init__(self) -> None:
        super().__init__()
        self.all_stored = asyncio.Event()
        self.input_bytes = 0

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
    ) -> bool:
        """See the port."""
        created = await super().create(name, body, metadata, shared=shared)
        if "/inputs/" in name:
            self.input_bytes += len(body) if isinstance(body, bytes) else 0
            if "total" in (metadata or {}):
                self.all_stored.set()
        return created


class Instant(MemoryCluster):
    """Ends each job as it is launched; with ``held`` set, only when `let_go` is called."""

    def __init__(self, store: MemoryStore, *, held: bool = False) -> None:
        super().__init__(store, _nothing)
        self.held = held
        self.committed: dict[int, float] | None = None
        self._objects = store
        self._waiting: deque[JobSpec] = deque()
        self._taken = asyncio.Event()
        self._news: deque[Observation] = deque()
        self._awake = asyncio.Event()

    async def launch(self, job: JobSpec) -> None:
        """See the port."""
        self.requests["launch"] += 1
        if self.held:
            self._waiting.append(job)
            self._taken.set()
        else:
            await self._end(job)

    async def launched(self, count: int) -> None:
        """Wait until *count* jobs are held."""
        while len(self._waiting) < count:
            self._taken.clear()
            await self._taken.wait()

    async def end_next(self) -> None:
        """End the job that was launched first."""
        await self._end(self._waiting.popleft())

    async def let_go(self) -> None:
        """End what was launched so far, and from now on everything at once."""
        self.held = False
        while self._waiting:
            await self.end_next()

    async def _end(self, job: JobSpec) -> None:
        order = job.order
        place = (order.scope, order.index, order.attempt)
        name = wire.attempt_key(*place, "outcome")
        await self._objects.create(name, BODY, OUTCOME.signed(job.key, *place))
        if self.committed is not None:
            self.committed[order.index] = time.perf_counter()
        self._news.append(
            Observation(
                name=job.name,
                phase=Phase.ENDED,
                labels=job.labels,
                executor="nobody",
                exit_code=0,
            )
        )
        self._awake.set()

    async def watch(self, labels: Mapping[str, str]) -> AsyncIterator[Observation]:
        """See the port; for one watcher."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._news:
                yield self._news.popleft()

    async def find(
        self, *, names: Collection[str] = (), labels: Mapping[str, str] | None = None
    ) -> list[Observation]:
        """See the port: what has ended is forgotten at once."""
        self.requests["find"] += 1
        return []


async def _nothing(run: Any) -> None:
    raise AssertionError("nothing runs here")


def platform(*, held: bool = False) -> tuple[Platform, Recording, Instant]:
    """A new one."""
    store = Recording()
    cluster = Instant(store, held=held)
    return Platform(store=store, images=MemoryImages(), cluster=cluster), store, cluster


@dataclass(frozen=True, slots=True)
class _Part:
    scope: str
    key: bytes


async def bare(items: int) -> MemoryStore:
    """Launch *items* jobs, hear of their ends and read their outcomes: no engine at all."""
    made, store, cluster = platform()
    part = _Part(f"batches/grp-{'0' * 12}/", bytes(32))
    common: dict[str, Any] = {"image": Image(uri="", command=()), "environment": {}}
    labels = {f"kinetic.dev/{name}": "x" for name in ("submission", "client", "index", "attempt")}
    watch = cluster.watch({})
    nothing = wire.Input(name="", start=0, stop=0, digest="")
    for index in range(items):
        order = wire.Order(
            store="",
            scope=part.scope,
            job_id="",
            index=index,
            attempt=1,
            function=nothing,
            arguments=nothing,
        )
        await cluster.launch(
            JobSpec(
                name=f"{index}",
                labels=labels,
                order=order,
                key=part.key,
                resources=Resources(),
                **common,
            )
        )
        await anext(watch)
        await store.get(wire.attempt_key(part.scope, index, 1, "outcome"))
    await made.aclose()
    return store
