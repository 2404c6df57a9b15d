"""List a collection, watch it from the listed version, and list again if a watch can't resume."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from absl import logging

from kinetic._tasks import until_set
from kinetic.aio._net.http import json_object
from kinetic.aio._net.retry import growing_pauses
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.documents import Document, get_dict
from kinetic.aio.kubernetes.manifests import Paths
from kinetic.aio.kubernetes.trimming import trim
from kinetic.errors import Expired, Throttled, Unavailable

PAGE_SIZE = 250
"""Objects in one page of a list; decoding a page blocks the event loop for about 20 ms."""

TRIES = 3
"""How often to try a list that expires before its last page."""

WARN_AFTER = 5
"""The number of failures in a row after which the log has a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """The timing of a watch; in seconds.

    ``idle_s`` is the silence after which a connection counts as dead. ``life_s`` is how long the
    server keeps one watch open. ``relist_s`` is how often kinetic lists everything again, in case
    an event was lost. The pause before the next watch grows after each watch that ended within
    ``brief_s`` without an event. A pause that the server asks for is limited to
    ``longest_retry_after_s``, because kinetic sees no changes during a pause.
    """

    idle_s: float = 100.0
    life_s: float = 280.0
    relist_s: float = 1800.0
    brief_s: float = 5.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 4.0
    longest_retry_after_s: float = 30.0

    def pauses(self) -> Iterator[float]:
        """Yield growing pauses; half of each pause is random."""
        return growing_pauses(self.first_pause_s, self.longest_pause_s, jitter=0.5)


class Bell:
    """Wake those who wait until a watch of this client sees a change of any pod."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake all who wait now."""
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Wait for the next change, up to *timeout* seconds."""
        await until_set(self._rung, timeout)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace as one client reads it: ``paths.jobs`` has Jobs, or the sets of one kind."""

    api: Api
    paths: Paths
    rhythm: Rhythm
    bell: Bell

    async def jobs(self, selector: str) -> Listed:
        """Return the Jobs, or the sets, that *selector* matches."""
        return await list_all(self.api, self.paths.jobs, selector)

    async def pods(self, selector: str) -> Listed:
        """Return the pods that *selector* matches."""
        return await list_all(self.api, self.paths.pods, selector)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """All objects that match a selector, as of the collection's ``version``."""

    items: list[Document]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One object as it is now, or as it was when it was deleted."""

    document: Document
    deleted: bool


async def list_all(api: Api, path: str, selector: str) -> Listed:
    """Read all objects that *selector* matches, as of one moment."""
    for _ in range(TRIES):
        try:
            return await _read_pages(api, path, selector)
        except Expired:  # the server no longer has the state of that moment for a later page
            continue
    raise Unavailable(
        f"the server dropped the list of {path} {TRIES} times before its last page; try again",
        retryable=True,
    )


async def _read_pages(api: Api, path: str, selector: str) -> Listed:
    items: list[Document] = []
    query = {"labelSelector": selector, "limit": str(PAGE_SIZE)}
    while True:
        answer = await api.call("GET", path, query=query)
        items += (trim(item) for item in answer.get("items") or ())
        metadata = get_dict(answer, "metadata")
        if not (continue_token := str(metadata.get("continue") or "")):
            return Listed(items=items, version=_resource_version(answer))
        query["continue"] = continue_token


async def reflect(
    api: Api, path: str, selector: str, rhythm: Rhythm
) -> AsyncGenerator[Listed | Changed]:
    """Yield what exists, then every change, forever; each `Listed` replaces everything before it.

    A watch resumes at the version where it stopped. `reflect` lists everything again when the
    server no longer has that version, after an error in the watch, and every ``rhythm.relist_s``
    seconds.

    Raises:
        BackendError: The server refuses the read permanently.
    """
    clock = asyncio.get_running_loop().time
    version, relist_at = "", 0.0
    failures, pauses = 0, rhythm.pauses()
    while True:
        started, progressed, wait_s = clock(), False, 0.0
        problem = "the server ended the watch at once"
        try:
            if not version or started >= relist_at:
                found = await list_all(api, path, selector)
                started = clock()
                version, relist_at = found.version, started + rhythm.relist_s
                yield found
            async with aclosing(_events(api, path, selector, version, rhythm)) as events:
                async for event in events:
                    document: dict[str, Any] = event.get("object") or {}
                    version, progressed = _resource_version(document) or version, True
                    if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):  # not BOOKMARK
                        deleted = event["type"] == "DELETED"
                        yield Changed(document=trim(document), deleted=deleted)
        except Expired as exc:
            version, problem = "", str(exc)
        except (Unavailable, Throttled) as exc:
            problem, wait_s = str(exc), min(exc.retry_after or 0.0, rhythm.longest_retry_after_s)
        if progressed or clock() - started >= rhythm.brief_s:
            failures, pauses = 0, rhythm.pauses()
        failures += 1
        if failures == WARN_AFTER:
            logging.warning("the watch of %s was interrupted: %s; retrying", path, problem)
        await asyncio.sleep(max(wait_s, next(pauses)))


async def _events(
    api: Api, path: str, selector: str, version: str, rhythm: Rhythm
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events after *version* from one connection; an event ERROR raises `Expired`."""
    query = {
        "watch": "1",
        "labelSelector": selector,
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        # Random, so that the watches of many clients don't end together.
        "timeoutSeconds": str(int(rhythm.life_s * random.uniform(0.8, 1.0)) or 1),
    }
    async with aclosing(api.lines(path, query=query, idle_s=rhythm.idle_s)) as lines:
        async for line in lines:
            if not line.strip():
                continue
            event = json_object(line.decode(errors="replace"))
            if not event:
                raise Unavailable(
                    f"watching {path}: {line[:100]!r} isn't an event of a Kubernetes API server; "
                    "check whether a proxy answers for the server",
                    retryable=True,
                )
            if event.get("type") == "ERROR":
                status = get_dict(event, "object")
                message = status.get("message") or status.get("reason") or "no reason given"
                raise Expired(f"watching {path}: {message}")
            yield event


def _resource_version(document: Document) -> str:
    return str(get_dict(document, "metadata").get("resourceVersion") or "")
