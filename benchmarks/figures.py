"""How figures are taken and shown: medians and minima of several rounds, ratios within a round."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

RECORD = "BENCHMARKS_RECORD"
"""The variable that names the file for the figures of a run."""


def machine() -> str:
    """Describe the machine that the figures depend on."""
    platform_name = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    return f"Python {platform.python_version()}, {platform_name}, load {os.getloadavg()[0]:.1f}"


@dataclass(frozen=True, slots=True)
class Effort:
    """How often everything is measured, and whether the run takes only seconds."""

    rounds: int
    quick: bool


def effort(purpose: str | None, *, full: int, quick: int) -> Effort:
    """Read from the command line how much to measure."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    options = parser.parse_args()
    return Effort(options.rounds or (quick if options.quick else full), options.quick)


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """End the block with a TimeoutError after *limit_s* seconds.

    If the block catches the error or hangs while it closes, the error repeats each tenth of that
    time.
    """

    def raise_timeout(*_: object) -> None:
        raise TimeoutError(f"not over after {limit_s:g} s")

    previous_handler = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


def ratio(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median of each round's ratio, in which noise of a whole round cancels out."""
    return statistics.median(value / base for value, base in zip(values, baseline, strict=True))


def median_and_min(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> tuple[str, str]:
    """Format the median and the minimum of *values*."""
    return (
        f"{statistics.median(values) * scale:.{digits}f}",
        f"{min(values) * scale:.{digits}f}",
    )


def caption(text: str) -> None:
    """Print the line above a table."""
    print(text, flush=True)
    record("caption", text)


def head(name: str, *cells: object) -> None:
    """Print the first line of a table: a name for the rows, and one for each column."""
    _print_cells(name, cells)
    record("head", [name, *map(str, cells)])


def row(name: str, *cells: object) -> None:
    """Print a row of a table: its name, and a cell for each column."""
    _print_cells(name, cells)
    record("row", [name, *map(str, cells)])


def _print_cells(name: str, cells: Sequence[object]) -> None:
    print(f"{name:26}" + "".join(f"{cell!s:>11}" for cell in cells), flush=True)


def record(kind: str, content: object) -> None:
    """Add a line of JSON to the file that ``python -m benchmarks --record`` names."""
    if file := os.environ.get(RECORD):
        with open(file, "a", encoding="utf-8") as output:
            output.write(json.dumps({kind: content}, ensure_ascii=False) + "\n")
