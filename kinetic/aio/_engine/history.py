"""Read the history of every item of a batch, and pack it for the record of a collection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


async def read(batch: Batch) -> list[Item]:
    """Return the items of *batch* as they are now, without their values.

    This takes one listing per 500 items, one listing of the inputs, and one request per 100 inputs.
    If the batch is collected, this reads only the record of the collection.

    Raises:
        NotFound: Another process is removing the objects, or has removed them without a history.
        WireError: The inputs aren't the ones that the submitter signed.
    """
    if await batch.submission.read_collected():
        return [*_unpack_items(await batch.submission.read_history())]
    if not batch.submits and batch.inputs.total is None:
        await batch.inputs.read()
    inputs = await batch.inputs.notes(batch.manifest["parameters"])
    # Read requests first: a listing from before a stop may lack an attempt that had begun.
    await batch.submission.requests.read()
    known = range(batch.known)
    attempts = await batch.submission.all_attempts(known)
    standings = [batch.submission.requests.standing(index) for index in known]
    budgets = batch.submission.identity.budgets
    return await in_thread(
        lambda: [
            _build_item(
                index, standings[index], budgets, attempts.get(index, {}), inputs.get(index, {})
            )
            for index in known
        ]
    )


def pack_items(items: Iterable[Item]) -> list[Any]:
    """Convert *items*, which must all have succeeded, to values for JSON, in the same order."""
    return [[item.attempts, item.input, item.result] for item in items]


def _unpack_items(packed_items: Iterable[Any]) -> Iterator[Item]:
    for index, (attempts, input_note, result) in enumerate(packed_items):
        yield Item(
            index=index,
            state=State.SUCCEEDED,
            attempts=tuple(Attempt(*values) for values in attempts),
            input=input_note,
            result=result,
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
    result: Note = {}
    if item.state is wire.ItemState.SUCCEEDED and item.outcome is not None:
        result = item.outcome.note or {}
    claimant = found.get(item.attempt, wire.Attempt()).executor
    status = JobStatus.PENDING if claimant in (None, wire.VOID) else JobStatus.RUNNING
    return Item(
        index=index,
        state=state_of(item, status, refused=False),
        attempts=tuple(_build_attempt(*numbered) for numbered in sorted(found.items())),
        input=input_note,
        result=result,
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
