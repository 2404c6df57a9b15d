"""A platform that takes no time: a job has ended, with its outcome, when its launch returns.

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


class RecordingStore(MemoryStore):
    """A store that says when all inputs of a batch are stored, and how large they are."""

    def __init__(self) -> None:
        super().__init__()
        self.all_stored = asyncio.Event()
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
            if "total" in (metadata or {}):
                self.all_stored.set()
        return created


class InstantCluster(MemoryCluster):
    """A cluster that ends each job at its launch; while ``holding``, only at `release_all`."""

    def __init__(self, store: MemoryStore, *, holding: bool = False) -> None:
        super().__init__(store, _run_nothing)
        self.holding = holding
        self.committed: dict[int, float] | None = None
        self._objects = store
        self._waiting: deque[JobSpec] = deque()
        self._launched_event = asyncio.Event()
        self._observations: deque[Observation] = deque()
        self._observed_event = asyncio.Event()

    async def launch(self, job: JobSpec) -> None:
        """Implement `Cluster.launch`: end the job, or hold it."""
        self.requests["launch"] += 1
        if self.holding:
            self._waiting.append(job)
            self._launched_event.set()
        else:
            await self._end(job)

    async def wait_until_launched(self, count: int) -> None:
        """Wait until *count* jobs are held."""
        while len(self._waiting) < count:
            self._launched_event.clear()
            await self._launched_event.wait()

    async def end_next(self) -> None:
        """End the job that was launched first."""
        await self._end(self._waiting.popleft())

    async def release_all(self) -> None:
        """End all held jobs, and from now on each job at its launch."""
        self.holding = False
        while self._waiting:
            await self.end_next()

    async def _end(self, job: JobSpec) -> None:
        order = job.order
        attempt_id = (order.scope, order.index, order.attempt)
        name = wire.attempt_key(*attempt_id, "outcome")
        await self._objects.create(name, BODY, OUTCOME.signed(job.key, *attempt_id))
        if self.committed is not None:
            self.committed[order.index] = time.perf_counter()
        self._observations.append(
            Observation(
                name=job.name,
                phase=Phase.ENDED,
                labels=job.labels,
                executor="nobody",
                exit_code=0,
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
    return Platform(store=store, images=MemoryImages(), cluster=cluster), store, cluster


async def run_bare(items: int) -> MemoryStore:
    """Launch *items* jobs, watch them end, and read their outcomes: no engine at all."""
    platform, store, cluster = make_platform()
    scope = f"batches/grp-{'0' * 12}/"
    labels = {f"kinetic.dev/{name}": "x" for name in ("submission", "client", "index", "attempt")}
    watch = cluster.watch({})
    no_input = wire.Input(name="", start=0, stop=0, digest="")
    for index in range(items):
        order = wire.Order(
            store="",
            scope=scope,
            job_id="",
            index=index,
            attempt=1,
            function=no_input,
            arguments=no_input,
        )
        await cluster.launch(
            JobSpec(
                name=f"{index}",
                labels=labels,
                order=order,
                key=bytes(32),
                resources=Resources(),
                image=Image(uri="", command=()),
                environment={},
            )
        )
        await anext(watch)
        await store.get(wire.attempt_key(scope, index, 1, "outcome"))
    await platform.aclose()
    return store
