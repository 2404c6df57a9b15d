"""Read the output of a job: from its pod and the pods that replace it, or from several hosts.

`job_log` chooses the pods of an attempt, and resumes broken connections. It reads Jobs and pods
again while it waits for them, and after each connection. It has no watch of its own: that of the
session rings a `Bell`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import re
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from contextlib import aclosing
from typing import TypeVar

from kinetic._tasks import end_all
from kinetic.aio.kubernetes.diagnosis.documents import (
    Document,
    age_key,
    annotations_of,
    condition,
    get_dict,
    uid,
)
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.manifests import CONTAINER, HOSTS, by_items, by_worker
from kinetic.aio.kubernetes.multihost import host_of
from kinetic.aio.kubernetes.observations import name_of
from kinetic.aio.kubernetes.reflector import Namespace
from kinetic.aio.ports import ItemOutput, LogPiece, LogPieces
from kinetic.errors import NotFound, Refused, Throttled, Unavailable

T = TypeVar("T")

IDLE_S = 300.0
"""Seconds of silence after which kinetic reconnects, because silence may mean a dead connection."""

FRESH_S = 0.25
"""How long what was read counts as new, in seconds; the logs of all hosts of a set share it."""

MAX_EMPTY_READS = 5
"""After this many connections in a row without output, kinetic gives up an ended pod's log."""

_REMOVED = re.compile(
    rb"unable to retrieve container logs for |failed to try resolving symlinks in path "
)
"""What a kubelet answers if it has removed the log. A program's lines begin with a time instead."""

KUBELET = "[kubelet] "
"""The mark of a line that the kubelet wrote into the answer, such as an error of its own."""

_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ?")
"""The time of a line; containerd writes it in the time zone of the node."""


class _Memory:
    """Remember which lines of the last two seconds were yielded, to skip them on reconnect.

    A connection can resume only at a whole second, and lines may be up to a second out of
    order.
    """

    def __init__(self, newest: str = "") -> None:
        self._yielded: dict[str, Counter[int]] = {}
        self._expected: dict[str, Counter[int]] = {}
        self._newest = newest
        self._second = ""  # the time of the line whose pieces arrive now
        self._notes: set[bytes] = set()
        self.removed = False
        """Whether the kubelet has answered that it removed the log."""
        self.has_output = False
        """Whether this connection brought new output of the program."""
        self.has_note = False
        """Whether the kubelet wrote a line of its own, so that it can't follow the log now."""

    @property
    def since(self) -> str:
        """The time to continue from; "" before the first line."""
        return _second_before(self._newest) if self._newest else ""

    def prepare_reconnect(self) -> None:
        """Prepare to skip the lines of the last two seconds, which the new connection repeats."""
        self.removed = self.has_output = self.has_note = False
        self._expected = {second: Counter(lines) for second, lines in self._yielded.items()}

    def texts(self, pieces: Iterator[LogPiece], *, unfinished: bool = False) -> list[str]:
        """Return the lines that weren't yielded before; those of the kubelet are marked.

        With *unfinished*, skip the program's output, which is the start of a line.
        """
        contents = (self._new_content(piece, unfinished) for piece in pieces)
        return [content.decode(errors="replace") for content in contents if content is not None]

    def _new_content(self, piece: LogPiece, unfinished: bool) -> bytes | None:
        """Return a piece without its time; None if it was yielded before."""
        stamp = _STAMP.match(piece.content) if piece.number == 0 else None
        if piece.number == 0:
            self._second = _utc_second(stamp[1].decode(), stamp[2].decode()) if stamp else ""
        if not self._second:
            self.has_note = True
            self.removed = self.removed or _REMOVED.match(piece.content) is not None
            if piece.content in self._notes or (self.removed and not self.since):
                return None
            self._notes.add(piece.content)
            return KUBELET.encode() + piece.content
        if unfinished:  # the next connection repeats the line
            return None
        second, line_hash = self._second, hash((piece.number, piece.content))
        expected = self._expected.get(second)
        if expected is not None and expected[line_hash] > 0:
            expected[line_hash] -= 1
            return None
        self.has_output = True
        if second > self._newest:
            self._newest = second
            oldest = _second_before(second)[:19]
            self._yielded = {
                earlier: lines for earlier, lines in self._yielded.items() if earlier >= oldest
            }
        self._yielded.setdefault(second, Counter())[line_hash] += 1
        return piece.content[stamp.end() if stamp else 0 :]


def _utc_second(second: str, offset: str) -> str:
    """Return the UTC time of *second*, a time with this *offset* from UTC."""
    if offset == "Z":
        return second
    moment = datetime.datetime.fromisoformat(second + offset).astimezone(datetime.UTC)
    return moment.replace(tzinfo=None).isoformat()


def _second_before(second: str) -> str:
    moment = datetime.datetime.fromisoformat(second) - datetime.timedelta(seconds=1)
    return f"{moment.isoformat()}Z"


