"""Read the state of a submission's items from the store; a submission is a batch or a single job.

The store only gains facts, so an older view is incomplete but not wrong. A final item stays final
until a request to retry it is read.

A process *claims* an attempt by creating its claim object, and then runs it. A client can also
create the claim to keep the attempt from ever running: the attempt is then *void*. An attempt is
*open* until it has an outcome. A client *closes* an attempt that can't write its own outcome.

An item is *open* until it is *final*: it has a value, or failed and has no retry
left, or was stopped and no claimed attempt of it is open. A retry request reopens
it. The item's *base* is then the number of its last attempt before the request;
attempts up to the base no longer count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from kinetic._runner.protocol import signing, wire
from kinetic._tasks import in_thread
from kinetic.aio._submissions import results
from kinetic.aio._submissions.control_log import ControlLog
from kinetic.aio._submissions.ids import Identity
from kinetic.aio._submissions.meter import Meter
from kinetic.aio.ports import Object, ObjectInfo, Store
from kinetic.errors import NotFound, WireError

MAX_CACHED, MAX_CACHED_BYTES = 10_000, 4096
"""How many outcomes are held in memory for later callers, and the maximum size of each in bytes."""

SLICE = 100
"""Maximum number of items whose outcomes are verified in one turn of the loop."""

Listener = Callable[[int, "wire.Item | None"], None]

_Verified = tuple[int, int, wire.Outcome, bytes]
"""An item, the number of its attempt, and the verified outcome with its body."""


class ItemStates:
    """The states of one submission's items, read from their objects."""

    def __init__(self, identity: Identity, store: Store) -> None:
        self.identity = identity
        self.requests = ControlLog(store, identity.scope, identity.key)
        self.ended = 0
        """How many items are final."""
        self.meter = Meter()
        self.collected: int | None = None
        """The number of items if this process knows that the batch is collected, otherwise None."""
        self._store = store
        self._items: dict[int, wire.Item] = {}
        self._attempts: dict[int, dict[int, wire.Attempt]] = {}
        self._final_since: dict[int, int] = {}  # final item → how many requests were known then
        self._cached: dict[int, tuple[int, wire.Outcome, bytes]] = {}
        self._listeners: tuple[Listener, ...] = ()

    def item(self, index: int) -> wire.Item | None:
        """Return the item as last read; only a retry request changes a final item."""
        return self._items.get(index)

    def is_final(self, index: int) -> bool:
        """Return whether the item is final and wasn't reopened since."""
        known = self._items.get(index)
        return known is not None and known.state.final and not self._is_reopened(index, known)

    def unfinished(self, indices: Iterable[int]) -> list[int]:
        """Return those of *indices* whose items are not final."""
        return [index for index in indices if not self.is_final(index)]

    def is_pruned(self, index: int) -> bool:
        """Return whether the item has ended as pruned, as last read."""
        outcome = self._items.get(index, _UNTOUCHED).outcome
        return outcome is not None and outcome.reason == wire.PRUNED

    def attempt(self, index: int, number: int) -> wire.Attempt:
        """Return one attempt as last read."""
        return self._attempts.get(index, {}).get(number, wire.Attempt())

    def claimant(self, index: int) -> str | None:
        """Return the process that has claimed the item's last attempt, as last read."""
        item = self._items.get(index, _UNTOUCHED)
        return self.attempt(index, item.attempt).executor

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call *listener* with the index and state of each item that is read.

        The state is None if only the item's status or error changed. Return a function that
        removes the listener.
        """
        self._listeners = (*self._listeners, listener)

        def stop() -> None:
            kept = [*self._listeners]
            kept.remove(listener)
            self._listeners = tuple(kept)

        return stop

    def concerns(self, index: int, number: int) -> bool:
        """Return whether a report on attempt *number* can still change the item."""
        item = self._items.get(index)
        return item is None or not (item.state.final or number < item.attempt)

    def has_begun(self, index: int) -> bool:
        """Return whether an attempt of the item is known, or the item ended without one."""
        item = self._items.get(index)
        return item is not None and (item.state.final or bool(self._attempts.get(index)))

    # --- reading ---

    async def read_item(self, index: int) -> wire.Item:
        """Read one item's objects now, and new requests only if requests can change its state."""
        known_requests = len(self.requests.entries)
        found = await self.list_attempts(index)
        known = self._items.get(index)
        # Its objects were removed: by `results()`, or else with the batch.
        if not found and known is not None and known.state.final and known.outcome is not None:
            return known if await self.read_collected() else _UNTOUCHED
        if self._state_of(index, self._merge(index, found)).state is not wire.ItemState.SUCCEEDED:
            await self.requests.read()
            while (
                known_requests < len(self.requests.entries)
                and self.requests.standing(index).stopped
            ):
                # An attempt may have begun before the stop request that was just read.
                known_requests = len(self.requests.entries)
                found = await self.list_attempts(index)
            if await self.read_collected():  # after the listing, which may lack removed objects
                return self._items.get(index, _UNTOUCHED)
        return self._update(index, found, known_requests)

    async def list_attempts(self, index: int) -> dict[int, wire.Attempt]:
        """Read the attempts of an item now."""
        listed = await self._store.list(wire.item_prefix(self.identity.scope, index))
        return self._parse(index, listed)

    async def all_attempts(self, indices: Iterable[int]) -> dict[int, dict[int, wire.Attempt]]:
        """Read the attempts of items now, including final items."""
        found: dict[int, dict[int, wire.Attempt]] = {}
        for prefix, members in self._blocks(indices).items():
            if len(members) == 1:  # don't list the other 499 items of the block
                found[members[0]] = await self.list_attempts(members[0])
                continue
            for index, listed in (await self._list_block(prefix, members)).items():
                found[index] = self._parse(index, listed)
            await asyncio.sleep(0)
        return found

    async def retry_bases(self, indices: Iterable[int]) -> dict[int, int]:
        """Return item → base of a retry, for those of *indices* that ended without a value.

        The caller has just read the items.
        """
        failed = [
            index
            for index in indices
            if self.is_final(index) and self._items[index].state is not wire.ItemState.SUCCEEDED
        ]
        found = (await self.all_attempts(failed)).items()
        bases = {
            index: wire.retry_base(self.requests.standing(index), attempts, self.identity.budgets)
            for index, attempts in found
        }
        return {index: base for index, base in bases.items() if base is not None}

    async def read_end(
        self, index: int, number: int, receipt: wire.Receipt | None = None
    ) -> wire.Item | None:
        """Read the outcome of one attempt by one request; a listing takes at least two.

        Return None if a listing must decide: the attempt has no outcome, the outcome of an earlier
        attempt is unknown, or the item was stopped. A *receipt* with the outcome's body saves the
        request.

        Raises:
            WireError: The outcome, or the receipt, isn't what the job has signed.
        """
        end = await self._fetch_end(index, number, receipt)
        return None if end is None else (await self._take_in([end])).get((index, number))

    async def read_ends(
        self, attempts: Iterable[tuple[int, int]]
    ) -> Mapping[tuple[int, int], wire.Item]:
        """Read outcomes as `read_end` does; return the items of those that it has read."""
        ends: list[_Verified] = []
        key, scope = self.identity.key, self.identity.scope
        named = {
            wire.attempt_key(scope, *attempt, "outcome"): attempt
            for attempt in attempts
            if self._knows_earlier(*attempt)
        }
        for name, content in (await self._store.get_many(named)).items():
            with contextlib.suppress(WireError):  # `read_end` tells
                ends.append(
                    (*named[name], *results.verified_outcome(content, key, scope, *named[name]))
                )
        return await self._take_in(ends)

    def _knows_earlier(self, index: int, number: int) -> bool:
        """Return whether the outcomes of all earlier attempts of the item are known.

        How they ended decides whether this one counts, by the budgets.
        """
        return all(self.attempt(index, before).outcome for before in range(1, number))

    async def _fetch_end(
        self, index: int, number: int, receipt: wire.Receipt | None = None
    ) -> _Verified | None:
        """Return the verified outcome of an attempt; None if a listing must decide."""
        if not self._knows_earlier(index, number):
            return None
        name = wire.attempt_key(self.identity.scope, index, number, "outcome")
        if receipt is not None and wire.BODY in receipt.metadata:
            content = Object(name=name, body=b"", metadata=receipt.metadata, generation=0)
        else:
            try:
                content = await self._store.get(name)
            except NotFound:
                return None
        key, scope = self.identity.key, self.identity.scope
        return index, number, *results.verified_outcome(content, key, scope, index, number)

    async def _take_in(self, ends: Sequence[_Verified]) -> Mapping[tuple[int, int], wire.Item]:
        """Update the items of verified outcomes; return those that need no listing."""
        if [it for it in ends if it[2].kind is not wire.Kind.VALUE]:
            await self.requests.read()
            standing = self.requests.standing
            # If an item is stopped, this doesn't show whether its next attempt has begun.
            ends = [
                it for it in ends if it[2].kind is wire.Kind.VALUE or not standing(it[0]).stopped
            ]
            if await self.read_collected():  # a slow process may write after the removal
                return {it[:2]: self._items[it[0]] for it in ends if it[0] in self._items}
        known_requests = len(self.requests.entries)
        found: dict[tuple[int, int], wire.Item] = {}
        for index, number, outcome, body in ends:
            self._hold(index, number, outcome, body)
            attempts = {number: wire.Attempt(outcome.executor, outcome)}
            found[index, number] = self._update(index, attempts, known_requests)
        return found

    async def read_items(self, indices: Iterable[int]) -> None:
        """Read the objects of these items now; one listing covers up to 500 items."""
        await self.requests.read()
        for prefix, members in self._blocks(indices).items():
            await self._read_block(prefix, members)

    def _blocks(self, indices: Iterable[int]) -> dict[str, list[int]]:
        blocks: dict[str, list[int]] = {}
        for index in sorted({*indices}):
            blocks.setdefault(wire.block_prefix(self.identity.scope, index), []).append(index)
        return blocks

    async def _list_block(self, prefix: str, indices: list[int]) -> dict[int, list[ObjectInfo]]:
        groups: dict[int, list[ObjectInfo]] = {index: [] for index in indices}
        for info in await self._store.list(prefix):
            index_text = info.name[len(prefix) :].partition(".")[0]
            if index_text.isdecimal() and int(index_text) in groups:
                groups[int(index_text)].append(info)
        return groups

    async def _read_block(self, prefix: str, indices: list[int]) -> None:
        """List the items of one block; list again the items that were stopped meanwhile."""
        requests = self.requests
        while indices:
            known_requests = len(requests.entries)
            found: dict[int, dict[int, wire.Attempt]] = {}
            for index, listed in (await self._list_block(prefix, indices)).items():
                found[index] = self._parse(index, listed)
                if len(found) % SLICE == 0:
                    await asyncio.sleep(0)
            all_values = all(
                any(it.outcome and it.outcome.kind is wire.Kind.VALUE for it in attempts.values())
                for attempts in found.values()
            )
            # After the listing, as in `read_item`.
            if not all_values and await self.read_collected():
                return
            for index, attempts in found.items():
                self._update(index, attempts, known_requests)
            if known_requests == len(requests.entries):
                return
            # Another task has read new requests. An item that they stop may have been claimed after
            # the listing, so list it again.
            indices = [it for it in self.unfinished(indices) if requests.standing(it).stopped]

    async def read_collected(self) -> bool:
        """Return whether the batch is collected: all items had values; their objects are removed.

        If this returns False after a listing of attempts, that listing was complete.

        Raises:
            WireError: The object that records the removal is forged or damaged.
        """
        if self.collected is None and self.identity.leased:
            if await self._store.look(wire.collected_key(self.identity.scope)) is None:
                return False
            fields = await self._read_collected_fields()
            attempts: dict[str, int] = fields["attempts"]
            pruned, history = {*fields.get("pruned", ())}, fields["history"]
            for index in range(fields["total"]):
                item = _SHARED[wire.PRUNED if index in pruned else "", False]
                if (number := attempts.get(str(index))) is not None:
                    item = item._replace(attempt=number)
                self._set(index, item)
                if history is not None and item.outcome is not None:
                    _, _, note = history[index]
                    item = item._replace(outcome=item.outcome._replace(note=note))
                self._notify(index, item)
                if index % (SLICE * 10) == 0:
                    await asyncio.sleep(0)
            self.collected = fields["total"]
        return self.collected is not None

    async def refuse_collected(self) -> None:
        """Refuse to read items whose objects were removed."""
        if await self.read_collected():
            raise NotFound(
                f"results() has collected the values of {self.identity.id} and removed the objects "
                "of its items; results(cleanup=False) keeps the objects"
            )

    async def _read_collected_fields(self) -> dict[str, Any]:
        scope = self.identity.scope
        name = wire.collected_key(scope)
        content = await self._store.get(name, limit=None)  # of a large batch, it is large
        if not signing.is_signed(content.metadata, self.identity.key, scope, name, content.body):
            raise WireError(f"{name} is forged or damaged; nothing of it was used")
        fields: dict[str, Any] = json.loads(content.body)
        self.meter.restore(fields["spent"])
        return fields

    async def write_collected(self, total: int, history: Sequence[Any] | None) -> None:
        """Record that all *total* items have their values, before their objects are removed.

        No later request changes this record: an item with a value never runs again. *history* has
        what a report needs of each item.
        """
        retried = {index: item.attempt for index, item in self._items.items() if item.attempt != 1}
        fields = {
            "total": total,
            "attempts": retried,
            "pruned": [*filter(self.is_pruned, self._items)],
            "spent": self.meter.to_fields(),
            "history": history,
        }
        scope = self.identity.scope
        name, body = wire.collected_key(scope), json.dumps(fields, separators=(",", ":")).encode()
        await self._store.create(
            name, body, {"mac": signing.sign(self.identity.key, scope, name, body)}
        )
        self.collected = total

    async def names_of_values(self) -> list[str]:
        """Return the names of the claims and outcomes of all attempts that returned a value."""
        scope = self.identity.scope
        items = [*self._items.items()]  # the loop may change the dict while the thread reads it
        return await in_thread(
            lambda: [
                wire.attempt_key(scope, index, item.attempt, part)
                for index, item in items
                if item.state is wire.ItemState.SUCCEEDED
                for part in ("claim", "outcome")
            ]
        )

    async def read_history(self) -> Sequence[Any]:
        """Return the facts about each item that `write_collected` stored for reports."""
        kept: Sequence[Any] | None = (await self._read_collected_fields())["history"]
        if kept is None:
            await self.refuse_collected()
        return kept or ()

    def held(self, index: int, number: int) -> tuple[wire.Outcome, bytes] | None:
        """Return what `outcome` would return, if it is in memory with the whole value."""
        held = self._cached.get(index)
        return None if held is None or held[0] != number or held[1].value else held[1:]

    def drop(self, index: int) -> None:
        """Keep the item's outcome in memory no longer."""
        self._cached.pop(index, None)

    async def outcome(self, index: int, number: int) -> tuple[wire.Outcome, bytes]:
        """Return the verified outcome of one attempt with its body.

        Raises:
            NotFound: The outcome was cleaned up.
            WireError: The outcome is forged, damaged, or absent.
        """
        held = self._cached.pop(index, None)
        if held is not None and held[0] == number:
            return held[1], held[2]
        return await self.read_outcome(index, number)

    async def read_outcome(self, index: int, number: int) -> tuple[wire.Outcome, bytes]:
        """Return the outcome like `outcome`, but always send a request and keep a cached copy."""
        identity = self.identity
        name = wire.attempt_key(identity.scope, index, number, "outcome")
        try:
            content = await self._store.get(name)
        except NotFound as exc:
            if not await self._store.list(identity.manifest_name):
                raise identity.gone_error from exc
            await self.refuse_collected()
            raise WireError(
                f"{name} is not in {self._store.url} any more, or something else is in its "
                "place; check who can write there"
            ) from exc
        key, scope = identity.key, identity.scope
        outcome, body = results.verified_outcome(content, key, scope, index, number)
        item = self._items.get(index)
        has_value = item is not None and item.state is wire.ItemState.SUCCEEDED
        if has_value and outcome.kind is not wire.Kind.VALUE:
            await self.refuse_collected()  # a slow process may write after the removal
        return outcome, body

    async def value(self, index: int, outcome: wire.Outcome, body: bytes) -> Any:
        """Rebuild the value of an outcome; see `results.value_of`."""
        try:
            return await results.value_of(self._store, outcome, body, self.identity.job_id(index))
        except NotFound:
            await self.refuse_collected()
            raise

    async def kept_log(self, index: int, number: int) -> list[str]:
        """Return the output of an attempt that its runner stored, one host after the other."""
        prefix = wire.log_prefix(self.identity.scope, index, number)
        names = [info.name for info in await self._store.list(prefix)]
        log: list[str] = []
        for name in names:
            try:
                content = await self._store.get(name, limit=wire.LOG_BYTES)
            except NotFound:  # a cleanup has just removed the object
                continue
            key, scope = self.identity.key, self.identity.scope
            if not signing.is_signed(content.metadata, key, scope, name, content.body):
                logging.warning("the log %s is forged or damaged; it is not shown", name)
                continue
            lines = content.body.decode(errors="replace").removesuffix("\n").split("\n")
            host = f"[{int(name.removeprefix(prefix))}] " if len(names) > 1 else ""
            log += [host + line for line in lines]
        return log

    # --- updating ---

    def _parse(self, index: int, listed: Iterable[ObjectInfo]) -> dict[int, wire.Attempt]:
        scope, metadata = self.identity.scope, {info.name: info.metadata for info in listed}
        found = wire.attempts_of(metadata.items(), self.identity.key, scope).get(index, {})
        for number, attempt in () if self.is_final(index) else found.items():
            if (outcome := attempt.outcome) is not None:
                name = wire.attempt_key(scope, index, number, "outcome")
                body = wire.body_of(b"", metadata.get(name, {}))
                if results.is_body_of(outcome, body):
                    self._hold(index, number, outcome, body)
        return found

    def _hold(self, index: int, number: int, outcome: wire.Outcome, body: bytes) -> None:
        """Keep an outcome for the next caller, if it is small and there is room."""
        if len(body) <= MAX_CACHED_BYTES and len(self._cached) < MAX_CACHED:
            self._cached[index] = (number, outcome, body)

    def _merge(self, index: int, found: dict[int, wire.Attempt]) -> dict[int, wire.Attempt]:
        for number, known in self._attempts.get(index, {}).items():
            other = found.get(number)
            # Facts only grow: what an older listing lacks exists all the same.
            if other is None or (known.outcome is not None and other.outcome is None):
                found[number] = known
        return found

    def _state_of(self, index: int, attempts: Mapping[int, wire.Attempt]) -> wire.Item:
        return wire.item_state(self.requests.standing(index), attempts, self.identity.budgets)

    def _update(self, index: int, found: dict[int, wire.Attempt], known_requests: int) -> wire.Item:
        """Merge the attempts *found* into the item's known state, and call the listeners.

        A final state is not changed unless a retry has reopened the item.

        *known_requests* is the number of requests to stop or retry that were known when the item
        was read.
        """
        known = self._items.get(index)
        if known is not None and known.state.final and not self._is_reopened(index, known):
            self._notify(index, known)
            return known
        attempts = self._merge(index, found)
        item = self._state_of(index, attempts)
        late = known_requests < len(self.requests.entries) and self.requests.standing(index).stopped
        # An attempt that *found* lacks may have begun before the stop that was read since.
        if late and item.state in (wire.ItemState.FAILED, wire.ItemState.CANCELLED):
            return known if known is not None and not known.state.final else _UNTOUCHED
        self.meter.note(index, attempts, final=item.state is wire.ItemState.SUCCEEDED)
        if attempts and not item.state.final:
            self._attempts[index] = attempts
        self._set(index, _intern(item))
        self._notify(index, item)
        return item

    def _is_reopened(self, index: int, known: wire.Item) -> bool:
        if known.state is wire.ItemState.SUCCEEDED:
            return False
        return self.requests.standing(index).retried > self._final_since.get(index, 0)

    def _set(self, index: int, item: wire.Item) -> None:
        """Keep the item's new state, and count it in ``ended`` while it is final."""
        known = self._items.get(index)
        was_final = known is not None and known.state.final
        self._items[index] = item
        self.ended += item.state.final - was_final
        self._final_since.pop(index, None)
        if item.state.final:
            self._attempts.pop(index, None)
            if item.state is not wire.ItemState.SUCCEEDED:
                self._final_since[index] = len(self.requests.entries)

    def _notify(self, index: int, item: wire.Item | None) -> None:
        for listener in self._listeners:
            listener(index, item)


_UNTOUCHED = wire.Item(wire.ItemState.OPEN, 1)
"""The state of an item without objects: most items of a large batch, most of the time."""

_SUCCEEDED = wire.Item(wire.ItemState.SUCCEEDED, 1, wire.Outcome(kind=wire.Kind.VALUE))

_SHARED = {
    (reason, metrics): _SUCCEEDED._replace(
        outcome=wire.Outcome(kind=wire.Kind.VALUE, reason=reason, metrics=metrics)
    )
    for reason in ("", wire.PRUNED)
    for metrics in (True, False)
}
"""The states in which nearly all items end, by the facts that differ."""


def _intern(item: wire.Item) -> wire.Item:
    """Return *item*, or the shared object of a common state, to save memory."""
    if item.attempt == 1:
        if item.state is wire.ItemState.SUCCEEDED and item.outcome is not None:
            return _SHARED.get((item.outcome.reason, item.outcome.metrics), item)
        if item == _UNTOUCHED:
            return _UNTOUCHED
    return item
