"""How long from submitting one job to its result, when everything is warm?

Milliseconds on the local platform, in a small project, against a fresh
``python -c pass`` just before; one job at a time. A regression: more than 1.5
times that interpreter, median of the pairs' ratios.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from benchmarks import contenders, figures, setting
from kinetic import aio


async def run_job(client: aio.Client, number: int) -> tuple[float, float]:
    """Return the seconds to submit a job, and from then to its value."""
    import work

    started = time.perf_counter()
    job = await client.submit(work.square, number)
    submitted = time.perf_counter()
    assert await job.result() == number * number
    return submitted - started, time.perf_counter() - submitted


def fresh_python() -> None:
    """Start an interpreter that does nothing."""
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def main() -> None:
    """Print the table."""
    effort = figures.effort(__doc__, full=200, quick=40)
    fresh, submitting, waiting, bare = ([] for _ in range(4))
    with (
        setting.scratch() as scratch,
        setting.project(scratch),
        contenders.fork_server(1, scratch) as server,
        setting.home(scratch, 2),
        asyncio.Runner() as loop,
    ):
        client = aio.Client(backend="local")
        for number in range(5):
            loop.run(run_job(client, number))
            fresh_python()
        for number in range(effort.rounds):
            fresh.append(figures.seconds(fresh_python))
            submitted, waited = loop.run(run_job(client, number))
            submitting.append(submitted)
            waiting.append(waited)
            bare.append(figures.seconds(lambda: server.run([3])))
        loop.run(client.aclose())
    total = [
        submit_seconds + wait_seconds
        for submit_seconds, wait_seconds in zip(submitting, waiting, strict=True)
    ]
    figures.head(f"{effort.rounds} pairs", "median ms", "min ms", "x fresh")
    for name, runs in {
        "python -c pass": fresh,
        "bare fork server": bare,
        "kinetic": total,
        "  submit": submitting,
        "  then result": waiting,
    }.items():
        figures.row(name, *figures.median_and_min(runs, 1e3), f"{figures.ratio(runs, fresh):.2f}")


if __name__ == "__main__":
    main()
