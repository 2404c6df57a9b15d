"""Learning curves of real models, recorded: what a sweep would see, without its training time.

``python -m benchmarks.curves`` trains the models and writes ``curves.jsonl``. Each line is a model:
its data set, its arguments, and after each epoch the share of wrong predictions, in thousandths.
"""

from __future__ import annotations

import json
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kinetic.sweeps import Choice, Domain, Float, RandomSearch

FILE = Path(__file__).with_name("curves.jsonl")
DATA_SETS = ("digits", "breast_cancer")
MODELS, EPOCHS = 64, 81
SPACE: dict[str, Domain] = {
    "learning_rate_init": Float(1e-4, 1.0, log=True),
    "momentum": Float(0, 0.99),
    "alpha": Float(1e-6, 1e-1, log=True),
    "batch_size": Choice([32, 64, 128]),
    "units": Choice([4, 8, 16, 32, 64]),
}


def load() -> dict[str, list[list[float]]]:
    """Return data set → the curve of each model."""
    curves: defaultdict[str, list[list[float]]] = defaultdict(list)
    for line in FILE.read_text(encoding="utf-8").splitlines():
        model = json.loads(line)
        curves[model["data"]].append([error / 1000 for error in model["errors"]])
    return dict(curves)


def train(data: str, units: int, **params: Any) -> Iterator[float]:
    """Train a network with one hidden layer, and yield its validation error after each epoch."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier
    from sklearn.preprocessing import StandardScaler

    inputs, labels = getattr(datasets, f"load_{data}")(return_X_y=True)
    split = train_test_split(inputs, labels, test_size=0.3, random_state=0, stratify=labels)
    scaler = StandardScaler().fit(split[0])
    model = MLPClassifier((units,), solver="sgd", random_state=0, **params)
    classes = sorted({*labels})
    for _ in range(EPOCHS):
        try:
            model.partial_fit(scaler.transform(split[0]), split[2], classes=classes)
            yield 1 - float(model.score(scaler.transform(split[1]), split[3]))
        except ValueError as exc:
            if "non-finite" not in str(exc):
                raise
            yield 1.0


def main() -> None:
    """Write the file anew; this takes a few minutes."""
    warnings.simplefilter("ignore")
    with FILE.open("w", encoding="utf-8") as file:
        for data in DATA_SETS:
            search = RandomSearch(SPACE, seed=random.Random(data).randrange(1000))
            for _ in range(MODELS):
                proposal = search.ask()
                assert proposal is not None
                errors = [round(1000 * error) for error in train(data, **proposal.params)]
                params = {name: _rounded(value) for name, value in proposal.params.items()}
                entry = {"data": data, **params, "errors": errors}
                file.write(json.dumps(entry, separators=(",", ":")) + "\n")
                print(data, params, errors[-1] / 1000, flush=True)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
