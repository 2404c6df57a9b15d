"""Jobs or pods as they are, and then every change: list, watch, and go on.

A watch goes on at the version it has seen last. It begins anew with a list when
the server has forgotten that version. Silence is a failure: the server sends a
bookmark every minute or so.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from absl import logging

from kinetic.aio.clusters._api import Api
from kinetic.aio.clusters._kube_trim import trimmed
from kinetic.aio.clusters._reasons.documents import Document, part
from kinetic.errors import BackendError, Expired, Throttled, Unavailable

__all__ = ["Changed", "Listed", "Rhythm", "listing", "reflect"]

PAGE = 250
"""Objects in one answer: some 20 ms of work for the event loop."""

GONE = 410
TRIES = 3
"""So often a list begins anew, or a watch goes on that the server refuses to carry on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How a watch is kept alive; seconds.

    ``idle_s`` is the silence that counts as a dead connection. ``life_s`` is
    how long the server shall keep one watch open. What ends within ``brief_s``
    and said nothing is asked for again only after a pause, which grows.
    """

    page: int = PAGE
    idle_s: float = 100.0
    life_s: float = 280.0
    brief_s: float = 5.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Everything there is now."""

    items: list[Document]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One object as it is now, or as it was when it was deleted."""

    document: Document
    deleted: bool


async def listing(api: Api, path: str, selector: str, page: int = PAGE) -> Listed:
    """A consistent read of all that *selector* finds.

    A list that takes so long that the server forgets its beginning begins anew.
    """
    for _ in range(TRIES):
        try:
            return await _pages(api, path, selector, page)
        except Expired:
            continue
    raise Unavailable(
        f"listing {path} took so long that its beginning was forgotten, {TRIES} times; try again",
        retryable=True,
    )


async def _pages(api: Api, path: str, selector: str, page: int) -> Listed:
    items: list[Document] = []
    query = {"labelSelector": selector, "limit": str(page)}
    while True:
        answer = await api.call("GET", path, query=query)
        items += (trimmed(one) for one in answer.get("items") or ())
        metadata = part(answer, "metadata")
        if not (more := str(metadata.get("continue") or "")):
            return Listed(items=items, version=str(metadata.get("resourceVersion") or ""))
        query["continue"] = more


async def reflect(
    api: Api, path: str, selector: str, rhythm: Rhythm
) -> AsyncGenerator[Listed | Changed]:
    """What is there, then every change, for ever; a further `Listed` replaces all before.

    Raises:
        BackendError: The server will not let it be read, however often it is asked.
    """
    loop, pauses = asyncio.get_running_loop(), _Pauses(rhythm)
    while True:
        try:
            found = await listing(api, path, selector, rhythm.page)
        except (Unavailable, Throttled) as exc:
            await pauses.wait(f"listing {path}", exc)
            continue
        begun = loop.time()
        yield found
        watch = _Watch(api, path, selector, found.version, pauses)
        async with aclosing(watch.changes()) as changes:
            async for change in changes:
                yield change
        if loop.time() - begun < rhythm.brief_s:  # a server that forgets what it has just told
            await pauses.wait(f"watching {path}", "the server has forgotten what was listed")


class _Pauses:
    """How long to wait after failures that follow each other."""

    def __init__(self, rhythm: Rhythm) -> None:
        self.rhythm = rhythm
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    async def wait(self, what: str, why: object) -> None:
        rhythm = self.rhythm
        longest = min(rhythm.longest_pause_s, rhythm.first_pause_s * 2 ** min(self._failures, 20))
        self._failures += 1
        if self._failures == 5:  # some seconds of it
            logging.warning("%s was interrupted: %s; trying on", what, why)
        wish = (why.retry_after if isinstance(why, BackendError) else None) or 0.0
        pause = max(min(wish, rhythm.longest_pause_s), longest * random.uniform(0.5, 1.0))
        await asyncio.sleep(pause)  # a watch that sleeps for an hour is blind for an hour


class _Watch:
    """Connections one after the other, as long as the server remembers where they stopped."""

    def __init__(self, api: Api, path: str, selector: str, version: str, pauses: _Pauses) -> None:
        self._api = api
        self._path = path
        self._selector = selector
        self._version = version
        self._pauses = pauses
        self._refusals = 0

    async def changes(self) -> AsyncGenerator[Changed]:
        """Every change, until the server says that it has forgotten some."""
        loop = asyncio.get_running_loop()
        while True:
            begun, before = loop.time(), self._version
            why: object = "the server ended it at once"
            try:
                async with aclosing(self._connection()) as events:
                    async for event in events:
                        if (change := self._understood(event)) is not None:
                            self._refusals = 0
                            yield change
            except Expired:
                return
            except (Unavailable, Throttled) as exc:
                why = exc
            if self._refusals >= TRIES:
                return
            if self._version != before or loop.time() - begun >= self._pauses.rhythm.brief_s:
                self._pauses.reset()
            await self._pauses.wait(f"watching {self._path}", why)

    async def _connection(self) -> AsyncGenerator[dict[str, Any]]:
        rhythm = self._pauses.rhythm
        query = {
            "watch": "1",
            "labelSelector": self._selector,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(rhythm.life_s * random.uniform(0.8, 1.0)) or 1),
        }
        lines = self._api.lines(self._path, query=query, idle=rhythm.idle_s)
        async with aclosing(lines) as stream:
            async for line in stream:
                if line.strip():
                    yield _decoded(line, self._path)

    def _understood(self, event: dict[str, Any]) -> Changed | None:
        """The change that *event* tells; None for a bookmark.

        Raises:
            Expired: The version to go on from is forgotten.
            Unavailable: The server cannot go on now.
        """
        document: dict[str, Any] = event.get("object") or {}
        kind = event.get("type")
        if kind == "ERROR":
            said = str(document.get("message") or document.get("reason") or "no reason given")
            if document.get("code") == GONE or document.get("reason") in ("Expired", "Gone"):
                raise Expired(f"watching {self._path}: {said}")
            self._refusals += 1
            raise Unavailable(f"watching {self._path}: {said}", retryable=True)
        version = str(part(document, "metadata").get("resourceVersion") or "")
        self._version = version or self._version
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            return None
        return Changed(document=trimmed(document), deleted=kind == "DELETED")


def _decoded(line: bytes, path: str) -> dict[str, Any]:
    try:
        event: Any = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise Unavailable(
            f"watching {path}: {line[:100]!r} is no event of a Kubernetes API server; check "
            "whether a proxy stands before it",
            retryable=True,
        )
    return cast("dict[str, Any]", event)
