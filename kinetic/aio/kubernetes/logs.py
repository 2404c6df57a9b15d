"""Read the output of a job: from its pod, from the pods that replace it, or from several at once.

A line passes two stages here. `container_log` reads one container and resumes a broken
connection. `job_log` chooses the pods of an attempt.
"""

from __future__ import annotations

import asyncio
import datetime
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import Document, age, condition, part, uid
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.manifests import ATTEMPT, CONTAINER, HOSTS, Paths, by_items
from kinetic.aio.kubernetes.multihost import host_of
from kinetic.aio.kubernetes.observations import name_of
from kinetic.aio.kubernetes.reflector import Changed, Listed, Rhythm, follow_both, list_both
from kinetic.aio.ports import LogPiece, LogPieces
from kinetic.errors import NotFound, Refused, Throttled, Unavailable

T = TypeVar("T")

IDLE_S = 300.0
"""Seconds of silence after which kinetic reconnects: a silent program looks like a dead peer."""

TRIES = 5
"""Connections in a row that bring nothing before kinetic gives up on the log of an ended pod."""

_REMOVED = re.compile(
    rb"unable to retrieve container logs for |failed to try resolving symlinks in path "
)
"""A kubelet's answer for a log that it removed. Lines of a program begin with a time."""

_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00) ?")


class _Memory:
    """Remember which lines of the last two seconds were yielded, to skip them on reconnect.

    A connection can resume only at a whole second, and lines may be up to a second out of
    order.
    """

    def __init__(self) -> None:
        self._yielded: dict[str, Counter[int]] = {}
        self._again: dict[str, Counter[int]] = {}
        self._newest = ""
        self._second = ""  # of the line whose pieces arrive
        self.removed = False
        """Whether the kubelet has answered that it removed the log."""

    @property
    def since(self) -> str:
        """The time to continue from; "" before the first line."""
        return _second_before(self._newest) if self._newest else ""

    def reconnect(self) -> None:
        """Prepare for a reconnect: the lines of the last two seconds come again."""
        self.removed = False
        self._again = {second: Counter(lines) for second, lines in self._yielded.items()}

    def texts(self, pieces: Iterator[LogPiece]) -> list[str]:
        """Return the program's output, without the lines that were yielded before."""
        found = (self._new(piece) for piece in pieces)
        return [one.decode(errors="replace") for one in found if one is not None]

    def _new(self, piece: LogPiece) -> bytes | None:
        stamp = _STAMP.match(piece.content) if piece.number == 0 else None
        if piece.number == 0:
            self._second = stamp[1].decode() if stamp else ""
        if not self._second:
            self.removed = self.removed or _REMOVED.match(piece.content) is not None
            return None if self.removed else piece.content
        second, mark = self._second, hash((piece.number, piece.content))
        again = self._again.get(second)
        if again is not None and again[mark] > 0:
            again[mark] -= 1
            return None
        if second > self._newest:
            self._newest = second
            oldest = _second_before(second)[:19]
            self._yielded = {one: lines for one, lines in self._yielded.items() if one >= oldest}
        self._yielded.setdefault(second, Counter())[mark] += 1
        return piece.content[stamp.end() if stamp else 0 :]


def _second_before(second: str) -> str:
    moment = datetime.datetime.fromisoformat(second) - datetime.timedelta(seconds=1)
    return f"{moment.isoformat()}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where one container's log is, and whether the container has ended by now."""

    api: Api
    path: str
    container: str
    ended: Callable[[], bool]
    rhythm: Rhythm


