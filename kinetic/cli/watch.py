"""``kinetic batches watch``: a batch as it goes on, on a terminal or line by line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import textwrap
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kinetic._messages import one_line, span
from kinetic.cli import output
from kinetic.errors import KineticError
from kinetic.progress import Progress

if TYPE_CHECKING:
    from rich.text import Text

    from kinetic import aio

SLOWEST, FAILURES = 5, 5
ROOM = 10
"""With so many lines the title has one of its own, and the bar what that leaves."""
EACH_S = 1.0
LINE_S = 5.0
"""Without a terminal a line is printed no more often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the screen shows: ``slowest`` and ``failures`` are pairs of item and words."""

    title: str
    progress: Progress
    max_concurrent: int | None = None
    slowest: Sequence[tuple[int, float]] = ()
    failures: Sequence[tuple[int, str]] = field(default=())
    trouble: str = ""


def screen(view: View, width: int, height: int) -> list[Text]:
    """The lines, none wider than *width* and no more than *height*: the last ones give way."""
    from rich.text import Text

    from kinetic._progress.line import compose

    told = view.progress
    if height < ROOM:
        lines = compose(view.title, told, width)[:1]
    else:
        short = replace(told, waiting=0, running=0, retried=0)  # which the counts below say
        lines = [Text(view.title, "bold"), compose("", short, width)[0][2:]]
    lines += (Text(line) for line in textwrap.wrap(told.counts(), width))
    if view.max_concurrent is not None and not told.finished:
        lines.append(Text(f"max_concurrent: {view.max_concurrent:,}"))
    if told.retried_after:
        causes = ", ".join(f"{count:,} {reason}" for reason, count in told.retried_after)
        words = textwrap.wrap(f"retried after: {causes}", width)
        lines += (Text(line, "yellow") for line in words)
    if view.trouble:
        lines += (Text(line, "yellow") for line in textwrap.wrap(view.trouble, width))
    if view.slowest:
        lines.append(Text("longest running", "bold"))
        lines += (Text(f"  item {index:<8} {span(seconds)}") for index, seconds in view.slowest)
    if view.failures:
        lines.append(Text("last failures", "bold red"))
        lines += (Text(f"  item {index:<8} {words}") for index, words in view.failures)
    if not told.finished:
        lines = [*lines[: max(1, height - 1)], Text("q leaves; the batch goes on", "dim")]
    lines = lines[:height]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


async def follow(batch: aio.BatchHandle[Any], *, as_json: bool) -> Progress:
    """Show *batch* until it has ended, or whoever looks at it leaves; how far it was then."""
    views = _views(batch)
    async with aclosing(views):
        if as_json or not sys.stdout.isatty():
            return await _line_by_line(views, as_json=as_json)
        return await _live(batch, views)


async def _line_by_line(views: AsyncGenerator[View], *, as_json: bool) -> Progress:
    clock = asyncio.get_running_loop().time
    due, last, told = 0.0, "", Progress()
    async for view in views:
        told = view.progress
        if not view.progress.finished and clock() < due:
            continue
        due = clock() + (EACH_S if as_json else LINE_S)
        if as_json:
            output.json_line("batches.watch", asdict(view))
        elif (line := view.progress.line()) != last:
            last = line
            output.lines([line])
    return told


async def _live(batch: aio.BatchHandle[Any], views: AsyncGenerator[View]) -> Progress:
    """Show each view, and the last one anew every second: it grows older, or a server is silent."""
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    left, warnings, told = asyncio.Event(), _Warnings(), Progress()
    with warnings, _keys(left), Live(console=console, auto_refresh=False, screen=False) as live:
        leaving = asyncio.ensure_future(left.wait())
        coming = asyncio.ensure_future(anext(views, None))
        view: View | None = None
        try:
            while True:
                await asyncio.wait(
                    {coming, leaving}, timeout=EACH_S, return_when=asyncio.FIRST_COMPLETED
                )
                if leaving.done():
                    return told
                if coming.done():
                    if (view := coming.result()) is None:
                        return told
                    told = view.progress
                    coming = asyncio.ensure_future(anext(views, None))
                if view is not None:
                    now = replace(
                        view,
                        slowest=batch.longest_running(SLOWEST),
                        trouble=view.trouble or warnings.last,
                    )
                    live.update(Group(*screen(now, console.width, console.height)), refresh=True)
        finally:  # also after Ctrl-C: the views cannot be closed while one is waited for
            leaving.cancel()
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


class _Warnings(logging.Handler):
    """While the block lasts, the *last* warning is kept for the screen, which it would break.

    One of them says that a server does not answer, and another that it does again.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = one_line(record.getMessage())

    def __enter__(self) -> None:
        root = logging.getLogger()
        self._before: list[logging.Handler] = root.handlers
        root.handlers = [self]

    def __exit__(self, *_: object) -> None:
        logging.getLogger().handlers = self._before


@contextlib.contextmanager
def _keys(left: asyncio.Event) -> Generator[None]:
    """Set *left* when q is pressed; the terminal is as it was afterwards."""
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
        except OSError:  # the terminal is gone
            keys = b""
        if not keys or keys.lower().startswith(b"q"):
            loop.remove_reader(descriptor)  # which is ready from now on, if it has ended
            left.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        with contextlib.suppress(termios.error):  # it may be gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _views(batch: aio.BatchHandle[Any]) -> AsyncGenerator[View]:
    """What there is to show, whenever it changes.

    Raises:
        SubmitterLost: Nobody submits the rest of it any more: it would be waited for in vain.
    """
    failures: deque[tuple[int, str]] = deque(maxlen=FAILURES)
    known: set[int] = set()
    title = batch.name or batch.group_id
    async with aclosing(batch.progress()) as values:
        async for value in values:
            trouble = ""
            if value.failed + value.lost > len(known):
                try:
                    await _note_failures(batch, known, failures)
                except KineticError as exc:  # it is asked again with the next change
                    trouble = one_line(str(exc))
            yield View(
                title=title,
                progress=value,
                max_concurrent=batch.max_concurrent,
                slowest=batch.longest_running(SLOWEST),
                failures=tuple(failures),
                trouble=trouble,
            )
    await batch.wait()  # all have ended, or it says why not


async def _note_failures(
    batch: aio.BatchHandle[Any], known: set[int], failures: deque[tuple[int, str]]
) -> None:
    new = [job for job in await batch.failures() if job.group_index not in known]
    for job in new[:-FAILURES]:
        known.add(job.group_index or 0)
    for job in new[-FAILURES:]:
        failures.append((job.group_index or 0, one_line(await job.reason())))
        known.add(job.group_index or 0)
