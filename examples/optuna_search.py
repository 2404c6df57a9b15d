"""Search with Optuna: four trials at once, weak ones pruned, continued after Ctrl-C.

python examples/optuna_search.py [TRIALS]
"""

import sys
from typing import Any

import optuna

import kinetic


@kinetic.run(backend="local", accelerator="cpu")
def descend(rate: float, momentum: float) -> float:
    """Take 200,000 steps down Rosenbrock's valley, and report the height 20 times."""
    x, y, dx, dy, height = -1.2, 1.0, 0.0, 0.0, 0.0
    for step in range(1, 200_001):
        slope = 200 * (y - x * x)
        dx = momentum * dx - rate * (2 * (x - 1) - 2 * x * slope)
        dy = momentum * dy - rate * slope
        x, y = max(-5.0, min(5.0, x + dx)), max(-5.0, min(5.0, y + dy))
        height = (1 - x) ** 2 + 100 * (y - x * x) ** 2
        if step % 10_000 == 0:
            kinetic.report(step, height)
    return height


def space(trial: optuna.Trial) -> dict[str, Any]:
    rate = trial.suggest_float("rate", 1e-7, 1e-2, log=True)
    return {"rate": rate, "momentum": trial.suggest_float("momentum", 0, 0.99)}


if __name__ == "__main__":
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=4))
    options: Any = {"trials": int([*sys.argv, "40"][1]), "max_concurrent": 4}
    with descend.sweep(study, space, **options, name="valley", resume=True) as sweep:
        for trial in sweep:
            print(trial.number, trial.state, trial.value)
    print(f"height {sweep.best.value:.2g} with {sweep.best.params}")
