"""What a new holder finds: read after it has its fence, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kinetic._runner import wire
from kinetic.aio import fanout
from kinetic.aio._patience import patiently
from kinetic.aio._session import LABEL_ATTEMPT, LABEL_INDEX, LABEL_SUBMISSION, Session
from kinetic.aio._stock import Stock
from kinetic.aio._submission import Submission
from kinetic.aio._withdrawal import withdraw_idle
from kinetic.aio.ports import Observation, Phase

__all__ = ["since", "survey"]

SLICE = 1000
"""Items that are gone through in one turn of the loop."""


async def survey(session: Session, submission: Submission, stock: Stock) -> list[fanout.Event]:
    """Read control, inputs, attempts and jobs, in this order, and say what they mean.

    Every job without an outcome is busy. What has ended is closed, here or by
    the watch; what has nothing may start. All is read once more when somebody
    has asked for something meanwhile, of which no holder has heard.
    """
    batch, requests = submission.identity.id, submission.requests
    while True:
        await patiently(submission.read_requests, f"reading the requests of {batch}")
        asked = len(requests.entries)
        events = await _surveyed(session, submission, stock)
        if len(requests.entries) == asked:
            return events


def since(submission: Submission, event: fanout.Event) -> Iterator[fanout.Seen]:
    """What a new holder could not hear, for it came while it looked around and found *event*.

    Also of items that nobody had asked for by then: the request of one that died may come late.
    """
    match event:
        case fanout.Found(index, attempt) | fanout.Again(index, attempt):
            attempts = {index: attempt}
        case fanout.Stored(first, count):
            attempts = dict.fromkeys(range(first, first + count), 1)
        case _:
            return
    for index, attempt in attempts.items():
        item = submission.item(index)
        if item is not None and (item.state.final or item.attempt != attempt):
            yield fanout.Seen(index, item)


async def _surveyed(session: Session, submission: Submission, stock: Stock) -> list[fanout.Event]:
    batch = submission.identity.id
    await patiently(stock.read, f"reading the inputs of {batch}")
    count = max(stock.count, stock.total or 0)  # a stop may have come before all were stored
    unknown = [index for index in range(count) if not submission.is_final(index)]
    await patiently(lambda: submission.look_at_each(unknown), f"reading the attempts of {batch}")
    claimants, before = await _claimants(submission, unknown), submission.observations()
    labels = {LABEL_SUBMISSION: batch}
    cluster = session.platform.cluster
    jobs = await patiently(lambda: cluster.find(labels=labels), f"asking for the jobs of {batch}")
    found = {
        (int(seen.labels[LABEL_INDEX]), int(seen.labels[LABEL_ATTEMPT])): seen for seen in jobs
    }
    live = [one for one, seen in found.items() if seen.phase not in (Phase.ENDED, Phase.GONE)]
    await withdraw_idle(cluster, submission, live)  # who was stopped had no time for that
    survey = _Survey(session, submission, found, before, claimants)
    for index in range(count):
        survey.add(index)
        if index % SLICE == SLICE - 1:
            await asyncio.sleep(0)
    return survey.events(count)


async def _claimants(submission: Submission, indices: list[int]) -> dict[tuple[int, int], str]:
    """Who has claimed the open attempts, as far as that is known."""
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


class _Survey:
    def __init__(
        self,
        session: Session,
        submission: Submission,
        found: dict[tuple[int, int], Observation],
        before: dict[int, Observation],
        claimants: dict[tuple[int, int], str],
    ) -> None:
        self._session = session
        self._submission = submission
        self._found = found
        self._before = before
        self._claimants = claimants
        self._known: list[fanout.Event] = []
        self._fresh: list[tuple[int, int]] = []

    def add(self, index: int) -> None:
        if self._submission.is_damaged(index):
            self._known.append(fanout.Refused(index))  # it counts as failed, and is not run again
            return
        item = self._submission.item(index)
        assert item is not None
        if item.state.final:
            self._known.append(fanout.Seen(index, item))
            return
        seen = self._found.get((index, item.attempt))
        claimed = self._submission.attempt(index, item.attempt).executor is not None
        if seen is not None or claimed:
            self._known.append(fanout.Found(index, item.attempt))
            if self._submission.is_over(index, item.attempt, seen, self._before.get(index)):
                claimant = self._claimants.get((index, item.attempt))
                self._session.settle(self._submission, index, item.attempt, seen, claimant)
        elif item.attempt > 1:
            self._known.append(fanout.Again(index, item.attempt))
        elif self._fresh and self._fresh[-1][1] == index:
            self._fresh[-1] = (self._fresh[-1][0], index + 1)
        else:
            self._fresh.append((index, index + 1))

    def events(self, count: int) -> list[fanout.Event]:
        events: list[fanout.Event] = [fanout.Known(count)]
        if self._submission.requests.all_stopped:
            events.append(fanout.StopRequested())
        events += self._known
        if self._submission.requests.all_stopped:
            return events + self._revived()
        return events + [fanout.Stored(first, stop - first) for first, stop in self._fresh]

    def _revived(self) -> list[fanout.Event]:
        """A stop keeps everything from starting but what was reopened after it."""
        requests = self._submission.requests
        events: list[fanout.Event] = [
            self._reopened(one.index, one.attempt)
            for one in self._known
            if isinstance(one, fanout.Again | fanout.Found)
            and not requests.standing(one.index).stopped
        ]
        for first, stop in self._fresh:
            for index in range(first, stop):
                item = self._submission.item(index)
                if item is not None and item.state is wire.ItemState.OPEN:
                    events.append(self._reopened(index, item.attempt))
        return events

    def _reopened(self, index: int, attempt: int) -> fanout.Reopened:
        return fanout.Reopened(index, attempt, self._submission.requests.standing(index))
