"""How fast does a plain call print, compared with reading the same lines by `logs()`?

Lines a second of one job that prints into a file: while it runs, by a plain call and by
iterating over ``logs(follow=True)`` from the submission on; and of one that has ended, by
``result(stream_logs=True)`` and by ``logs()``. A regression: printing at less than 0.6 of
reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kinetic
from benchmarks import figures
from kinetic import aio

LINES = 300_000


@kinetic.run(backend="local", accelerator="cpu")
def print_lines(count: int) -> int:
    """Print *count* lines: the function of the job."""
    for number in range(count):
        print("line number", number)
    return count


def main() -> None:
    """Print the table."""
    effort = figures.effort(__doc__, full=9, quick=3)
    with tempfile.TemporaryDirectory(prefix="kb-") as home:
        os.environ |= {"KINETIC_HOME": home, "KINETIC_LOCAL_IDLE_S": "5", "KINETIC_PROGRESS": "off"}
        os.environ["KINETIC_PACKAGE_ROOT"] = ""
        print_lines(0)  # starts the supervisor
        seconds_by_name: dict[str, list[float]] = {}
        for _ in range(effort.rounds):
            run_round(seconds_by_name, Path(home, "printed"))
    figures.head(f"{effort.rounds} rounds of {LINES:,}", "lines/s", "best/s", "x logs()")
    for name, baseline in (
        ("running: logs(follow=True)", ""),
        ("running: plain call", "running: logs(follow=True)"),
        ("ended: logs()", ""),
        ("ended: printed", "ended: logs()"),
    ):
        rates = sorted(LINES / seconds for seconds in seconds_by_name[name])
        ratio = figures.ratio(seconds_by_name[baseline or name], seconds_by_name[name])
        figures.row(name, f"{rates[len(rates) // 2]:,.0f}", f"{rates[-1]:,.0f}", f"{ratio:.2f}")


def run_round(seconds_by_name: dict[str, list[float]], file: Path) -> None:
    """Measure each way of getting the lines once."""

    def measure(name: str, work: Callable[[], object]) -> None:
        seconds_by_name.setdefault(name, []).append(figures.seconds(work))

    measure("running: logs(follow=True)", lambda: asyncio.run(follow_log()))
    measure("running: plain call", lambda: run_into_file(file, lambda: print_lines(LINES)))
    job = print_lines.run_async(LINES)
    job.result(cleanup=False)
    measure("ended: logs()", lambda: asyncio.run(read_log(job.job_id)))
    measure("ended: printed", lambda: run_into_file(file, lambda: stream_result(job.job_id)))
    job.cleanup()


def run_into_file(file: Path, work: Callable[[], object]) -> None:
    """Do *work* with *file* as standard output, and check that no line is missing."""
    with file.open("w") as stdout, contextlib.redirect_stdout(stdout):
        work()
    assert file.read_bytes().count(b"\n") == LINES


def stream_result(job_id: str) -> Any:
    """Print the log of an ended job as a plain call does."""
    return kinetic.attach(job_id).result(cleanup=False, stream_logs=True)


async def follow_log() -> None:
    """Read the log of a job while it runs."""
    job = await aio.submit(print_lines, LINES)
    assert len([line async for line in job.logs(follow=True)]) == LINES
    await job.result()


async def read_log(job_id: str) -> None:
    """Read the log of an ended job."""
    job = await aio.attach(job_id)
    assert len([line async for line in job.logs()]) == LINES


if __name__ == "__main__":
    main()
