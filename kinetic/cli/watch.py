"""``kinetic batches watch``: show a batch's progress, on a terminal or line by line."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import textwrap
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from absl import logging

from kinetic._messages import format_duration, one_line
from kinetic.cli import output
from kinetic.errors import KineticError
from kinetic.progress import Progress

if TYPE_CHECKING:
    from rich.text import Text

    from kinetic import aio

MAX_RUNNING_SHOWN, MAX_FAILURES_SHOWN = 5, 5
"""Maximum number of running items, and of failed ones, on the screen."""

REFRESH_S = 1.0
"""Seconds between two drawings of the screen; minimum seconds between two JSON lines."""

LINE_INTERVAL_S = 5.0
"""Minimum seconds between two lines without a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The screen's content: ``failures`` has (item, reason).

    ``slowest`` has (item, seconds of running, seconds of waiting before, or None if unknown).
    """

    title: str
    progress: Progress
    max_concurrent: int | None = None
    slowest: Sequence[tuple[int, float, float | None]] = ()
    failures: Sequence[tuple[int, str]] = ()


def screen(view: View, width: int, height: int) -> list[Text]:
    """Return at most *height* lines, none wider than *width*; leave out the last lines first."""
    from rich.text import Text

    from kinetic._progress.line import compose

    progress = view.progress
    # Other lines show these numbers.
    bar = replace(progress, waiting=0, running=0, retried=0, pruned=0, best=None)
    lines = [Text(view.title, "bold"), compose("", bar, width)[0][2:]]
    lines += map(Text, textwrap.wrap(progress.counts(), width))
    if progress.best is not None:
        lines.append(Text(f"best so far: {progress.best_value()}", "green"))
    if progress.rungs:
        rungs = ", ".join(f"{count:,} at {rung:,}" for rung, count in progress.rungs)
        share = progress.pruned / max(1, progress.ended)
        pruned = f"pruned {share:.0%} of the ended trials; by rung: {rungs}"
        lines += map(Text, textwrap.wrap(pruned, width))
    if view.max_concurrent is not None and not progress.finished:
        lines.append(Text(f"max_concurrent: {view.max_concurrent:,}"))
    if progress.retried_after:
        causes = ", ".join(f"{count:,} {reason}" for reason, count in progress.retried_after)
        lines += (
            Text(cause_line, "yellow")
            for cause_line in textwrap.wrap(f"retried after: {causes}", width)
        )
    if view.slowest:
        lines.append(Text("longest running", "bold"))
        lines += (
            Text(
                f"  item {index:<8} {format_duration(ran)}"
                + ("" if waited is None else f" (waited {format_duration(waited)})")
            )
            for index, ran, waited in view.slowest
        )
    if view.failures:
        lines.append(Text("last failures", "bold red"))
        lines += (Text(f"  item {index:<8} {failure}") for index, failure in view.failures)
    if not progress.finished:
        lines = [*lines[: max(1, height - 1)], Text("q leaves; the batch continues", "dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


async def follow(batch: aio.BatchHandle[Any], *, as_json: bool) -> Progress:
    """Show *batch* until it ends or the user leaves, and return its last progress."""
    async with aclosing(_views(batch)) as views:
        if as_json or not sys.stdout.isatty():
            return await _line_by_line(views, as_json=as_json)
        return await _live(batch, views)


async def _line_by_line(views: AsyncGenerator[View], *, as_json: bool) -> Progress:
    """Print one view every few seconds, and the last view; return the last progress."""
    clock = asyncio.get_running_loop().time
    next_due, last_line, progress = 0.0, "", Progress()
    async for view in views:
        progress = view.progress
        if not progress.finished and clock() < next_due:
            continue
        next_due = clock() + (REFRESH_S if as_json else LINE_INTERVAL_S)
        if as_json:
            output.json_line("batches.watch", asdict(view))
        elif (line := progress.line()) != last_line:
            last_line = line
            output.lines([line])
    return progress


async def _live(batch: aio.BatchHandle[Any], views: AsyncGenerator[View]) -> Progress:
    """Show views until the batch ends or the user presses q; return the last progress."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    quit_pressed = asyncio.Event()
    view: View | None = None
    with _watch_keys(quit_pressed), Live(console=console, auto_refresh=False) as live:
        quitting = asyncio.ensure_future(quit_pressed.wait())
        next_view = asyncio.ensure_future(anext(views, None))
        try:
            while not quitting.done():
                await asyncio.wait(
                    {next_view, quitting}, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED
                )
                if next_view.done():
                    if (received := next_view.result()) is None:
                        break
                    view, next_view = received, asyncio.ensure_future(anext(views, None))
                if view is not None:
                    refreshed = replace(view, slowest=batch.running_times(MAX_RUNNING_SHOWN))
                    live.update(
                        Group(*screen(refreshed, console.width, console.height)), refresh=True
                    )
        finally:  # a generator can't be closed while its next value is awaited
            quitting.cancel()
            next_view.cancel()
            await asyncio.gather(next_view, return_exceptions=True)
    return view.progress if view is not None else Progress()


@contextlib.contextmanager
def _watch_keys(quit_pressed: asyncio.Event) -> Generator[None]:
    """Set *quit_pressed* when the user presses q; at the end, restore the terminal's settings."""
    if not sys.stdin.isatty():
        yield
        return
    import os
    import termios
    import tty

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    saved_settings = termios.tcgetattr(descriptor)

    def read_keys() -> None:
        try:
            keys = os.read(descriptor, 64)
        except OSError:  # the terminal was closed
            keys = b""
        if not keys or keys.lower().startswith(b"q"):
            loop.remove_reader(descriptor)  # else the loop calls this forever for a closed terminal
            quit_pressed.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read_keys)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        with contextlib.suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(descriptor, termios.TCSADRAIN, saved_settings)


async def _views(batch: aio.BatchHandle[Any]) -> AsyncGenerator[View]:
    """Yield a view whenever the batch changes."""
    failures: deque[tuple[int, str]] = deque(maxlen=MAX_FAILURES_SHOWN)
    noted: set[int] = set()
    async with aclosing(batch.progress()) as updates:
        async for progress in updates:
            if progress.failed + progress.lost > len(noted):
                try:
                    new = [job for job in await batch.failures() if job.group_index not in noted]
                    noted.update(job.group_index or 0 for job in new[:-MAX_FAILURES_SHOWN])
                    for job in new[-MAX_FAILURES_SHOWN:]:
                        failures.append((job.group_index or 0, one_line(await job.reason())))
                        noted.add(job.group_index or 0)
                except KineticError as exc:  # the next change of the batch retries
                    logging.warning("can't read the failures: %s", exc)
            yield View(
                title=batch.name or batch.group_id,
                progress=progress,
                max_concurrent=batch.max_concurrent,
                slowest=batch.running_times(MAX_RUNNING_SHOWN),
                failures=tuple(failures),
            )
    await batch.wait()  # raises if the batch can't end
