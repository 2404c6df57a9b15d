"""A fake Cloud Storage in memory: the parts of the JSON API that a store needs, and faults.

It follows the service where other emulators don't. Preconditions apply to resumable uploads and
deletions, clients can ask for the status of a resumable upload, and invalid names are refused.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import email
import itertools
import json
import re
import urllib.parse
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import google_crc32c
from aiohttp import web
from yarl import URL

PERSISTED = 256 * 1024
"""When a resumable upload is cut, the server keeps whole multiples of this many bytes."""


@dataclass
class Stored:
    body: bytes
    metadata: dict[str, str]
    generation: int
    custom_time: str = ""
    metageneration: int = 1
    time_created: str = field(default_factory=lambda: datetime.now(UTC).isoformat())


@dataclass
class Upload:
    """A resumable upload; ``done`` is the object's resource once the upload is complete."""

    resource: dict[str, Any]
    precondition: int | None
    received: bytearray = field(default_factory=bytearray)
    done: dict[str, Any] | None = None


@dataclass
class Fault:
    """A fault in the next ``times`` requests of a kind (see `GcsServer.requests`).

    By default, the server does nothing and answers ``status`` with ``text`` and ``headers``; with
    status 0, it cuts the connection. The other fields change this:

    - ``late``: the request takes effect before the fault.
    - ``at``: the connection is cut after this many bytes of a request's or answer's body. An
      answer is cut only once ``among`` requests have run at the same time.
    - ``stall``: the server doesn't answer, or with ``at`` stops after those bytes. It cuts the
      connection after ``stall_s``; None means never.
    - ``body``: a function that changes the content.
    - ``crc32c``: a wrong checksum to report.

    ``seen`` counts how often the fault has happened.
    """

    kind: str
    times: int = 1
    status: int = 0
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    late: bool = False
    at: int | None = None
    among: int = 0
    stall: bool = False
    stall_s: float | None = None
    body: Callable[[bytes], bytes] | None = None
    crc32c: str = ""
    seen: int = 0


class Cut(Exception):
    """Close the connection without an answer."""


def crc32c(body: bytes) -> str:
    return base64.b64encode(google_crc32c.value(bytes(body)).to_bytes(4, "big")).decode()


def error(status: int, message: str, reason: str = "") -> web.Response:
    body = {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}
    return web.json_response({"error": body}, status=status)


def _range_of(request: web.Request) -> str:
    """Return the part of the content that an upload request has: all of it without the header."""
    size = request.content_length or 0
    return request.headers.get("Content-Range", f"bytes 0-{size - 1}/{size}")


