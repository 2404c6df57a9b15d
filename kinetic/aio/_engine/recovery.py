"""Read how far a batch was submitted, from the store and the platform.

A process does this before it takes over the submission of the batch.

A coordinator is the part of a process that submits a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kinetic._runner.protocol import wire
from kinetic.aio._engine import scheduler
from kinetic.aio._engine.cleanup import withdraw_idle
from kinetic.aio._engine.inputs import InputIndex
from kinetic.aio._engine.session import Session
from kinetic.aio._engine.submission import (
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_SUBMISSION,
    Evidence,
    Submission,
)
from kinetic.aio._net.retry import retry_forever
from kinetic.aio.ports import Phase

SLICE = 1000
"""Maximum number of items handled in one turn of the loop."""


async def recover_state(
    session: Session, submission: Submission, inputs: InputIndex
) -> list[scheduler.Event]:
    """Read requests, inputs, attempts, and jobs, in this order; return what they mean as events.

    An attempt with a job or a claim, but no outcome, counts as running. If it has died, a task of
    the session closes it. An item whose attempt has neither job, claim, nor outcome may start. If
    a request to stop or retry came meanwhile, read everything again: no coordinator has read that.

    Raises:
        NotFound: The batch was cleaned up.
    """
    store, identity = session.platform.store, submission.identity
    batch, requests = identity.id, submission.requests
    while True:
        await retry_forever(submission.requests.read, f"reading the requests of {batch}")
        # A removal deletes the manifest first. It exists, so no request was removed.
        there = await retry_forever(lambda: store.look(identity.entry), f"looking for {batch}")
        if there is None:
            raise identity.gone
        asked = len(requests.entries)
        events = await _surveyed(session, submission, inputs)
        known = scheduler.Known(count_of(inputs))  # another task may have read more inputs
        if len(requests.entries) == asked and known in events:
            return events


async def read_inputs(submission: Submission, inputs: InputIndex) -> None:
    """Read how many inputs are stored, or were before they were removed."""
    await inputs.read()
    if inputs.total is None and await submission.read_collected():
        inputs.total = submission.collected


def since(submission: Submission, event: scheduler.Event) -> Iterator[scheduler.Seen]:
    """Yield changes of *event*'s items that came while the state was read.

    Even an item without a job may have changed: a launch that the former coordinator sent
    before it died may reach the platform late.
    """
    match event:
        case scheduler.Found(index, attempt) | scheduler.Again(index, attempt):
            attempts = {index: attempt}
        case scheduler.Stored(first, count):
            attempts = dict.fromkeys(range(first, first + count), 1)
        case _:
            return
    for index, attempt in attempts.items():
        item = submission.item(index)
        if item is not None and (item.state.final or item.attempt != attempt):
            yield scheduler.Seen(index, item)


async def _surveyed(
    session: Session, submission: Submission, inputs: InputIndex
) -> list[scheduler.Event]:
    batch = submission.identity.id
    reading = f"reading the inputs of {batch}"
    await retry_forever(lambda: read_inputs(submission, inputs), reading)
    count = count_of(inputs)
    unknown = [index for index in range(count) if not submission.is_final(index)]
    await retry_forever(
        lambda: submission.look_at_each(unknown), f"reading the attempts of {batch}"
    )
    claimants, before = await _claimants(submission, unknown), submission.observations()
    labels = {LABEL_SUBMISSION: batch}
    cluster = session.platform.cluster
    asked = len(submission.requests.entries)
    jobs = await retry_forever(
        lambda: cluster.find(labels=labels), f"asking for the jobs of {batch}"
    )
    # A retry is stored before its jobs are launched. Without the retry, such a job looks idle.
    await retry_forever(submission.requests.read, f"reading the requests of {batch}")
    if asked != len(submission.requests.entries):
        return []  # the caller reads everything again
    found = {
        (int(seen.labels[LABEL_INDEX]), int(seen.labels[LABEL_ATTEMPT])): seen for seen in jobs
    }
    live = [one for one, seen in found.items() if seen.phase not in (Phase.ENDED, Phase.GONE)]
    # The former coordinator may have died before it deleted the jobs of ended items.
    await withdraw_idle(submission, live)
    known: list[scheduler.Event] = []
    fresh: list[tuple[int, int]] = []  # ranges of items that never started
    for index in range(count):
        item = submission.item(index)
        if submission.is_damaged(index):
            known.append(scheduler.Refused(index))  # counts as failed, and is not run again
        elif item is not None and item.state.final:
            known.append(scheduler.Seen(index, item))
        elif item is not None:
            number = item.attempt
            seen = found.get((index, number))
            if seen is not None or submission.attempt(index, number).executor is not None:
                known.append(scheduler.Found(index, number))
                if submission.is_over(index, number, seen, before.get(index)):
                    claimant = claimants.get((index, number))
                    session.settle_soon(submission, Evidence(index, number, seen, claimant))
            elif number > 1:
                known.append(scheduler.Again(index, number))
            else:
                first = fresh.pop()[0] if fresh and fresh[-1][1] == index else index
                fresh.append((first, index + 1))
        if index % SLICE == SLICE - 1:
            await asyncio.sleep(0)
    if submission.requests.all_stopped:
        revived = _revived(submission, known, fresh)
        return [scheduler.Known(count), scheduler.StopRequested(), *known, *revived]
    ready = (scheduler.Stored(first, stop - first) for first, stop in fresh)
    return [scheduler.Known(count), *known, *ready]


def count_of(inputs: InputIndex) -> int:
    """Return how many items there are, as far as is known."""
    return max(inputs.count, inputs.total or 0)  # a stop may have come before all were stored


async def _claimants(submission: Submission, indices: list[int]) -> dict[tuple[int, int], str]:
    """Return the known claimants of the open attempts."""
    found: dict[tuple[int, int], str] = {}
    for place, index in enumerate(indices, start=1):
        item = submission.item(index)
        if item is not None and not item.state.final:
            executor = submission.attempt(index, item.attempt).executor
            if executor is not None:
                found[index, item.attempt] = executor
        if place % SLICE == 0:
            await asyncio.sleep(0)
    return found


def _revived(
    submission: Submission, known: list[scheduler.Event], fresh: list[tuple[int, int]]
) -> list[scheduler.Event]:
    """Return events for the items that a retry request reopened after a stop of the whole batch.

    *known* has the events found so far, *fresh* the ranges (first, stop) of other indices.
    """
    requests = submission.requests
    attempts = {
        one.index: one.attempt
        for one in known
        if isinstance(one, scheduler.Again | scheduler.Found)
        and not requests.standing(one.index).stopped
    }
    for first, stop in fresh:
        for index in range(first, stop):
            item = submission.item(index)
            if item is not None and item.state is wire.ItemState.OPEN:
                attempts[index] = item.attempt
    return [
        scheduler.Reopened(index, number, requests.standing(index))
        for index, number in attempts.items()
    ]
