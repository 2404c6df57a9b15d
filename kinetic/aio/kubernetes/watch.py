"""Find or watch the jobs that match a selector, by listing or watching their Jobs and pods.

`with_items` learns from the logs of workers which item each of them runs, and when it has ended. A
line that says so may be forged or missed. So it is only a hint to read the store now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace

from absl import logging

from kinetic._labels import INDEX, KIND, WORKER, of_attempt
from kinetic._runner.protocol.marks import Mark, parse_mark
from kinetic._tasks import all_or_none, end_all, release
from kinetic.aio.kubernetes.diagnosis.documents import get_dict, uid
from kinetic.aio.kubernetes.manifests import CONTAINER, by_items, by_labels, by_worker
from kinetic.aio.kubernetes.pending import SAMPLE_SIZE, Diagnostics, PendingMonitor
from kinetic.aio.kubernetes.reflector import Namespace, reflect
from kinetic.aio.kubernetes.tables import Table
from kinetic.aio.ports import LogPieces, Observation, Phase
from kinetic.errors import BackendError

JOBS_PER_TURN = 100
"""How many jobs to evaluate before other tasks of the event loop run."""


async def _list_jobs(
    namespace: Namespace, selector: str, table: Table, diagnostics: Diagnostics | None
) -> list[Observation]:
    """Return all jobs that match *selector*; *diagnostics* finds out why some of them wait."""
    # The list of pods is the later one, so that it shows how the pods of ended jobs ended.
    table.feed(await namespace.jobs(selector), pods=False)
    table.feed(await namespace.pods(selector), pods=True)
    if table.has_strays:  # a stray's Job was created after the list of jobs, or is deleted
        table.feed(await namespace.jobs(selector), pods=False)
        table.reports_orphans = True
    observations = await _evaluate(table)
    if diagnostics is not None:
        for entry in [*table.waiting.values()][:SAMPLE_SIZE]:
            table.learn(entry.name, await diagnostics.read_facts(entry))
        observations |= await _evaluate(table)
    return [observations[name] for name in sorted(observations)]


async def _evaluate(table: Table) -> dict[str, Observation]:
    observations: dict[str, Observation] = {}
    while table.has_changes:
        observations |= {observation.name: observation for observation in table.news(JOBS_PER_TURN)}
        await asyncio.sleep(0)
    return observations


async def find_jobs(
    namespace: Namespace,
    names: Collection[str],
    labels: Mapping[str, str] | None,
    diagnostics: Diagnostics | None,
    make_table: Callable[[], Table] = Table,
) -> list[Observation]:
    """Return the jobs with these *names* and the jobs with *labels*; if neither is given, all.

    *make_table* makes the table that evaluates the jobs.
    """
    found: list[Observation] = []
    if names:
        listed = await _list_jobs(namespace, by_items(names), make_table(), diagnostics)
        found += [observation for observation in listed if observation.name in names]
    if labels is not None or not names:
        found += await _list_jobs(namespace, by_labels(labels or {}), make_table(), diagnostics)
    return [*{observation.name: observation for observation in found}.values()]


async def watch_jobs(
    namespace: Namespace, selector: str, diagnostics: Diagnostics, table: Table
) -> AsyncGenerator[Observation]:
    """Yield each job's state, then its changes, forever; a slow reader misses some changes.

    Raises:
        BackendError: The server refuses the read permanently.
    """
    changed, listed, paths = asyncio.Event(), asyncio.Event(), namespace.paths
    monitor = PendingMonitor(table, diagnostics, changed.set)

    async def follow(path: str, *, pods: bool) -> None:
        if pods:  # as in `_list_jobs`
            await listed.wait()
        async with aclosing(reflect(namespace.api, path, selector, namespace.rhythm)) as updates:
            async for update in updates:
                table.feed(update, pods=pods)
                changed.set()
                listed.set()
                if pods:  # the readers of logs wait for it
                    namespace.bell.ring()

    work = all_or_none(
        follow(paths.jobs, pods=False), follow(paths.pods, pods=True), monitor.work()
    )
    task = asyncio.create_task(work, name="kinetic watch")
    task.add_done_callback(lambda _: changed.set())
    try:
        while True:
            await changed.wait()
            changed.clear()
            if task.done():
                task.result()  # raises the error that ended the task
            while table.has_changes:
                for observation in [*table.news(JOBS_PER_TURN)]:
                    yield observation
                await asyncio.sleep(0)
    finally:
        await end_all([task])
        if table.held:  # the last item may have ended just now
            await release(monitor.end_held(), operation="ending pods that others hold")


# --- the items that workers run ---

MOST_FOLLOWED = 100
"""How many logs one watch follows; each is a connection."""

LAST_S = 60
"""How much of a log to read at first, in seconds."""

IDLE_S = 300.0
"""After this many seconds of silence, connect again: the connection may be dead."""


async def with_items(
    namespace: Namespace, source: AsyncGenerator[Observation]
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
                    work = _follow(namespace, observation, queue)
                    followers[name] = asyncio.create_task(work, name=f"kinetic log of {name}")
            yield observation
        await pumping  # raises the error that ended the watch
    finally:
        await end_all([pumping, *followers.values()])


async def _follow(
    namespace: Namespace, worker: Observation, queue: asyncio.Queue[Observation | None]
) -> None:
    """Put an observation into *queue* for each mark in the log of *worker*, until cancelled."""
    query = {"container": CONTAINER, "follow": "true", "sinceSeconds": str(LAST_S)}
    path, pauses = "", namespace.rhythm.pauses()
    while True:
        try:
            path = path or await _log_path(namespace, worker)
            pieces = LogPieces()
            async with namespace.api.stream(path, query=query, idle_s=IDLE_S) as contents:
                async for content in contents:
                    for piece in pieces.feed(content):
                        if (found := parse_mark(piece.text)) is not None:
                            queue.put_nowait(_observation(worker, found))
        except BackendError as exc:
            logging.debug("can't follow the log of %s: %s", worker.name, exc)
        await asyncio.sleep(next(pauses))


async def _log_path(namespace: Namespace, worker: Observation) -> str:
    """Return the path of the log of the worker's pod.

    Raises:
        BackendError: The server doesn't answer, or refuses.
    """
    for pod in (await namespace.pods(by_worker(worker.name))).items:
        if uid(pod) == worker.executor:
            return f"{namespace.paths.pods}/{get_dict(pod, 'metadata')['name']}/log"
    raise BackendError(f"the pod {worker.executor} of {worker.name} is gone")


def _observation(worker: Observation, found: Mark) -> Observation:
    return replace(
        worker,
        name=f"{found.group_id}-{found.item}-{found.attempt}",
        labels=of_attempt(worker.labels, found.item, found.attempt),
        leaving=found.has_ended,
    )
