"""How long is tried again, in virtual time: every second below takes none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kinetic.aio.gcs.http import Damaged, Patience, Refusal, persist
from kinetic.errors import AuthError, Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime(start=0)]

PATIENCE = Patience(total_s=120, first_s=0.2, longest_s=10)


class Work:
    """Fails with what *failures* says for each try, None for success; notes when it was tried."""

    def __init__(self, failures: Callable[[int], BaseException | None]) -> None:
        self.times: list[float] = []
        self._failures = failures

    async def __call__(self) -> str:
        self.times.append(asyncio.get_running_loop().time())
        failure = self._failures(len(self.times))
        if failure is not None:
            raise failure
        return "done"


async def tried(work: Work, **more: Callable[[], int]) -> str:
    return await persist(work, PATIENCE, what="x", **more)


async def test_waits_grow_are_random_and_bounded() -> None:
    work = Work(lambda n: Refusal(503) if n < 20 else None)
    assert await tried(work) == "done"
    waits = [after - before for before, after in zip(work.times, work.times[1:], strict=False)]
    assert all(wait <= min(10, 0.2 * 2**n) + 1e-6 for n, wait in enumerate(waits))
    assert len({round(wait, 6) for wait in waits}) > 10
    assert max(waits) > 2


async def test_patience_ends_with_the_last_failure() -> None:
    work = Work(lambda n: Refusal(503, f"try {n}"))
    with pytest.raises(Refusal) as raised:
        await tried(work)
    assert raised.value.text == f"try {len(work.times)}"
    assert 100 <= work.times[-1] <= 120


async def test_what_the_server_wishes_is_waited_for() -> None:
    work = Work(lambda n: Refusal(429, "", 30.0) if n == 1 else None)
    await tried(work)
    assert 30 <= work.times[1] <= 30.2


async def test_a_wish_past_patience_ends_it_at_once() -> None:
    work = Work(lambda n: Refusal(429, "", 3600.0))
    with pytest.raises(Refusal):
        await tried(work)
    assert work.times == [0]


async def test_progress_starts_patience_afresh() -> None:
    done = 0

    async def work() -> None:
        nonlocal done
        await asyncio.sleep(100)
        if done < 10:
            done += 1
            raise Unavailable("cut", retryable=True)

    await persist(work, PATIENCE, what="x", progress=lambda: done)
    assert asyncio.get_running_loop().time() > 1000


@pytest.mark.parametrize(
    "failure", [Refusal(404), Refusal(412), Refusal(403), AuthError("no"), ValueError("a bug")]
)
async def test_what_does_not_pass_is_not_tried_again(failure: Exception) -> None:
    work = Work(lambda n: failure)
    with pytest.raises(type(failure)):
        await tried(work)
    assert len(work.times) == 1


async def test_damage_is_tried_three_times() -> None:
    work = Work(lambda n: Damaged("x") if n % 2 else Refusal(400, "provided CRC32C differs"))
    with pytest.raises(Damaged):
        await tried(work)
    assert len(work.times) == 3


async def test_cancelling_ends_the_waiting() -> None:
    work = Work(lambda n: Refusal(429, "", 100.0))
    task = asyncio.create_task(tried(work))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(work.times) == 1
