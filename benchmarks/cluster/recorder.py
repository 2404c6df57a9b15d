"""Record the requests of a client to the API server and the GCS server, and forward them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

from benchmarks.cluster.servers import Cluster, Workspace

FORWARDED_HEADERS = (
    "Content-Type",
    "Authorization",
    "Accept",
    "Range",
    "Content-Range",
    "X-Upload-Content-Type",
)
MAX_BODY_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request; ``api`` says whether it went to the API server, and not to the GCS server."""

    api: bool
    method: str
    path: str
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def creates_job(self) -> bool:
        """Whether the request creates a Job."""
        return self.api and self.method == "POST" and self.path.split("?")[0].endswith("/jobs")

    @property
    def is_write(self) -> bool:
        """Whether the request creates or changes something."""
        return self.method in ("POST", "PUT", "PATCH")

    def moved(self, source: Workspace, target: Workspace) -> RecordedRequest:
        """Return the same request for the workspace *target*.

        Contents of stored objects don't change, because the requests contain their checksums.
        """
        old, new = source.name, target.name
        return RecordedRequest(
            api=self.api,
            method=self.method,
            path=self.path.replace(old, new),
            headers=self.headers,
            body=self.body.replace(old.encode(), new.encode()) if self.api else self.body,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All requests in order, and the workspace whose servers are those of the recorder."""

    workspace: Workspace
    requests: list[RecordedRequest] = field(default_factory=list)


@contextlib.asynccontextmanager
async def record(cluster: Cluster, workspace: Workspace) -> AsyncIterator[Recording]:
    """Start two servers on loopback that record requests and forward them to the real servers."""
    user = cluster.user
    connector = aiohttp.TCPConnector(limit=0, ssl=user.tls())
    timeout = aiohttp.ClientTimeout(total=None)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                auto_decompress=False,
                skip_auto_headers=(
                    "Content-Type",
                ),  # without the header, the server's default applies
            )
        )
        requests: list[RecordedRequest] = []
        urls = []
        for api, server in ((True, user.server), (False, cluster.gcs)):
            runner = web.AppRunner(
                _app(session, server, api=api, requests=requests), shutdown_timeout=0
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield Recording(workspace=cluster.workspace_at(workspace.name, *urls), requests=requests)


def _app(
    session: aiohttp.ClientSession, server: str, *, api: bool, requests: list[RecordedRequest]
) -> web.Application:
    """Return the application that records and forwards the requests to one *server*."""

    async def forward(request: web.Request) -> web.StreamResponse:
        headers = {
            name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers
        }
        body = await request.read()
        recorded = RecordedRequest(
            api=api, method=request.method, path=request.path_qs, headers=headers, body=body
        )
        requests.append(recorded)
        url = URL(server + request.raw_path, encoded=True)
        async with session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            answer_headers = {
                name: value for name, value in answer.headers.items() if name not in _OWN_HEADERS
            }
            response = web.StreamResponse(status=answer.status, headers=answer_headers)
            with contextlib.suppress(ConnectionResetError):  # the client has closed the connection
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_route("*", "/{path:.*}", forward)
    return app


_OWN_HEADERS = ("Transfer-Encoding", "Connection", "Date", "Content-Length")
"""Headers that the recorder's server sets itself."""
