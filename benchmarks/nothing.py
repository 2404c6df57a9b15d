"""A platform that takes no time: each item has its outcome as soon as its input is stored.

The rest of a batch's time is kinetic's. `run_bare` measures the platform alone, with the
same jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from kinetic._runner.protocol import frames, wire
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Image, JobSpec, Observation, Phase, Resources
from kinetic.testing import MemoryCluster, MemoryStore
from kinetic.testing.platform import MemoryImages

BODY = frames.pack([pickle.dumps(0.5)])
DIGEST = hashlib.sha256(BODY).hexdigest()
OUTCOME = wire.Outcome(kind=wire.Kind.VALUE, executor="nobody", phase="execute", body=DIGEST)


HELD = 64
"""How many items a worker holds that may end none."""


class RecordingStore(MemoryStore):
    """A store that says when all inputs of a batch are stored, and how large they are."""

    def __init__(self) -> None:
        super().__init__()
        self.all_stored = asyncio.Event()
        self.slot_stored = asyncio.Event()
        self.input_bytes = 0

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        **options: Any,
    ) -> bool:
        """Implement `Store.create`, and record the inputs."""
        created = await super().create(name, body, metadata, **options)
        if "/inputs/" in name:
            self.input_bytes += len(body) if isinstance(body, bytes) else 0
            self.slot_stored.set()
            if "total" in (metadata or {}):
                self.all_stored.set()
        return created


class InstantCluster(MemoryCluster):
    """A cluster whose worker ends each item at once; while ``holding``, only at `release_all`."""

    shows_items = True
    replaces = True

    def __init__(self, store: RecordingStore, *, holding: bool = False) -> None:
        super().__init__(store, _run_nothing)
        self.holding = holding
        self._own_tasks: set[asyncio.Task[None]] = set()
        self._released = asyncio.Event()
        self.committed: dict[int, float] | None = None
        self._objects = store
        self._waiting: deque[tuple[JobSpec, int]] = deque()
        self._launched_event = asyncio.Event()
        self._observations: deque[Observation] = deque()
        self._observed_event = asyncio.Event()

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        """Implement `Workers.scale`: run all items of the batch, or hold them."""
        self.requests["scale"] += 1
        task = asyncio.create_task(self._run_items(job))
        self._own_tasks.add(task)
        task.add_done_callback(self._own_tasks.discard)
        return ranks.stop

    async def tell(self, labels: Mapping[str, str]) -> None:
        """Implement `Workers.tell`; the store has told already."""

    async def grow(self, name: str, workers: int) -> int:
        """Implement `Workers.grow`: one worker is enough."""
        return workers

    async def extend(self, name: str, seconds: float) -> None:
        """Implement `Workers.extend`: the round has no deadline."""

    async def _run_items(self, job: JobSpec) -> None:
        scope, number = job.order.scope, 0
        while True:
            self._objects.slot_stored.clear()
            name = wire.input_key(scope, number)
            if (info := await self._objects.look(name)) is None:
                await self._objects.slot_stored.wait()
                continue
            slot = wire.Slot.verified(info.metadata, job.key, scope, name)
            if slot.total is not None:
                return
            for index in range(slot.first, slot.first + slot.count):
                while self.holding and len(self._waiting) >= HELD:
                    self._released.clear()
                    await self._released.wait()
                if self.holding:
                    self._waiting.append((job, index))
                    self._launched_event.set()
                else:
                    await self.finish_item(job, index)
                    if index % HELD == 0:
                        await asyncio.sleep(0)
            number += 1

    async def wait_until_launched(self, count: int) -> None:
        """Wait until *count* items are held, at most `HELD`."""
        while len(self._waiting) < count:
            self._launched_event.clear()
            await self._launched_event.wait()

    async def end_next(self) -> None:
        """End the item that was taken first."""
        await self.finish_item(*self._waiting.popleft())
        self._released.set()

    async def release_all(self) -> None:
        """End all held items, and from now on each item at once."""
        self.holding = False
        while self._waiting:
            await self.end_next()

    async def finish_item(self, job: JobSpec, index: int) -> None:
        """Store the outcome of an item, and report its end."""
        attempt_id = (job.order.scope, index, 1)
        name = wire.attempt_key(*attempt_id, "outcome")
        await self._objects.create(name, BODY, OUTCOME.signed(job.key, *attempt_id))
        if self.committed is not None:
            self.committed[index] = time.perf_counter()
        item = {"kinetic.dev/index": str(index), "kinetic.dev/attempt": "1"}
        self._observations.append(
            Observation(
                name=f"{job.labels['kinetic.dev/submission']}-{index}-1",
                phase=Phase.GONE,
                labels={**job.labels, **item},
                executor="nobody",
            )
        )
        self._observed_event.set()

    async def watch(self, labels: Mapping[str, str]) -> AsyncGenerator[Observation]:
        """Implement `Cluster.watch`, for one watcher."""
        while True:
            await self._observed_event.wait()
            self._observed_event.clear()
            while self._observations:
                yield self._observations.popleft()

    async def find(self, **filters: Any) -> list[Observation]:
        """Implement `Cluster.find`: return nothing, because the cluster keeps no ended job."""
        self.requests["find"] += 1
        return []


async def _run_nothing(run: Any) -> None:
    raise AssertionError("nothing runs here")


def make_platform(*, holding: bool = False) -> tuple[Platform, RecordingStore, InstantCluster]:
    """Return a new platform, with its store and its cluster."""
    store = RecordingStore()
    cluster = InstantCluster(store, holding=holding)
    platform = Platform(store=store, images=MemoryImages(), cluster=cluster)
    return platform, store, cluster


async def run_bare(items: int) -> MemoryStore:
    """End *items* items, watch them end, and read their outcomes: no engine at all."""
    platform, store, cluster = make_platform()
    scope = f"batches/grp-{'0' * 12}/"
    labels = {f"kinetic.dev/{name}": "x" for name in ("submission", "client")}
    watch = cluster.watch({})
    no_input = wire.Input(name="", start=0, stop=0, digest="")
    job = JobSpec(
        name="bare",
        labels=labels,
        order=wire.Order(
            store="",
            scope=scope,
            job_id="",
            index=0,
            attempt=1,
            function=no_input,
            arguments=no_input,
        ),
        key=bytes(32),
        resources=Resources(),
        image=Image(uri="", command=()),
        environment={},
    )
    for index in range(items):
        await cluster.finish_item(job, index)
        await anext(watch)
        await store.get(wire.attempt_key(scope, index, 1, "outcome"))
    await platform.aclose()
    return store
