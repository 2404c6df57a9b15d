"""The output of a job: of its pod, of the pods that came after it, or of several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from kinetic.aio.clusters._api import Api
from kinetic.aio.clusters._group_judge import host_of
from kinetic.aio.clusters._job_manifest import ATTEMPT, CONTAINER, HOSTS
from kinetic.aio.clusters._kube_job import name_of
from kinetic.aio.clusters._kube_log import Source, container_log
from kinetic.aio.clusters._kube_paths import Paths, by_items
from kinetic.aio.clusters._kube_reflect import Changed, Listed, Rhythm, listing, reflect
from kinetic.aio.clusters._reasons.containers import containers
from kinetic.aio.clusters._reasons.documents import Document, condition, part, uid
from kinetic.aio.clusters._reasons.ending import has_ended
from kinetic.errors import NotFound

__all__ = ["job_log"]

LINES = 100
"""Lines of several pods that wait for whoever reads."""


class _Scene:
    """An attempt called *name*, with all Jobs and pods of its item, as they are now."""

    def __init__(self, name: str, rhythm: Rhythm) -> None:
        self.name = name
        self.rhythm = rhythm
        self.jobs: dict[str, Document] = {}
        self.pods: dict[str, Document] = {}
        self._listed: set[bool] = set()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    def feed(self, word: Listed | Changed, *, pods: bool) -> None:
        known = self.pods if pods else self.jobs
        if isinstance(word, Listed):
            known.clear()
            known.update((uid(one), one) for one in word.items)
            self._listed.add(pods)
        elif word.deleted:
            known.pop(uid(word.document), None)
        else:
            known[uid(word.document)] = word.document
        if len(self._listed) == 2:
            self._changed.set()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._changed.set()

    @property
    def there(self) -> bool:
        """Whether there is such an attempt, or will be."""
        jobs = self.jobs.values()
        return (
            (bool(jobs) and bool(self.of(None)))
            or any(not has_ended(pod) for pod in self.of(None))
            or any(self.name == name_of(job) or not _is_over(job) for job in jobs)
        )

    @property
    def has_job(self) -> bool:
        """Whether there is a Job that was made for this very attempt."""
        return any(self.name == name_of(job) for job in self.jobs.values())

    @property
    def over(self) -> bool:
        """Whether no further pod will come."""
        pods = self.of(None)
        if (hosts := self._hosts) > 1:  # they are made one after the other
            return not self.jobs or len({host_of(pod) for pod in pods}) == hosts
        numbered = any(ATTEMPT in part(part(pod, "metadata"), "labels") for pod in pods)
        return numbered or all(_is_over(job) for job in self.jobs.values())

    @property
    def indexes(self) -> int:
        """How many pods of the attempt run at once."""
        mine = [one for one in self.jobs.values() if name_of(one) == self.name]
        several = (int(part(one, "spec").get("completions") or 1) for one in mine)
        return max(several, default=1) if (hosts := self._hosts) == 1 else hosts

    @property
    def _hosts(self) -> int:
        """How many hosts it has, which are pods of one set."""
        known = [part(part(one, "metadata"), "annotations") for one in self.jobs.values()]
        known += [part(part(one, "metadata"), "annotations") for one in self.of(None)]
        return max((int(one.get(HOSTS) or 1) for one in known), default=1)

    def of(self, index: int | None) -> list[Document]:
        """Its pods of one index, or of any, in the order in which they were made."""
        pods = [
            pod
            for pod in self.pods.values()
            if name_of(pod) == self.name and index in (None, host_of(pod))
        ]
        return sorted(pods, key=lambda pod: str(part(pod, "metadata").get("creationTimestamp")))

    async def change(self, timeout: float | None = None) -> None:
        """Wait until something is different, *timeout* seconds at most."""
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()
        if self._failure is not None:
            raise self._failure


def _is_over(job: Document) -> bool:
    return any(condition(job, one) is not None for one in ("Complete", "Completed", "Failed"))


@asynccontextmanager
async def _live(api: Api, paths: Paths, name: str, rhythm: Rhythm) -> AsyncGenerator[_Scene]:
    """The scene, kept as it is by a watch of the Jobs and one of their pods."""
    scene = _Scene(name, rhythm)
    (selector,) = by_items([name])

    async def pump(path: str, *, pods: bool) -> None:
        try:
            async with aclosing(reflect(api, path, selector, rhythm)) as told:
                async for word in told:
                    scene.feed(word, pods=pods)
        except Exception as exc:
            scene.fail(exc)

    tasks = [
        asyncio.create_task(pump(paths.jobs, pods=False), name="kinetic log: job"),
        asyncio.create_task(pump(paths.pods, pods=True), name="kinetic log: pods"),
    ]
    try:
        await scene.change()
        yield scene
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def job_log(
    api: Api, paths: Paths, name: str, rhythm: Rhythm, *, follow: bool, tail: int | None
) -> AsyncGenerator[str]:
    """Lines of an attempt's output, without their newline; *follow* waits until it has ended.

    Of several pods that ran one after the other the last one's are told, and
    with *follow* those of the pods to come. Where several run at once, each
    line begins with the pod's index.

    Raises:
        NotFound: There is no such job, or its log is gone.
    """
    if follow:
        async with (
            _live(api, paths, name, rhythm) as scene,
            aclosing(_told(api, paths, scene, tail, follow=True)) as lines,
        ):
            async for line in lines:
                yield line
        return
    scene = _Scene(name, rhythm)
    (selector,) = by_items([name])
    scene.feed(await listing(api, paths.jobs, selector), pods=False)
    scene.feed(await listing(api, paths.pods, selector), pods=True)
    async with aclosing(_told(api, paths, scene, tail, follow=False)) as lines:
        async for line in lines:
            yield line


async def _told(
    api: Api, paths: Paths, scene: _Scene, tail: int | None, *, follow: bool
) -> AsyncGenerator[str]:
    if not scene.there:
        raise _absent(api, paths, scene)
    one = _followed if follow else _last
    if (count := scene.indexes) == 1:
        lines = one(api, paths, scene, None, tail)
    else:
        streams = [(f"[{i}] ", one(api, paths, scene, i, tail)) for i in range(count)]
        lines = _merged(streams)
    async with aclosing(lines) as told:
        async for line in told:
            yield line


def _absent(api: Api, paths: Paths, scene: _Scene) -> NotFound:
    return NotFound(
        f"there is no job {scene.name!r} in namespace {paths.namespace} of {api.cluster}, or "
        "it was deleted"
    )


def _source(api: Api, paths: Paths, scene: _Scene, pod: Document) -> Source:
    key, name = uid(pod), part(pod, "metadata").get("name")
    names = [one.name for one in containers(pod) if not one.init]

    def ended() -> bool:
        now = scene.pods.get(key)
        return now is None or has_ended(now)

    return Source(
        api=api,
        path=f"{paths.pods}/{name}/log",
        container=CONTAINER if CONTAINER in names or not names else names[0],
        ended=ended,
        rhythm=scene.rhythm,
    )


def _begun(pod: Document) -> bool:
    """Whether its program was started, so that it has a log."""
    programs = [one for one in containers(pod) if not one.init]
    return any(one.state("running") is not None or one.ended is not None for one in programs)


async def _last(
    api: Api, paths: Paths, scene: _Scene, index: int | None, tail: int | None
) -> AsyncGenerator[str]:
    """The log of the last pod that has one."""
    pods = [pod for pod in scene.of(index) if _begun(pod)]
    if not pods:
        return
    source = _source(api, paths, scene, pods[-1])
    async with aclosing(container_log(source, follow=False, tail=tail)) as lines:
        async for line in lines:
            yield line


async def _followed(
    api: Api, paths: Paths, scene: _Scene, index: int | None, tail: int | None
) -> AsyncGenerator[str]:
    """The log of the last pod, and of each that comes after it, until the job has ended."""
    read = {uid(pod) for pod in scene.of(index)[:-1]}
    while True:
        pods = [pod for pod in scene.of(index) if uid(pod) not in read]
        if not pods and scene.over:
            if not (read or scene.has_job):
                raise _absent(api, paths, scene)  # its Job is about to come, or never will
            return
        if not pods or not (_begun(pods[0]) or has_ended(pods[0])):
            await scene.change()
            continue
        pod = pods[0]
        read.add(uid(pod))
        if not _begun(pod):
            continue  # it ended without ever running
        try:
            lines = container_log(_source(api, paths, scene, pod), follow=True, tail=tail)
            async with aclosing(lines) as told:
                async for line in told:
                    yield line
        except NotFound:
            if scene.of(index)[-1:] == [pod] and not scene.over:
                raise
        tail = None


async def _merged(streams: list[tuple[str, AsyncGenerator[str]]]) -> AsyncGenerator[str]:
    """The lines of all, as they come, each with its stream's prefix."""
    queue: asyncio.Queue[str | Exception | None] = asyncio.Queue(LINES)

    async def pump(prefix: str, lines: AsyncGenerator[str]) -> None:
        try:
            async with aclosing(lines):
                async for line in lines:
                    await queue.put(prefix + line)
            await queue.put(None)
        except Exception as exc:
            await queue.put(exc)

    tasks = [
        asyncio.create_task(pump(prefix, lines), name=f"kinetic log {prefix}")
        for prefix, lines in streams
    ]
    try:
        left = len(tasks)
        while left:
            word = await queue.get()
            if isinstance(word, Exception):
                raise word
            if word is None:
                left -= 1
            else:
                yield word
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
