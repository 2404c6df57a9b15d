"""The live report: it answers the page on this machine only, and ends with the batch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kinetic import aio
from kinetic.cli import live_report
from kinetic.errors import ConfigurationError
from tests.engine.world import World
from tests.report.browser import CHROMIUM, MISSING, Browser

pytestmark = pytest.mark.usefixtures("small_project")


def double(x: int) -> int:
    return 2 * x


class Live:
    """A live report of two batches, which end when ``world.gate`` is set."""

    world: World
    url: str
    serving: asyncio.Task[None]
    session: aiohttp.ClientSession

    async def get(self, path: str = "", **headers: str) -> tuple[int, str]:
        async with self.session.get(f"{self.url}{path}", headers=headers) as answer:
            return answer.status, await answer.text()


@pytest.fixture
async def live(capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Live]:
    live, live.world = Live(), World()
    async with (
        aio.Client(backend="local", platform=live.world.platform) as client,
        aiohttp.ClientSession() as live.session,
    ):
        first, second = [await client.run_async_map(double, range(n), name=f"{n}") for n in (2, 3)]
        await live.world.until_started(5)
        snapshots = first.snapshots(None, None, [second])
        live.serving = asyncio.create_task(live_report.serve([first, second], snapshots))
        printed = ""
        while not printed.endswith("\n") and not live.serving.done():
            await asyncio.sleep(0.01)
            printed += capsys.readouterr().out
        live.url = printed.strip()
        yield live
        live.serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await live.serving
        live.world.gate.set()


async def test_only_a_request_with_the_token_and_the_own_host_is_answered(live: Live) -> None:
    assert live.url.startswith("http://127.0.0.1:")
    status, page = await live.get()
    assert status == 200 and page.startswith("<!doctype html>")
    origin, _, rest = live.url.partition("//")
    host, token, _ = rest.split("/")
    assert len(token) >= 40
    assert (await live.get("facts"))[0] == 200
    assert (await live.get("facts", Host=host.replace("127.0.0.1", "localhost")))[0] == 200
    for name in ("evil.example", f"evil.example:{host.partition(':')[2]}", "127.0.0.1"):
        assert await live.get("facts", Host=name) == (404, "")
    for path in ("", "facts", f"{token[:-1]}/facts", f"{token}x/", "../facts", "é/facts"):
        async with live.session.get(f"{origin}//{host}/{path}") as answer:
            assert (answer.status, await answer.text()) == (404, "")
    for path in ("other", "log/x", "log/", "log/99"):
        assert (await live.get(path))[0] in (404, 503)
    async with live.session.post(live.url) as answer:
        assert answer.status == 405
        assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"


async def facts(live: Live, version: str = "") -> tuple[str, Any]:
    async with live.session.get(f"{live.url}facts", headers={"If-None-Match": version}) as answer:
        body = await answer.json() if answer.status == 200 else None
        return answer.headers.get("ETag", version), body


async def test_the_facts_are_new_until_the_batches_have_ended(live: Live) -> None:
    version, body = await facts(live)
    assert (body["known"], body["ended"], body["live"]) == (5, False, True)
    assert [part["label"] for part in body["parts"]] == ["2", "3"]
    assert await facts(live, version) == (version, None), "nothing is read at once again"
    live.world.gate.set()
    while body is None or not body["ended"]:
        version, body = await facts(live, version)
    assert body["counts"][2] == 5
    await live.serving
    with pytest.raises(aiohttp.ClientError):
        await live.get("facts")


async def test_the_last_facts_are_read_at_once_although_a_read_is_under_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reads, last = [asyncio.Event() for _ in range(3)], asyncio.Event()

    class Slow:
        async def read(self) -> Any:
            begun = next(read for read in reads if not read.is_set())
            begun.set()
            if begun is reads[1]:
                await last.wait()
            return await snapshots.read()

    world = World()
    async with (
        aio.Client(backend="local", platform=world.platform) as client,
        aiohttp.ClientSession() as session,
        asyncio.TaskGroup() as tasks,
    ):
        batch = await client.run_async_map(double, [1])
        snapshots: Any = batch.snapshots(None, None, ())
        serving = tasks.create_task(live_report.serve([batch], Slow()))  # type: ignore[arg-type]
        await reads[0].wait()
        while not (url := capsys.readouterr().out.strip()):
            await asyncio.sleep(0.01)

        async def ask() -> None:
            ended = False
            while not ended:
                async with session.get(f"{url}facts") as answer:
                    ended = (await answer.json())["ended"]

        asking = tasks.create_task(ask())
        await reads[1].wait()
        world.gate.set()
        await batch.wait()
        for _ in range(20):  # `serve` learns of it, too
            await asyncio.sleep(0)
        last.set()
        async with asyncio.timeout(0.9):
            await reads[2].wait()
        await asyncio.gather(asking, serving)


async def test_a_page_that_was_closed_does_not_keep_the_command(live: Live) -> None:
    live.world.gate.set()
    await live.serving


async def test_a_metric_that_no_result_has_is_refused_at_once() -> None:
    world = World()
    world.gate.set()
    async with aio.Client(backend="local", platform=world.platform) as client:
        batch = await client.run_async_map(double, [1])
        await batch.wait()
        with pytest.raises(ConfigurationError, match="'loss'"):
            await live_report.serve([batch], batch.snapshots(None, "loss", ()))


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
async def test_a_browser_shows_the_end_of_the_batches(live: Live) -> None:
    with Browser() as browser:
        await asyncio.to_thread(browser.open, live.url)
        await asyncio.to_thread(browser.until, "document.documentElement.dataset.live === 'yes'")
        assert browser.ask("document.getElementById('live').textContent").startswith("Live")
        live.world.gate.set()
        await asyncio.to_thread(browser.until, "document.documentElement.dataset.live === 'ended'")
        assert "all ended" in browser.ask("document.getElementById('subtitle').textContent")
        await live.serving
        assert browser.complaints == []
