"""How much does a call of the sync API cost on top of the coroutine it awaits?

Microseconds of one call that awaits nothing: through the portal's loop on its
own thread, by hand to such a loop, and by `asyncio.run`, which makes a loop
each time. A regression: the portal at more than `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

from benchmarks import figures
from kinetic._sync.portal import PORTAL

CALLS = 300


async def nothing() -> None:
    """Await nothing: the coroutine of each call."""


def main() -> None:
    """Print the table."""
    effort = figures.effort(__doc__, full=20, quick=5)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    calls: dict[str, Callable[[], object]] = {
        "asyncio.run": lambda: asyncio.run(nothing()),
        "run_coroutine_threadsafe": lambda: asyncio.run_coroutine_threadsafe(
            nothing(), loop
        ).result(),
        "kinetic's portal": lambda: PORTAL.call(nothing),
    }
    seconds_by_name: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(effort.rounds):
        for name, call in calls.items():
            call()
            seconds_by_name[name].append(figures.seconds(partial(repeat, call)) / CALLS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    figures.head(f"{effort.rounds} rounds of {CALLS}", "median us", "min us", "x run")
    for name, runs in seconds_by_name.items():
        ratio = figures.ratio(runs, seconds_by_name["asyncio.run"])
        figures.row(name, *figures.median_and_min(runs, 1e6, 1), f"{ratio:.2f}")


def repeat(call: Callable[[], object]) -> None:
    """Make all calls, one after the other."""
    for _ in range(CALLS):
        call()


if __name__ == "__main__":
    main()
