"""Read what is known of every item of a batch: its history, and records of it for tables.

The records are flat dicts of scalars. The history is also packed for the record of a collection.
Nothing is unpickled.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from kinetic._messages import suggest
from kinetic._progress.tally import State
from kinetic._report.facts import Attempt, Direction, Item
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.notes import ERROR, RESULT, Note, Scalar
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._tasks import in_thread
from kinetic.aio._engine.batch import Batch
from kinetic.aio._reading.progress import state_of
from kinetic.errors import ConfigurationError
from kinetic.job_status import JobStatus

_NO_NOTE: Note = {}


async def read_items(batch: Batch) -> list[Item]:
    """Return the items of *batch* as they are now, without their values.

    This takes one listing per 500 items, one listing of the inputs, and one request per 100 inputs.
    If the batch is collected, this reads only the record of the collection.

    Raises:
        NotFound: Another process is removing the objects, or has removed them without a history.
        WireError: The inputs aren't the ones that the submitter signed.
    """
    if await batch.submission.read_collected():
        packed = await batch.submission.read_history()
        return await in_thread(lambda: [*_unpack_items(packed)])
    inputs = await _read_notes(batch)
    return await _list_items(batch, range(batch.known), inputs)


async def read_packed(batch: Batch, verified: Mapping[int, wire.Outcome]) -> Sequence[Any]:
    """Return the history of *batch*, whose items have all succeeded, as values for JSON.

    *verified* has the outcomes of items whose first attempt has returned a value.

    Raises:
        NotFound, WireError: As `read_items`.
    """
    if await batch.submission.read_collected():
        return await batch.submission.read_history()
    inputs = await _read_notes(batch)
    standing = batch.submission.requests.standing
    # Unless a request has retried such an item, it has no other attempt, so don't list it.
    first = {index: value for index, value in verified.items() if not standing(index).base}
    known = range(batch.known)  # the thread below must not keep the batch alive
    unknown = [index for index in known if index not in first]
    listed = {item.index: item for item in await _list_items(batch, unknown, inputs)}

    def pack(index: int) -> tuple[Any, ...]:
        if (outcome := first.get(index)) is None:
            item = listed[index]
            return item.attempts, item.input, item.pruned or item.result
        attempt = _build_attempt(1, wire.Attempt(outcome=outcome))
        return (attempt,), inputs.get(index, _NO_NOTE), outcome.note or _NO_NOTE

    return await in_thread(lambda: [*map(pack, known)])


async def _read_notes(batch: Batch) -> dict[int, Note]:
    """Read the notes of the inputs, and then the requests to stop or retry."""
    if not batch.submits and batch.inputs.total is None:
        await batch.inputs.read()
    inputs = await batch.inputs.notes(batch.manifest["parameters"])
    # Before the items: a listing from before a stop may lack an attempt that had begun.
    await batch.submission.requests.read()
    return inputs


async def _list_items(
    batch: Batch, indices: Collection[int], inputs: Mapping[int, Note]
) -> list[Item]:
    attempts = await batch.submission.all_attempts(indices)
    standings = [batch.submission.requests.standing(index) for index in indices]
    budgets = batch.submission.identity.budgets
    return await in_thread(
        lambda: [
            _build_item(index, standing, budgets, attempts.get(index, {}), inputs.get(index, {}))
            for index, standing in zip(indices, standings, strict=True)
        ]
    )


def _unpack_items(packed_items: Iterable[Any]) -> Iterator[Item]:
    for index, (values_of_attempts, input_note, result) in enumerate(packed_items):
        attempts = tuple(Attempt(*values) for values in values_of_attempts)
        is_pruned = bool(attempts) and attempts[-1].reason == wire.PRUNED
        yield Item(
            index=index,
            state=State.PRUNED if is_pruned else State.SUCCEEDED,
            attempts=attempts,
            input=input_note,
            result=_NO_NOTE if is_pruned else result,
            pruned=result if is_pruned else _NO_NOTE,
        )


def _build_item(
    index: int,
    standing: wire.Standing,
    budgets: RetryBudgets,
    found: Mapping[int, wire.Attempt],
    input_note: Note,
) -> Item:
    """Return the item's history, from the attempts *found* in the store."""
    item = wire.item_state(standing, found, budgets)
    claimant = found.get(item.attempt, wire.Attempt()).executor
    status = JobStatus.PENDING if claimant in (None, wire.VOID) else JobStatus.RUNNING
    state = state_of(item, status, refused=False)
    note = item.outcome.note if item.outcome is not None else None
    return Item(
        index=index,
        state=state,
        attempts=tuple(_build_attempt(*numbered) for numbered in sorted(found.items())),
        input=input_note,
        result=note or _NO_NOTE if state is State.SUCCEEDED else _NO_NOTE,
        pruned=note or _NO_NOTE if state is State.PRUNED else _NO_NOTE,
        has_tail=item.outcome is not None and item.outcome.metrics,
    )


def _build_attempt(number: int, attempt: wire.Attempt) -> Attempt:
    outcome = attempt.outcome
    began_at = None if attempt.executor == wire.VOID else attempt.claimed
    if outcome is None:
        return Attempt(number=number, begun=began_at)
    outcome_note = outcome.note or {}
    return Attempt(
        number=number,
        kind=outcome.kind.value,
        reason=outcome.reason,
        message="" if outcome.kind is wire.Kind.VALUE else str(outcome_note.get(ERROR, "")),
        begun=outcome.started if outcome.started is not None else began_at,
        ended=outcome.ended,
    )


# --- records of items ---

FIELDS = ("index", "job_id", "state", "reason", "attempts", "began_at", "ended_at", "seconds")
"""The fields of every record, before those of its input and its result."""

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Numbers that a note has as text, because JSON has no such numbers."""


async def read(batch: Batch) -> list[dict[str, Any]]:
    """Return a record of each item of *batch*, as the store has it now, by index.

    Raises:
        NotFound, WireError: As `read_items`.
    """
    await batch.refuse_gone()
    items, now = await read_items(batch), time.time()
    return await in_thread(lambda: [_build_record(batch, item, now) for item in items])


async def to_dataframe(batch: Batch) -> Any:
    """Return the records of *batch* as a ``pandas.DataFrame``.

    Raises:
        ConfigurationError: pandas isn't installed.
        NotFound, WireError: As `read_items`.
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
        NotFound, WireError: As `read_items`.
    """
    await batch.refuse_gone()
    items, goal = await read_items(batch), batch.goal
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


def _build_record(batch: Batch, item: Item, now: float) -> dict[str, Any]:
    last = item.last or Attempt(number=0)
    values = (
        item.index,
        batch.submission.identity.job_id(item.index),
        item.state.name.lower(),
        item.message,
        len(item.attempts),
        _moment(last.begun),
        _moment(last.ended),
        item.seconds(now),
    )
    record = dict[str, Any](zip(FIELDS, values, strict=True))
    for kind, note in (("input", item.input), ("result", item.result), ("pruned", item.pruned)):
        for name, value in note.items():
            field = f"{kind}{name}" if name.startswith("[") else f"{kind}.{name}"
            # A result that is a scalar itself has no name of its own.
            record[RESULT if kind == name == RESULT else field] = _value(value)
    return record


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _value(value: Scalar) -> Scalar:
    return _NUMBERS.get(value, value) if isinstance(value, str) else value


def _numbers(item: Item, metric: str) -> list[float]:
    """Return the number that *item* has for *metric*; an empty list if it is none, or infinite."""
    value = _value(item.result.get(metric))
    return [value] if isinstance(value, int | float) and math.isfinite(value) else []