class GcsServer:
    """``async with GcsServer() as server`` serves the bucket ``kn-test`` on ``server.url``.

    ``requests`` counts requests by kind: create, begin, put, ask, metadata, media, list, delete,
    renew, token, batch. ``batched`` counts those within batches.
    ``tokens`` are the accepted ones; None accepts requests without a token.
    ``peers`` are the addresses of the connections that had requests.
    ``logins`` are the refresh tokens for which this server has issued them.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.requests: Counter[str] = Counter()
        self.batched: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.faults: list[Fault] = []
        self.tokens: set[str] | None = None
        self.logins: list[str] = []
        self.proxied: set[str] = set()
        self.peers: set[Any] = set()
        self.payers: list[str | None] = []
        self.busy = self.most = 0
        self.buckets = {"kn-test"}
        self.settings: dict[str, Any] = {}
        self._numbers = itertools.count(1795275568707580)
        self._ended = asyncio.Event()

    def login(self, folder: Path) -> Path:
        """Require tokens; write application-default credentials that get them from this server."""
        user = {"type": "authorized_user", "client_id": "c", "client_secret": "s"}
        path = folder / "credentials.json"
        uri = f"{self.url}/token"
        path.write_text(json.dumps({**user, "refresh_token": "r", "token_uri": uri}))
        self.tokens = set()
        return path

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended.set()
        await self._runner.cleanup()

    def fail(self, kind: str, **fields: Any) -> Fault:
        """Add a fault to requests of *kind*; ``*`` is any kind."""
        fault = Fault(kind, **fields)
        self.faults.append(fault)
        return fault

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        kind = self._kind(request)
        self.requests[kind] += 1
        if request.transport is not None:
            self.peers.add(request.transport.get_extra_info("peername"))
        header = request.headers.get("X-Goog-User-Project")
        self.payers.append(request.query.get("userProject") or header)
        self.proxied |= {request.headers.get("Proxy-Authorization", "")} - {""}
        self.busy += 1
        self.most = max(self.most, self.busy)
        fault = next((x for x in self.faults if x.times and x.kind in ("*", kind)), None)
        try:
            if fault is not None:
                fault.times -= 1
                fault.seen += 1
                if not fault.late and await self._replaces_answer(fault):
                    return self._answer(fault)
            if kind != "token" and (refused := self._unauthorized(request)):
                return refused
            answer: web.StreamResponse = await getattr(self, f"_on_{kind}")(
                request, fault or Fault(kind)
            )
            if fault is not None and fault.late and await self._replaces_answer(fault):
                return self._answer(fault)
            return answer
        except Cut:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            self.busy -= 1

    async def _replaces_answer(self, fault: Fault) -> bool:
        """Return whether the fault replaces the answer instead of damaging a body; stall first."""
        if fault.at is not None or fault.body is not None or fault.crc32c:
            return False
        if fault.stall:
            await self._stall(fault)
        return True

    async def _stall(self, fault: Fault) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), fault.stall_s)

    def _answer(self, fault: Fault) -> web.StreamResponse:
        if not fault.status:
            raise Cut
        answer = error(fault.status, fault.text or "injected")
        if fault.text.startswith("{"):
            answer = web.Response(status=fault.status, text=fault.text)
        answer.headers.update(fault.headers)
        return answer

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.tokens is None or token in self.tokens:
            return None
        return error(401, "Invalid Credentials", "authError")

    @staticmethod
    def _kind(request: web.Request) -> str:
        path, method = request.rel_url.raw_path, request.method
        if path in ("/token", "/batch/storage/v1"):
            return path.split("/")[1]
        if path.startswith("/upload/"):
            if method == "POST":
                multipart = request.query["uploadType"] == "multipart"
                return "create" if multipart else "begin"
            return "ask" if "*" in _range_of(request).split("/")[0] else "put"
        if path.endswith("/o"):
            return "list"
        if "/o/" not in path:
            return "bucket"
        if method in ("DELETE", "PATCH"):
            return "delete" if method == "DELETE" else "renew"
        return "media" if request.query.get("alt") == "media" else "metadata"

    @staticmethod
    def _object(path: str) -> str:
        return urllib.parse.unquote(path.partition("/o/")[2])

    def _resource(self, name: str, fault: Fault | None = None) -> dict[str, Any]:
        stored = self.objects[name]
        return {
            "kind": "storage#object",
            "name": name,
            "size": str(len(stored.body)),
            "generation": str(stored.generation),
            "metageneration": str(stored.metageneration),
            "crc32c": (fault.crc32c if fault else "") or crc32c(stored.body),
            "timeCreated": stored.time_created,
            **({"metadata": stored.metadata} if stored.metadata else {}),
            **({"customTime": stored.custom_time} if stored.custom_time else {}),
        }

    async def _on_batch(self, request: web.Request, fault: Fault) -> web.Response:
        """Answer each part; the faults of its kind apply to it."""
        content_type = request.headers["Content-Type"].encode()
        head = b"Content-Type: " + content_type + b"\r\n\r\n"
        parts: Any = email.message_from_bytes(head + await request.read()).get_payload()
        answers = ""
        for part in parts:
            method, path, _ = part.get_payload().splitlines()[0].split()
            url = URL(path, encoded=True)
            inner: Any = SimpleNamespace(method=method, rel_url=url, query=url.query)
            kind = self._kind(inner)
            self.batched[kind] += 1
            found = next((x for x in self.faults if x.times and x.kind == kind), None)
            if found is not None:
                found.times -= 1
                found.seen += 1
                answer = error(found.status, found.text or "injected")
            else:
                answer = await getattr(self, f"_on_{kind}")(inner, Fault(kind))
            answers += (
                f"--answers\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {answer.status} "
                f"{answer.reason}\r\nContent-Type: {answer.content_type}\r\n\r\n"
                f"{answer.text or ''}\r\n"
            )
        headers = {"Content-Type": 'multipart/mixed; boundary="answers"'}
        content = f"{answers}--answers--\r\n".encode()
        return web.Response(body=fault.body(content) if fault.body else content, headers=headers)

    async def _on_bucket(self, request: web.Request, fault: Fault) -> web.Response:
        return web.json_response({"kind": "storage#bucket", **self.settings})

    async def _on_token(self, request: web.Request, fault: Fault) -> web.Response:
        assert self.tokens is not None
        self.logins.append(str((await request.post())["refresh_token"]))
        token = f"token-{next(self._numbers)}"
        self.tokens.add(token)
        return web.json_response({"access_token": token, "expires_in": 3600})

    async def _on_create(self, request: web.Request, fault: Fault) -> web.Response:
        boundary = request.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
        boundary = re.escape(boundary)
        content = await request.read()
        _, first, second, _ = re.split(rb"(?:\r\n)?--%s(?:--)?(?:\r\n|\Z)" % boundary, content)
        resource = json.loads(first.partition(b"\r\n\r\n")[2])
        body = second.partition(b"\r\n\r\n")[2]
        return self._store(resource, body, self._precondition(request), fault)

    @staticmethod
    def _precondition(request: web.Request) -> int | None:
        generation = request.query.get("ifGenerationMatch")
        return None if generation is None else int(generation)

    def _refused(self, name: str, precondition: int | None) -> web.Response | None:
        generation = self.objects[name].generation if name in self.objects else 0
        if precondition is not None and precondition != generation:
            return error(412, "At least one of the pre-conditions did not hold.", "conditionNotMet")
        if name in ("", ".", "..") or re.search("[\r\n]", name) or len(name.encode()) > 1024:
            return error(400, "Invalid object name", "invalid")
        return None

    def _store(
        self, resource: dict[str, Any], body: bytes, precondition: int | None, fault: Fault
    ) -> web.Response:
        name = resource["name"]
        if refused := self._refused(name, precondition):
            return refused
        if fault.body is not None:
            body = fault.body(body)
            if fault.status:  # the service compares the request's checksum with the body's
                return error(400, f"Provided CRC32C doesn't match calculated {crc32c(body)}")
        metadata = {key: str(value) for key, value in resource.get("metadata", {}).items()}
        if sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items()) > 8192:
            return error(400, "The metadata is larger than 8 KiB", "invalid")
        custom_time = resource.get("customTime", "")
        self.objects[name] = Stored(bytes(body), metadata, next(self._numbers), custom_time)
        return web.json_response(self._resource(name, fault))

    async def _on_begin(self, request: web.Request, fault: Fault) -> web.Response:
        resource = await request.json()
        if refused := self._refused(resource["name"], self._precondition(request)):
            return refused
        number = str(next(self._numbers))
        self.uploads[number] = Upload(resource, self._precondition(request))
        location = f"{self.url}/upload/storage/v1/b/kn-test/o?upload_id={number}"
        return web.Response(headers={"Location": location})

    async def _on_ask(self, request: web.Request, fault: Fault) -> web.Response:
        upload = self.uploads.get(request.query["upload_id"])
        if upload is None:
            return error(404, "No such upload")
        size = int(request.headers["Content-Range"].rpartition("/")[2])
        return self._state(upload, size, fault)

    def _state(self, upload: Upload, size: int, fault: Fault) -> web.Response:
        if upload.done is not None:
            return web.json_response(upload.done)
        if len(upload.received) < size:
            last = len(upload.received) - 1
            return web.Response(
                status=308, headers={"Range": f"bytes=0-{last}"} if upload.received else {}
            )
        body = bytes(upload.received)
        checksum = upload.resource.get("crc32c", "")
        if checksum and checksum != crc32c(body):
            message = f"Provided CRC32C {checksum} doesn't match calculated {crc32c(body)}"
            return error(400, message)
        answer = self._store(upload.resource, body, upload.precondition, fault)
        if answer.status == 200:
            upload.done = self._resource(upload.resource["name"])
            upload.received.clear()
        return answer

    async def _on_put(self, request: web.Request, fault: Fault) -> web.Response:
        upload = self.uploads.get(request.query["upload_id"])
        if upload is None:
            return error(404, "No such upload")
        part = _range_of(request)
        self.ranges.append(part)
        first, size = int(re.findall(r"\d+", part)[0]), int(part.rpartition("/")[2])
        if upload.done is not None:
            return web.json_response(upload.done)
        if first > len(upload.received):
            return error(400, f"expected offset {len(upload.received)}")
        known, taken = len(upload.received) - first, 0
        async for chunk in request.content.iter_any():
            # Like the service, ignore bytes that were received before.
            upload.received += chunk[max(0, known - taken) :]
            taken += len(chunk)
            if fault.at is not None and taken >= fault.at:
                del upload.received[len(upload.received) // PERSISTED * PERSISTED :]
                if fault.status == 308:  # the answer says how much was received
                    break
                if fault.stall:
                    await self._stall(fault)
                raise Cut
        return self._state(upload, size, fault)

    async def _on_metadata(self, request: web.Request, fault: Fault) -> web.Response:
        name = self._object(request.rel_url.raw_path)
        if name not in self.objects:
            return error(404, f"No such object: kn-test/{name}", "notFound")
        return web.json_response(self._resource(name, fault))

    async def _on_media(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        name = self._object(request.rel_url.raw_path)
        stored = self.objects.get(name)
        pinned = request.query.get("generation")
        if stored is None or (pinned is not None and pinned != str(stored.generation)):
            return error(404, f"No such object: kn-test/{name}", "notFound")
        body, size, status = memoryview(stored.body), len(stored.body), 200
        headers = {"X-Goog-Generation": str(stored.generation)}
        if size < 1 << 20:  # the service doesn't know the checksum of every object
            headers["X-Goog-Hash"] = f"crc32c={crc32c(stored.body)}"
        if requested := request.headers.get("Range", ""):
            self.ranges.append(requested)
            first, last = requested.removeprefix("bytes=").split("-")
            start, stop = int(first), int(last) + 1 if last else size
            if start >= size:
                return error(416, "Request range not satisfiable")
            body, status = body[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{min(stop, size) - 1}/{size}"
        if fault.body is not None:
            body = memoryview(fault.body(bytes(body)))
        headers["Content-Length"] = str(len(body))
        answer = web.StreamResponse(status=status, headers=headers)
        await answer.prepare(request)
        await self._stream(answer, body, fault)
        return answer

    async def _stream(self, answer: web.StreamResponse, body: memoryview, fault: Fault) -> None:
        end = len(body) if fault.at is None else fault.at
        for start in range(0, end, 1 << 20):
            await answer.write(bytes(body[start : min(end, start + (1 << 20))]))
        if fault.at is not None:
            await asyncio.sleep(0.05)  # lets the client receive what was written
            for _ in range(2000):  # gives up after 20 s; tests see it in `most`
                if self.most >= fault.among:
                    break
                await asyncio.sleep(0.01)
            if fault.stall:
                await self._stall(fault)
            raise Cut

    async def _on_list(self, request: web.Request, fault: Fault) -> web.Response:
        bucket = request.rel_url.raw_path.split("/")[4]
        if bucket not in self.buckets:
            return error(404, "The specified bucket does not exist.", "notFound")
        prefix, token = request.query.get("prefix", ""), request.query.get("pageToken", "")
        after = base64.urlsafe_b64decode(token).decode() if token else None
        page = min(1000, int(request.query.get("maxResults", "1000")))
        names = sorted((x for x in self.objects if x.startswith(prefix)), key=str.encode)
        rest = [name for name in names if after is None or name.encode() > after.encode()]
        answer: dict[str, Any] = {"kind": "storage#objects"}
        if rest:
            answer["items"] = [self._resource(name) for name in rest[:page]]
        if len(rest) > page:
            answer["nextPageToken"] = base64.urlsafe_b64encode(rest[page - 1].encode()).decode()
        return web.json_response(answer)

    def _deleted(self, name: str, query: Mapping[str, str]) -> web.Response:
        if name not in self.objects:
            return error(404, f"No such object: kn-test/{name}", "notFound")
        stored = self.objects[name]
        conditions = {
            "ifGenerationMatch": stored.generation,
            "ifMetagenerationMatch": stored.metageneration,
        }
        if any(query.get(key, str(number)) != str(number) for key, number in conditions.items()):
            return error(412, "At least one of the pre-conditions did not hold.")
        del self.objects[name]
        return web.Response(status=204)

    async def _on_delete(self, request: web.Request, fault: Fault) -> web.Response:
        return self._deleted(self._object(request.rel_url.raw_path), request.query)

    def _renewed(self, name: str, content: str) -> web.Response:
        if name not in self.objects:
            return error(404, f"No such object: kn-test/{name}", "notFound")
        stored, moment = self.objects[name], json.loads(content)["customTime"]
        if moment < stored.custom_time:
            return error(400, "Custom time cannot be set to an earlier time", "invalid")
        stored.custom_time, stored.metageneration = moment, stored.metageneration + 1
        return web.json_response(self._resource(name))

    async def _on_renew(self, request: web.Request, fault: Fault) -> web.Response:
        return self._renewed(self._object(request.rel_url.raw_path), await request.text())
