"""The output of a job: of its pod, of the pods that came after it, or of several at once."""

from __future__ import annotations

import asyncio
import datetime
import math
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, uid
from kinetic.aio.kubernetes.diagnosis.pods import Pod
from kinetic.aio.kubernetes.manifests import ATTEMPT, CONTAINER, HOSTS, Paths, by_items
from kinetic.aio.kubernetes.multihost import host_of
from kinetic.aio.kubernetes.tables import Changed, Listed, Rhythm, listing, name_of, reflect
from kinetic.errors import BackendError, NotFound, Refused, Throttled, Unavailable

T = TypeVar("T")

LONGEST_LINE = 1 << 20
IDLE_S = 300.0
"""A program may be silent for ever; a dead connection is noticed after so many seconds."""

TRIES = 5
"""Connections in a row that bring nothing, before a log that has ended is given up."""

_GONE = re.compile(
    rb"unable to retrieve container logs for |failed to try resolving symlinks in path "
)
"""What a kubelet says in place of a log that it has no more; what programs write has a time."""

_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00) ?")


@dataclass(frozen=True, slots=True)
class Piece:
    """A line, or a part of one that is too long to be held; ``first`` and ``last`` of its line."""

    content: bytes
    first: bool
    last: bool


class Pieces:
    """Cuts a stream into lines: the same stream into the same pieces, however it comes.

    No more is held than the longest piece, and what was fed last.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._first = True

    def feed(self, content: bytes) -> Iterator[Piece]:
        """What *content* completes."""
        *lines, rest = content.split(b"\n")
        for line in lines:
            self._rest += line
            yield from self._parts()
            yield self._taken(len(self._rest), last=True)
        self._rest += rest
        yield from self._parts()

    def end(self) -> Iterator[Piece]:
        """What is left when nothing more comes: the last line needs no newline."""
        if self._rest:
            yield self._taken(len(self._rest), last=True)

    def _parts(self) -> Iterator[Piece]:
        while len(self._rest) > self._longest:
            cut = self._longest
            while cut > self._longest - 4 and self._rest[cut] & 0xC0 == 0x80:
                cut -= 1  # not within a character
            yield self._taken(cut, last=False)

    def _taken(self, count: int, *, last: bool) -> Piece:
        piece = Piece(bytes(self._rest[:count]), self._first, last)
        del self._rest[:count]
        self._first = last
        return piece


class _Memory:
    """Which lines of the last two seconds were told already.

    Of a log that was *cut* to its last lines, those before them are not told either.
    Of a line that comes in pieces it is known how many of them were told when the
    connection broke: the same will come again.
    """

    def __init__(self, *, cut: bool) -> None:
        self._told: dict[str, Counter[int]] = {}
        self._again: dict[str, Counter[int]] = {}
        self._last = ""
        self._cut = cut
        self.gone = False
        """Whether the kubelet has said that it has the log no more."""
        self._first: tuple[str, int] | None = None
        self._skipping = False
        self._line: tuple[str, int] | None = None  # whose pieces come
        self._place = 0  # of the next one
        self._known: float = 0  # how many of them were told before
        self._open: tuple[tuple[str, int] | None, int] = None, 0  # of the line last told from

    @property
    def since(self) -> str:
        """The time to go on from; empty if there was no line."""
        return _before(self._last) if self._last else ""

    def reconnect(self) -> None:
        """What was told will come again."""
        self.gone = False
        self._again = {second: Counter(lines) for second, lines in self._told.items()}
        self._skipping = self._first is not None and self._first[0] in self._told

    def text(self, piece: Piece) -> bytes | None:
        """What the program wrote; None when it was told before."""
        content: bytes | None = piece.content
        if piece.first:
            self._line = None
            content = self._begun(piece.content)
            line, told = self._open
            before = told if self._line == line else math.inf
            self._place, self._known = 0, 0 if content is not None else before
        self._place += 1
        if self._place <= self._known:
            return None
        self._open = (None, 0) if piece.last else (self._line, self._place)
        return content

    def _begun(self, line: bytes) -> bytes | None:
        """The same, of a whole line or the first piece of one."""
        found = _STAMP.match(line)
        if found is None:
            self.gone = self.gone or _GONE.match(line) is not None
            return None if self.gone else line
        second, mark = found[1].decode(), hash(line)
        self._line = second, mark
        if self._skipping and (second, mark) != self._first:
            return None
        self._skipping = False
        again = self._again.get(second)
        if again is not None and again[mark] > 0:
            again[mark] -= 1
            return None
        if self._cut and not self._told:
            self._first = second, mark
        if second > self._last:
            self._last = second
            oldest = _before(second)[:19]
            self._told = {one: lines for one, lines in self._told.items() if one >= oldest}
        self._told.setdefault(second, Counter())[mark] += 1
        return line[found.end() :]


def _before(second: str) -> str:
    moment = datetime.datetime.fromisoformat(second) - datetime.timedelta(seconds=1)
    return f"{moment.isoformat()}Z"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One container's log: where it is, and whether the container has ended by now."""

    api: Api
    path: str
    container: str
    ended: Callable[[], bool]
    rhythm: Rhythm


