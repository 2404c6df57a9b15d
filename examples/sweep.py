"""A hyperparameter sweep: 12 support vector machines on handwritten digits, on this machine.

Each trial is a job of its own: an isolated process with a durable result. Stop
the sweep with Ctrl-C and nothing is left running.
"""

from __future__ import annotations

from itertools import product

import kinetic


@kinetic.run(backend="local", accelerator="cpu")
def accuracy(c: float, gamma: float) -> float:
    """Mean accuracy over five folds of the 1,797 digits that scikit-learn ships."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import cross_val_score
    from sklearn.svm import SVC

    images, labels = load_digits(return_X_y=True)
    return float(cross_val_score(SVC(C=c, gamma=gamma), images, labels, cv=5).mean())


def main() -> None:
    grid = [{"c": c, "gamma": gamma} for c, gamma in product((1, 3, 10, 30), (1e-4, 3e-4, 1e-3))]
    best, best_trial = 0.0, grid[0]
    with accuracy.run_async_map(grid, name="digits") as batch:
        for _, trial, outcome in batch.outcomes():  # a live line shows how far it is
            if (value := outcome.unwrap()) > best:
                best, best_trial = value, trial
                print(f"accuracy {best:.4f} with {best_trial}")
    print(f"best of {len(grid)}: accuracy {best:.4f} with {best_trial}")


if __name__ == "__main__":
    main()
