"""Write a page about a batch, from the batch's objects in the store.

This module lists the batch's objects. It reads a short description of each input (its note), and
the failures that the page quotes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic._report import compare, file
from kinetic._report.digest import group_failures
from kinetic._report.facts import BatchReport, Direction, Example, Item
from kinetic._report.page import render
from kinetic._runner.protocol import frames
from kinetic._tasks import for_each, in_thread
from kinetic.aio._engine import history
from kinetic.aio._engine.batch import Batch
from kinetic.aio._engine.curves import CurveReader
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
            NotFound, WireError: As `history.read`.
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
    """Collect the content of the page about *batch* from the store; nothing is unpickled.

    This takes as many requests as `history.read`, and one more for each failure that is quoted. If
    jobs have reported metrics, it takes one more listing, and one request for each stored piece.
    """
    if not await batch.exists():
        raise batch.submission.identity.gone_error
    items = await history.read(batch)
    manifest = batch.manifest
    quoted = [group.example for group in (await in_thread(group_failures, items))[:MAX_QUOTED]]
    examples = await _read_in_full(batch, [items[index] for index in quoted])
    record, terms = manifest.get("record", {}), manifest.get("terms", {})
    return BatchReport(
        group_id=batch.group_id,
        name=manifest["name"] or "",
        function=record.get("func_name", ""),
        tags=manifest["tags"],
        where=_location(record),
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


def _location(record: Mapping[str, str]) -> str:
    parts = [record.get(name, "") for name in ("project", "zone", "cluster_name", "namespace")]
    return " / ".join([record.get("backend", ""), *(part for part in parts if part)])


async def _read_in_full(batch: Batch, items: Iterable[Item]) -> dict[int, Example]:
    """Return the texts of failures by item; leave out the outcomes that were removed."""
    found: dict[int, Example] = {}

    async def read_example(item: Item) -> None:
        if (failure := item.failure) is None:
            return
        try:
            outcome, body = await batch.submission.read_outcome(item.index, failure.number)
            error_fields: dict[str, Any] = (
                frames.unpack(body).fields.get("error", {}) if body else {}
            )
            texts = {
                name: str(error_fields.get(name, "")) for name in ("message", "traceback", "log")
            }
            kind = str(error_fields.get("qualname", ""))
        except NotFound:
            return
        except (WireError, *frames.MALFORMED) as exc:
            found[item.index] = Example(message=f"the outcome can't be read: {exc}")
            return
        if outcome.phase == "execute" and kind:
            texts["message"] = f"{kind}: {texts['message']}"
        found[item.index] = Example(**texts)

    await for_each(read_example, items, limit=MAX_CONCURRENT_READS)
    return found
