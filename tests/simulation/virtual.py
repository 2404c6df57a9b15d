"""An event loop on virtual time whose parties run, pause, and die independently.

A *party* stands for a process. Every task belongs to the party in whose context it was created.
In each turn, the loop runs one callback of one party, which the seed chooses. A paused party runs
no callbacks or timers, and a dead one never runs again. The loop waits for threads right where
they start, so that a seed always gives the same course of events.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import platform
import random
import sys
import threading
import time
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

import anyio.to_thread

PARTY: ContextVar[str] = ContextVar("party", default="world")


class Frozen(Exception):
    """The main task waits, but no callback or timer is left."""


class Runaway(Exception):
    """The loop ran more callbacks than a batch of this size can need."""


class _Handle(asyncio.Handle):
    __slots__ = ()


class _Timer(asyncio.TimerHandle):
    __slots__ = ()


class Party:
    """The ready callbacks, timers, and tasks of one process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.paused = 0
        self.dead = False
        self.asleep = 0.0  # seconds that its machine slept, while loop.time() stood still
        self.wall = 0.0  # seconds by which its wall clock is wrong
        self.tasks: set[asyncio.Task[Any]] = set()

    @property
    def runs(self) -> bool:
        return not self.dead and not self.paused


class VirtualLoop(asyncio.AbstractEventLoop):
    """The methods of an event loop that the engine uses."""

    LIMIT = 400_000
    """Maximum number of callbacks in a run."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 1000.0
        self.turns = 0
        self.parties: dict[str, Party] = {}
        self.failures: list[str] = []
        self.ignores_failures = False
        self._count = itertools.count()
        self._stopped = False
        self._foreign: deque[asyncio.Handle] = deque()
        self._limiter: Any = None
        self._closed = False

    def party(self, name: str) -> Party:
        if name not in self.parties:
            self.parties[name] = Party(name)
        return self.parties[name]

    # --- the interface for asyncio ---

    def time(self) -> float:
        return self.now - self.party(PARTY.get()).asleep

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else copy_context()
        handle = _Handle(callback, args, self, context)
        self.party(context.get(PARTY, "world")).ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else copy_context()
        handle = _Handle(callback, args, self, context)
        self._foreign.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = context if context is not None else copy_context()
        timer = _Timer(when, callback, args, self, context)
        party = self.party(context.get(PARTY, "world"))
        heapq.heappush(party.timers, (when, next(self._count), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        party = self.party((context or copy_context()).get(PARTY, "world"))
        party.tasks.add(task)
        task.add_done_callback(party.tasks.discard)
        return task

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        """Ignore it: the engine only watches for the end of the party's own process."""

    def remove_reader(self, fd: Any) -> bool:
        return True

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Close the loop, and end its worker threads, which AnyIO can no longer do."""
        self._closed = True
        for thread in threading.enumerate():
            if thread.name == "AnyIO worker thread" and thread.loop is self:  # type: ignore[attr-defined]
                thread.queue.put(None)  # type: ignore[attr-defined]
                thread.join()

    def stop(self) -> None:
        self._stopped = True

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.ignores_failures:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    # --- running ---

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run *main* to its end, as a task of the world."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=lambda _: None, finalizer=lambda _: None)
        asyncio._set_running_loop(self)
        self._stopped = False
        task = self.create_task(main, context=_context("world"))
        task.add_done_callback(base_events._run_until_complete_cb)
        try:
            while not self._stopped:
                self._turn()
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return task.result()

    def _turn(self) -> None:
        self.turns += 1
        if self.turns > self.LIMIT:
            tasks = [task for party in self.parties.values() for task in party.tasks]
            busy = [task for task in tasks if not task.get_stack()]
            raise Runaway(f"{self.turns} turns at {self.now:.1f} s; {busy[:3]}")
        while self._foreign:
            handle = self._foreign.popleft()
            self.party(handle._context.get(PARTY, "world")).ready.append(handle)
        ready = [party for party in self.parties.values() if party.runs and party.ready]
        if not ready:
            self._advance()
            return
        party = ready[0] if len(ready) == 1 else self.rng.choice(ready)
        handle = party.ready.popleft()
        if not handle._cancelled:
            handle._run()
        self._finish_threads()

    def _advance(self) -> None:
        """Advance the time to the next timer of a running party."""
        soonest = None
        for party in self.parties.values():
            while party.timers and party.timers[0][2]._cancelled:
                heapq.heappop(party.timers)
            if party.runs and party.timers:
                due = party.timers[0][0] + party.asleep
                soonest = due if soonest is None or due < soonest else soonest
        if soonest is None:
            raise Frozen(f"nothing is left to happen at {self.now:.1f} s")
        self.now = max(self.now, soonest)
        for party in self.parties.values():
            party_time = self.now - party.asleep
            while party.runs and party.timers and party.timers[0][0] <= party_time + 1e-9:
                party.ready.append(heapq.heappop(party.timers)[2])

    def _finish_threads(self) -> None:
        if self._limiter is None:
            return
        if self._limiter.borrowed_tokens:
            for thread in threading.enumerate():
                own = thread.name == "AnyIO worker thread" and thread.loop is self  # type: ignore[attr-defined]
                if own and not thread.stopping:  # type: ignore[attr-defined]
                    thread.queue.join()  # type: ignore[attr-defined]

    def adopt_threads(self) -> None:
        """Wait for threads at once from now on, so that they take no time; call it in a task."""
        self._limiter = anyio.to_thread.current_default_thread_limiter()

    # --- parties ---

    def spawn(self, party: str, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start *work* as a task of *party*."""
        return self.create_task(work, name=name, context=_context(party))

    def pause(self, name: str) -> None:
        """Pause the process; its clocks keep running."""
        self.party(name).paused += 1

    def wake(self, name: str, *, slept: float = 0.0) -> None:
        """Resume the process; *slept* seconds are missing on its loop's clock, as on a laptop."""
        party = self.party(name)
        party.paused -= 1
        party.asleep += slept

    def kill(self, name: str) -> None:
        """Never run the process again."""
        self.party(name).dead = True

    def bury(self, limit: int = 20_000) -> None:
        """Cancel all tasks, even those of dead parties, and run them to their end."""
        self.ignores_failures = True
        self.turns = 0
        asyncio._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=lambda _: None, finalizer=lambda _: None)
        try:
            for _ in range(4):
                for party in self.parties.values():
                    party.dead, party.paused = False, 0
                    for task in tuple(party.tasks):
                        task.cancel()
                for _ in range(limit):
                    if not any(party.tasks for party in self.parties.values()):
                        return
                    try:
                        self._turn()
                    except (Frozen, Runaway):
                        break
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            remaining = [task for party in self.parties.values() for task in party.tasks]
            for task in remaining:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            if remaining:
                self.failures.append(f"tasks that don't end when cancelled: {remaining[:3]}")


def _context(party: str) -> Context:
    context = copy_context()
    context.run(PARTY.set, party)
    return context


@contextmanager
def virtual_clocks(loop: VirtualLoop, rng: random.Random) -> Iterator[None]:
    """Make the clocks of the standard library show the loop's time; give each party a machine.

    Each party has its own wall clock, which may jump. Random bytes come from the seed.
    """
    real = (time.time, time.monotonic, time.clock_gettime, platform.node, os.urandom)
    epoch = 1_700_000_000.0

    def wall() -> float:
        return epoch + loop.now + loop.party(PARTY.get()).wall

    def boot(clock: int = 0) -> float:
        return loop.now

    def node() -> str:
        return f"machine-of-{PARTY.get()}"

    time.time, time.monotonic, time.clock_gettime = wall, loop.time, boot
    platform.node, os.urandom = node, rng.randbytes
    try:
        yield
    finally:
        time.time, time.monotonic, time.clock_gettime, platform.node, os.urandom = real
