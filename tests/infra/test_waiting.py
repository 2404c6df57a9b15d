"""How long an apply waits for a resource, on virtual time; each read gets the next state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

import pytest

from kinetic.aio._net.http import HttpError
from kinetic.aio.infra import Change, Site
from kinetic.aio.infra.apply import Cloud
from kinetic.aio.infra.resources import Action
from kinetic.aio.infra.setup import Setup, cluster
from kinetic.errors import Unavailable

pytestmark = pytest.mark.looptime

SITE = Site(project="acme-1", zone="us-central1-a", cluster="lab")
HOUR_S = 3600.0
ABSENT, DENIED = 404, 403


class Reads:
    """A client of Google whose reads return these states, one after the other."""

    first_pause_s = 1.0

    def __init__(self, *states: Iterable[str | int]) -> None:
        self._states = chain(*states)

    async def call(self, request: Any) -> dict[str, Any]:
        assert request.method == "GET", request
        match next(self._states):
            case int(status):
                raise HttpError(status)
            case state:
                return {"status": state}


async def wait(reads: Reads) -> tuple[float, list[str]]:
    """Wait for a cluster that was being created; return the seconds and the lines for the user."""
    lines: list[str] = []
    google: Any = reads
    change = Change(action=Action.WAIT, kind="cluster", name="lab")
    loop = asyncio.get_running_loop()
    start = loop.time()
    await Cloud(google, SITE, lines.append).apply([change], [cluster(Setup(site=SITE))])
    return loop.time() - start, lines


async def test_a_missing_reply_late_in_a_wait_does_not_end_it() -> None:
    reads = Reads(["RECONCILING"] * 60, [ABSENT], ["RECONCILING"] * 60, [DENIED], ["RUNNING"])
    seconds, lines = await wait(reads)
    assert seconds > 1000
    assert len(lines) == len(set(lines)) == 4, lines
    assert "cluster lab: it is RECONCILING" in lines[0]


@pytest.mark.parametrize(
    ("states", "limit_s", "reason"),
    [
        (["RECONCILING"], HOUR_S, "RECONCILING"),
        (["STOPPING"], HOUR_S, "STOPPING"),
        ([DENIED], 120.0, "can't read it"),
        (["RECONCILING", DENIED], 240.0, "can't read it"),
    ],
)
async def test_every_wait_ends(states: list[str | int], limit_s: float, reason: str) -> None:
    reads = Reads(state for _ in repeat(None) for state in states)
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(Unavailable, match=reason):
        await wait(reads)
    assert limit_s < loop.time() - start < limit_s + 30


async def test_a_cluster_that_disappears_is_not_waited_for_long() -> None:
    reads = Reads(["PROVISIONING"] * 60, repeat(ABSENT))
    with pytest.raises(Unavailable, match="show it"):
        await asyncio.wait_for(wait(reads), timeout=800)
