"""Find or watch the jobs that match a selector, by listing or watching their Jobs and pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping

from kinetic._tasks import all_or_none, release
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.manifests import Paths, by_items, by_labels
from kinetic.aio.kubernetes.pending import SAMPLE_SIZE, Diagnostics, PendingMonitor
from kinetic.aio.kubernetes.reflector import (
    Changed,
    Listed,
    Rhythm,
    follow_both,
    list_all,
    list_both,
)
from kinetic.aio.kubernetes.tables import Table
from kinetic.aio.ports import Observation

MANY_NAMES = 500
"""Above this many names, `find_jobs` lists all jobs, because selectors would need more requests."""

JOBS_PER_TURN = 100
"""How many jobs to evaluate before other tasks of the event loop run."""


async def list_jobs(
    api: Api,
    paths: Paths,
    selectors: Iterable[str],
    make_table: Callable[[], Table] = Table,
    diagnostics: Diagnostics | None = None,
) -> list[Observation]:
    """Return all jobs that match any of *selectors*.

    *make_table* makes the table that evaluates the jobs. *diagnostics* finds out why some of the
    jobs wait.
    """
    observations: dict[str, Observation] = {}
    for selector in selectors:
        table = make_table()

        async def take(update: Listed | Changed, pods: bool, table: Table = table) -> None:
            table.feed(update, pods=pods)

        await list_both(api, paths, selector, take)
        if table.has_strays:  # a stray's Job was created after the list of jobs, or is deleted
            table.feed(await list_all(api, paths.jobs, selector), pods=False)
            table.reports_orphans = True
        observations |= await _evaluate(table)
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
    api: Api,
    paths: Paths,
    names: Collection[str],
    labels: Mapping[str, str] | None,
    make_table: Callable[[], Table] = Table,
    diagnostics: Diagnostics | None = None,
) -> list[Observation]:
    """Return the jobs with these *names* and the jobs with *labels*; if neither is given, all."""
    wanted = set(names)
    selectors = by_items(wanted) if len(wanted) <= MANY_NAMES else (by_labels({}),)
    named = await list_jobs(api, paths, selectors, make_table, diagnostics)
    observations = {
        observation.name: observation for observation in named if observation.name in wanted
    }
    if labels is not None or not names:
        more = await list_jobs(api, paths, (by_labels(labels or {}),), make_table, diagnostics)
        observations |= {observation.name: observation for observation in more}
    return [*observations.values()]


async def watch_jobs(
    api: Api,
    paths: Paths,
    selector: str,
    diagnostics: Diagnostics,
    rhythm: Rhythm,
    make_table: Callable[[], Table] = Table,
) -> AsyncGenerator[Observation]:
    """Yield each job's state, then its changes, forever; a slow reader misses some changes.

    Raises:
        BackendError: The server refuses the read permanently.
    """
    table, changed = make_table(), asyncio.Event()
    monitor = PendingMonitor(table, diagnostics, changed.set)

    async def take(update: Listed | Changed, pods: bool) -> None:
        table.feed(update, pods=pods)
        changed.set()

    following = follow_both(api, paths, selector, rhythm, take)
    task = asyncio.create_task(all_or_none(following, monitor.work()), name="kinetic watch")
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
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if table.held:  # the last item may have ended just now
            await release(monitor.end_held(), operation="ending pods that others hold")
