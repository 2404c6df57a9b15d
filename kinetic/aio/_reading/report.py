"""Write a page about a batch, from the batch's objects in the store.

This module lists the batch's objects. It reads a short description of each input (its note), and
the failures that the page quotes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kinetic._progress.standing import Goal
from kinetic._report import compare, file
from kinetic._report.digest import choose_curves, group_failures
from kinetic._report.facts import BatchReport, Curve, Curves, Direction, Example, Item
from kinetic._report.page import render
from kinetic._runner.protocol import frames
from kinetic._runner.protocol import metrics as protocol
from kinetic._tasks import for_each, in_thread
from kinetic.aio._engine.batch import Batch
from kinetic.aio._reading.metrics import READS_AT_ONCE, read_slot, read_tail
from kinetic.aio._reading.records import read_items
from kinetic.errors import ConfigurationError, NotFound, WireError

MAX_QUOTED = 20
"""Maximum number of groups of similar failures from each of which one failure is quoted."""

MAX_CONCURRENT_READS = 8


class Snapshots:
    """The pages about one batch, or about several batches that they compare.

    *direction* and *metric* say what is best. None: what the first batch searches for if it is a
    sweep; else the lowest value, and the page chooses the metric.
    """

    def __init__(
        self, batches: Sequence[Batch], *, direction: Direction | None, metric: str | None
    ) -> None:
        self._batches = batches
        self._direction = direction
        self._metric = metric
        self._curves = [CurveReader(batch) for batch in batches]

    async def read(self) -> BatchReport:
        """Read the content of the page as it is now.

        Raises:
            ConfigurationError: No result is a number of that metric.
            NotFound, WireError: As `read_items`.
        """
        pairs = zip(self._batches, self._curves, strict=True)
        found = [await read(batch, curves) for batch, curves in pairs]
        report = await in_thread(compare.merge, found) if len(found) > 1 else found[0]
        goal = report.goal
        direction = self._direction or (goal.direction if goal is not None else "minimize")
        metric = self._metric or (goal.metric if goal is not None else None)
        report = replace(report, direction=direction, metric=metric)
        if self._metric is not None:
            await in_thread(_check_metric, report)
        return report

    async def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page as it is now, and return its path.

        Raises:
            ConfigurationError: The page can't be written to *path*; or as `read`.
            NotFound, WireError: As `read`.

        Cancelled: the file has its old content, or the whole new page.
        """
        target = file.check_path(path)
        content = await in_thread(render, await self.read())
        await in_thread(file.write, target, content)
        return target


def _check_metric(report: BatchReport) -> None:
    """Refuse a metric that no result has; accept any name while there are no results."""
    numbers = {
        name
        for item in report.items
        for name, value in item.result.items()
        if isinstance(value, int | float)
    }
    if numbers and report.metric not in numbers:
        raise ConfigurationError(
            f"no result of {report.group_id} is a number named {report.metric!r}; "
            f"the numeric results are {', '.join(sorted(numbers))}"
        )


async def read(batch: Batch, curves: CurveReader) -> BatchReport:
    """Read the content of the page about *batch* from the store; nothing is unpickled.

    This takes as many requests as `read_items`, and one more for each failure that is quoted. If
    jobs have reported metrics, it takes one more listing, and one request for each stored piece.
    """
    await batch.refuse_gone()
    items, manifest = await read_items(batch), batch.manifest
    quoted = [group.example for group in (await in_thread(group_failures, items))[:MAX_QUOTED]]
    examples = await _read_in_full(batch, [items[index] for index in quoted])
    record, terms = manifest.get("record", {}), manifest.get("terms", {})
    places = [record.get(name, "") for name in ("project", "zone", "cluster_name", "namespace")]
    return BatchReport(
        group_id=batch.group_id,
        name=manifest["name"] or "",
        function=record.get("func_name", ""),
        tags=manifest["tags"],
        where=" / ".join([record.get("backend", ""), *filter(None, places)]),
        accelerator=record.get("accelerator", ""),
        max_concurrent=terms.get("max_concurrent"),
        created=float(manifest.get("created", 0.0)),
        read_at=time.time(),
        total=batch.total,
        goal=batch.goal,
        curves=await curves.read(items, batch.goal),
        items=tuple(items),
        examples=examples,
    )


async def _read_in_full(batch: Batch, items: Iterable[Item]) -> dict[int, Example]:
    """Return the texts of failures by item; leave out the outcomes that were removed."""
    found: dict[int, Example] = {}

    async def read_example(item: Item) -> None:
        if (failure := item.failure) is None:
            return
        try:
            outcome, body = await batch.submission.read_outcome(item.index, failure.number)
            fields: dict[str, Any] = frames.unpack(body).fields.get("error", {}) if body else {}
            texts = {name: str(fields.get(name, "")) for name in ("message", "traceback", "log")}
            # Only a user's exception has a type that tells more than the message.
            if outcome.phase == "execute" and (kind := fields.get("qualname")):
                texts["message"] = f"{kind}: {texts['message']}"
            found[item.index] = Example(**texts)
        except NotFound:  # another process is removing the batch
            return
        except (WireError, *frames.MALFORMED) as exc:
            found[item.index] = Example(message=f"the outcome can't be read: {exc}")

    await for_each(read_example, items, limit=MAX_CONCURRENT_READS)
    return found


# --- the curves of the items ---

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
        # An outcome says whether its attempt reported; one that another process wrote doesn't.
        last = (item.attempts[-1].kind for item in items if item.attempts)
        may_be_any = any(item.has_tail for item in items) or not {*last} <= {"value", "error"}
        if self._submission.collected is not None or not may_be_any:
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


def _attempt_of(item: Item) -> tuple[int, int]:
    return item.index, item.attempts[-1].number if item.attempts else 0
