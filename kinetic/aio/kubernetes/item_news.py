"""Learn from the logs of workers which item each of them runs, and when it has ended.

A line that says so may be forged or missed. So it is only a hint to read the store now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from absl import logging

from kinetic._runner.protocol.marks import Mark, parse_mark
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import get_dict, get_list, uid
from kinetic.aio.kubernetes.manifests import (
    ATTEMPT,
    CONTAINER,
    INDEX,
    KIND,
    RANK,
    WORKER,
    Paths,
    by_jobs,
)
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.ports import LogPieces, Observation, Phase
from kinetic.errors import BackendError

MOST_FOLLOWED = 100
"""How many logs one watch follows; each is a connection."""

LAST_S = 60
"""How much of a log to read at first, in seconds."""

IDLE_S = 300.0
"""After this many seconds of silence, connect again: the connection may be dead."""


async def with_items(
    api: Api, paths: Paths, rhythm: Rhythm, source: AsyncGenerator[Observation]
) -> AsyncGenerator[Observation]:
    """Yield the observations of *source*, and those of the items that its workers run."""
    queue = asyncio.Queue[Observation | None]()
    followers: dict[str, asyncio.Task[None]] = {}

    async def pump() -> None:
        try:
            async with aclosing(source) as observations:
                async for observation in observations:
                    queue.put_nowait(observation)
        finally:
            queue.put_nowait(None)

    pumping = asyncio.create_task(pump(), name="kinetic watch of workers")
    try:
        while (observation := await queue.get()) is not None:
            if observation.labels.get(KIND) == WORKER and INDEX not in observation.labels:
                name, runs = observation.name, observation.phase is Phase.RUNNING
                if not runs and (follower := followers.pop(name, None)) is not None:
                    follower.cancel()
                elif runs and name not in followers and len(followers) < MOST_FOLLOWED:
                    work = _follow(api, paths, rhythm, observation, queue)
                    followers[name] = asyncio.create_task(work, name=f"kinetic log of {name}")
            yield observation
        await pumping  # raises the error that ended the watch
    finally:
        tasks = [pumping, *followers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    api: Api,
    paths: Paths,
    rhythm: Rhythm,
    worker: Observation,
    queue: asyncio.Queue[Observation | None],
) -> None:
    """Put an observation into *queue* for each mark in the log of *worker*, until cancelled."""
    query = {"container": CONTAINER, "follow": "true", "sinceSeconds": str(LAST_S)}
    path, pauses = "", rhythm.pauses()
    while True:
        try:
            path = path or await _log_path(api, paths, worker)
            pieces = LogPieces()
            async with api.stream(path, query=query, idle_s=IDLE_S) as contents:
                async for content in contents:
                    for piece in pieces.feed(content):
                        if (found := parse_mark(piece.text)) is not None:
                            queue.put_nowait(_observation(worker, found))
        except BackendError as exc:
            logging.debug("can't follow the log of %s: %s", worker.name, exc)
        await asyncio.sleep(next(pauses))


async def _log_path(api: Api, paths: Paths, worker: Observation) -> str:
    """Return the path of the log of the worker's pod.

    Raises:
        BackendError: The server doesn't answer, or refuses.
    """
    round_name, _, rank, _ = worker.name.rsplit(".", 3)
    (selector,) = by_jobs([round_name])
    query = {"labelSelector": f"{selector},{RANK}={rank}"}
    for pod in get_list(await api.call("GET", paths.pods, query=query), "items"):
        if uid(pod) == worker.executor:
            return f"{paths.pods}/{get_dict(pod, 'metadata')['name']}/log"
    raise BackendError(f"the pod {worker.executor} of {worker.name} is gone")


def _observation(worker: Observation, found: Mark) -> Observation:
    return replace(
        worker,
        name=f"{found.group_id}-{found.item}-{found.attempt}",
        labels={**worker.labels, INDEX: str(found.item), ATTEMPT: str(found.attempt)},
        leaving=found.has_ended,
    )
