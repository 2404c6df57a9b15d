"""The workers of the fake cluster: each carries out the operations of the real worker's rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kinetic._labels import KIND, of_attempt
from kinetic._runner.protocol import frames, outcomes, wire
from kinetic._runner.worker import pull
from kinetic.errors import BackendError, NotFound

if TYPE_CHECKING:
    from kinetic._runner.protocol.workers import WorkerId
    from kinetic.aio.ports import JobSpec, Store


class Items(NamedTuple):
    """How a worker's cluster runs an item, which it shows as a job.

    ``begin`` runs it, and returns how its coroutine has ended, if it has left no outcome. ``stop``
    asks the coroutine to end, and ``end`` notes that the item has its outcome.
    """

    begin: Callable[[JobSpec, str, str], asyncio.Future[outcomes.Death]]
    stop: Callable[[str], None]
    end: Callable[[str], None]


class MemoryWorker:
    """One worker of a round.

    Args:
        me: The worker.
        executor: The name of its process.
        spec: The job of each worker of the round.
        store: Where the objects are.
        items: Runs the items.
        once: Whether the worker takes one item at most.
    """

    def __init__(
        self, me: WorkerId, executor: str, spec: JobSpec, store: Store, items: Items, *, once: bool
    ) -> None:
        self._me = str(me)
        self._executor = executor
        self._spec = spec
        assert spec.crew is not None
        self._crew = spec.crew
        self._store = store
        self._items = items
        self._clock = asyncio.get_running_loop().time
        self._pull = pull.Pull(
            *(me, executor, spec.key, spec.order.scope, spec.crew.terms, self._clock), once=once
        )
        self._news = asyncio.Event()
        self._terminating = False
        self._item = ""  # the name of the running item's job
        self._running = 0, 0  # that item, and its attempt
        self._ended: asyncio.Future[outcomes.Death] | None = None
        self._input: tuple[wire.Input, tuple[wire.DataRef, ...]] | None = None

    def tell(self) -> None:
        """Tell the worker that the store has changed."""
        self._news.set()

    def terminate(self) -> None:
        """Ask the worker to end."""
        self._terminating = True
        self._news.set()

    async def run(self) -> int:
        """Work until nothing is left; return the exit code."""
        steps, answer = self._pull.steps(), None
        while True:
            try:
                operation = steps.send(answer)
            except StopIteration as end:
                code: int = end.value
                return code
            answer = await self._carry_out(operation)

    async def _carry_out(self, operation: pull.Operation) -> Any:
        store = self._store
        match operation:
            case pull.Create(name, body, metadata):
                created = await store.create(name, body, metadata)
                if self._item and name.endswith(".outcome"):
                    self._items.end(self._item)
                    self._item = ""
                    # The item's coroutine may have stored this very outcome.
                    found = None if created else await store.look(name)
                    created = created or (found is not None and found.metadata == metadata)
                return created
            case pull.Read(name):
                try:
                    read = await store.get(name)
                except NotFound:
                    return None
                return read.body, read.metadata
            case pull.List(prefix):
                await asyncio.sleep(0)  # a store in memory never waits, and a listing is long
                return [(info.name, info.metadata) for info in await store.list(prefix)]
            case pull.Delete(name):
                return await store.delete([name])
            case pull.Fetch(item, slot):
                return await self._fetch(item, slot)
            case pull.Open() | pull.Ready():
                return None
            case pull.Start(item, attempt):
                self._start(item, attempt)
            case pull.Stop():
                self._items.stop(self._item)
            case pull.Wait(seconds):
                return await self._wait(seconds)
        return None

    async def _fetch(self, item: int, number: int) -> bool | pull.Ended:
        name = wire.input_key(self._spec.order.scope, number)
        try:
            body = (await self._store.get(name)).body
        except NotFound:
            return False
        footer: Mapping[str, Any] = json.loads(frames.footer_of(body))
        position = item - self._pull.items.slots[number].first
        if (message := footer.get("failed", {}).get(str(position))) is not None:
            return _ended(outcomes.death_of_input(message))
        start = sum(footer["frames"][:position])
        stop = start + footer["frames"][position]
        data = footer.get("data", {}).get(str(position), ())
        part = wire.Input(name, start, stop, footer["digests"][position])
        self._input = part, tuple(wire.DataRef(**ref) for ref in data)
        return True

    def _start(self, item: int, attempt: int) -> None:
        assert self._input is not None
        order, (arguments, data) = self._spec.order, self._input
        self._item = f"{order.group_id}-{item}-{attempt}"
        labels = of_attempt({**self._spec.labels, KIND: "item"}, item, attempt)
        own_order = replace(
            order,
            job_id=f"{order.group_id}-{item}",
            index=item,
            attempt=attempt,
            arguments=arguments,
            data=(*order.data, *data),
            output_dir=f"{self._crew.outputs}/{item}",
        )
        spec = replace(
            self._spec, name=self._item, labels=labels, order=own_order, timeout=order.timeout
        )
        self._running = item, attempt
        self._ended = self._items.begin(spec, self._executor, self._me)

    async def _outcome_after(self, death: outcomes.Death) -> pull.Ended:
        """Return the outcome that the item's coroutine has stored, else one of its *death*."""
        key, scope = self._spec.key, self._spec.order.scope
        index, attempt = self._running
        try:
            found = await self._store.get(wire.attempt_key(scope, index, attempt, "outcome"))
            outcome = wire.Outcome.verified(found.metadata, key, scope, index, attempt)
        except (BackendError, ValueError):  # there is none, or the test has forged it
            return _ended(death)
        return pull.Ended(outcome, wire.body_of(found.body, found.metadata))

    async def _wait(self, seconds: float) -> pull.News | pull.Ended:
        ended = self._ended
        news = asyncio.ensure_future(self._news.wait())
        waiting: set[asyncio.Future[Any]] = {news} if ended is None else {news, ended}
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if ended is not None and ended.done():
            self._ended = None
            return await self._outcome_after(ended.result())
        if not self._news.is_set():
            return pull.News.TIME
        self._news.clear()
        if self._terminating:
            self._terminating = False
            return pull.News.TERMINATE
        return pull.News.CHANGE


def _ended(death: outcomes.Death) -> pull.Ended:
    item = wire.Item(wire.ItemState.OPEN, 1)
    return pull.Ended(*outcomes.outcome_of_death(death, item, ""))
