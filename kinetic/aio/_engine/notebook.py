"""Show a handle in a notebook: its counts, and a line that is updated in place.

A notebook calls these functions, on any thread, when a cell displays a handle. They don't wait or
send a request: a task of the client follows the batch or the job.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from kinetic._progress.entry import in_notebook
from kinetic._progress.tally import State, Tally
from kinetic._runner.protocol import wire
from kinetic._tasks import running_loop
from kinetic.aio._engine.batch import Batch
from kinetic.aio._engine.progress import ShownProgress, is_shown, progress, state_at
from kinetic.aio._engine.session import JobRef, Session
from kinetic.errors import KineticError


def counts_of(batch: Batch) -> dict[str, int]:
    """Return how many items are in each state; empty if this process hasn't read the batch yet."""
    if not batch.followed:
        return {}
    states = Counter(state_at(batch.submission, index) for index in range(batch.known))
    return {state.name.lower(): states[state] for state in State if states[state]}


def follow_batch(batch: Batch) -> None:
    """In the output of the running cell, show how far *batch* is until the batch is over."""
    if not (batch.finished or is_shown(batch)):
        _spawn_in_notebook(
            batch.session, lambda: _show_batch(batch), f"display of {batch.group_id}"
        )


def follow_job(job: JobRef) -> None:
    """In the output of the running cell, show the state of a job until the job has ended."""
    item = job.submission.item(job.index)
    if item is None or not item.state.final:
        name = job.submission.identity.job_id(job.index)
        _spawn_in_notebook(job.session, lambda: _show_job(job, name), f"display of {name}")


def _spawn_in_notebook(
    session: Session, work: Callable[[], Coroutine[Any, Any, None]], name: str
) -> None:
    """Start *work* if this is a notebook, on the loop of *session*, and *session* is open."""
    with contextlib.suppress(KineticError):  # no loop runs here, or the client is closed
        if in_notebook() and running_loop() is session.loop:
            session.spawn(work(), name=name)


async def _show_batch(batch: Batch) -> None:
    async with ShownProgress(batch, wanted=True):
        if is_shown(batch):  # it isn't shown if progress is switched off
            async with contextlib.aclosing(progress(batch, interval=1.0)) as values:
                async for _ in values:
                    pass


async def _show_job(job: JobRef, name: str) -> None:
    """Show the job as a batch of one item until it has ended."""
    from kinetic._progress.display import DISPLAY

    if (entry := DISPLAY.open(name)) is None:
        return
    loop, submission, index = job.session.loop, job.submission, job.index
    tally = Tally(loop.time())

    def update(changed_index: int, new_item: wire.Item | None) -> None:
        if changed_index == index:
            item, now = submission.item(index), loop.time()
            retries = item.attempt - 1 if item is not None else 0
            tally.put(0, state_at(submission, index), retries, now)
            entry.value = tally.value(now, total=1, known=1)

    stop_listening = submission.listen(update)
    try:
        update(index, None)
        with contextlib.suppress(KineticError):  # `result()` raises the error
            await job.session.until_final(submission, index)
        update(index, None)
    finally:
        stop_listening()
        DISPLAY.close(entry, lambda: None)
