"""Credentials are renewed in time, once for all who wait, in virtual time."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest

from kinetic.aio._net.http import HttpError
from kinetic.aio._net.tokens import FreshCredentials, Revoked, TokenCache, with_token
from kinetic.errors import AuthError, BackendError, ConfigurationError, Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime(start=0)]


class Source:
    """Takes *takes_s* seconds for a pass that is to be renewed after 80 s and ends after 100 s."""

    def __init__(self, takes_s: float = 1.0) -> None:
        self.takes_s = takes_s
        self.made = 0
        self.failure: Exception | None = None
        self.life = 80.0, 100.0
        self.passes = TokenCache(self.renew, "a test", clock=asyncio.get_running_loop().time)

    async def renew(self) -> FreshCredentials[str]:
        asked = asyncio.get_running_loop().time()
        await asyncio.sleep(self.takes_s)
        if self.failure is not None:
            raise self.failure
        self.made += 1
        early, late = self.life
        return FreshCredentials(
            value=f"pass {self.made}", renew_from=asked + early, renew_by=asked + late
        )

    async def get(self) -> str:
        return await self.passes.get()


async def test_all_who_wait_share_one_renewal_and_none_ends_it_for_the_others() -> None:
    source = Source()
    waiting = [asyncio.create_task(source.get()) for _ in range(100)]
    await asyncio.sleep(0.5)
    waiting[0].cancel()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == ["pass 1"] * 99


async def test_it_is_renewed_beside_requests_before_its_end_and_holds_them_up_after() -> None:
    source, loop = Source(), asyncio.get_running_loop()
    assert await source.get() == "pass 1"
    await asyncio.sleep(78)
    assert (await source.get(), source.made) == ("pass 1", 1)
    await asyncio.sleep(3)
    before = loop.time()
    assert (await source.get(), loop.time()) == ("pass 1", before)
    await asyncio.sleep(1.5)
    assert (await source.get(), source.made) == ("pass 2", 2)
    await asyncio.sleep(101)
    before = loop.time()
    assert await source.get() == "pass 3"
    assert loop.time() - before == pytest.approx(1.0)


async def test_what_fails_beside_is_tried_again_later_and_is_no_failure_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="absl")
    source = Source(takes_s=0.0)
    await source.get()
    source.failure = AuthError("offline")
    await asyncio.sleep(85)
    for _ in range(140):  # 14 s
        assert await source.get() == "pass 1"
        await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records] == [
        "the credentials of a test were not renewed yet: offline (it worked before)"
    ] * 2
    await asyncio.sleep(2)
    with pytest.raises(Unavailable, match="offline") as caught:
        await source.get()
    assert caught.value.retryable
    source.failure = None
    assert await source.get() == "pass 2"


async def test_what_never_worked_is_told_as_it_is() -> None:
    for failure in (AuthError("no"), ConfigurationError("no")):
        source = Source()
        source.failure = failure
        with pytest.raises(type(failure)):
            await source.passes.open()


async def test_another_cluster_is_no_passing_trouble() -> None:
    source = Source()
    shown = await source.passes.get()
    source.passes.forget(shown)
    source.failure = Revoked("it moved")
    with pytest.raises(Revoked):
        await source.get()


async def test_only_the_pass_that_is_given_out_now_can_be_forgotten() -> None:
    source = Source()
    source.life = math.inf, math.inf
    first = await source.passes.get()
    source.passes.forget(first)
    second = await source.passes.get()
    source.passes.forget(first)
    assert await source.passes.get() is second


async def test_closing_ends_a_renewal_and_tells_those_who_wait() -> None:
    source = Source(takes_s=1000.0)
    waiting = asyncio.create_task(source.get())
    await asyncio.sleep(1)
    await source.passes.aclose()
    with pytest.raises(BackendError, match="was closed meanwhile"):
        await waiting
    assert len(asyncio.all_tasks()) == 1


async def test_an_opening_that_is_cancelled_leaves_nothing_running() -> None:
    source = Source(takes_s=1000.0)
    opening = asyncio.create_task(source.passes.open())
    await asyncio.sleep(1)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert len(asyncio.all_tasks()) == 1


async def test_credentials_that_are_refused_are_changed_once() -> None:
    source = Source()
    shown: list[str] = []

    async def request(value: str) -> str:
        shown.append(value)
        if value in refused:
            raise HttpError(401)
        return value

    refused = {"pass 1"}
    assert await with_token(source.passes, request) == "pass 2"
    assert await with_token(source.passes, request) == "pass 2"
    refused |= {"pass 2", "pass 3"}
    with pytest.raises(HttpError):
        await with_token(source.passes, request)
    assert shown == ["pass 1", "pass 2", "pass 2", "pass 2", "pass 3"]
