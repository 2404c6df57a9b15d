"""``kinetic batches report --live``: serve the report of batches that run, to this machine only.

The server listens on the loopback. It answers only requests whose path begins with a random token,
and whose Host is the server's own address. Otherwise, other users of this machine, or a web page
that resolves its name to the loopback, could read the report.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kinetic._report.page import render_facts, render_live
from kinetic._tasks import in_thread
from kinetic.cli import output
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from aiohttp import web

    from kinetic import aio
    from kinetic._report.facts import BatchReport
    from kinetic.aio._reading.report import Snapshots

MIN_AGE_S, AGE_RATIO = 1.0, 4.0
"""A snapshot is read again after a second, and after 4 times as long as its reading took."""

WATCHED_S = 10.0
"""A page counts as open if it has asked for facts in the last 10 s."""

LOG_LINES = 1000
"""How many of the last lines of an item's log the page links to."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def serve(batches: Sequence[aio.BatchHandle[Any]], snapshots: Snapshots) -> None:
    """Serve the report until all *batches* have ended and an open page shows that.

    Prints the address of the page. The page asks for new facts every second; while no page is open,
    nothing is read.

    Raises:
        SubmitterLost: The process that submitted a batch has ended.
        NotFound: A batch was cleaned up.
        ConfigurationError: No result is a number of the metric.
    """
    from aiohttp import web  # a slow import

    page = _LivePage(batches, snapshots)
    await page.read()  # its errors are those of the command
    runner = web.AppRunner(page.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        page.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        output.lines([f"http://127.0.0.1:{port}/{page.token}/"])
        output.note("the page refreshes itself until the batch ends; press Ctrl-C to stop it")
        for batch in batches:
            await batch.wait()
        await page.end()
    finally:
        await runner.cleanup()


class _LivePage:
    """The page, its facts, and the logs of items; ``hosts`` are the server's own addresses."""

    def __init__(self, batches: Sequence[aio.BatchHandle[Any]], snapshots: Snapshots) -> None:
        self.token = secrets.token_urlsafe(32)
        self.hosts: set[str] = set()
        self._batches = batches
        self._snapshots = snapshots
        self._clock = asyncio.get_running_loop().time
        self._report: BatchReport | None = None
        self._facts = ""
        self._version = 0
        self._due = 0.0
        self._reading = asyncio.Lock()
        self._ended = False
        self._asked_at = -WATCHED_S
        self._told = asyncio.Event()  # a page has got the last facts
        from aiohttp import web

        self._respond = web.Response

    def application(self) -> web.Application:
        """Return the application that serves the page."""
        from aiohttp import web

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            """Refuse requests of others, and add the headers to each answer."""
            token = request.path.strip("/").partition("/")[0]
            is_own = secrets.compare_digest(token.encode(), self.token.encode())
            if request.host not in self.hosts or not is_own:
                return web.Response(status=HTTPStatus.NOT_FOUND, headers=HEADERS)
            try:
                answer: web.StreamResponse = await handler(request)
            except KineticError as exc:
                answer = web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE, text=str(exc))
            except web.HTTPException as exc:  # such as a path that the page doesn't have
                answer = web.Response(status=exc.status)
            answer.headers.update(HEADERS)
            return answer

        application = web.Application(middlewares=[guard])
        application.router.add_get("/{token}/", self._send_page)
        application.router.add_get("/{token}/facts", self._send_facts)
        application.router.add_get(r"/{token}/log/{position:\d{1,9}}", self._send_log)
        return application

    async def end(self) -> None:
        """Read the last facts, and wait until the open page has them."""
        async with self._reading:  # a read that is under way says when the next one is due
            self._ended, self._due = True, 0.0
        await self.read()
        left = self._asked_at + WATCHED_S - self._clock()
        if left > 0:
            with suppress(TimeoutError):  # the page was closed
                await asyncio.wait_for(self._told.wait(), left)

    async def read(self) -> None:
        """Read the batches again, unless the last snapshot is new enough."""
        async with self._reading:
            begun = self._clock()
            if begun < self._due:
                return
            ended = self._ended
            self._report = report = await self._snapshots.read()
            self._facts = await in_thread(lambda: render_facts(report, ended=ended))
            self._version += 1
            took = self._clock() - begun
            self._due = self._clock() + max(MIN_AGE_S, AGE_RATIO * took)
            if ended:  # the batches don't change any more
                self._due = float("inf")

    async def _send_page(self, request: web.Request) -> web.Response:
        await self.read()
        report = self._report
        assert report is not None
        text = await in_thread(lambda: render_live(report))
        return self._respond(text=text, content_type="text/html")

    async def _send_facts(self, request: web.Request) -> web.Response:
        self._asked_at = self._clock()
        await self.read()
        tag = f'"{self._version}"'
        if request.headers.get("If-None-Match") == tag:
            return self._respond(status=HTTPStatus.NOT_MODIFIED)
        if self._due == float("inf"):
            self._told.set()
        headers = {"ETag": tag}
        return self._respond(text=self._facts, content_type="application/json", headers=headers)

    async def _send_log(self, request: web.Request) -> web.Response:
        position, report = int(request.match_info["position"]), self._report
        assert report is not None
        batch, index = self._batches[0], position
        for candidate, part in zip(self._batches, report.parts, strict=False):
            if part.first <= position:
                batch, index = candidate, position - part.first
        job = await batch.job(index)
        return self._respond(text=await job.tail(LOG_LINES), content_type="text/plain")
