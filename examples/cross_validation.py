"""Cross-validate scikit-learn models: one job for each model and fold.

    python examples/cross_validation.py [FOLDS]

scikit-learn's own n_jobs= uses one machine. Here each fold is an item of a batch. So the folds run
on all machines of a cluster, failed folds run again, and the scores outlive this script.
"""

from __future__ import annotations

import sys
from itertools import product
from statistics import mean, stdev

from sklearn.base import ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import kinetic

MODELS: dict[str, ClassifierMixin] = {
    "logistic regression": make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)),
    "random forest": RandomForestClassifier(n_estimators=100, random_state=0),
    "support vectors": SVC(gamma=0.001),
}


@kinetic.run(backend="local", accelerator="cpu")
def score(name: str, fold: int, folds: int) -> float:
    """Fit a model to all folds but one, and return its accuracy on that one."""
    images, digits = load_digits(return_X_y=True)
    splits = StratifiedKFold(folds, shuffle=True, random_state=0).split(images, digits)
    train, test = list(splits)[fold]
    model = MODELS[name].fit(images[train], digits[train])
    return float(model.score(images[test], digits[test]))


def main(folds: int = 5) -> None:
    scores: dict[str, list[float]] = {name: [] for name in MODELS}
    calls = product(MODELS, range(folds), [folds])
    with score.run_async_map(calls, name="cross-validation", retries=1) as batch:
        for _, (name, *_), outcome in batch.outcomes():
            scores[name].append(outcome.unwrap())
    for name, values in sorted(scores.items(), key=lambda pair: -mean(pair[1])):
        print(f"{name:20} {mean(values):.3f} ± {stdev(values):.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