class _AttemptView:
    """The attempt called *name*: the Jobs and pods of its item, as they were last read."""

    def __init__(self, namespace: Namespace, name: str, *, follow: bool, begin: str = "") -> None:
        self.name = name
        self.follow = follow
        self._begin = begin  # the UTC second from which on to read the log; empty: all of it
        self._namespace = namespace
        self._jobs: list[Document] = []
        self._pods: list[Document] = []
        self._read_at = -math.inf
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Read the jobs and pods, unless the log of another host has read them a moment ago."""
        async with self._reading:
            clock = asyncio.get_running_loop().time
            if clock() >= self._read_at + FRESH_S:
                jobs = await self._namespace.jobs(self._selector)
                pods = await self._namespace.pods(self._selector)
                self._jobs, self._pods, self._read_at = jobs.items, pods.items, clock()

    async def _read_later(self, pause: float) -> None:
        """Read the jobs and pods after a change or a *pause*; if that fails, keep the old ones."""
        await asyncio.sleep(min(pause, FRESH_S))
        await self._namespace.bell.wait(max(0.0, pause - FRESH_S))
        with contextlib.suppress(Unavailable, Throttled):
            await self.read()

    @property
    def _selector(self) -> str:
        return by_items([self.name])

    def check_exists(self) -> None:
        """Check that the attempt exists, or will exist.

        Raises:
            NotFound: There is no such attempt, and none will start.
        """
        pods, jobs = self._pods_of(None), self._jobs
        if (pods and jobs) or not all(Pod(pod).ended for pod in pods):
            return
        if not any(self.name == name_of(job) or not _has_ended(job) for job in jobs):
            raise self._not_found()

    def _not_found(self) -> NotFound:
        return NotFound(
            f"there is no job {self.name!r} in namespace {self._namespace.paths.namespace} of "
            f"{self._namespace.api.cluster}, or it was deleted"
        )

    @property
    def _is_complete(self) -> bool:
        """Whether the attempt gets no further pod; it has one on each host."""
        pods = self._pods_of(None)
        if (hosts := self.hosts) > 1:  # the pods are created one after the other
            return not self._jobs or len({host_of(pod) for pod in pods}) == hosts
        return bool(pods) or all(_has_ended(job) for job in self._jobs)

    @property
    def hosts(self) -> int:
        """How many pods of the attempt run at once."""
        documents = [*self._jobs, *self._pods_of(None)]
        return max((int(annotations_of(found).get(HOSTS) or 1) for found in documents), default=1)

    def _pods_of(self, index: int | None) -> list[Document]:
        """Return the attempt's pods with this *index*, or all its pods for None, oldest first."""
        pods = (pod for pod in self._pods if name_of(pod) == self.name)
        return sorted((pod for pod in pods if index in (None, host_of(pod))), key=age_key)

    async def lines(self, index: int | None, tail: int | None) -> AsyncGenerator[str]:
        """Yield the lines of the last pod that has a log, each after *index* in brackets.

        With ``follow``, also yield the log of each pod that replaces this pod.
        """
        prefix = "" if index is None else f"[{index}] "
        async with aclosing(self._logged_pods(index)) as pods:
            async for pod in pods:
                async with aclosing(self._container_log(pod, tail)) as lines:
                    async for line in lines:
                        yield prefix + line
                tail = None

    async def _logged_pods(self, index: int | None) -> AsyncGenerator[Document]:
        """Yield the last pod that has a log; with ``follow``, also each pod that replaces it."""
        if not self.follow:
            for last in [pod for pod in self._pods_of(index) if _has_started(pod)][-1:]:
                yield last
            return
        read = {uid(pod) for pod in self._pods_of(index)[:-1]}
        pauses = self._namespace.rhythm.pauses()
        while True:
            unread = [pod for pod in self._pods_of(index) if uid(pod) not in read]
            pod = unread[0] if unread else None
            if pod is None and self._is_complete:
                if not (read or any(self.name == name_of(job) for job in self._jobs)):
                    raise self._not_found()  # the replacement pod was never created
                return
            if pod is None or not (_has_started(pod) or Pod(pod).ended):
                await self._read_later(next(pauses))
                continue
            read.add(uid(pod))
            if _has_started(pod):
                yield pod

    async def _container_log(self, pod: Document, tail: int | None) -> AsyncGenerator[str]:
        """Yield the lines of a pod's log; with ``follow``, also new lines until the program ends.

        Bytes that aren't UTF-8 are replaced. A line of more than 1 MiB comes in pieces.
        A broken connection neither repeats nor drops lines. With ``follow``, the iteration just
        ends if the node has removed the log, because another pod may follow. A line of the
        kubelet's comes once, after `KUBELET`.

        Raises:
            NotFound: Without ``follow``: the pod, or its log, no longer exists.
            Unavailable: The container has ended, and its log can't be read.
        """
        api, rhythm = self._namespace.api, self._namespace.rhythm
        path = f"{self._namespace.paths.pods}/{get_dict(pod, 'metadata').get('name')}/log"
        started, empty_reads, pauses = asyncio.get_running_loop().time(), 0, rhythm.pauses()
        memory = _Memory(self._begin)
        while True:
            # Check this before reading: if the container has ended, the log has all of its output.
            current = [found for found in self._pods if uid(found) == uid(pod)]
            ended = all(Pod(found).ended for found in current)
            is_last, failure = ended or not self.follow, None
            waited = asyncio.get_running_loop().time() - started
            query = _query(memory.since, tail, waited)
            if not is_last:
                query["follow"] = "true"
            memory.prepare_reconnect()
            try:
                pieces = LogPieces()
                async with api.stream(path, query=query, idle_s=IDLE_S) as contents:
                    async for content in contents:
                        for text in memory.texts(pieces.feed(content)):
                            yield text
                for text in memory.texts(pieces.feed(last=True), unfinished=not is_last):
                    yield text
                if memory.removed and not memory.since:
                    raise NotFound("the job's node has removed the log")
                if is_last:
                    return
            except NotFound:
                if not self.follow:
                    raise
                if is_last:
                    return
            except (Unavailable, Throttled) as exc:
                failure = exc
            except Refused as exc:  # the container waits to start, or the node has removed its log
                if ended:
                    raise NotFound(f"the log no longer exists: {exc}") from exc
            empty_reads = 0 if memory.has_output else empty_reads + 1
            if failure is not None and empty_reads >= MAX_EMPTY_READS and is_last:
                raise failure
            # While the kubelet can't follow the log, which its notes say, the pauses grow.
            if memory.has_output and not memory.has_note:
                pauses = rhythm.pauses()
            await self._read_later(next(pauses))


