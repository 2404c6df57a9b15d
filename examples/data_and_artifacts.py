"""Send a folder of data to a job, and fetch the files that it makes.

    python examples/data_and_artifacts.py [FOLDER]    the folder for the files

kinetic.Data uploads the folder once, by its content. The function receives a path. It writes its
files to KINETIC_OUTPUT_PATH, and fetch_outputs() copies them here.
"""

from __future__ import annotations

import csv
import os
import random
import sys
import tempfile
from pathlib import Path
from statistics import mean

import kinetic


def write_temperatures(folder: Path) -> None:
    """Write a year of temperatures for each of three stations."""
    rng = random.Random(0)
    for station, average in {"coast": 11.0, "hill": 7.5, "valley": 9.0}.items():
        with (folder / f"{station}.csv").open("w", newline="") as file:
            csv.writer(file).writerows((day, rng.gauss(average, 4)) for day in range(365))


@kinetic.run(backend="local", accelerator="cpu")
def summarize(folder: str) -> dict[str, float]:
    """Return the mean of each file in *folder*, and draw a chart of them."""
    means = {}
    for path in sorted(Path(folder).glob("*.csv")):
        with path.open(newline="") as file:
            means[path.stem] = round(mean(float(row[1]) for row in csv.reader(file)), 2)
    bars = "".join(
        f'<rect y="{30 * index}" width="{20 * value}" height="24" fill="steelblue"/>'
        f'<text x="6" y="{30 * index + 17}" fill="white">{name} {value} °C</text>'
        for index, (name, value) in enumerate(means.items())
    )
    chart = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif">{bars}</svg>'
    Path(os.environ["KINETIC_OUTPUT_PATH"], "chart.svg").write_text(chart, encoding="utf-8")
    return means


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "stations")
        results = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch, "results")
        data.mkdir()
        write_temperatures(data)
        job = summarize.run_async(kinetic.Data(data))
        print(job.result())
        print("the job wrote", *job.outputs())
        job.fetch_outputs(results)
        print(f"fetched {(results / 'chart.svg').stat().st_size} bytes")


if __name__ == "__main__":
    main()
