"""Diagnose waiting jobs for a user who may not read some objects."""

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
    api = Api(anonymous(server))
    yield api
    await api.aclose()


async def test_a_forbidden_request_is_not_repeated_soon(server: FaultServer, api: Api) -> None:
    diagnostics = Diagnostics(api, Paths("ns"), Patience(rights_s=3600.0))
    server.always = FORBIDDEN
    for _ in range(3):
        assert (await diagnostics.read_facts(ENTRY)).events == []
    assert len(server.seen) == 1


async def test_a_permission_granted_later_is_used(
    server: FaultServer, api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    diagnostics = Diagnostics(api, Paths("ns"), Patience(rights_s=0.01))
    server.always = FORBIDDEN
    with caplog.at_level(logging.INFO, logger="absl"):
        for _ in range(3):
            assert (await diagnostics.read_facts(ENTRY)).events == []
            await asyncio.sleep(0.02)  # longer than rights_s, so the next call asks again
    assert caplog.text.count("explains without events") == 1, "the warning appears once"
    server.always = answer({"items": [EVENT]})
    assert (await diagnostics.read_facts(ENTRY)).events == [EVENT]
