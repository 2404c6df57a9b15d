"""Limit the attempts that a client has under way, and cancel its calls when it closes."""

from __future__ import annotations

import asyncio
from types import TracebackType

from kinetic.errors import ClientClosed

CLOSED = "this client is closed; open another one"


class AttemptLimit:
    """Limit how many attempts without an outcome a client may have at once.

    If *max_attempts* is None, there is no limit.
    """

    def __init__(self, max_attempts: int | None) -> None:
        self._places = asyncio.Semaphore(max_attempts) if max_attempts is not None else None

    @property
    def is_bounded(self) -> bool:
        """Whether there is a limit."""
        return self._places is not None

    @property
    def is_full(self) -> bool:
        """Whether no place is free."""
        return self._places is not None and self._places.locked()

    async def acquire(self) -> None:
        """Wait until one more attempt may start."""
        if self._places is not None:
            await self._places.acquire()

    def release(self) -> None:
        """Let another attempt start, because one has its outcome, or was not started."""
        if self._places is not None:
            self._places.release()


class Places:
    """The places in a client's limit that the workers of one batch have; none without a limit."""

    def __init__(self, limit: AttemptLimit) -> None:
        self.limit = limit
        self.held = 0
        """How many they are; also for workers that were asked to leave."""

    async def acquire(self) -> None:
        """Wait for one more place of a bounded limit."""
        await self.limit.acquire()
        self.held += 1

    async def take(self, count: int) -> int:
        """Take up to *count* places, as many as are free now; return how many."""
        if not self.limit.is_bounded:
            return count
        held = self.held
        while self.held - held < count and not self.limit.is_full:
            await self.acquire()  # this doesn't wait, because a place is free
        return self.held - held

    def keep(self, count: int) -> None:
        """Give back the places above *count*."""
        while self.held > count:
            self.held -= 1
            self.limit.release()


class InFlight:
    """The running blocks of code that use a client; `end` cancels them when the client closes."""

    def __init__(self) -> None:
        self._timeouts: set[asyncio.Timeout] = set()
        self._all_ended = asyncio.Event()

    def block(self) -> InFlightBlock:
        """Return a context manager for a block, which `end` cancels as a timeout does.

        Raises (from the block):
            ClientClosed: `end` was called.
        """
        return InFlightBlock(self)

    def begin(self, timeout: asyncio.Timeout) -> None:
        """Note a block that *timeout* can cancel."""
        self._timeouts.add(timeout)

    def note_end(self, timeout: asyncio.Timeout) -> None:
        """Note the end of that block."""
        self._timeouts.discard(timeout)
        if not self._timeouts:
            self._all_ended.set()

    async def end(self) -> None:
        """Cancel all blocks, and wait until they have cleaned up."""
        loop = asyncio.get_running_loop()
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(loop.time())
        while self._timeouts:
            self._all_ended.clear()
            await self._all_ended.wait()


class InFlightBlock:
    """A block of code that uses a client; see `InFlight.block`.

    This isn't a generator: `contextlib.asynccontextmanager` sets an attribute of each exception
    that passes it, which the class of a job's exception may refuse.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._in_flight.begin(self._timeout)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise ClientClosed(CLOSED) from None
        finally:
            self._in_flight.note_end(self._timeout)
