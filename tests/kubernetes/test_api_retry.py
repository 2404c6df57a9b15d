"""How long a request is tried again, and how long it waits in between."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kinetic.aio.kubernetes.http import (
    HttpError,
    News,
    Patience,
    Request,
    Response,
    Trying,
    explained,
    persist,
)
from kinetic.errors import AuthError, BackendError, Throttled, Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime(start=0)]

QUIET = News(Patience(quiet_s=1e9))
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
    return HttpError(Response(status=status, text=text, wish_s=wish_s))


def explain(refused: HttpError) -> BackendError:
    return explained(refused.answer, ASK, "c")


async def test_pauses_grow_to_their_bound_and_are_random() -> None:
    patience = Patience(total_s=1e9, first_s=0.1, longest_s=10.0)
    highest = Trying(patience, 0.0, chance=lambda _, high: high)
    pauses = [highest.pause(0.0) for _ in range(9)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    trying = Trying(patience, 0.0)
    some = [trying.pause(0.0) or 0.0 for _ in range(200)]
    assert max(some) <= 10.0
    assert len(set(some)) > 150


async def test_a_wish_goes_before_the_pauses() -> None:
    work = Work(refusal(429, 7.0), refusal(503, 3.0), Unavailable("x", retry_after=2.0))
    assert await persist(work, Patience(), explain, QUIET) == "done"
    waits = [after - before for before, after in zip(work.times, work.times[1:], strict=False)]
    assert [int(wait) for wait in waits] == [7, 3, 2]


async def test_it_goes_on_for_as_long_as_patience_says_and_ends_with_the_last_failure() -> None:
    work = Work(*[refusal(503)] * 1000)
    with pytest.raises(Unavailable, match="answered 503"):
        await persist(work, Patience(total_s=100.0), explain, QUIET)
    assert 90.0 < work.times[-1] <= 100.0
    assert len(work.times) < 60


async def test_an_api_server_that_restarts_is_waited_for() -> None:
    work = Work(*[Unavailable("refused", retryable=True)] * 12)
    assert await persist(work, Patience(), explain, QUIET) == "done"


async def test_what_is_definite_is_not_repeated() -> None:
    for failure in (refusal(403), refusal(404), AuthError("no")):
        work = Work(failure, refusal(503))
        with pytest.raises(BackendError):
            await persist(work, Patience(), explain, QUIET)
        assert len(work.times) == 1


FORBIDDEN = '{"message": "User \\"ada\\" cannot get"}'


async def test_a_right_that_there_was_is_waited_for_but_not_for_long() -> None:
    work = Work(*[Unavailable("gone")] * 9, *[refusal(403, text=FORBIDDEN)] * 4)
    assert await persist(work, Patience(), explain, QUIET, lambda: True) == "done"
    work = Work(*[refusal(403, text=FORBIDDEN)] * 1000)
    with pytest.raises(AuthError, match="cannot get"):
        await persist(work, Patience(), explain, QUIET, lambda: True)
    assert 2 < len(work.times) < 50
    assert work.times[-1] - work.times[0] < 15.0
    work = Work(refusal(403, text=FORBIDDEN))
    with pytest.raises(AuthError):
        await persist(work, Patience(), explain, QUIET, lambda: False)
    assert len(work.times) == 1


async def test_failing_for_long_is_told_once_for_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="absl")
    news = News(Patience())
    await persist(Work(refusal(503), refusal(503)), Patience(), explain, news)
    assert not caplog.records
    many = [Work(*[refusal(503, 2.0)] * 10) for _ in range(50)]
    await asyncio.gather(*(persist(work, Patience(), explain, news) for work in many))
    (record,) = caplog.records
    assert "cannot list pods in namespace 'team' of c" in record.getMessage()
    assert "trying on" in record.getMessage()


async def test_the_body_may_say_when_to_come_again() -> None:
    body = '{"kind": "Status", "message": "m", "details": {"retryAfterSeconds": 4}}'
    error = explained(refusal(429, text=body).answer, ASK, "c")
    assert isinstance(error, Throttled)
    assert error.retry_after == 4.0
    assert refusal(429, 1.0, body).answer.wait_s == 1.0
