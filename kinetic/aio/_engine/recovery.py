"""Read how far a batch was submitted, from the store and the platform.

A process does this before it starts a coordinator, which then submits the rest of the batch.
"""

from __future__ import annotations

from kinetic.aio._engine import decisions, ending
from kinetic.aio._engine.inputs import InputIndex
from kinetic.aio._engine.submission import Submission
from kinetic.aio._net.retry import retry_forever


async def recover_state(submission: Submission, inputs: InputIndex) -> list[decisions.Event]:
    """Read requests, inputs, and attempts, in this order; return the state as events.

    Close the attempts of workers that have died. If a new stop or retry request came meanwhile,
    read everything again: the events lack its effect. The events also lack the items that are
    final: the caller reads them from *submission*.

    Raises:
        NotFound: The batch was cleaned up.
    """
    store, identity, requests = submission.store, submission.identity, submission.requests
    batch = identity.id
    while True:
        await retry_forever(requests.read, f"reading the requests of {batch}")
        # While the manifest exists, no request is missing: a removal deletes requests last.
        entry = await retry_forever(
            lambda: store.look(identity.manifest_name), f"looking for {batch}"
        )
        if entry is None:
            raise identity.gone_error
        known_requests = len(requests.entries)
        count = await _read(submission, inputs)
        await retry_forever(requests.read, f"reading the requests of {batch}")
        # Another task may have read more inputs.
        if len(requests.entries) == known_requests and count == count_of(inputs):
            return _events(submission, count)


async def _read(submission: Submission, inputs: InputIndex) -> int:
    """Read inputs and attempts, and close those of workers that have died; count the items."""
    batch = submission.identity.id
    await retry_forever(lambda: read_inputs(submission, inputs), f"reading the inputs of {batch}")
    count = count_of(inputs)
    unknown = [index for index in range(count) if not submission.is_final(index)]
    await retry_forever(
        lambda: submission.look_at_each(unknown), f"reading the attempts of {batch}"
    )
    begun = submission.begun(unknown)
    await retry_forever(lambda: ending.ask(submission, begun), f"asking for workers of {batch}")
    return count


def _events(submission: Submission, count: int) -> list[decisions.Event]:
    requests = submission.requests
    events: list[decisions.Event] = [decisions.ItemsKnown(count)]
    if requests.all_stopped:
        events.append(decisions.StopRequested())
    for index in range(count):
        item, standing = submission.item(index), requests.standing(index)
        if submission.is_damaged(index):
            events.append(decisions.Refused(index))  # counts as failed, and is not run again
        elif item is None or item.state.final:
            continue
        elif requests.all_stopped and not standing.stopped:
            events.append(decisions.Reopened(index, item.attempt, standing))
    return [*events, decisions.Stored(0, count)]


async def read_inputs(submission: Submission, inputs: InputIndex) -> None:
    """Read how many inputs are stored, or, if `results()` removed them, how many there were."""
    await inputs.read()
    if inputs.total is None and await submission.read_collected():
        inputs.total = submission.collected


def count_of(inputs: InputIndex) -> int:
    """Return how many items there are, as far as this process knows."""
    return max(inputs.count, inputs.total or 0)  # `total` may count unstored inputs
