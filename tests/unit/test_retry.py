"""How long is tried again and with which pauses, in virtual time: every second below takes none."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kinetic.aio._net.retry import Outage, RetryPolicy, growing_pauses, retry
from kinetic.errors import AuthError, Throttled, Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime(start=0)]


class Work:
    """Fails with what *failures* says for each try, None for success; notes when it was tried."""

    def __init__(self, failures: Callable[[int], Exception | None]) -> None:
        self.times: list[float] = []
        self._failures = failures

    async def __call__(self) -> str:
        self.times.append(asyncio.get_running_loop().time())
        failure = self._failures(len(self.times))
        if failure is not None:
            raise failure
        return "done"


def gone(number: int = 0) -> Unavailable:
    return Unavailable(f"gone {number}", retryable=True)


def busy(wish_s: float) -> Throttled:
    return Throttled("busy", retryable=True, retry_after=wish_s)


async def tried(work: Work, policy: RetryPolicy | None = None, **more: Any) -> str:
    return await retry(work, policy or RetryPolicy(), Outage("the server"), **more)


async def test_growing_pauses_have_a_bound() -> None:
    pauses = list(itertools.islice(growing_pauses(0.1, 10.0), 9))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


async def test_pauses_grow_to_their_bound_and_are_random() -> None:
    work = Work(lambda n: gone() if n < 20 else None)
    assert await tried(work) == "done"
    waits = [after - before for before, after in itertools.pairwise(work.times)]
    assert all(0 < wait <= min(10, 0.1 * 2**n) + 1e-6 for n, wait in enumerate(waits))
    assert len({round(wait, 6) for wait in waits}) > 10
    assert max(waits) > 5


async def test_patience_ends_with_the_last_failure() -> None:
    work = Work(gone)
    with pytest.raises(Unavailable) as raised:
        await tried(work)
    assert str(raised.value) == f"gone {len(work.times)}"
    assert 100 <= work.times[-1] <= 120
    assert len(work.times) < 60


async def test_what_the_server_wishes_is_waited_for() -> None:
    work = Work(lambda n: busy(30.0) if n == 1 else None)
    await tried(work)
    assert 30 <= work.times[1] <= 30.2


async def test_a_wish_past_patience_ends_it_at_once() -> None:
    work = Work(lambda n: busy(3600.0))
    with pytest.raises(Throttled):
        await tried(work)
    assert work.times == [0]


async def test_progress_starts_patience_afresh() -> None:
    done = 0

    async def work() -> None:
        nonlocal done
        await asyncio.sleep(100)
        if done < 10:
            done += 1
            raise gone()

    await retry(work, RetryPolicy(), Outage("the server"), progress=lambda: done)
    assert asyncio.get_running_loop().time() > 1000


@pytest.mark.parametrize("failure", [AuthError("no"), Unavailable("no"), ValueError("a bug")])
async def test_what_does_not_pass_is_not_tried_again(failure: Exception) -> None:
    work = Work(lambda n: failure)
    with pytest.raises(type(failure)):
        await tried(work)
    assert len(work.times) == 1


async def test_cancelling_ends_the_waiting() -> None:
    work = Work(lambda n: busy(100.0))
    task = asyncio.create_task(tried(work))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(work.times) == 1


async def test_an_outage_is_told_once_for_all_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="absl")
    outage = Outage("the server")

    def some(tries: int) -> Work:
        return Work(lambda n: busy(2.0) if n <= tries else None)

    await retry(some(2), RetryPolicy(), outage)
    assert not caplog.records, "it was short"
    for _ in range(2):
        caplog.clear()
        failing = [asyncio.create_task(retry(some(10), RetryPolicy(), outage)) for _ in range(50)]
        for _ in range(8):  # meanwhile others are lucky
            await asyncio.sleep(2)
            await retry(some(0), RetryPolicy(), outage)
        await asyncio.gather(*failing)
        first, last = [record.getMessage() for record in caplog.records]
        assert first == "the server has failed for 6 s: busy; retrying"
        assert last == "the server works again"


async def test_an_outage_that_outlasts_patience_is_over_with_the_next_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, logger="absl")
    outage = Outage("the server")
    with pytest.raises(Unavailable):
        await retry(Work(gone), RetryPolicy(), outage)
    await retry(Work(lambda n: None), RetryPolicy(), outage)
    _, last = [record.getMessage() for record in caplog.records]
    assert last == "the server works again"