async def container_log(
    source: Source, *, follow: bool, tail: int | None = None
) -> AsyncGenerator[str]:
    """Yield the lines so far; with *follow*, until the container has ended and all is read.

    Bytes that aren't UTF-8 are replaced. A line of more than 1 MiB comes in pieces.
    A broken connection neither repeats nor drops lines. With *follow*, the iteration just ends if
    the node has removed the log, because another pod may follow.

    Raises:
        NotFound: Without *follow*: the pod, or its log, no longer exists.
        Unavailable: The container has ended, and its log can't be read.
    """
    begun, barren, pauses = asyncio.get_running_loop().time(), 0, source.rhythm.pauses()
    memory = _Memory()
    while True:
        # Before reading: the log has everything that a container wrote before it ended.
        over = source.ended()
        last, found, failure = over or not follow, False, None
        query = _query(source, memory, begun, tail, follow=not last)
        memory.reconnect()
        try:
            pieces = LogPieces()
            async with source.api.stream(source.path, query=query, idle=IDLE_S) as contents:
                async for content in contents:
                    for text in memory.texts(pieces.feed(content)):
                        found = True
                        yield text
            for text in memory.texts(pieces.feed(last=True)):
                found = True
                yield text
            if memory.removed and not memory.since:
                raise NotFound("its node has removed the log")
            if last:
                return
        except NotFound:
            if not follow:
                raise
            if last:
                return
        except (Unavailable, Throttled) as exc:
            failure = exc
        except Refused as exc:  # "is waiting to start", or the node has removed it
            if over:
                raise NotFound(f"the log no longer exists: {exc}") from exc
        barren = 0 if found else barren + 1
        if failure is not None and barren >= TRIES and last:
            raise failure
        if found:
            pauses = source.rhythm.pauses()
        await asyncio.sleep(next(pauses))


def _query(
    source: Source, memory: _Memory, begun: float, tail: int | None, *, follow: bool
) -> dict[str, str]:
    query = {"container": source.container, "timestamps": "true"}
    if follow:
        query["follow"] = "true"
    if since := memory.since:
        query["sinceTime"] = since
    elif tail is not None:
        waited = asyncio.get_running_loop().time() - begun
        if tail == 0 and waited > 1:  # what was written since then is new
            query["sinceSeconds"] = str(int(waited) + 1)
        else:
            query["tailLines"] = str(tail)
    return query


class _Scene:
    """The attempt called *name*, with all Jobs and pods of its item as they are now."""

    def __init__(self, api: Api, paths: Paths, name: str, rhythm: Rhythm, *, follow: bool) -> None:
        self.name = name
        self.follow = follow
        self._api = api
        self._paths = paths
        self._rhythm = rhythm
        self._jobs: dict[str, Document] = {}
        self._pods: dict[str, Document] = {}
        self._listed: set[bool] = set()
        self._changed = asyncio.Event()

    async def take(self, update: Listed | Changed, pods: bool) -> None:
        """Process a change of the jobs, or of their *pods*."""
        known = self._pods if pods else self._jobs
        if isinstance(update, Listed):
            known.clear()
            known.update((uid(one), one) for one in update.items)
            self._listed.add(pods)
        elif update.deleted:
            known.pop(uid(update.document), None)
        else:
            known[uid(update.document)] = update.document
        if len(self._listed) == 2:
            self._changed.set()

    @asynccontextmanager
    async def kept_up(self) -> AsyncGenerator[None]:
        """Read the jobs and pods once; to follow the log, also watch them until the block ends."""
        (selector,) = by_items([self.name])
        if not self.follow:
            await list_both(self._api, self._paths, selector, self.take)
            yield
            return
        work = follow_both(self._api, self._paths, selector, self._rhythm, self.take)
        self._watching = asyncio.create_task(work, name="kinetic log: jobs and pods")
        self._watching.add_done_callback(lambda _: self._changed.set())
        try:
            await self.change()
            yield
        finally:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def change(self) -> None:
        """Wait until something changes.

        Raises:
            BackendError: The watch has failed.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._watching.done():
            self._watching.result()

    def check(self) -> None:
        """Check that the attempt exists, or will.

        Raises:
            NotFound: There is no such attempt, and none will start.
        """
        own, jobs = self._of(None), self._jobs.values()
        exists = (bool(own) and bool(jobs)) or any(not Pod(pod).ended for pod in own)
        if not exists and not any(self.name == name_of(job) or not _is_over(job) for job in jobs):
            raise self._absent()

    def _absent(self) -> NotFound:
        return NotFound(
            f"there is no job {self.name!r} in namespace {self._paths.namespace} of "
            f"{self._api.cluster}, or it was deleted"
        )

    @property
    def _over(self) -> bool:
        """Whether no further pod will come."""
        pods = self._of(None)
        if (hosts := self.hosts) > 1:  # their pods are made one after the other
            return not self._jobs or len({host_of(pod) for pod in pods}) == hosts
        numbered = any(ATTEMPT in part(part(pod, "metadata"), "labels") for pod in pods)
        return numbered or all(_is_over(job) for job in self._jobs.values())

    @property
    def hosts(self) -> int:
        """How many pods of the attempt run at once."""
        known = [part(part(one, "metadata"), "annotations") for one in self._jobs.values()]
        known += [part(part(one, "metadata"), "annotations") for one in self._of(None)]
        return max((int(one.get(HOSTS) or 1) for one in known), default=1)

    def _of(self, index: int | None) -> list[Document]:
        """Return the attempt's pods with this *index*, or all its pods for None, oldest first."""
        pods = [
            pod
            for pod in self._pods.values()
            if name_of(pod) == self.name and index in (None, host_of(pod))
        ]
        return sorted(pods, key=age)

    async def logs(
        self, index: int | None, tail: int | None
    ) -> AsyncGenerator[AsyncGenerator[str]]:
        """Yield the log of the last pod that has a log.

        With ``follow``, also yield the log of each pod that replaces this pod.
        """
        if not self.follow:
            for last in [pod for pod in self._of(index) if _begun(pod)][-1:]:
                yield container_log(self._source(last), follow=False, tail=tail)
            return
        read = {uid(pod) for pod in self._of(index)[:-1]}
        while True:
            further = [pod for pod in self._of(index) if uid(pod) not in read]
            pod = further[0] if further else None
            if pod is None and self._over:
                if not (read or any(self.name == name_of(job) for job in self._jobs.values())):
                    raise self._absent()  # the replacement pod was never created
                return
            if pod is None or not (_begun(pod) or Pod(pod).ended):
                await self.change()
                continue
            read.add(uid(pod))
            if _begun(pod):
                yield container_log(self._source(pod), follow=True, tail=tail)
                tail = None

    def _source(self, pod: Document) -> Source:
        key, name = uid(pod), part(pod, "metadata").get("name")
        names = [one.name for one in Pod(pod).programs]

        def ended() -> bool:
            now = self._pods.get(key)
            return now is None or Pod(now).ended

        return Source(
            api=self._api,
            path=f"{self._paths.pods}/{name}/log",
            container=CONTAINER if CONTAINER in names or not names else names[0],
            ended=ended,
            rhythm=self._rhythm,
        )


