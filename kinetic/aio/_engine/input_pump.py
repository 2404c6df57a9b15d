"""Store the inputs of a batch before their attempts start.

The inputs lie in objects with consecutive numbers, the *slots*. The store creates an object only
once. So if two processes want to fill the same slot, only one succeeds, and no two inputs get the
same index.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio.to_thread
from absl import logging

from kinetic._runner.protocol import frames, wire
from kinetic.aio._engine import decisions
from kinetic.aio._engine.launcher import BatchContext
from kinetic.aio._net.retry import create_object, retry_forever
from kinetic.aio._preparing import calls
from kinetic.aio._preparing.input_source import Source
from kinetic.aio._preparing.inputs import CHUNK_ITEMS, EncodedInput, Encoder, first_chunk
from kinetic.aio._submissions.inputs import chunk_body
from kinetic.errors import InputsUnfinished, SubmissionError, SubmitterLost, SweepError


class Backpressure:
    """Limit how many items have begun and aren't delivered to all consumers yet.

    Each consumer gets every item, so the slowest consumer decides. Without consumers there is no
    limit.
    """

    def __init__(self, limit: int | None, on_change: Callable[[], None]) -> None:
        self.limit = limit
        self._on_change = on_change
        self._counts: dict[object, int] = {}
        self._will_tell = False

    @property
    def delivered(self) -> int | None:
        """How many items the slowest consumer has got; None without consumers."""
        return min(self._counts.values(), default=None)

    @property
    def bound(self) -> int | None:
        """Maximum number of items that may have started; None if there is no limit."""
        delivered = self.delivered
        return None if self.limit is None or delivered is None else self.limit + delivered

    def note(self, consumer: object, count: int) -> None:
        """Record that *consumer* has got *count* items in all, including refused items."""
        self._counts[consumer] = count
        if self.limit is not None and not self._will_tell:
            self._will_tell = True  # of all items that are delivered in this turn of the loop
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._will_tell = False
        self._on_change()

    def leave(self, consumer: object) -> None:
        """Note that a consumer stops reading."""
        self._counts.pop(consumer, None)
        self._on_change()

    def lift(self) -> None:
        """Remove the limit."""
        self.limit = None
        self._on_change()


FIRST_CHUNK_ITEMS = 8
"""Maximum number of inputs in an iterator's first chunk; few, to start the first jobs soon."""


ITEMS_PER_STEP = 10 * CHUNK_ITEMS
"""Maximum number of inputs taken and stored in one step, if their total number is known."""


DRAIN_S = 0.25
"""How long a closing batch waits for an input already being produced, in seconds."""


