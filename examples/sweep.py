"""Sweep learning rate and width of a small neural network; each trial runs in its own process.

    python examples/sweep.py              grid search: 12 trials
    python examples/sweep.py random 20    random search: 20 trials

The network is plain Python, so this example needs kinetic and nothing else. Press Ctrl-C to stop
the sweep: kinetic ends every running trial.
"""

from __future__ import annotations

import math
import random
import sys
from itertools import product

import kinetic


def draw_moons(count: int, seed: int) -> list[tuple[float, float, int]]:
    """Draw points (x, y, class) from two interleaved half circles, one for each class."""
    rng = random.Random(seed)
    points = []
    for index in range(count):
        label, angle = index % 2, rng.uniform(0, math.pi)
        x, y = math.cos(angle), math.sin(angle)
        x, y = (1 - x, 0.5 - y) if label else (x, y)
        points.append((x + rng.gauss(0, 0.15), y + rng.gauss(0, 0.15), label))
    return points


@kinetic.run(backend="local", accelerator="cpu")
def accuracy(rate: float, width: int) -> float:
    """Train one hidden layer of *width* units at learning rate *rate*, and test it."""
    rng = random.Random(0)
    hidden = [[rng.gauss(0, 1) for _ in range(3)] for _ in range(width)]
    output = [rng.gauss(0, 1) for _ in range(width + 1)]

    def forward(x: float, y: float) -> tuple[list[float], float]:
        units = [*(math.tanh(a * x + b * y + c) for a, b, c in hidden), 1.0]
        return units, 1 / (1 + math.exp(-sum(map(math.prod, zip(output, units, strict=True)))))

    for _ in range(60):
        for x, y, label in draw_moons(200, seed=1):
            units, predicted = forward(x, y)
            error = rate * (predicted - label)
            for weights, unit, weight in zip(hidden, units, output, strict=False):
                delta = error * weight * (1 - unit * unit)
                weights[:] = weights[0] - delta * x, weights[1] - delta * y, weights[2] - delta
            output = [weight - error * unit for weight, unit in zip(output, units, strict=True)]
    test = draw_moons(1000, seed=2)
    return sum((forward(x, y)[1] > 0.5) == bool(label) for x, y, label in test) / len(test)


def grid_trials() -> list[dict[str, float]]:
    """Combine every rate with every width."""
    pairs = product((0.003, 0.03, 0.3), (2, 4, 8, 16))
    return [{"rate": rate, "width": width} for rate, width in pairs]


def random_trials(count: int) -> list[dict[str, float]]:
    """Draw rates evenly on a logarithmic scale, and widths from 2 to 16."""
    rng = random.Random(0)
    pairs = [(10 ** rng.uniform(-2.5, -0.5), rng.randint(2, 16)) for _ in range(count)]
    return [{"rate": round(rate, 4), "width": width} for rate, width in pairs]


def main() -> None:
    trials = random_trials(int(sys.argv[2])) if sys.argv[1:2] == ["random"] else grid_trials()
    best, best_trial = 0.0, trials[0]
    with accuracy.run_async_map(trials, name="moons") as batch:
        for _, trial, outcome in batch.outcomes():
            if (score := outcome.unwrap()) > best:
                best, best_trial = score, trial
                print(f"accuracy {best:.3f} with {best_trial}")
    print(f"best of {len(trials)}: accuracy {best:.3f} with {best_trial}")


if __name__ == "__main__":
    main()
