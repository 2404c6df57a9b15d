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

from kinetic._messages import one_line, span
from kinetic.cli import output
from kinetic.errors import KineticError
from kinetic.progress import Progress

if TYPE_CHECKING:
    from rich.text import Text

    from kinetic import aio

SLOWEST, FAILURES = 5, 5
"""Maximum number of running items, and of failed ones, on the screen."""

LOW = 10
"""Below this many rows the terminal shows title and bar on one line."""

REFRESH_S = 1.0
"""How often the screen, whose durations grow, and a JSON line are refreshed."""

LINE_S = 5.0
"""Minimum time between two lines without a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The screen's content: ``slowest`` has items and seconds, ``failures`` items and reasons."""

    title: str
    progress: Progress
    max_concurrent: int | None = None
    slowest: Sequence[tuple[int, float]] = ()
    failures: Sequence[tuple[int, str]] = ()


def screen(view: View, width: int, height: int) -> list[Text]:
    """Return at most *height* lines, none wider than *width*; the last lines are left out first."""
    from rich.text import Text

    from kinetic._progress.line import compose

    now = view.progress
    if height < LOW:
        lines = compose(view.title, now, width)[:1]
    else:
        short = replace(now, waiting=0, running=0, retried=0)  # the line of counts shows these
        lines = [Text(view.title, "bold"), compose("", short, width)[0][2:]]
    lines += map(Text, textwrap.wrap(now.counts(), width))
    if view.max_concurrent is not None and not now.finished:
        lines.append(Text(f"max_concurrent: {view.max_concurrent:,}"))
    if now.retried_after:
        causes = ", ".join(f"{count:,} {reason}" for reason, count in now.retried_after)
        lines += (Text(one, "yellow") for one in textwrap.wrap(f"retried after: {causes}", width))
    if view.slowest:
        lines.append(Text("longest running", "bold"))
        lines += (Text(f"  item {index:<8} {span(seconds)}") for index, seconds in view.slowest)
    if view.failures:
        lines.append(Text("last failures", "bold red"))
        lines += (Text(f"  item {index:<8} {words}") for index, words in view.failures)
    if not now.finished:
        lines = [*lines[: max(1, height - 1)], Text("q leaves; the batch continues", "dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


async def follow(batch: aio.BatchHandle[Any], *, as_json: bool) -> Progress:
    """Show *batch* until it ends or the user leaves, and return the progress by then."""
    async with aclosing(_views(batch)) as views:
        if as_json or not sys.stdout.isatty():
            return await _line_by_line(views, as_json=as_json)
        return await _live(batch, views)


async def _line_by_line(views: AsyncGenerator[View], *, as_json: bool) -> Progress:
    clock = asyncio.get_running_loop().time
    due, last, now = 0.0, "", Progress()
    async for view in views:
        now = view.progress
        if not now.finished and clock() < due:
            continue
        due = clock() + (REFRESH_S if as_json else LINE_S)
        if as_json:
            output.json_line("batches.watch", asdict(view))
        elif (line := now.line()) != last:
            last = line
            output.lines([line])
    return now


async def _live(batch: aio.BatchHandle[Any], views: AsyncGenerator[View]) -> Progress:
    """Show each view, and again every second: durations grow while nothing else changes."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    left = asyncio.Event()
    view: View | None = None
    with _keys(left), Live(console=console, auto_refresh=False) as live:
        leaving = asyncio.ensure_future(left.wait())
        coming = asyncio.ensure_future(anext(views, None))
        try:
            while not leaving.done():
                await asyncio.wait(
                    {coming, leaving}, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED
                )
                if coming.done():
                    if (new := coming.result()) is None:
                        break
                    view, coming = new, asyncio.ensure_future(anext(views, None))
                if view is not None:
                    now = replace(view, slowest=batch.longest_running(SLOWEST))
                    live.update(Group(*screen(now, console.width, console.height)), refresh=True)
        finally:  # a generator can't be closed while its next value is awaited
            leaving.cancel()
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
    return view.progress if view is not None else Progress()


@contextlib.contextmanager
def _keys(left: asyncio.Event) -> Generator[None]:
    """Set *left* when the user presses q; afterwards the terminal has its old settings."""
    if not sys.stdin.isatty():
        yield
        return
    import os
    import termios
    import tty

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> None:
        try:
            keys = os.read(descriptor, 64)
        except OSError:  # the terminal was closed
            keys = b""
        if not keys or keys.lower().startswith(b"q"):
            loop.remove_reader(descriptor)  # a closed terminal stays readable, which would spin
            left.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        with contextlib.suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _views(batch: aio.BatchHandle[Any]) -> AsyncGenerator[View]:
    """Yield a view whenever the batch changes.

    Raises:
        SubmitterLost: The batch's submitter died, so the rest would never start.
    """
    failures: deque[tuple[int, str]] = deque(maxlen=FAILURES)
    known: set[int] = set()
    async with aclosing(batch.progress()) as values:
        async for value in values:
            if value.failed + value.lost > len(known):
                try:
                    await _note_failures(batch, known, failures)
                except KineticError as exc:  # the next change asks again
                    logging.warning("can't read the failures: %s", exc)
            yield View(
                title=batch.name or batch.group_id,
                progress=value,
                max_concurrent=batch.max_concurrent,
                slowest=batch.longest_running(SLOWEST),
                failures=tuple(failures),
            )
    await batch.wait()  # raises if the batch can't end


async def _note_failures(
    batch: aio.BatchHandle[Any], known: set[int], failures: deque[tuple[int, str]]
) -> None:
    new = [job for job in await batch.failures() if job.group_index not in known]
    known.update(job.group_index or 0 for job in new[:-FAILURES])
    for job in new[-FAILURES:]:
        failures.append((job.group_index or 0, one_line(await job.reason())))
        known.add(job.group_index or 0)
