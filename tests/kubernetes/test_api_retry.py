"""How long a request is tried again, and how long it waits in between."""

from __future__ import annotations

import asyncio

import pytest

from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import Outage, RetryPolicy
from kinetic.aio.kubernetes.http import (
    Request,
    explained,
    retry_request,
)
from kinetic.errors import AuthError, BackendError, Throttled, Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime(start=0)]

ASK = Request(method="GET", path="/api/v1/namespaces/team/pods")


class Work:
    """Fails with these, one after the other, and then succeeds; remembers when it was done."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.times: list[float] = []

    async def __call__(self) -> str:
        self.times.append(asyncio.get_running_loop().time())
        if self.failures:
            raise self.failures.pop(0)
        return "done"


def refusal(status: int, wish_s: float | None = None, text: str = "") -> HttpError:
    return HttpError(status, text, wish_s)


def explain(refused: HttpError) -> BackendError:
    return explained(refused, ASK, "c")


async def tried(work: Work, *, had_right: bool = False) -> str:
    outage = Outage("c")
    return await retry_request(work, explain, RetryPolicy(), outage, had_right=lambda: had_right)


async def test_an_api_server_that_restarts_is_waited_for() -> None:
    work = Work(*[Unavailable("refused", retryable=True)] * 12)
    assert await tried(work) == "done"


async def test_what_is_definite_is_not_repeated() -> None:
    for failure in (refusal(403), refusal(404), AuthError("no")):
        work = Work(failure, refusal(503))
        with pytest.raises(BackendError):
            await tried(work)
        assert len(work.times) == 1


FORBIDDEN = '{"message": "User \\"ada\\" cannot get"}'


async def test_a_right_that_there_was_is_waited_for_but_not_for_long() -> None:
    work = Work(*[Unavailable("gone", retryable=True)] * 9, *[refusal(403, text=FORBIDDEN)] * 4)
    assert await tried(work, had_right=True) == "done"
    work = Work(*[refusal(403, text=FORBIDDEN)] * 1000)
    with pytest.raises(AuthError, match="cannot get"):
        await tried(work, had_right=True)
    assert 2 < len(work.times) < 50
    assert work.times[-1] - work.times[0] < 15.0
    work = Work(refusal(403, text=FORBIDDEN))
    with pytest.raises(AuthError):
        await tried(work)
    assert len(work.times) == 1


async def test_the_body_may_say_when_to_come_again() -> None:
    body = '{"kind": "Status", "message": "m", "details": {"retryAfterSeconds": 4}}'
    error = explained(refusal(429, text=body), ASK, "c")
    assert isinstance(error, Throttled)
    assert error.retry_after == 4.0
    assert explained(refusal(429, 1.0, body), ASK, "c").retry_after == 1.0
