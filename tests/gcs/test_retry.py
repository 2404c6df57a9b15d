"""What of Cloud Storage's answers is tried again, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import Outage, RetryPolicy, retry
from kinetic.aio.gcs.http import Damaged, forgiving
from kinetic.errors import AuthError, Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime(start=0)]


async def tries(failures: Callable[[int], BaseException]) -> int:
    """How often work is tried that always fails."""
    count = 0

    async def work() -> None:
        nonlocal count
        count += 1
        raise failures(count)

    with pytest.raises(BaseException) as raised:  # noqa: PT011 -- which one is held against below
        await retry(work, RetryPolicy(), Outage("x"), is_passing=forgiving())
    assert raised.type is type(failures(count))
    return count


@pytest.mark.parametrize(
    "failure",
    [
        HttpError(503),
        HttpError(429),
        HttpError(403, '{"error": {"errors": [{"reason": "rateLimitExceeded"}]}}'),
        Unavailable("cut", retryable=True),
    ],
)
async def test_what_passes_is_tried_again(failure: Exception) -> None:
    assert await tries(lambda n: failure) > 10


@pytest.mark.parametrize(
    "failure",
    [HttpError(404), HttpError(412), HttpError(403), AuthError("no"), ValueError("a bug")],
)
async def test_what_does_not_pass_is_not_tried_again(failure: Exception) -> None:
    assert await tries(lambda n: failure) == 1


async def test_damage_is_tried_three_times() -> None:
    assert await tries(lambda n: Damaged("x") if n % 2 else HttpError(400, "CRC32C differs")) == 3
