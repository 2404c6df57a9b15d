"""Records of a batch's items for tables: flat dicts of scalars, read without unpickling."""

from __future__ import annotations

import importlib
import math
import time
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from kinetic._messages import suggest
from kinetic._report.facts import Direction, Item
from kinetic._runner.protocol.notes import RESULT, Scalar
from kinetic._tasks import in_thread
from kinetic.aio._engine import history
from kinetic.aio._engine.batch import Batch
from kinetic.errors import ConfigurationError

FIELDS = (*("index", "job_id", "state", "reason", "attempts", "began_at", "ended_at", "seconds"),)
"""The fields of every record, before those of its input and its result."""

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers that a note has as text, because JSON has no such numbers."""


async def read(batch: Batch) -> list[dict[str, Any]]:
    """Return a record of each item of *batch*, as the store has it now, by index.

    Raises:
        NotFound, WireError: As `history.read`.
    """
    items, now = await _read_items(batch), time.time()
    return await in_thread(lambda: [_build_record(batch, item, now) for item in items])


async def to_dataframe(batch: Batch) -> Any:
    """Return the records of *batch* as a ``pandas.DataFrame``.

    Raises:
        ConfigurationError: pandas isn't installed.
        NotFound, WireError: As `history.read`.
    """
    try:
        pandas: Any = await in_thread(importlib.import_module, "pandas")
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            "to_dataframe() needs pandas, which isn't installed: run `pip install pandas`, or call "
            "records(), which returns the same as dicts"
        ) from exc
    records = await read(batch)
    return pandas.DataFrame(records, columns=None if records else FIELDS).set_index("index")


async def best(batch: Batch, metric: str | None, direction: Direction | None) -> dict[str, Any]:
    """Return the record of the item with the best *metric*; of equal ones, the first.

    None, for *metric* or *direction*: as the batch searches if it is a sweep.

    Raises:
        ConfigurationError: No result has a number of that name; or *metric* is None and the results
            don't have exactly one numeric scalar.
        NotFound, WireError: As `history.read`.
    """
    items = await _read_items(batch)
    goal = batch.goal
    metric = metric or (goal.metric if goal is not None else None)
    direction = direction or (goal.direction if goal is not None else "minimize")
    names = sorted({name for item in items for name in item.result if _numbers(item, name)})
    if not names:
        raise ConfigurationError(f"no item of {batch.group_id} has a numeric result yet")
    if metric is None and len(names) > 1:
        listed = ", ".join(map(repr, names))
        raise ConfigurationError(f"the results of {batch.group_id} have {listed}: name the metric")
    metric = names[0] if metric is None else metric
    if metric not in names:
        raise ConfigurationError(
            f"no result of {batch.group_id} is a number named {metric!r}; {suggest(metric, names)}"
        )
    ranked = [(number, item) for item in items for number in _numbers(item, metric)]
    choose = min if direction == "minimize" else max
    return _build_record(batch, choose(ranked, key=itemgetter(0))[1], time.time())


async def _read_items(batch: Batch) -> list[Item]:
    if not await batch.exists():
        raise batch.submission.identity.gone_error
    return await history.read(batch)


def _build_record(batch: Batch, item: Item, now: float) -> dict[str, Any]:
    last = item.last
    values = (
        item.index,
        batch.submission.identity.job_id(item.index),
        item.state.name.lower(),
        item.message,
        len(item.attempts),
        None if last is None else _moment(last.begun),
        None if last is None else _moment(last.ended),
        item.seconds(now),
    )
    return {
        **dict(zip(FIELDS, values, strict=True)),
        **{_field("input", name): _value(value) for name, value in item.input.items()},
        **{_field("result", name): _value(value) for name, value in item.result.items()},
        **{_field("pruned", name): _value(value) for name, value in item.pruned.items()},
    }


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _field(kind: str, name: str) -> str:
    """Return the field of the scalar *name*; a result that is a scalar itself is ``result``."""
    if kind == name == RESULT:
        return RESULT
    return f"{kind}{name}" if name.startswith("[") else f"{kind}.{name}"


def _value(value: Scalar) -> Scalar:
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def _numbers(item: Item, metric: str) -> list[float]:
    """Return the number that *item* has for *metric*; an empty list if it is none, or nan."""
    value = _value(item.result.get(metric))
    return [value] if isinstance(value, int | float) and not math.isnan(value) else []
