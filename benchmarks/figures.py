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

__all__ = [
    "RECORD",
    "Effort",
    "caption",
    "effort",
    "head",
    "limited",
    "machine",
    "ratio",
    "record",
    "row",
    "seconds",
    "shown",
]

RECORD = "BENCHMARKS_RECORD"
"""The variable that names the file for the figures of a run."""


def machine() -> str:
    """Describe the machine that the figures depend on."""
    here = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    return f"Python {platform.python_version()}, {here}, load {os.getloadavg()[0]:.1f}"


@dataclass(frozen=True, slots=True)
class Effort:
    """How often everything is measured, and whether that is to take seconds only."""

    rounds: int
    quick: bool


def effort(purpose: str | None, *, full: int, quick: int) -> Effort:
    """Read from the command line how much to measure."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    chosen = parser.parse_args()
    return Effort(chosen.rounds or (quick if chosen.quick else full), chosen.quick)


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """End the block with a TimeoutError after *limit_s* seconds.

    What catches it within, or hangs while it is closed, gets another one each tenth of that time.
    """

    def over(*_: object) -> None:
        raise TimeoutError(f"not over after {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios: noise that lasts a round falls out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def shown(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> tuple[str, str]:
    """Median and minimum."""
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
    _print(name, cells)
    record("head", [name, *map(str, cells)])


def row(name: str, *cells: object) -> None:
    """Print another line of a table."""
    _print(name, cells)
    record("row", [name, *map(str, cells)])


def _print(name: str, cells: Sequence[object]) -> None:
    print(f"{name:26}" + "".join(f"{cell!s:>11}" for cell in cells), flush=True)


def record(kind: str, content: object) -> None:
    """Add a line of JSON to the file that ``python -m benchmarks --record`` names."""
    if file := os.environ.get(RECORD):
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({kind: content}, ensure_ascii=False) + "\n")