def _is_over(job: Document) -> bool:
    return any(condition(job, one) is not None for one in ("Complete", "Completed", "Failed"))


def _begun(pod: Document) -> bool:
    """Return whether the pod's program has started, so that the pod has a log."""
    programs = Pod(pod).programs
    return any(one.state("running") is not None or one.ended is not None for one in programs)


async def job_log(
    api: Api,
    find_paths: Callable[[], Awaitable[Paths]],
    name: str,
    rhythm: Rhythm,
    *,
    follow: bool,
    tail: int | None,
) -> AsyncGenerator[str]:
    """Yield the lines of an attempt's output; with *follow*, until the attempt has ended.

    If several pods ran one after the other, these are the lines of the last pod, and with
    *follow* also of the pods that replace it. If several pods run at once, each line begins
    with its pod's index.

    Raises:
        NotFound: The job doesn't exist, or its log no longer exists.
    """
    scene = _Scene(api, await find_paths(), name, rhythm, follow=follow)
    async with scene.kept_up():
        scene.check()
        if (count := scene.hosts) > 1:
            streams = [_marked(scene, index, tail) for index in range(count)]
            async with aclosing(merged(streams)) as lines:
                async for line in lines:
                    yield line
            return
        async with aclosing(scene.logs(None, tail)) as logs:
            async for log in logs:
                async with aclosing(log):
                    async for line in log:
                        yield line


async def _marked(scene: _Scene, index: int, tail: int | None) -> AsyncGenerator[str]:
    """Yield the lines of the pods of one index, each after that index in brackets."""
    async with aclosing(scene.logs(index, tail)) as logs:
        async for log in logs:
            async with aclosing(log):
                async for line in log:
                    yield f"[{index}] {line}"


async def merged(streams: Collection[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Merge *streams*: yield each item when it arrives, and close the streams at the end.

    The merged stream ends when all streams have ended, and fails when one stream fails. It reads
    one item of each stream at a time, so a stream that skips outdated items can still do so.
    """
    waiting: dict[asyncio.Task[T | None], AsyncGenerator[T]] = {}
    idle = [*streams]
    try:
        while idle or waiting:
            for stream in idle:
                waiting[asyncio.create_task(_next(stream), name="kinetic merged stream")] = stream
            idle.clear()
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                if (item := task.result()) is None:
                    continue
                yield item
                idle.append(stream)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T]) -> T | None:
    """Return the next item; None at the end of the stream."""
    return await anext(stream, None)
