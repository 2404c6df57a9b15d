"""Read the history of every item of a batch, and pack it for the record of a collection."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kinetic._progress.tally import State
from kinetic._report.facts import Attempt, Item
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.notes import ERROR, Note
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._tasks import in_thread
from kinetic.aio._engine.batch import Batch
from kinetic.aio._engine.progress import state_of
from kinetic.job_status import JobStatus

_NO_NOTE: Note = {}


async def read(batch: Batch) -> list[Item]:
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
    return await _read_items(batch, range(batch.known), inputs)


async def read_packed(batch: Batch, verified: Mapping[int, wire.Outcome]) -> Sequence[Any]:
    """Return the history of *batch*, whose items have all succeeded, as values for JSON.

    *verified* has the outcomes of items whose first attempt has returned a value. Unless a request
    has retried such an item, it has no other attempt, so this doesn't list it.

    Raises:
        NotFound, WireError: As `read`.
    """
    if await batch.submission.read_collected():
        return await batch.submission.read_history()
    inputs = await _read_notes(batch)
    standing = batch.submission.requests.standing
    first = {index: value for index, value in verified.items() if not standing(index).base}
    known = range(batch.known)  # the thread below must not keep the batch alive
    unknown = [index for index in known if index not in first]
    listed = {item.index: item for item in await _read_items(batch, unknown, inputs)}

    def pack(index: int) -> tuple[Any, ...]:
        if (outcome := first.get(index)) is None:
            item = listed[index]
            return item.attempts, item.input, item.pruned or item.result
        attempt = _build_attempt(1, wire.Attempt(outcome=outcome))
        return (attempt,), inputs.get(index, _NO_NOTE), outcome.note or _NO_NOTE

    return await in_thread(lambda: [*map(pack, known)])


async def _read_notes(batch: Batch) -> dict[int, Note]:
    """Read the notes of the inputs, and then the requests to stop or retry.

    Items are read after the requests: a listing from before a stop may lack an attempt that had
    begun.
    """
    if not batch.submits and batch.inputs.total is None:
        await batch.inputs.read()
    inputs = await batch.inputs.notes(batch.manifest["parameters"])
    await batch.submission.requests.read()
    return inputs


async def _read_items(
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
