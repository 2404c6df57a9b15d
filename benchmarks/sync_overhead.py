"""How much does a call of the sync API cost on top of the coroutine it awaits?

Microseconds of one call that awaits nothing: through the portal's loop on its
own thread, by hand to such a loop, and by `asyncio.run`, which makes a loop
each time. A regression: the portal at more than `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from benchmarks import figures
from kinetic._sync.portal import PORTAL

CALLS = 300


async def nothing() -> None:
    """The coroutine."""


def main() -> None:
    """Print the table."""
    effort = figures.effort(__doc__, full=20, quick=5)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ways: dict[str, Callable[[], object]] = {
        "asyncio.run": lambda: asyncio.run(nothing()),
        "run_coroutine_threadsafe": lambda: asyncio.run_coroutine_threadsafe(
            nothing(), loop
        ).result(),
        "kinetic's portal": lambda: PORTAL.call(nothing),
    }
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(effort.rounds):
        for name, call in ways.items():
            call()
            seen[name].append(figures.seconds(lambda call=call: repeat(call)) / CALLS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    figures.head(f"{effort.rounds} rounds of {CALLS}", "median us", "min us", "x run")
    for name, runs in seen.items():
        ratio = figures.ratio(runs, seen["asyncio.run"])
        figures.row(name, *figures.shown(runs, 1e6, 1), f"{ratio:.2f}")


def repeat(call: Callable[[], object]) -> None:
    """Many calls, one after the other."""
    for _ in range(CALLS):
        call()


if __name__ == "__main__":
    main()
