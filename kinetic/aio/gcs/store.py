"""The store of the cloud platforms: a bucket of Google Cloud Storage, or a folder of one."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinetic._tasks import all_or_none
from kinetic.aio._net.http import HttpError, retry_after
from kinetic.aio.gcs import transfer
from kinetic.aio.gcs.http import (
    EMULATOR,
    Described,
    Http,
    Limits,
    Location,
    Verb,
    described,
    is_passing,
)
from kinetic.aio.gcs.transfer import opened
from kinetic.aio.ports import RECORD_BYTES, Object, ObjectInfo
from kinetic.errors import Conflict

__all__ = ["GcsStore", "Limits", "Task", "each", "listed", "now", "renewed"]


CALLS = 100
FEW = 3
"""Up to here each is asked for by a request of its own: a batch takes longer than one."""

ABSENT = 404

BOUNDARY = re.compile(r"boundary=\"?([^\";]+)")
STATUS = re.compile(r"(?m)^HTTP/[\d.]+ (\d{3})")
NUMBER = re.compile(r"(?mi)^content-id: *<response-(\d+)>")
WISH = re.compile(r"(?mi)^retry-after: *(\S.*?)\r?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The same for many objects. What is answered with a status of ``known`` has not failed."""

    verb: Verb
    method: str
    body: Mapping[str, str] = field(default_factory=dict[str, str])
    known: frozenset[int] = frozenset({ABSENT})


