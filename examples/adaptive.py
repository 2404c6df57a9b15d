"""A search whose next trial depends on the trials so far: inputs are made while it runs.

python examples/adaptive.py [TRIALS]

A weight swings on a spring. From ten seconds of measurements, which stiffness
and which friction does the spring have? An async generator proposes trials, at
first anywhere, then ever closer around the best one known. Four trials have
begun at most whose results are not read yet (that is what ``window`` says), and
four more are taken ahead, so it always knows nearly all there is to know.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator

import kinetic
from kinetic.aio import Client

TRUTH = {"stiffness": 3.7, "friction": 0.42}


def swing(stiffness: float, friction: float) -> list[float]:
    """Where the weight is, twenty times a second for ten seconds."""
    step, place, speed = 0.005, 1.0, 0.0
    seen = []
    for number in range(2000):
        if number % 10 == 0:
            seen.append(place)
        speed -= step * (stiffness * place + friction * speed)
        place += step * speed
    return seen


MEASURED = swing(**TRUTH)


@kinetic.run(backend="local", accelerator="cpu")
def error(stiffness: float, friction: float) -> float:
    """How far from the measurements such a spring would be, squared and summed."""
    wrong = zip(swing(stiffness, friction), MEASURED, strict=True)
    return sum((one - other) ** 2 for one, other in wrong)


class Search:
    """What is known so far, and what to try next."""

    def __init__(self, trials: int, seed: int = 1) -> None:
        self.trials = trials
        self.best: dict[str, float] = {}
        self.least = float("inf")
        self._random = random.Random(seed)

    async def proposals(self) -> AsyncIterator[dict[str, float]]:
        for number in range(self.trials):
            if number < self.trials / 3 or not self.best:
                yield {
                    "stiffness": self._random.uniform(0.5, 10),
                    "friction": self._random.uniform(0, 2),
                }
            else:
                width = 0.02 + 0.3 * (1 - number / self.trials)
                yield {
                    name: max(0.0, value * self._random.gauss(1, width))
                    for name, value in self.best.items()
                }

    def learn(self, trial: dict[str, float], value: float) -> None:
        if value < self.least:
            self.best, self.least = trial, value


async def main(trials: int) -> None:
    search = Search(trials)
    async with Client(backend="local") as client:
        started = await client.run_async_map(
            error, search.proposals(), max_concurrent=4, window=4, progress=True
        )
        async with started as batch:
            async for _, trial, outcome in batch.outcomes():
                search.learn(trial, outcome.unwrap())
    found = ", ".join(f"{name} {value:.3f}" for name, value in search.best.items())
    print(f"{trials} trials: {found} (error {search.least:.2g})")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