class _WorkerView(_AttemptView):
    """The pod of the worker called *name*."""

    @property
    def _selector(self) -> str:
        return by_worker(self.name)

    def check_exists(self) -> None:
        """Check that the pod exists.

        Raises:
            NotFound: There is no such pod.
        """
        if not self._pods_of(None):
            raise self._not_found()

    @property
    def _is_complete(self) -> bool:
        return True


async def item_log(
    namespace: Namespace, place: ItemOutput, *, follow: bool, tail: int | None
) -> AsyncGenerator[str]:
    """Yield the lines between two marks in the log of a worker's pod.

    Raises:
        NotFound: The pod doesn't exist, or its log no longer exists.
    """
    skipped = 0
    if tail is not None:
        last = deque[str](maxlen=tail)
        whole = item_log(namespace, place, follow=False, tail=None)
        async with aclosing(whole) as lines:
            async for line in lines:
                last.append(line)
                skipped += 1
        for line in last:
            yield line
        if not follow:
            return
    begin = datetime.datetime.fromtimestamp(place.since, datetime.UTC)
    second = begin.replace(microsecond=0, tzinfo=None).isoformat()
    view = _WorkerView(namespace, place.worker, follow=follow, begin=second)
    await view.read()
    view.check_exists()
    has_begun = False
    async with aclosing(view.lines(None, None)) as lines:
        async for line in lines:
            if line == place.marks[1]:
                return
            if has_begun and skipped:
                skipped -= 1
            elif has_begun:
                yield line
            has_begun = has_begun or line == place.marks[0]


def _query(since: str, tail: int | None, waited: float) -> dict[str, str]:
    """Return the query of a request: where the log continues, or how many last lines to send."""
    query = {"container": CONTAINER, "timestamps": "true"}
    if since:
        query["sinceTime"] = since
    elif tail == 0 and waited > 1:  # the caller wants all lines since it began to wait
        query["sinceSeconds"] = str(int(waited) + 1)
    elif tail is not None:
        query["tailLines"] = str(tail)
    return query


def _has_ended(job: Document) -> bool:
    return any(condition(job, kind) is not None for kind in ("Complete", "Completed", "Failed"))


def _has_started(pod: Document) -> bool:
    """Return whether the pod's program has started, so that the pod has a log."""
    return Pod(pod).runs or any(program.end is not None for program in Pod(pod).programs)


async def job_log(
    find_namespace: Callable[[], Awaitable[Namespace]], name: str, *, follow: bool, tail: int | None
) -> AsyncGenerator[str]:
    """Yield the lines of a job's output; with *follow*, until the job has ended.

    If several pods ran one after the other, yield the lines of the last pod and, with *follow*, of
    the pods that replace it. If several pods run at once, each line begins with the pod's index.

    Raises:
        NotFound: The job doesn't exist, or its log no longer exists.
    """
    view = _AttemptView(await find_namespace(), name, follow=follow)
    await view.read()
    view.check_exists()
    indices = range(view.hosts) if view.hosts > 1 else (None,)
    streams = [view.lines(index, tail) for index in indices]
    merged = merge_streams(streams) if len(streams) > 1 else streams[0]
    async with aclosing(merged) as lines:
        async for line in lines:
            yield line


async def merge_streams(streams: Collection[AsyncGenerator[T]]) -> AsyncGenerator[T]:
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
        await end_all(waiting)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[T]) -> T | None:
    """Return the next item; None at the end of the stream."""
    return await anext(stream, None)