async def container_log(
    source: Source, *, follow: bool, tail: int | None = None
) -> AsyncGenerator[str]:
    """The lines so far; with *follow*, until the container has ended and all is read.

    What is no UTF-8 is replaced; a line of more than 1 MiB comes in pieces.
    Nothing is told twice and nothing is left out when a connection breaks.

    Raises:
        NotFound: The pod, or its log, is gone.
        Unavailable: The log cannot be read, and the container has ended.
    """
    begun, barren, pauses = asyncio.get_running_loop().time(), 0, source.rhythm.pauses()
    memory = _Memory(cut=tail is not None)
    while True:
        over = source.ended()  # asked before reading: what it wrote before its end is there then
        query = _query(source, memory, begun, tail, follow=follow and not over)
        whole, told = False, False
        failure: BackendError | None = None
        memory.reconnect()
        try:
            pieces = _read(source.api.stream(source.path, query=query, idle=IDLE_S))
            async with aclosing(pieces) as stream:
                async for piece in stream:
                    if (text := memory.text(piece)) is not None:
                        told = True
                        yield text.decode(errors="replace")
            whole = not memory.gone
            if memory.gone and (over or not follow):
                if memory.since:
                    return  # it has told what it had
                raise NotFound("its node has removed the log")
        except (Unavailable, Throttled) as exc:
            failure = exc
        except Refused as exc:  # "is waiting to start", or the node has removed it
            if over:
                raise NotFound(f"the log is gone: {exc}") from exc
            failure = exc
        if whole and (over or not follow):
            return
        barren += 1
        if told:
            barren, pauses = 0, source.rhythm.pauses()
        if failure is not None and barren >= TRIES and (over or not follow):
            raise failure
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
        if tail == 0 and waited > 1:  # what has come since then was not told yet
            query["sinceSeconds"] = str(int(waited) + 1)
        else:
            query["tailLines"] = str(tail)
    return query


async def _read(contents: AsyncGenerator[bytes]) -> AsyncGenerator[Piece]:
    pieces = Pieces()
    async with aclosing(contents) as stream:
        async for content in stream:
            for piece in pieces.feed(content):
                yield piece
    for piece in pieces.end():
        yield piece


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
            or any(not Pod(pod).ended for pod in self.of(None))
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
        streams = [_marked(f"[{i}] ", one(api, paths, scene, i, tail)) for i in range(count)]
        lines = merged(streams)
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
    names = [one.name for one in Pod(pod).programs]

    def ended() -> bool:
        now = scene.pods.get(key)
        return now is None or Pod(now).ended

    return Source(
        api=api,
        path=f"{paths.pods}/{name}/log",
        container=CONTAINER if CONTAINER in names or not names else names[0],
        ended=ended,
        rhythm=scene.rhythm,
    )


def _begun(pod: Document) -> bool:
    """Whether its program was started, so that it has a log."""
    programs = Pod(pod).programs
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
        if not pods or not (_begun(pods[0]) or Pod(pods[0]).ended):
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


async def _marked(prefix: str, lines: AsyncGenerator[str]) -> AsyncGenerator[str]:
    async with aclosing(lines):
        async for line in lines:
            yield prefix + line


async def merged(streams: Collection[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield what any of *streams* yields, as it comes, and close them at the end.

    It ends when all have ended, and fails when one does. It takes one item of each
    at a time, so a stream that skips what is outdated goes on doing so.
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
    """Return the next item; None at the end, which no item is."""
    return await anext(stream, None)
