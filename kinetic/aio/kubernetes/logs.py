"""The output of a job: of its pod, of the pods that replace it, or of several at once."""

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
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.manifests import ATTEMPT, CONTAINER, HOSTS, Paths, by_items
from kinetic.aio.kubernetes.multihost import host_of
from kinetic.aio.kubernetes.tables import Changed, Listed, Rhythm, listing, name_of, reflect
from kinetic.errors import BackendError, NotFound, Refused, Throttled, Unavailable

T = TypeVar("T")

LONGEST_LINE = 1 << 20
IDLE_S = 300.0
"""Seconds of silence after which kinetic reconnects: a silent program looks like a dead peer."""

TRIES = 5
"""Connections in a row that bring nothing before kinetic gives up on the log of an ended pod."""

_GONE = re.compile(
    rb"unable to retrieve container logs for |failed to try resolving symlinks in path "
)
"""What a kubelet answers for a log that it has removed. Lines of a program begin with a time."""

_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(?:Z|\+00:00) ?")


@dataclass(frozen=True, slots=True)
class Piece:
    """A line, or a part of one that is too long to hold: maybe its ``first``, or its ``last``."""

    content: bytes
    first: bool
    last: bool


class Pieces:
    """Cut a stream into lines, independent of the chunks it arrives in.

    It holds no more than one piece of the longest length and the last chunk.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._first = True

    def feed(self, content: bytes) -> Iterator[Piece]:
        """Yield the pieces that *content* completes."""
        *lines, rest = content.split(b"\n")
        for line in lines:
            self._rest += line
            yield from self._parts()
            yield self._taken(len(self._rest), last=True)
        self._rest += rest
        yield from self._parts()

    def end(self) -> Iterator[Piece]:
        """Yield the rest at the end of the stream: the last line needs no newline."""
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
    """Remember which lines of the last two seconds were yielded, to skip them on reconnect.

    If the log was *cut* to its last lines, earlier lines are skipped too. For a line in
    pieces it counts the pieces yielded before the connection broke: they come again.
    """

    def __init__(self, *, cut: bool) -> None:
        self._told: dict[str, Counter[int]] = {}
        self._again: dict[str, Counter[int]] = {}
        self._last = ""
        self._cut = cut
        self.gone = False
        """Whether the kubelet has answered that it removed the log."""
        self._first: tuple[str, int] | None = None
        self._skipping = False
        self._line: tuple[str, int] | None = None  # whose pieces come
        self._place = 0  # of the next one
        self._known: float = 0  # how many of them were told before
        self._open: tuple[tuple[str, int] | None, int] = None, 0  # of the line last told from

    @property
    def since(self) -> str:
        """The time to continue from; "" before the first line."""
        return _before(self._last) if self._last else ""

    def reconnect(self) -> None:
        """Expect the lines of the last two seconds once more."""
        self.gone = False
        self._again = {second: Counter(lines) for second, lines in self._told.items()}
        self._skipping = self._first is not None and self._first[0] in self._told

    def text(self, piece: Piece) -> bytes | None:
        """Return what the program wrote; None if it was yielded before."""
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
        """Do the same for a whole line, or the first piece of one."""
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
    A broken connection neither repeats nor drops lines.

    Raises:
        NotFound: The pod, or its log, is gone.
        Unavailable: The container has ended, and its log can't be read.
    """
    begun, barren, pauses = asyncio.get_running_loop().time(), 0, source.rhythm.pauses()
    memory = _Memory(cut=tail is not None)
    while True:
        over = source.ended()  # before reading: all that it wrote by then is in the log
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
                    return  # it has answered all that it had
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
    """The attempt called *name*, with all Jobs and pods of its item as they are now."""

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
        """Whether the attempt exists, or will."""
        jobs = self.jobs.values()
        return (
            (bool(jobs) and bool(self.of(None)))
            or any(not Pod(pod).ended for pod in self.of(None))
            or any(self.name == name_of(job) or not _is_over(job) for job in jobs)
        )

    @property
    def has_job(self) -> bool:
        """Whether some Job was made for this attempt, not an earlier one."""
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
        """How many hosts it has: pods of one set."""
        known = [part(part(one, "metadata"), "annotations") for one in self.jobs.values()]
        known += [part(part(one, "metadata"), "annotations") for one in self.of(None)]
        return max((int(one.get(HOSTS) or 1) for one in known), default=1)

    def of(self, index: int | None) -> list[Document]:
        """Return its pods of one index, or of any, oldest first."""
        pods = [
            pod
            for pod in self.pods.values()
            if name_of(pod) == self.name and index in (None, host_of(pod))
        ]
        return sorted(pods, key=lambda pod: str(part(pod, "metadata").get("creationTimestamp")))

    async def change(self) -> None:
        """Wait until something changes.

        Raises:
            BackendError: The watch has failed.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure


def _is_over(job: Document) -> bool:
    return any(condition(job, one) is not None for one in ("Complete", "Completed", "Failed"))


@asynccontextmanager
async def _opened(
    api: Api, paths: Paths, name: str, rhythm: Rhythm, *, follow: bool
) -> AsyncGenerator[_Scene]:
    """Give the scene as it is now; with *follow*, two watches keep it up to date."""
    scene = _Scene(name, rhythm)
    (selector,) = by_items([name])
    if not follow:
        scene.feed(await listing(api, paths.jobs, selector), pods=False)
        scene.feed(await listing(api, paths.pods, selector), pods=True)
        yield scene
        return

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
    """Yield the lines of an attempt's output; with *follow*, until the attempt has ended.

    If several pods ran one after the other, these are the last one's, and with
    *follow* those of the pods to come. If several run at once, each line begins
    with its pod's index.

    Raises:
        NotFound: The job doesn't exist, or its log is gone.
    """
    one = _followed if follow else _last
    async with _opened(api, paths, name, rhythm, follow=follow) as scene:
        if not scene.there:
            raise _absent(api, paths, scene)
        if (count := scene.indexes) == 1:
            lines = one(api, paths, scene, None, tail)
        else:
            lines = merged(
                [_marked(f"[{i}] ", one(api, paths, scene, i, tail)) for i in range(count)]
            )
        async with aclosing(lines):
            async for line in lines:
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
    """Return whether its program has started, so that it has a log."""
    programs = Pod(pod).programs
    return any(one.state("running") is not None or one.ended is not None for one in programs)


async def _last(
    api: Api, paths: Paths, scene: _Scene, index: int | None, tail: int | None
) -> AsyncGenerator[str]:
    """Yield the log of the last pod that has one."""
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
    """Yield the log of the last pod and of each that follows, until the job has ended."""
    read = {uid(pod) for pod in scene.of(index)[:-1]}
    while True:
        pods = [pod for pod in scene.of(index) if uid(pod) not in read]
        if not pods and scene.over:
            if not (read or scene.has_job):
                raise _absent(api, paths, scene)  # its Job may still come, or never will
            return
        if not pods or not (_begun(pods[0]) or Pod(pods[0]).ended):
            await scene.change()
            continue
        pod = pods[0]
        read.add(uid(pod))
        if not _begun(pod):
            continue  # it ended before it ran
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
