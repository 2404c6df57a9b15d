"""A stand-in of Google's APIs on this machine, and a site that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from kinetic.aio.infra import Infrastructure, Site
from tests.infra.google import Google
from tests.infra.sites import opened, up


@pytest.fixture
async def google() -> AsyncIterator[Google]:
    """Serve Google's APIs for a project whose zone has e2 machines; no API is enabled."""
    google = Google(machines={"us-central1-a": ("e2-standard-4", "n2-standard-4")})
    runner = web.AppRunner(google.app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    google.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield google
    finally:
        await runner.cleanup()


@pytest.fixture
def site() -> Site:
    return Site(project="acme-1", zone="us-central1-a", cluster="lab")


@pytest.fixture
async def infra(google: Google, site: Site) -> AsyncIterator[Infrastructure]:
    async with opened(google, site) as infra:
        yield infra


@pytest.fixture
async def lab(infra: Infrastructure) -> Infrastructure:
    """Set the site up."""
    await up(infra)
    return infra
