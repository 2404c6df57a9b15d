"""What is asked about jobs that wait, where some of it may not be asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.manifests import Paths
from kinetic.aio.kubernetes.pending import Diagnostics, Patience
from kinetic.aio.kubernetes.tables import Entry
from tests.kubernetes.faults import FaultServer, anonymous, answer, status

FORBIDDEN = status(403, "Forbidden", 'User "x" cannot list resource "events"')
EVENT = {"reason": "FailedMount", "message": "no such volume"}
ENTRY = Entry("job-1")


@pytest.fixture
async def api(server: FaultServer) -> AsyncIterator[Api]:
    made = Api(anonymous(server))
    yield made
    await made.aclose()


async def test_what_may_not_be_asked_is_not_asked_in_a_hurry(server: FaultServer, api: Api) -> None:
    inquiry = Diagnostics(api, Paths("ns"), Patience(rights_s=3600.0))
    server.always = FORBIDDEN
    for _ in range(3):
        assert (await inquiry.read_facts(ENTRY)).events == []
    assert len(server.seen) == 1


async def test_a_right_that_is_granted_later_is_used(
    server: FaultServer, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    inquiry = Diagnostics(api, Paths("ns"), Patience(rights_s=0.01))
    server.always = FORBIDDEN
    with caplog.at_level(logging.INFO, logger="absl"):
        for _ in range(3):
            assert (await inquiry.read_facts(ENTRY)).events == []
            await asyncio.sleep(0.02)  # so long it is not asked for
    assert caplog.text.count("explained without events") == 1, "it is told once"
    server.always = answer({"items": [EVENT]})
    assert (await inquiry.read_facts(ENTRY)).events == [EVENT]
