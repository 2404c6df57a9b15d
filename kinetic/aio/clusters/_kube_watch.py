"""Jobs of one selector, looked at once or watched: one list and watch of jobs, one of pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias

from kinetic.aio.clusters._api import Api
from kinetic.aio.clusters._kube_inquiry import Inquiry
from kinetic.aio.clusters._kube_paths import Paths, by_items, by_labels
from kinetic.aio.clusters._kube_reflect import Changed, Listed, Rhythm, listing, reflect
from kinetic.aio.clusters._kube_table import Table
from kinetic.aio.clusters._kube_worry import Word, Worry
from kinetic.aio.ports import Observation

__all__ = ["MANY_NAMES", "found", "observed", "sought"]

MANY_NAMES = 500
"""To look for more than these by name would take more requests than to look at all there is."""

QUEUE = 1000
"""Changes that wait for whoever reads; the rest waits in the connection."""

TICK_S = 1.0
"""How often what waits is looked at, while something does."""

TURN = 100
"""Jobs that are judged in one turn of the loop."""

Words: TypeAlias = "asyncio.Queue[Word | Exception]"


async def found(
    api: Api,
    paths: Paths,
    selectors: Iterable[str],
    empty: Callable[[], Table] = Table,
) -> list[Observation]:
    """All that any of *selectors* finds: a consistent read, by means of an *empty* table.

    Jobs are read before pods: what a Job leaves behind that is deleted in
    between is seen among the pods.
    """
    seen: dict[str, Observation] = {}
    for selector in selectors:
        table = empty()
        table.feed(await listing(api, paths.jobs, selector), pods=False)
        table.feed(await listing(api, paths.pods, selector), pods=True)
        if table.strays:  # of a Job that was made in between, or is gone
            table.feed(await listing(api, paths.jobs, selector), pods=False)
            table.orphans = True
        while table.dirty:
            seen |= {one.name: one for one in table.news(TURN)}
            await asyncio.sleep(0)
    return [seen[name] for name in sorted(seen)]


async def sought(
    api: Api,
    paths: Paths,
    names: Collection[str],
    labels: Mapping[str, str] | None,
    empty: Callable[[], Table] = Table,
) -> list[Observation]:
    """All of these *names*, and all that carry *labels*; everything, if neither is given."""
    wanted = set(names)
    some = by_items(wanted) if len(wanted) <= MANY_NAMES else (by_labels({}),)
    there = await found(api, paths, some, empty)
    seen = {one.name: one for one in there if one.name in wanted}
    if labels is not None or not names:
        more = await found(api, paths, (by_labels(labels or {}),), empty)
        seen |= {one.name: one for one in more}
    return [*seen.values()]


async def observed(
    api: Api,
    paths: Paths,
    selector: str,
    inquiry: Inquiry,
    rhythm: Rhythm,
    empty: Callable[[], Table] = Table,
) -> AsyncGenerator[Observation]:
    """What is there now, then every change, for ever; whoever reads slowly gets the latest.

    Raises:
        BackendError: The server will not let it be read, however often it is asked.
    """
    loop = asyncio.get_running_loop()
    table = empty()
    words: Words = asyncio.Queue(QUEUE)
    worry = Worry(table, inquiry, words.put)
    listed = asyncio.Event()
    tasks = [
        loop.create_task(_told(work, words), name=f"kinetic watch of {name}")
        for name, work in (
            ("jobs", _pump(reflect(api, paths.jobs, selector, rhythm), words, listed, pods=False)),
            ("pods", _pump(reflect(api, paths.pods, selector, rhythm), words, listed, pods=True)),
            ("reasons", worry.work()),
        )
    ]
    due = 0.0
    try:
        while True:
            for word in await _next(words, TICK_S if table.waiting else None):
                if isinstance(word, Exception):
                    raise word
                word(table)
            while table.dirty:
                for seen in [*table.news(TURN)]:
                    yield seen
                if table.dirty:
                    await asyncio.sleep(0)
            if table.curious or loop.time() >= due:
                worry.look(loop.time())
                due = loop.time() + TICK_S
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _told(work: Coroutine[Any, Any, None], words: Words) -> None:
    """Do *work*; its failure ends the watch."""
    try:
        await work
    except Exception as exc:
        await words.put(exc)


async def _pump(
    told: AsyncGenerator[Listed | Changed], words: Words, listed: asyncio.Event, *, pods: bool
) -> None:
    """Pods come once jobs were *listed*: an older list would not have how those ended."""
    async with aclosing(told):
        if pods:
            await listed.wait()
        async for word in told:
            listed.set()
            await words.put(_feed(word, pods=pods))


def _feed(word: Listed | Changed, *, pods: bool) -> Word:
    return lambda table: table.feed(word, pods=pods)


async def _next(words: Words, timeout: float | None) -> list[Word | Exception]:
    """The next word and what else is there already; nothing after *timeout* seconds."""
    try:
        async with asyncio.timeout(timeout):
            found = [await words.get()]
    except TimeoutError:
        return []
    while not words.empty():
        found.append(words.get_nowait())
    return found
