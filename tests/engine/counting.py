"""An event loop that counts its work, and a block that counts calls."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


class CountingLoop(asyncio.SelectorEventLoop):
    """Count callbacks, timers, and tasks except the platform's jobs and items."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def call_soon(self, callback: Any, *args: Any, **more: Any) -> asyncio.Handle:
        self.counts["callbacks"] += 1
        return super().call_soon(callback, *args, **more)

    def call_at(self, when: float, callback: Any, *args: Any, **more: Any) -> asyncio.TimerHandle:
        self.counts["timers"] += 1
        return super().call_at(when, callback, *args, **more)

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **more: Any,
    ) -> asyncio.Task[Any]:
        if not (name or "").startswith(("job ", "item ")):
            self.counts["tasks"] += 1
        return super().create_task(coro, name=name, context=context, **more)


class counted:
    """Count this thread's calls of Python functions and builtins in the block."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        calls = 0

        def count_call(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += 1

        self._calls: Callable[[], int] = lambda: calls
        self._before = sys.getprofile()
        sys.setprofile(count_call)

    def __exit__(self, *exc_info: object) -> None:
        sys.setprofile(self._before)
        self._counts["calls"] += self._calls()
