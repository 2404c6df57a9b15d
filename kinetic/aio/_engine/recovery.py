"""Read how far a batch was submitted, from the store and the platform.

A process does this before it starts a coordinator, which then submits the rest of the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kinetic.aio._engine import ending, scheduler
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
    """Read requests, inputs, attempts, and jobs, in this order; return the state as events.

    An attempt with a job or a claim, but no outcome, counts as running. If it has died, a task of
    the session closes it. An item whose attempt has neither job, claim, nor outcome may start. If
    a new stop or retry request came meanwhile, read everything again: the events lack its effect.

    Raises:
        NotFound: The batch was cleaned up.
    """
    store, identity = session.platform.store, submission.identity
    batch, requests = identity.id, submission.requests
    while True:
        await retry_forever(submission.requests.read, f"reading the requests of {batch}")
        # While the manifest exists, no request is missing: a removal deletes requests last.
        entry = await retry_forever(
            lambda: store.look(identity.manifest_name), f"looking for {batch}"
        )
        if entry is None:
            raise identity.gone_error
        known_requests = len(requests.entries)
        events = await _survey(session, submission, inputs)
        known = scheduler.ItemsKnown(count_of(inputs))  # another task may have read more inputs
        if len(requests.entries) == known_requests and known in events:
            return events


async def read_inputs(submission: Submission, inputs: InputIndex) -> None:
    """Read how many inputs are stored, or, if `results()` removed them, how many there were."""
    await inputs.read()
    if inputs.total is None and await submission.read_collected():
        inputs.total = submission.collected


def changes_since(submission: Submission, event: scheduler.Event) -> Iterator[scheduler.ItemRead]:
    """Yield an event for each item of *event* that has changed since *event* was made.

    Even an item without a job may have changed: a launch that the former coordinator sent
    before it died may reach the platform late.
    """
    match event:
        case scheduler.AttemptFound(index, attempt) | scheduler.AttemptReady(index, attempt):
            attempts = {index: attempt}
        case scheduler.Stored(first, count):
            attempts = dict.fromkeys(range(first, first + count), 1)
        case _:
            return
    for index, attempt in attempts.items():
        item = submission.item(index)
        if item is not None and (item.state.final or item.attempt != attempt):
            yield scheduler.ItemRead(index, item)


async def _survey(
    session: Session, submission: Submission, inputs: InputIndex
) -> list[scheduler.Event]:
    """Return the batch's state as events; an empty list if a new request came meanwhile."""
    batch, requests = submission.identity.id, submission.requests
    reading = f"reading the inputs of {batch}"
    await retry_forever(lambda: read_inputs(submission, inputs), reading)
    count = count_of(inputs)
    unknown = [index for index in range(count) if not submission.is_final(index)]
    await retry_forever(
        lambda: submission.look_at_each(unknown), f"reading the attempts of {batch}"
    )
    seen = [
        index
        for index in unknown
        if index in submission.observations or submission.has_begun(index)
    ]
    questions = {
        (question.index, question.number): question
        for question in ending.questions(submission, seen)
    }
    labels = {LABEL_SUBMISSION: batch}
    cluster = session.platform.cluster
    known_requests = len(requests.entries)
    jobs = await retry_forever(
        lambda: cluster.find(labels=labels), f"asking for the jobs of {batch}"
    )
    # A retry request is stored before its jobs are launched. Without reading the request,
    # `withdraw_idle` would delete these jobs.
    await retry_forever(requests.read, f"reading the requests of {batch}")
    if known_requests != len(requests.entries):
        return []  # the caller reads everything again
    found = {
        (int(observation.labels[LABEL_INDEX]), int(observation.labels[LABEL_ATTEMPT])): observation
        for observation in jobs
        if LABEL_INDEX in observation.labels  # a worker has none
    }
    if submission.workers is not None:
        found = await ending.find(submission, [*questions])
    live_attempts = [
        attempt
        for attempt, observation in found.items()
        if observation.phase not in (Phase.ENDED, Phase.GONE)
    ]
    # The former coordinator may have died before it deleted the jobs of ended items.
    await withdraw_idle(submission, live_attempts)
    events: list[scheduler.Event] = []
    unstarted: list[tuple[int, int]] = []  # ranges of items that never started
    for index in range(count):
        item = submission.item(index)
        if submission.is_damaged(index):
            events.append(scheduler.Refused(index))  # counts as failed, and is not run again
        elif item is not None and item.state.final:
            events.append(scheduler.ItemRead(index, item))
        elif item is not None:
            number, standing = item.attempt, requests.standing(index)
            question = questions.get((index, number))
            claimant = question.claimant if question is not None else None
            previous = question.previous if question is not None else None
            observation = found.get((index, number))
            has_started = (
                observation is not None or submission.attempt(index, number).executor is not None
            )
            if has_started:
                events.append(scheduler.AttemptFound(index, number))
                if submission.is_over(index, number, observation, previous):
                    session.settle_soon(submission, Evidence(index, number, observation, claimant))
            if requests.all_stopped and not standing.stopped:
                events.append(scheduler.Reopened(index, number, standing))
            elif not has_started and number > 1:
                events.append(scheduler.AttemptReady(index, number))
            elif not has_started:
                first = unstarted.pop()[0] if unstarted and unstarted[-1][1] == index else index
                unstarted.append((first, index + 1))
        if index % SLICE == SLICE - 1:
            await asyncio.sleep(0)
    stop_events = [scheduler.StopRequested()] if requests.all_stopped else []
    stored_events = (scheduler.Stored(first, stop - first) for first, stop in unstarted)
    return [scheduler.ItemsKnown(count), *stop_events, *events, *stored_events]


def count_of(inputs: InputIndex) -> int:
    """Return how many items there are, as far as this process knows."""
    return max(inputs.count, inputs.total or 0)  # `total` may count unstored inputs