class InputPump:
    """Pull and store all inputs; if their number is unknown, pull more only as items end."""

    def __init__(
        self,
        context: BatchContext,
        source: Source,
        window: Backpressure,
        state: decisions.State,
        changed: Callable[[], None],
        report_refusal: Callable[[int, Exception], Awaitable[None]],
        *,
        ends_inputs: bool,
    ) -> None:
        identity = context.submission.identity
        self._store = context.session.platform.store
        self._source = source
        self._encoder = Encoder(context.uploaded, source.mode)
        self._inputs = context.inputs
        self._window = window
        self._state = state
        self._lease = context.lease
        self._changed = changed
        self._report_refusal = report_refusal
        self._batch = identity.id
        self._scope = identity.scope
        self._key = identity.key
        self._first_index = self._inputs.count
        # What is stored may run. So if the window limits how many run, it limits what is stored.
        self._stores_window = window.limit is not None
        self._room = asyncio.Event()
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self.ends_inputs = ends_inputs
        """Whether no inputs follow those of the source."""
        self.closing = False
        self.seals = False
        """Whether the inputs stored until `close` are all."""
        self.finished = False
        """Whether the end of the inputs is recorded, or is being recorded."""
        self.over = asyncio.Event()
        """Set when `run` has ended."""

    @property
    def has_known_length(self) -> bool:
        """Whether the number of inputs is known; if so, all are stored before the first job."""
        return self._source.length is not None and not self._stores_window

    @property
    def has_iterator(self) -> bool:
        """Whether the inputs come from an iterator, not from a list."""
        return self._source.known_inputs is None

    @property
    def is_cut_off(self) -> bool:
        """Whether an iterator may have more inputs, once `run` has ended."""
        return self.has_iterator and not self._source.has_ended

    def wake(self) -> None:
        """Let the pump check again whether it may pull more inputs, or must end."""
        self._room.set()

    def close(self, *, seal: bool = False) -> None:
        """Pull no more inputs from an iterator, but store pulled ones; a list is stored whole.

        With *seal*, `run` then records that there are no more, even if the caller is cancelled.
        """
        if self.has_iterator:
            self.closing = True
            self.seals = self.seals or seal
            self._room.set()
            self._source.stop()

    async def input_of(self, index: int) -> tuple[Any] | None:
        """Return the user's input in a tuple, or None if this process doesn't have it any more."""
        position, listed = index - self._first_index, self._source.known_inputs
        if listed is not None and 0 <= position < len(listed):
            own = listed[position]
        elif index in self._recent:
            own = self._recent[index]
        else:
            return None
        if (digest := self._inputs.known_digest(index)) is None:
            return (own,)
        encoded = self._encoder.encode_small(own)
        if encoded is None:
            encoded = await anyio.to_thread.run_sync(self._encoder.encode, own)
        return (own,) if encoded.digest == digest else None  # the user may have changed it since

    async def run(self) -> None:
        """Store all inputs, and then record that there are no more.

        Raises:
            SubmitterLost: Another process submits the batch now.
            Exception: The user's iterator raised this error.
        """
        try:
            await self._pull()
            drained = await self._source.drain(0.0 if self._state.stopping else DRAIN_S)
            await self._store_inputs(drained)
            if self.has_known_length and self._inputs.count > self._first_index:
                self._state.store(self._inputs.count)
                self._changed()
            if self.seals or (self.ends_inputs and not self.closing):
                await self.end()
        finally:
            try:
                await self._source.aclose()
            except Exception as exc:
                logging.warning("closing the inputs' iterator of %s raised %r", self._batch, exc)
            finally:
                self.over.set()

    async def end(self) -> None:
        """Record in the store that there are no more inputs."""
        self.finished = True
        while self._inputs.total is None:
            total = self._inputs.count
            if self._state.stopping:  # the inputs of a list that aren't stored count as items, too
                total = max(total, self._first_index + (self._source.length or 0))
            content = {"kind": "end", "total": total, "sealed_by": self._lease.fence}
            name = wire.input_key(self._scope, self._inputs.slots)
            body, slot = json.dumps(content).encode(), wire.Slot(total=total)
            metadata = slot.signed(self._key, self._scope, name)
            if not await create_object(self._store, name, body, metadata):
                await self._adopt(())
            else:
                self._inputs.total, self._inputs.sealed = total, True
                self._inputs.slots += 1
        self._state.end(self._inputs.total)
        self._changed()

    async def _pull(self) -> None:
        """Pull and store inputs, whenever `_wait_for_room` allows more."""
        size = FIRST_CHUNK_ITEMS
        while wanted := await self._wait_for_room(size):
            try:
                values = await self._source.take(wanted, self._encoder)
            except SweepError:  # it says how to go on: a sealed batch would end the sweep
                raise
            except Exception as exc:
                exc.add_note(
                    f"The iterator of the inputs of {self._batch} raised this. Running jobs "
                    f"continue, and kinetic submits nothing more. {self._inputs.count} inputs are "
                    "stored. resume(seal=True) runs the stored inputs only; resume(inputs=...) "
                    "adds those that you give. But a `with` block cancels the batch, and a "
                    "cancelled batch takes no more inputs"
                )
                raise
            if not values:
                break
            await self._store_inputs(values)
            size = min(2 * size, CHUNK_ITEMS)

    async def _wait_for_room(self, size: int) -> int:
        """Wait until inputs may be pulled; return how many, or 0 if there are to be no more."""
        # A list is pulled whole, also after `close` or a stop.
        while not (self.has_iterator and (self.closing or self._state.stopping)):
            if self.has_known_length:
                return ITEMS_PER_STEP
            room = self._pull_limit() - self._inputs.count
            minimum = min(size, CHUNK_ITEMS, self._window.limit or CHUNK_ITEMS)
            if room >= minimum:
                return minimum
            # To wait until there is room for a full chunk would leave the worker idle.
            if room >= 1 and self._state.has_idle_worker:
                return int(room)
            self._room.clear()
            await self._room.wait()
        return 0

    def _pull_limit(self) -> float:
        """Return how many inputs, counted from the first, may have been pulled by now.

        The limit is the sum of the delivered items (without consumers: the ended items),
        ``max_concurrent``, and the window; infinity if there is no limit.
        """
        workers, delivered = self._state.settings.max_concurrent, self._window.delivered
        if self._stores_window and (bound := self._window.bound) is not None:
            return bound
        if self._window.limit is None or (workers is None and delivered is None):
            return float("inf")
        finished = self._state.ended if delivered is None else delivered
        return (workers or 0) + self._window.limit + finished

    async def _store_inputs(self, inputs: Sequence[EncodedInput]) -> None:
        while inputs:
            chunk = first_chunk(inputs)
            await self._store_chunk(chunk, inputs)
            inputs = inputs[len(chunk) :]

    async def _store_chunk(
        self, chunk: Sequence[EncodedInput], pulled: Sequence[EncodedInput]
    ) -> None:
        """Store *chunk*, the beginning of the *pulled* inputs.

        The chunk's items may start at once; with a known length, they wait for all chunks.
        """
        try:
            first, failed = await self._claim_slot(chunk, pulled)
        except SubmitterLost as exc:
            exc.add_note(f"{len(pulled)} inputs were pulled and not stored: {_sample(pulled)}")
            raise
        if self.has_iterator:
            self._remember(first, chunk)
        for position, error in failed.items():
            self._state.add(self._inputs.count)
            await self._report_refusal(first + position, error)
        if self.has_known_length:
            self._state.add(first + len(chunk))
        else:
            self._state.store(first + len(chunk))
        self._changed()

    def _remember(self, first: int, inputs: Sequence[EncodedInput]) -> None:
        """Keep the newest inputs for `input_of`; with a window, all undelivered inputs."""
        for index, encoded in enumerate(inputs, start=first):
            self._recent[index] = encoded.value
        limit = self._window.limit or CHUNK_ITEMS
        while len(self._recent) > limit + (self._state.settings.max_concurrent or 0):
            self._recent.popitem(last=False)

    async def _claim_slot(
        self, chunk: Sequence[EncodedInput], pulled: Sequence[EncodedInput]
    ) -> tuple[int, Mapping[int, Exception]]:
        """Store a chunk in the next free slot.

        Return the index of its first input, and the errors of its failed inputs by position.
        """
        refs: dict[int, tuple[wire.DataRef, ...]] = {}
        failed: dict[int, Exception] = {}
        for position, encoded in enumerate(chunk):
            if encoded.error is not None:
                failed[position] = encoded.error
            elif encoded.data:
                try:
                    refs[position] = await calls.upload_all(self._store, encoded.data, {})
                except SubmissionError as exc:
                    failed[position] = exc
        while True:
            first = self._inputs.count
            body = chunk_body(chunk, first, refs, failed)
            footer = hashlib.sha256(frames.footer_of(body)).hexdigest()
            slot = wire.Slot(first, len(chunk), footer, len(body))
            name = wire.input_key(self._scope, self._inputs.slots)
            if await create_object(
                self._store, name, body, slot.signed(self._key, self._scope, name)
            ):
                break
            await self._adopt(pulled)
        self._inputs.add(slot, chunk, refs, failed)
        return first, failed

    async def _adopt(self, pulled: Sequence[EncodedInput]) -> None:
        """Read a slot that an earlier submitter has filled, so that this process could not."""
        await retry_forever(self._lease.renew, "renewing the lease")
        before = self._inputs.count
        await retry_forever(self._inputs.read, "reading the inputs")
        if self._inputs.total is not None and pulled:
            raise InputsUnfinished(
                f"{self._batch} was sealed with {self._inputs.total} inputs meanwhile; "
                f"{len(pulled)} more inputs are not part of it: {_sample(pulled)}; submit them as "
                "another batch",
                stored=self._inputs.total,
            )
        count = self._inputs.count - before
        logging.warning("%s: found %d inputs of an earlier submitter", self._batch, count)
        if count:
            self._state.store(self._inputs.count)
            self._changed()


def _sample(inputs: Sequence[EncodedInput]) -> str:
    shown = ", ".join(repr(encoded.value)[:60] for encoded in inputs[:3])
    return f"{shown}, …" if len(inputs) > 3 else shown