async def each(
    http: Http, task: Task, names: Collection[str], queries: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Do *task* with the objects of *names*; those that were answered with one of its statuses.

    *queries* has the parameters of each request, by name. Cancelled: it may be done with any of
    them.
    """
    queries = queries or {}
    paths = ((name, http.object_path(http.place.object_name(name))) for name in names)
    every = [(name, path + queries.get(name, "")) for name, path in paths]
    if len(every) <= FEW:
        work = (_one(http, task, name, path) for name, path in every)
    else:
        starts = range(0, len(every), CALLS)
        work = (_Batch(http, task, every[start : start + CALLS]).run() for start in starts)
    found: dict[str, int] = {}
    for known in await all_or_none(*work):
        found |= known
    return found


async def _one(http: Http, task: Task, name: str, path: str) -> dict[str, int]:
    url = f"{http.endpoint}{path}"

    async def work() -> None:
        body = json.dumps(dict(task.body)).encode() if task.body else None
        headers = {"Content-Type": "application/json"} if task.body else {}
        async with http.response(task.method, url, headers=headers, data=body) as answer:
            await answer.read()

    try:
        await http.do(task.verb, name, work)
    except HttpError as refusal:
        if refusal.status in task.known:
            return {name: refusal.status}
        raise http.explained(refusal, task.verb, name) from None
    return {}


class _Batch:
    """Up to a hundred calls; those that failed in passing are made again."""

    def __init__(self, http: Http, task: Task, objects: Sequence[tuple[str, str]]) -> None:
        self._http = http
        self._task = task
        self._left = list(objects)
        self._done = 0
        self._known: dict[str, int] = {}

    async def run(self) -> dict[str, int]:
        """Make them all."""
        first = self._left[0][0]
        verb = self._task.verb
        try:
            await self._http.do(verb, first, self._once, progress=lambda: self._done)
        except HttpError as refusal:
            name = self._left[0][0]
            raise self._http.explained(refusal, verb, name) from None
        return self._known

    async def _once(self) -> None:
        boundary = f"kinetic-{secrets.token_hex(8)}"
        body = _written(self._task, [path for _, path in self._left], boundary)
        limits = self._http.limits
        async with (
            asyncio.timeout(limits.connect_s + 2 * limits.idle_s),
            self._http.response(
                "POST",
                f"{self._http.endpoint}/batch/storage/v1",
                headers={"Content-Type": f"multipart/mixed; boundary={boundary}"},
                data=body,
            ) as answer,
        ):
            kind = answer.headers.get("Content-Type", "")
            refusals = _read(kind, await answer.read(), len(self._left))
        for number in [one for one, why in refusals.items() if why.status in self._task.known]:
            self._known[self._left[number][0]] = refusals.pop(number).status
        self._done += len(self._left) - len(refusals)
        self._left = [self._left[number] for number in refusals] or self._left[:1]
        for refusal in sorted(refusals.values(), key=is_passing):
            raise refusal  # one that will not pass, if there is one


def _written(task: Task, paths: Sequence[str], boundary: str) -> bytes:
    content = json.dumps(dict(task.body)) if task.body else ""
    about = ["Content-Type: application/json", f"Content-Length: {len(content)}"] if content else []
    lines: list[str] = []
    for number, path in enumerate(paths):
        lines += (
            f"--{boundary}",
            "Content-Type: application/http",
            f"Content-ID: <{number}>",
            "",
            f"{task.method} {path} HTTP/1.1",
            *about,
            "",
            content,
        )
    return "\r\n".join([*lines, f"--{boundary}--", ""]).encode()


def _read(kind: str, body: bytes, count: int) -> dict[int, HttpError]:
    """The number of each call that was refused, with why.

    Raises:
        ValueError: It is no answer to a batch of *count*.
    """
    boundary = BOUNDARY.search(kind)
    parts = body.decode(errors="replace").split(f"--{boundary[1]}")[1:-1] if boundary else []
    if len(parts) != count:
        raise ValueError(f"{len(parts)} answers to {count} calls")
    refusals: dict[int, HttpError] = {}
    for place, part in enumerate(parts):
        status = STATUS.search(part)
        if status is None:
            raise ValueError("an answer without a status")
        code = int(status[1])
        if code >= 300:
            number, wish = NUMBER.search(part), WISH.search(part)
            refusal = HttpError(code, part[status.end() :], retry_after(wish[1] if wish else None))
            refusals[int(number[1]) if number else place] = refusal
    return refusals


TOO_EARLY = 400
SKEW = datetime.timedelta(days=1)
"""How far a clock may be ahead of another one."""


def now() -> str:
    """This moment, as the service takes it."""
    return _text(datetime.datetime.now(datetime.UTC))


def _text(moment: datetime.datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def renewed(http: Http, names: Collection[str]) -> set[str]:
    """Set it to now for all of *names*; those that are not there.

    Raises:
        AuthError: A permission is missing.
        Unavailable: The service did not answer.

    Cancelled: any of them may be renewed.
    """
    moment = datetime.datetime.now(datetime.UTC)
    task = Task(
        verb=Verb.RENEW,
        method="PATCH",
        body={"customTime": _text(moment)},
        known=frozenset({ABSENT, TOO_EARLY}),
    )
    found = await each(http, task, names)
    absent = {name for name, status in found.items() if status == ABSENT}
    for name in found.keys() - absent:  # somebody whose clock is ahead was faster
        try:
            about = await described(http, name)
        except HttpError as refusal:
            if refusal.status != ABSENT:
                raise http.explained(refusal, Verb.GET, name) from None
            absent.add(name)
            continue
        if about.used is None or about.used < (moment - SKEW).timestamp():
            raise http.explained(HttpError(TOO_EARLY), Verb.RENEW, name)
    return absent


FIELDS = "nextPageToken,items(name,size,generation,metageneration,metadata,customTime)"


async def listed(http: Http, prefix: str) -> list[ObjectInfo]:
    """All objects whose names begin with *prefix*, sorted by name."""
    found: list[ObjectInfo] = []
    token: str | None = ""
    while token is not None:
        page, token = await _page(http, prefix, token)
        found += page
    # The service sorts by the bytes of its own names, which are not quite ours.
    return sorted(found, key=lambda info: info.name)


async def _page(http: Http, prefix: str, token: str) -> tuple[list[ObjectInfo], str | None]:
    params = {
        "prefix": http.place.object_name(prefix),
        "maxResults": str(http.limits.page),
        "fields": FIELDS,
        **({"pageToken": token} if token else {}),
    }

    async def work() -> tuple[list[ObjectInfo], str | None]:
        answer = await http.storage.list_objects(
            http.place.bucket, params=dict(params), timeout=http.timeout
        )
        infos = (_info(http, resource) for resource in answer.get("items") or ())
        return [info for info in infos if info is not None], answer.get("nextPageToken") or None

    try:
        return await http.do(Verb.LIST, prefix, work)
    except HttpError as refusal:
        raise http.explained(refusal, Verb.LIST, prefix) from None


def _info(http: Http, resource: Mapping[str, Any]) -> ObjectInfo | None:
    """What a listing tells of one object, unless it is none of this store."""
    name = http.place.name(resource["name"])
    if name is None:
        return None
    return Described.from_resource(resource).info(name)


DELETE = Task(verb=Verb.DELETE, method="DELETE")
RENEWED = 412
"""A condition of the request does not hold: somebody has changed the object."""

COLLECT = Task(verb=Verb.DELETE, method="DELETE", known=frozenset({ABSENT, RENEWED}))


class GcsStore:
    """`kinetic.aio.ports.Store` over ``gs://bucket`` or ``gs://bucket/folder``.

    It belongs to the event loop that uses it first. STORAGE_EMULATOR_HOST, a URL,
    names a server to use instead of Google's, without credentials.

    Raises:
        ConfigurationError: *url* names no bucket.
    """

    def __init__(
        self,
        url: str,
        environ: Mapping[str, str] = os.environ,
        *,
        endpoint: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        emulator = environ.get(EMULATOR, "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        self._http = Http(
            Location.from_url(url),
            endpoint or emulator or None,
            limits or Limits(),
            authorized=not emulator,
        )

    @property
    def url(self) -> str:
        return self._http.place.url

    async def create(
        self,
        name: str,
        body: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
    ) -> bool:
        """See the port. A body of up to 1 MiB takes one request, a larger one two and no memory.

        Raises:
            AuthError: The credentials are missing, or lack a permission.
            Unavailable: The service did not answer for two minutes.
        """
        used = now() if shared else ""
        return await self._made(name, body, metadata or {}, used) is not None

    async def begin(self, name: str, body: bytes) -> int | None:
        """See the port."""
        return await self._made(name, body, {}, "")

    async def _made(
        self, name: str, body: bytes | Path, metadata: Mapping[str, str], used: str
    ) -> int | None:
        """The generation of a new object; None when there is one."""
        async with opened(body, self._http.limits.piece_bytes) as content:
            return await transfer.write(
                self._http, Verb.CREATE, name, content, metadata, generation=0, used=used
            )

    async def replace(self, name: str, body: bytes, *, generation: int) -> int:
        """See the port."""
        async with opened(body, self._http.limits.piece_bytes) as content:
            made = await transfer.write(
                self._http, Verb.REPLACE, name, content, {}, generation=generation
            )
        if made is not None:
            return made
        try:
            await described(self._http, name)
        except HttpError as refusal:
            raise self._http.explained(refusal, Verb.GET, name) from None
        raise Conflict(f"{name} is no longer of generation {generation}")

    async def get(self, name: str, *, limit: int | None = RECORD_BYTES, start: int = 0) -> Object:
        """See the port. Two requests at once: the API gives metadata and content by one each."""
        return await transfer.get(self._http, name, limit, start)

    async def fetch(self, name: str, path: Path) -> None:
        """See the port. A large object comes in several ranges at once."""
        await transfer.fetch(self._http, name, path)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """See the port. One request for each thousand objects."""
        return await listed(self._http, prefix)

    async def look(self, name: str) -> ObjectInfo | None:
        """See the port. One request, of the cheaper kind."""
        try:
            return (await described(self._http, name)).info(name)
        except HttpError as refusal:
            if refusal.status == ABSENT:
                return None
            raise self._http.explained(refusal, Verb.GET, name) from None

    async def renew(self, names: Collection[str]) -> set[str]:
        """See the port. One request for each hundred objects; it is their custom time."""
        return await renewed(self._http, names)

    async def collect(self, objects: Sequence[ObjectInfo]) -> bool:
        """See the port. One look, and one request for each hundred objects."""
        there = await self.look(objects[0].name) if objects else None
        if there is not None and there.used != objects[0].used:
            return False
        return await self._collect(objects[:1]) and await self._collect(objects[1:])

    async def _collect(self, objects: Sequence[ObjectInfo]) -> bool:
        queries = {
            one.name: f"?ifGenerationMatch={one.generation}"
            f"&ifMetagenerationMatch={one.metageneration}"
            for one in objects
        }
        return RENEWED not in (await each(self._http, COLLECT, queries, queries)).values()

    async def delete(self, names: Collection[str]) -> None:
        """See the port. One request for each hundred objects."""
        await each(self._http, DELETE, names)

    async def aclose(self) -> None:
        """Close the connections; requests under way fail."""
        await self._http.aclose()
