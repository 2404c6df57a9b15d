"""Sweep learning rate and width of a small neural network: 12 trials, each in its own process.

The network is plain Python, so this example needs kinetic and nothing else. Press Ctrl-C to stop
the sweep: kinetic ends every running trial.
"""

from __future__ import annotations

import math
import random
from itertools import product

import kinetic

Point = tuple[float, float, float]
"""Coordinates x and y, and the class of the point: 0.0 or 1.0."""


def moons(count: int, seed: int) -> list[Point]:
    """Draw points from two interleaved half circles, one for each class."""
    chance = random.Random(seed)
    points: list[Point] = []
    for index in range(count):
        label, angle = index % 2, chance.uniform(0, math.pi)
        x, y = math.cos(angle), math.sin(angle)
        x, y = (1 - x, 0.5 - y) if label else (x, y)
        points.append((x + chance.gauss(0, 0.15), y + chance.gauss(0, 0.15), float(label)))
    return points


@kinetic.run(backend="local", accelerator="cpu")
def accuracy(rate: float, width: int) -> float:
    """Train one hidden layer of *width* units at learning rate *rate*, and test it."""
    chance = random.Random(0)
    hidden = [[chance.gauss(0, 1) for _ in range(3)] for _ in range(width)]
    output = [chance.gauss(0, 1) for _ in range(width + 1)]

    def forward(x: float, y: float) -> tuple[list[float], float]:
        units = [math.tanh(a * x + b * y + c) for a, b, c in hidden]
        score = sum(w * unit for w, unit in zip(output, units, strict=False)) + output[-1]
        return units, 1 / (1 + math.exp(-score))

    for _ in range(60):
        for x, y, label in moons(200, seed=1):
            units, predicted = forward(x, y)
            error = rate * (predicted - label)
            for index, unit in enumerate(units):
                slope = error * output[index] * (1 - unit * unit)
                output[index] -= error * unit
                weights = hidden[index]
                weights[0] -= slope * x
                weights[1] -= slope * y
                weights[2] -= slope
            output[-1] -= error
    test = moons(1000, seed=2)
    return sum((forward(x, y)[1] > 0.5) == (label > 0.5) for x, y, label in test) / len(test)


def main() -> None:
    grid = [
        {"rate": rate, "width": width} for rate, width in product((0.003, 0.03, 0.3), (2, 4, 8, 16))
    ]
    best, best_trial = 0.0, grid[0]
    with accuracy.run_async_map(grid, name="moons") as batch:
        for _, trial, outcome in batch.outcomes():
            if (value := outcome.unwrap()) > best:
                best, best_trial = value, trial
                print(f"accuracy {best:.3f} with {best_trial}")
    print(f"best of {len(grid)}: accuracy {best:.3f} with {best_trial}")


if __name__ == "__main__":
    main()
