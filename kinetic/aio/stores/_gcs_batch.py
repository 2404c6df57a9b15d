"""Many objects deleted or renewed by few requests: the JSON API takes a hundred calls in one."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kinetic.aio._release import all_or_none
from kinetic.aio._retry_after import retry_after
from kinetic.aio.stores._gcs_errors import Refusal, Verb, is_passing
from kinetic.aio.stores._gcs_http import Http

__all__ = ["Task", "each"]

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


async def each(http: Http, task: Task, names: Collection[str]) -> dict[str, int]:
    """Do *task* with the objects of *names*; those that were answered with one of its statuses.

    Cancelled: it may be done with any of them.
    """
    objects = {name: http.place.object_name(name) for name in names}
    every = list(objects.items())
    if len(every) <= FEW:
        work = (_one(http, task, name, object_name) for name, object_name in every)
    else:
        starts = range(0, len(every), CALLS)
        work = (_Batch(http, task, every[start : start + CALLS]).run() for start in starts)
    found: dict[str, int] = {}
    for known in await all_or_none(*work):
        found |= known
    return found


async def _one(http: Http, task: Task, name: str, object_name: str) -> dict[str, int]:
    url = http.object_url(object_name)

    async def work() -> None:
        body = json.dumps(dict(task.body)).encode() if task.body else None
        headers = {"Content-Type": "application/json"} if task.body else {}
        async with http.response(task.method, url, headers=headers, data=body) as answer:
            await answer.read()

    try:
        await http.do(task.verb, name, work)
    except Refusal as refusal:
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
        except Refusal as refusal:
            name = self._left[0][0]
            raise self._http.explained(refusal, verb, name) from None
        return self._known

    async def _once(self) -> None:
        boundary = f"kinetic-{secrets.token_hex(8)}"
        names = [name for _, name in self._left]
        body = _written(self._task, self._http.place.bucket, names, boundary)
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


def _written(task: Task, bucket: str, objects: Sequence[str], boundary: str) -> bytes:
    content = json.dumps(dict(task.body)) if task.body else ""
    about = ["Content-Type: application/json", f"Content-Length: {len(content)}"] if content else []
    lines: list[str] = []
    for number, name in enumerate(objects):
        quoted = urllib.parse.quote(name, safe="")
        lines += (
            f"--{boundary}",
            "Content-Type: application/http",
            f"Content-ID: <{number}>",
            "",
            f"{task.method} /storage/v1/b/{bucket}/o/{quoted} HTTP/1.1",
            *about,
            "",
            content,
        )
    return "\r\n".join([*lines, f"--{boundary}--", ""]).encode()


def _read(kind: str, body: bytes, count: int) -> dict[int, Refusal]:
    """The number of each call that was refused, with why.

    Raises:
        ValueError: It is no answer to a batch of *count*.
    """
    boundary = BOUNDARY.search(kind)
    parts = body.decode(errors="replace").split(f"--{boundary[1]}")[1:-1] if boundary else []
    if len(parts) != count:
        raise ValueError(f"{len(parts)} answers to {count} calls")
    refusals: dict[int, Refusal] = {}
    for place, part in enumerate(parts):
        status = STATUS.search(part)
        if status is None:
            raise ValueError("an answer without a status")
        code = int(status[1])
        if code >= 300:
            number, wish = NUMBER.search(part), WISH.search(part)
            refusal = Refusal(code, part[status.end() :], retry_after(wish[1] if wish else None))
            refusals[int(number[1]) if number else place] = refusal
    return refusals
