"""Test that credentials are renewed in time, and once for all waiting requests (virtual time)."""

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
    """Issue tokens: each takes *takes_s*, should be renewed after 80 s, and expires after 100 s."""

    def __init__(self, takes_s: float = 1.0) -> None:
        self.takes_s = takes_s
        self.issued = 0
        self.failure: Exception | None = None
        self.lifetimes = 80.0, 100.0
        self.cache = TokenCache(self.renew, "a test", clock=asyncio.get_running_loop().time)

    async def renew(self) -> FreshCredentials[str]:
        requested = asyncio.get_running_loop().time()
        await asyncio.sleep(self.takes_s)
        if self.failure is not None:
            raise self.failure
        self.issued += 1
        early, late = self.lifetimes
        return FreshCredentials(
            value=f"token {self.issued}", renew_from=requested + early, renew_by=requested + late
        )

    async def get(self) -> str:
        return await self.cache.get()


async def test_waiting_requests_share_one_renewal_and_cancelling_one_does_not_end_it() -> None:
    source = Source()
    waiting = [asyncio.create_task(source.get()) for _ in range(100)]
    await asyncio.sleep(0.5)
    waiting[0].cancel()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == ["token 1"] * 99


async def test_a_renewal_delays_requests_only_after_the_token_has_expired() -> None:
    source, loop = Source(), asyncio.get_running_loop()
    assert await source.get() == "token 1"
    await asyncio.sleep(78)
    assert (await source.get(), source.issued) == ("token 1", 1)
    await asyncio.sleep(3)
    before = loop.time()
    assert (await source.get(), loop.time()) == ("token 1", before)
    await asyncio.sleep(1.5)
    assert (await source.get(), source.issued) == ("token 2", 2)
    await asyncio.sleep(101)
    before = loop.time()
    assert await source.get() == "token 3"
    assert loop.time() - before == pytest.approx(1.0)


async def test_a_failed_renewal_is_retried_and_is_an_error_only_after_expiry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="absl")
    source = Source(takes_s=0.0)
    await source.get()
    source.failure = AuthError("offline")
    await asyncio.sleep(85)
    for _ in range(140):  # 14 s
        assert await source.get() == "token 1"
        await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records] == [
        "can't renew the credentials of a test yet: offline (an earlier renewal succeeded)"
    ] * 2
    await asyncio.sleep(2)
    with pytest.raises(Unavailable, match="offline") as caught:
        await source.get()
    assert caught.value.retryable
    source.failure = None
    assert await source.get() == "token 2"


async def test_the_first_failure_is_raised_unchanged() -> None:
    for failure in (AuthError("no"), ConfigurationError("no")):
        source = Source()
        source.failure = failure
        with pytest.raises(type(failure)):
            await source.cache.open()


async def test_revoked_credentials_are_a_permanent_error() -> None:
    source = Source()
    token = await source.cache.get()
    source.cache.forget(token)
    source.failure = Revoked("it moved")
    with pytest.raises(Revoked):
        await source.get()


async def test_only_the_current_token_can_be_forgotten() -> None:
    source = Source()
    source.lifetimes = math.inf, math.inf
    first = await source.cache.get()
    source.cache.forget(first)
    second = await source.cache.get()
    source.cache.forget(first)
    assert await source.cache.get() is second


async def test_closing_ends_a_renewal_with_an_error_for_waiting_requests() -> None:
    source = Source(takes_s=1000.0)
    waiting = asyncio.create_task(source.get())
    await asyncio.sleep(1)
    await source.cache.aclose()
    with pytest.raises(BackendError, match="was closed meanwhile"):
        await waiting
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_first_request_leaves_no_task() -> None:
    source = Source(takes_s=1000.0)
    first = asyncio.create_task(source.cache.open())
    await asyncio.sleep(1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert len(asyncio.all_tasks()) == 1


async def test_refused_credentials_are_renewed_once() -> None:
    source = Source()
    used: list[str] = []

    async def request(value: str) -> str:
        used.append(value)
        if value in refused:
            raise HttpError(401)
        return value

    refused = {"token 1"}
    assert await with_token(source.cache, request) == "token 2"
    assert await with_token(source.cache, request) == "token 2"
    refused |= {"token 2", "token 3"}
    with pytest.raises(HttpError):
        await with_token(source.cache, request)
    assert used == ["token 1", "token 2", "token 2", "token 2", "token 3"]
