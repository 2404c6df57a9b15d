"""Writes down what a client asks of the API server and of the GCS server, and passes it on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

from benchmarks.cluster.place import Corner, Place

__all__ = ["Asked", "Tape", "recording"]

KEPT = (
    "Content-Type",
    "Authorization",
    "Accept",
    "Range",
    "Content-Range",
    "X-Upload-Content-Type",
)
LARGEST = 256 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request; ``api`` says to which of the servers."""

    api: bool
    method: str
    path: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def makes_job(self) -> bool:
        """Whether it is one for a Job."""
        return self.api and self.method == "POST" and self.path.split("?")[0].endswith("/jobs")

    @property
    def writes(self) -> bool:
        """Whether it makes something."""
        return self.method in ("POST", "PUT", "PATCH")

    def within(self, here: Corner, there: Corner) -> Asked:
        """The same, in another corner. Contents of objects stay: their checksums go with them."""
        old, new = here.name, there.name
        return Asked(
            api=self.api,
            method=self.method,
            path=self.path.replace(old, new),
            headers=self.headers,
            body=self.body.replace(old.encode(), new.encode()) if self.api else self.body,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """All requests in order, and the corner as it is seen by way of the recorder."""

    corner: Corner
    requests: list[Asked] = field(default_factory=list)

    def storage(self) -> Counter[str]:
        """How often the GCS server was asked, by what was asked."""
        return Counter(_kind(one) for one in self.requests if not one.api)


def _kind(one: Asked) -> str:
    if one.method == "GET":
        path = one.path.split("?")[0]
        if path.endswith("/o"):
            return "list"
        return "read" if "alt=media" in one.path or "/download/" in path else "look"
    return {"DELETE": "delete"}.get(one.method, "write")


@contextlib.asynccontextmanager
async def recording(place: Place, corner: Corner) -> AsyncIterator[Tape]:
    """Two servers on loopback that stand before the real ones."""
    user = place.user
    connector = aiohttp.TCPConnector(limit=0, ssl=user.tls())
    timeout = aiohttp.ClientTimeout(total=None)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                auto_decompress=False,
                skip_auto_headers=("Content-Type",),  # who says none means the server's default
            )
        )
        requests: list[Asked] = []
        urls = []
        for api, server in ((True, user.server), (False, place.gcs)):
            runner = web.AppRunner(
                _app(session, server, api=api, requests=requests), shutdown_timeout=0
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield Tape(corner=place.at(corner.name, *urls), requests=requests)


def _app(
    session: aiohttp.ClientSession, server: str, *, api: bool, requests: list[Asked]
) -> web.Application:
    async def passed_on(request: web.Request) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in KEPT if name in request.headers}
        body = await request.read()
        asked = Asked(
            api=api, method=request.method, path=request.path_qs, headers=headers, body=body
        )
        requests.append(asked)
        url = URL(server + request.raw_path, encoded=True)
        async with session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k not in _OWN}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with contextlib.suppress(ConnectionResetError):  # it wants no more of it
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
            return response

    app = web.Application(client_max_size=LARGEST)
    app.router.add_route("*", "/{path:.*}", passed_on)
    return app


_OWN = ("Transfer-Encoding", "Connection", "Date", "Content-Length")
