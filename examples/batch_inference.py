"""Batch inference: score files with a trained model, many files for each job.

    python examples/batch_inference.py [FOLDER]

The model goes to the store once, as kinetic.Data, and each job receives its path. A job loads the
model once, and scores all its files with it. A job writes its predictions to
KINETIC_OUTPUT_PATH, and returns only how many there are. Items that fail run again.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

import kinetic

FILES_PER_JOB = 8
WEIGHTS = {"great": 2.0, "good": 1.0, "fine": 0.3, "slow": -0.8, "bad": -1.2, "broken": -2.0}


@kinetic.run(backend="local", accelerator="cpu")
def predict(model: str, files: list[str]) -> int:
    """Load the model once, then write one line of JSON for each file."""
    weights = json.loads(Path(model).read_text())
    with Path(os.environ["KINETIC_OUTPUT_PATH"], "predictions.jsonl").open("w") as output:
        for path in map(Path, files):
            words = re.findall(r"\w+", path.read_text().lower())
            score = 1 / (1 + math.exp(-sum(weights.get(word, 0.0) for word in words)))
            print(json.dumps({"file": path.name, "positive": round(score, 3)}), file=output)
    return len(files)


def make_reviews(folder: Path) -> None:
    """Write 40 short reviews to try the example with."""
    folder.mkdir()
    words = list(WEIGHTS)
    for number in range(40):
        text = f"The first is {words[number % 6]}, the second {words[number * 5 % 7 % 6]}."
        (folder / f"review-{number:02}.txt").write_text(text)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        reviews = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch, "reviews")
        if len(sys.argv) == 1:
            make_reviews(reviews)
        (model := Path(scratch, "model.json")).write_text(json.dumps(WEIGHTS))
        files = [kinetic.Data(path) for path in sorted(reviews.iterdir())]
        inputs = [
            {"model": kinetic.Data(model), "files": files[start : start + FILES_PER_JOB]}
            for start in range(0, len(files), FILES_PER_JOB)
        ]
        predictions = []
        with predict.run_async_map(inputs, name="inference", retries=2) as batch:
            for index, _, outcome in batch.outcomes():
                outcome.unwrap()
                folder = Path(scratch, "results", str(index))
                batch.job(index).fetch_outputs(folder)
                lines = (folder / "predictions.jsonl").read_text().splitlines()
                predictions += [json.loads(line) for line in lines]
    predictions.sort(key=lambda prediction: prediction["positive"])
    print(f"{len(predictions)} files in {len(inputs)} jobs, each of which loaded the model once")
    print("worst:", *[prediction["file"] for prediction in predictions[:3]])
    print("best: ", *[prediction["file"] for prediction in predictions[-3:]])


if __name__ == "__main__":
    main()
