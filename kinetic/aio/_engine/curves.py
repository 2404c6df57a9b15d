"""Read the curves of a batch's items as they are now: what the attempts have reported so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kinetic._progress.standing import Goal
from kinetic._report.digest import choose_curves
from kinetic._report.facts import Curve, Curves, Item
from kinetic._runner.protocol import metrics as protocol
from kinetic._tasks import for_each
from kinetic.aio._engine.batch import Batch
from kinetic.aio._engine.metrics import READS_AT_ONCE, read_slot, read_tail
from kinetic.errors import NotFound

MAX_CURVES = 200
"""Maximum number of items whose curves are read."""

MAX_SLOTS = 2000
"""Approximate maximum number of slots that are read for all curves."""


class _Piece(NamedTuple):
    """A stored part of a curve: a slot of an attempt; None is the tail in its outcome."""

    item: int
    attempt: int
    slot: int | None


class CurveReader:
    """Read curves without waiting for more reports; a stored piece is read once."""

    def __init__(
        self, batch: Batch, *, max_curves: int = MAX_CURVES, max_slots: int = MAX_SLOTS
    ) -> None:
        self._submission = batch.submission
        self._max_curves = max_curves
        self._max_slots = max_slots
        self._read: dict[_Piece, Curve] = {}

    async def read(self, items: Sequence[Item], goal: Goal | None) -> Curves:
        """Return the curves of the last attempts; *items* are all items of the batch.

        Of many items, return the curves of the best ones and of every nth one. Of many slots, read
        every nth one. If `results` has removed the reports, return no curve.
        """
        if self._submission.collected is not None or not any(map(_may_have_reported, items)):
            return Curves()
        slots = await self._list_slots()
        reported = [item.index for item in items if item.has_tail or _attempt_of(item) in slots]
        chosen = choose_curves(reported, items, goal, self._max_curves)
        pieces = {index: [*self._pieces_of(items[index], slots, len(chosen))] for index in chosen}
        new = [piece for found in pieces.values() for piece in found if piece not in self._read]
        await for_each(self._read_piece, new, limit=READS_AT_ONCE)
        curves = {
            index: {step: value for piece in found for step, value in self._read.get(piece, ())}
            for index, found in pieces.items()
        }
        return Curves(
            by_item={index: sorted(curve.items()) for index, curve in curves.items()},
            reported=len(reported),
        )

    async def _list_slots(self) -> dict[tuple[int, int], int]:
        """Return how many slots each attempt has stored, by item and number."""
        prefix = protocol.metrics_prefix(self._submission.identity.scope)
        counts: dict[tuple[int, int], int] = {}
        for info in await self._submission.store.list(prefix):
            index, number, slot = info.name.removeprefix(prefix).split(".")
            if slot.isdecimal():  # the others are requests to prune
                counts[int(index), int(number)] = int(slot) + 1
        return counts

    def _pieces_of(
        self, item: Item, slots: Mapping[tuple[int, int], int], curves: int
    ) -> Sequence[_Piece]:
        """Choose the slots of an item to read: every nth one and the last; and add the tail."""
        at = _attempt_of(item)
        count = slots.get(at, 0)
        step = max(1, math.ceil(count / max(2, self._max_slots // curves)))
        chosen = sorted({*range(0, count, step), count - 1}) if count else []
        return [*(_Piece(*at, slot) for slot in chosen), *([_Piece(*at, None)] * item.has_tail)]

    async def _read_piece(self, piece: _Piece) -> None:
        index, number, slot = piece
        try:
            reports = await (
                read_tail(self._submission, index, number)
                if slot is None
                else read_slot(self._submission, index, number, slot)
            )
        except NotFound:  # another process is removing the batch
            return
        self._read[piece] = reports.entries if reports is not None else ()


def _may_have_reported(item: Item) -> bool:
    """Return whether *item* may have reports, as far as its outcome says."""
    last = item.attempts[-1] if item.attempts else None
    return item.has_tail or (last is not None and last.kind not in ("value", "error"))


def _attempt_of(item: Item) -> tuple[int, int]:
    return item.index, item.attempts[-1].number if item.attempts else 0
