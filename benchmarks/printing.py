"""How fast does a plain call print, beside reading the same lines by `logs()`?

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
def talk(count: int) -> int:
    """The job."""
    for number in range(count):
        print("line number", number)
    return count


def main() -> None:
    """Print the table."""
    effort = figures.effort(__doc__, full=9, quick=3)
    with tempfile.TemporaryDirectory(prefix="kb-") as home:
        os.environ |= {"KINETIC_HOME": home, "KINETIC_LOCAL_IDLE_S": "5", "KINETIC_PROGRESS": "off"}
        os.environ["KINETIC_PACKAGE_ROOT"] = ""
        talk(0)  # from now on everybody is warm
        seen: dict[str, list[float]] = {}
        for _ in range(effort.rounds):
            take_turns(seen, Path(home, "printed"))
    figures.head(f"{effort.rounds} rounds of {LINES:,}", "lines/s", "best/s", "x logs()")
    for name, beside in (
        ("running: logs(follow=True)", ""),
        ("running: plain call", "running: logs(follow=True)"),
        ("ended: logs()", ""),
        ("ended: printed", "ended: logs()"),
    ):
        rates = sorted(LINES / one for one in seen[name])
        ratio = figures.ratio(seen[beside or name], seen[name])
        figures.row(name, f"{rates[len(rates) // 2]:,.0f}", f"{rates[-1]:,.0f}", f"{ratio:.2f}")


def take_turns(seen: dict[str, list[float]], file: Path) -> None:
    """One round."""

    def note(name: str, work: Callable[[], object]) -> None:
        seen.setdefault(name, []).append(figures.seconds(work))

    note("running: logs(follow=True)", lambda: asyncio.run(follow()))
    note("running: plain call", lambda: printed(file, lambda: talk(LINES)))
    job = talk.run_async(LINES)
    job.result(cleanup=False)
    note("ended: logs()", lambda: asyncio.run(read(job.job_id)))
    note("ended: printed", lambda: printed(file, lambda: show(job.job_id)))
    job.cleanup()


def printed(file: Path, work: Callable[[], object]) -> None:
    """Do *work* with *file* as standard output, and check that no line is missing."""
    with file.open("w") as out, contextlib.redirect_stdout(out):
        work()
    assert file.read_bytes().count(b"\n") == LINES


def show(job_id: str) -> Any:
    """As a plain call does when its job is over."""
    return kinetic.attach(job_id).result(cleanup=False, stream_logs=True)


async def follow() -> None:
    """Read while it runs."""
    job = await aio.submit(talk, LINES)
    assert len([line async for line in job.logs(follow=True)]) == LINES
    await job.result()


async def read(job_id: str) -> None:
    """Read what there is."""
    job = await aio.attach(job_id)
    assert len([line async for line in job.logs()]) == LINES


if __name__ == "__main__":
    main()
