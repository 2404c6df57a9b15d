"""Test the limits and the pauses of retries, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

import pytest

from kinetic.aio._net.retry import Outage, RetryPolicy, growing_pauses, retry
from kinetic.errors import AuthError, Throttled, Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime(start=0)]


class Work:
    """Record the time of each try, and raise the exception that *failures* returns for it."""

    def __init__(self, failures: Callable[[int], Exception | None]) -> None:
        self.times: list[float] = []
        self._failures = failures

    async def __call__(self) -> str:
        self.times.append(asyncio.get_running_loop().time())
        failure = self._failures(len(self.times))
        if failure is not None:
            raise failure
        return "done"


def unavailable(number: int = 0) -> Unavailable:
    return Unavailable(f"failure {number}", retryable=True)


def busy(delay_s: float) -> Throttled:
    return Throttled("busy", retryable=True, retry_after=delay_s)


async def retried(work: Work) -> str:
    return await retry(work, RetryPolicy(), Outage("the server"))


async def test_growing_pauses_have_a_bound() -> None:
    pauses = list(itertools.islice(growing_pauses(0.1, 10.0), 9))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


async def test_pauses_grow_to_their_bound_and_are_random() -> None:
    work = Work(lambda n: unavailable() if n < 20 else None)
    assert await retried(work) == "done"
    waits = [after - before for before, after in itertools.pairwise(work.times)]
    assert all(0 < wait <= min(10, 0.1 * 2**n) + 1e-6 for n, wait in enumerate(waits))
    assert len({round(wait, 6) for wait in waits}) > 10
    assert max(waits) > 5


async def test_the_time_limit_starts_again_with_each_progress() -> None:
    work, last = Work(unavailable), 40
    with pytest.raises(Unavailable):
        await retry(
            work, RetryPolicy(), Outage("the server"), progress=lambda: min(len(work.times), last)
        )
    assert work.times[last - 1] > 120
    assert 100 < work.times[-1] - work.times[last - 1] <= 120


async def test_retries_end_with_the_last_failure() -> None:
    work = Work(unavailable)
    with pytest.raises(Unavailable) as raised:
        await retried(work)
    assert str(raised.value) == f"failure {len(work.times)}"
    assert 100 <= work.times[-1] <= 120
    assert len(work.times) < 60


async def test_the_delay_that_the_server_asks_for_is_respected() -> None:
    work = Work(lambda n: busy(30.0) if n == 1 else None)
    await retried(work)
    assert 30 <= work.times[1] <= 30.2


async def test_a_delay_beyond_the_limit_ends_the_retries_at_once() -> None:
    work = Work(lambda n: busy(3600.0))
    with pytest.raises(Throttled):
        await retried(work)
    assert work.times == [0]


@pytest.mark.parametrize("failure", [AuthError("no"), Unavailable("no"), ValueError("a bug")])
async def test_permanent_failures_are_not_retried(failure: Exception) -> None:
    work = Work(lambda n: failure)
    with pytest.raises(type(failure)):
        await retried(work)
    assert len(work.times) == 1


async def test_cancelling_ends_the_waiting() -> None:
    work = Work(lambda n: busy(100.0))
    task = asyncio.create_task(retried(work))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(work.times) == 1


async def test_the_beginning_and_the_end_of_an_outage_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="absl")
    outage = Outage("the server")

    def failing_work(failures: int) -> Work:
        return Work(lambda n: busy(2.0) if n <= failures else None)

    await retry(failing_work(2), RetryPolicy(), outage)
    assert not caplog.records, "a short outage is not logged"
    for _ in range(2):
        caplog.clear()
        retries = [
            asyncio.create_task(retry(failing_work(10), RetryPolicy(), outage)) for _ in range(50)
        ]
        for _ in range(8):  # meanwhile other calls succeed
            await asyncio.sleep(2)
            await retry(failing_work(0), RetryPolicy(), outage)
        await asyncio.gather(*retries)
        first, last = [record.getMessage() for record in caplog.records]
        assert first == "the server has failed for 6 s: busy; retrying"
        assert last == "the server works again"


async def test_an_outage_longer_than_the_limit_ends_with_the_next_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="absl")
    outage = Outage("the server")
    with pytest.raises(Unavailable):
        await retry(Work(unavailable), RetryPolicy(), outage)
    await retry(Work(lambda n: None), RetryPolicy(), outage)
    _, last = [record.getMessage() for record in caplog.records]
    assert last == "the server works again"
