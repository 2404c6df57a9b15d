"""The log of requests to stop and retry items, to which every client of a batch may append.

Each request is a numbered object in the store; the number is called its *slot*.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from kinetic._runner.protocol import frames, wire
from kinetic.aio.ports import Object, Store
from kinetic.errors import NotFound, WireError

if TYPE_CHECKING:
    from kinetic._runner.protocol.workers import Requests

KINDS = ("stop", "retry")

UNTOUCHED = wire.Standing()
UNNAMED = -1
"""An item that no request names: what stops it stops the whole batch."""

MERGE_S = 1.0
"""Minimum interval between two requests to stop single items, in seconds."""


class ControlLog:
    """The requests that this process has read; it calls ``listeners`` with each new request."""

    def __init__(self, store: Store, scope: str, key: bytes) -> None:
        self.entries: list[wire.Request] = []
        self.listeners: list[Callable[[wire.Request], None]] = []
        self.workers: int | None = None
        """How many workers a client has asked for last; None if none has."""
        self._store = store
        self._scope = scope
        self._key = key
        self._effect: Requests | None = None
        self._retried: dict[int, None] = {}
        self._unsent: set[int] = set()
        self._send_lock = asyncio.Lock()
        self._last_sent = -math.inf

    @property
    def effect(self) -> Requests:
        """The effect of the requests read so far, also on workers."""
        if self._effect is None:
            from kinetic._runner.protocol.workers import Requests  # most jobs have no request

            self._effect = Requests()
        return self._effect

    def standing(self, index: int) -> wire.Standing:
        """Return the effect of the requests read so far on an item."""
        return UNTOUCHED if self._effect is None else self._effect.standing(index)

    @property
    def all_stopped(self) -> bool:
        """Whether the whole batch was stopped, even if items were retried since."""
        return self.standing(UNNAMED).stopped

    @property
    def removing(self) -> bool:
        """Whether the batch is being removed; later requests are ignored."""
        return self.standing(UNNAMED).removing

    @property
    def last_retry(self) -> int:
        """The number of the last request to retry; 0 without one."""
        return 0 if self._effect is None else self._effect.retries

    @property
    def reopened(self) -> list[int]:
        """The items that a request has reopened."""
        return [index for index in self._retried if self.standing(index).retried]

    async def read(self) -> list[wire.Request]:
        """Return all entries, in order; read only new ones from the store.

        Raises:
            WireError: An entry is damaged, or has an unknown kind and must not be ignored.
        """
        while True:
            known = len(self.entries)
            name = wire.control_key(self._scope, known)
            try:
                content = await self._store.get(name)
            except NotFound:
                return self.entries
            if known == len(self.entries):  # otherwise, another task has added the entry
                self._note(self._parse(content))

    async def read_new(self) -> None:
        """Read new entries; if there are none, this takes only one small request."""
        if await self._store.look(wire.control_key(self._scope, len(self.entries))) is not None:
            await self.read()

    async def append(self, request: wire.Request) -> None:
        """Add a request after all others."""
        while not await self.append_at(len(await self.read()), request):
            pass

    async def append_at(self, slot: int, request: wire.Request) -> bool:
        """Add a request at exactly *slot*; return False if the slot is taken."""
        name = wire.control_key(self._scope, slot)
        body, metadata = request.signed(self._key, self._scope, name)
        if not await self._store.create(name, body, metadata):
            return False
        if slot == len(self.entries):  # otherwise, another task has added the request
            self._note(request)
        return True

    async def stop_item(self, index: int) -> None:
        """Stop a single item; concurrent callers share one entry of the log."""
        self._unsent.add(index)
        async with self._send_lock:
            if index not in self._unsent:
                return  # another caller's request has included the item
            loop = asyncio.get_running_loop()
            # Even without a wait, the other callers in this turn of the loop join.
            await asyncio.sleep(max(0.0, self._last_sent + MERGE_S - loop.time()))
            items, self._unsent = self._unsent, set()
            try:
                request = wire.Request(kind="stop", items=tuple(sorted(items)), cause="cancel")
                await self.append(request)
            except BaseException:
                self._unsent |= items - {index}  # the others' callers still wait for the lock
                raise
            self._last_sent = loop.time()

    def _parse(self, content: Object) -> wire.Request:
        """Return a stored request; if its signature is wrong, its kind is `UNSIGNED`: no effect."""
        name = content.name
        try:
            request = wire.Request.verified(
                content.body, content.metadata, self._key, self._scope, name
            )
        except frames.MALFORMED as exc:
            raise WireError(
                f"the request {name} is damaged: {exc}; clean up the batch, and submit it again"
            ) from exc
        if request.kind == wire.UNSIGNED:  # anyone may have written it, so it stops nothing
            logging.warning(
                "kinetic ignores the request %s, because it has no valid signature; "
                "check who can write to %s",
                name,
                self._store.url,
            )
        if request.must and request.kind not in KINDS:
            raise WireError(
                f"this version of kinetic doesn't know the request {request.kind!r} in {name}, and "
                "must not ignore it; use the version that stored the request"
            )
        return request

    def _note(self, request: wire.Request) -> None:
        self.entries.append(request)
        self.effect.add(request)
        if request.kind == "scale":
            self.workers = int(request.cause)
        if request.kind == "retry":
            self._retried |= dict.fromkeys(request.bases)
        for listener in tuple(self.listeners):
            listener(request)
