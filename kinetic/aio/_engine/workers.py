"""The workers of a batch: which ones live, how many there are to be, and how to change that.

The page about the protocol of workers (``docs/workers.md``) says what rounds and ranks are.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from absl import logging

from kinetic._labels import INDEX, ROUND
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import EXIT_DONE, EXIT_SURPLUS, Requests, WorkerId
from kinetic.aio._engine.in_flight import Places
from kinetic.aio._submissions.control_log import UNNAMED
from kinetic.aio._submissions.submission import Submission
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase, Resources
from kinetic.worker import Worker

MOST_WORKERS = 10_000
"""Maximum number of workers of a round."""


def count_workers(
    platform: Platform, resources: Resources, max_concurrent: int | None, items: int | None
) -> int:
    """Return how many workers a batch gets: no more than can run at once, and one at least."""
    limits = [MOST_WORKERS, max_concurrent or MOST_WORKERS, items or MOST_WORKERS]
    if (capacity := platform.capacity) is not None:
        limits.append(int(capacity.cpus // max(1.0, resources.cpu)))
        if resources.accelerator.kind != "cpu" and capacity.gpus:
            limits.append(capacity.gpus // max(1, resources.accelerator.count))
    return max(1, min(limits))


class _Seen(NamedTuple):
    """A worker that the platform shows."""

    worker: WorkerId
    observation: Observation

    @property
    def is_alive(self) -> bool:
        return not self.observation.phase.is_over


def _seen(submission: Submission, observations: Iterable[Observation]) -> list[_Seen]:
    """Return the workers among *observations*, of all rounds."""
    found: list[_Seen] = []
    for it in observations:
        if INDEX in it.labels or ROUND not in it.labels:
            continue
        number = int(it.labels[ROUND])
        place = it.name.removeprefix(f"{submission.identity.round_name(number)}.")
        # The name lacks the number of disruptions, which doesn't matter here.
        if (worker := WorkerId.parse(f"{number}.{place}.0")) is not None:
            found.append(_Seen(worker, it))
    return found


@dataclass(frozen=True, slots=True)
class Roster:
    """The ranks of the current round.

    ``active`` are those that take items, in the order in which they are to stay. ``size`` is how
    many ranks the round has begun with; 0 if the platform shows no living worker. ``leaving`` says
    how many ranks of the round were asked to leave. ``earlier`` are the rounds before that must end
    first: a stop or a retry has ended them, but the platform shows a living worker.
    """

    active: tuple[int, ...]
    size: int
    leaving: int
    earlier: tuple[int, ...] = ()

    def size_for(self, workers: int) -> int:
        """Return how many ranks the round must have, for *workers* that take items."""
        if not self.size:
            return workers + self.leaving
        return self.size + max(0, workers - len(self.active))


async def read_roster(submission: Submission, requests: Requests) -> Roster:
    """Ask the platform for the workers of the current round."""
    found = await submission.cluster.find(labels=submission.identity.labels)
    every = _seen(submission, found)
    earlier: tuple[int, ...] = ()
    if submission.listed:  # elsewhere, workers read the request at once, and leave
        rounds = {it.worker.round for it in every if it.is_alive}
        earlier = tuple(sorted(number for number in rounds if number < requests.round))
    seen = [it for it in every if it.worker.round == requests.round]
    living = [it for it in seen if it.is_alive]
    if not living:
        # If each worker runs one item, the next one gets the next rank.
        used = 0 if submission.runs_alone else max((it.worker.rank for it in seen), default=-1) + 1
        return Roster((), used, len(requests.leaving), earlier)
    # If the round was started again, the workers of its first start have all ended.
    job = living[0].worker.job
    last = dict[int, _Seen]()
    for it in sorted(seen, key=lambda it: it.worker.restarts):
        if it.worker.job == job or not submission.runs_alone:
            last[it.worker.rank] = it
    # A platform that replaces workers replaces each one that died, so such a rank stays active.
    left = (EXIT_DONE, EXIT_SURPLUS)
    active = [
        rank
        for rank, it in last.items()
        if rank not in requests.leaving
        and (it.is_alive or (submission.runs_alone and it.observation.exit_code not in left))
    ]
    # One that waits for a place has nothing to finish, so it leaves first.
    active.sort(key=lambda rank: (last[rank].observation.phase is Phase.PENDING, rank))
    return Roster(tuple(active), max(last) + 1, len(requests.leaving), earlier)


async def registered_places(submission: Submission, number: int) -> dict[str, int]:
    """Return the ranks of round *number* that have registered, by name, without restarts."""
    prefix = wire.worker_key(submission.identity.scope, f"{number:06d}.")
    found = await submission.store.list(prefix)
    keys = [info.name.removeprefix(prefix).split(".") for info in found]
    name = submission.identity.round_name(number)
    return {f"{name}.{job}.{int(rank)}": int(rank) for job, rank, _ in keys}


async def fit(
    submission: Submission,
    wanted: Callable[[], int],
    allow: Callable[[int], Awaitable[int]] | None = None,
) -> int:
    """Have as many workers in the current round as *wanted* says, if any of them lives.

    Several processes may do this concurrently: each follows the last request to scale. *allow* says
    how many more workers this process may ask for; without it, all. Return how many of these the
    platform doesn't add.
    """
    log, cluster = submission.requests, submission.cluster
    while True:
        entries = len(await log.read())
        requests, count = copy.copy(log.effect), wanted()  # that of *entries*
        if requests.done or requests.removing:
            return 0
        roster = await read_roster(submission, requests)
        if not roster.size:
            return 0
        if len(roster.active) < count and not cluster.replaces:
            return 0  # the process that submits the batch follows the request
        if len(roster.active) < count:
            more = count - len(roster.active)
            if allow is not None:
                more = await allow(more)
            size = roster.size_for(len(roster.active) + more)
            found = await cluster.grow(submission.identity.round_name(requests.round), size)
            if len(await log.read()) == entries or wanted() == count:
                return max(0, size - found) if found else 0  # 0: the round is over
        elif len(roster.active) == count:
            return 0
        else:
            leave = wire.Request(kind="leave", ranks=tuple(sorted(roster.active[count:])))
            if await log.append_at(entries, leave):
                await cluster.tell(submission.identity.labels)
                return 0


async def fit_alone(submission: Submission, places: Places, wanted: Callable[[], int]) -> int:
    """Do as `fit` in a process that doesn't submit the batch.

    The workers that it asks for take *places*, and give them back as they leave.
    """
    batch = submission.identity.id

    async def allow(more: int) -> int:
        if (taken := await places.take(more)) < more:
            logging.warning(
                "%s gets %d of %d more workers, because this client's max_concurrent allows no "
                "others; scale it again later, or from another client",
                *(batch, taken, more),
            )
        return taken

    def on_worker_gone(worker: Observation) -> None:
        living = len(submission.worker_observations)
        if worker.exit_code == EXIT_SURPLUS or not living:  # otherwise another replaces it
            places.keep(living)

    submission.on_worker_gone = on_worker_gone
    lacking = await fit(submission, wanted, allow)
    places.keep(max(wanted(), len(submission.worker_observations)))
    return lacking


async def describe(submission: Submission, known: int) -> list[Worker]:
    """Return the workers that wait or run; *known* is how many items there are.

    Without the outcomes of a collected batch, nothing says what they have done, and they leave.
    """
    await submission.requests.read()
    requests = submission.requests.effect
    found = await submission.cluster.find(labels=submission.identity.labels, explained=True)
    living = [it for it in _seen(submission, found) if it.is_alive]
    if not living:
        return []
    items = {it.executor: int(it.labels[INDEX]) for it in found if INDEX in it.labels}
    done = Counter[tuple[int, str, int]]()
    for index, attempts in (await submission.all_attempts(range(known))).items():
        for attempt in attempts.values():
            if attempt.executor is not None and attempt.outcome is None:
                items[attempt.executor] = index
        writers = (it.outcome.writer for it in attempts.values() if it.outcome is not None)
        done.update(it.place for it in map(WorkerId.parse, writers) if it is not None)
    if await submission.read_collected():  # the listing may lack outcomes that were removed
        return []
    described: list[Worker] = []
    for worker, observation in sorted(living, key=lambda it: it.worker):
        waits = observation.phase is Phase.PENDING
        item = None if waits else items.get(observation.executor)
        described.append(
            Worker(
                name=name_of(str(worker)),
                number=worker.rank,
                round=worker.round,
                restarts=worker.restarts,
                state="waiting" if waits else "idle" if item is None else "running",
                leaving=worker.round == requests.round and worker.rank in requests.leaving,
                reason=observation.message if waits else "",
                item=item,
                done=done[worker.place],
            )
        )
    return described


def name_of(worker: str) -> str:
    """Return the name that a user sees of a `WorkerId`, which lacks the number of disruptions."""
    return worker.rpartition(".")[0]


# --- ending them ---


async def end_workers(submission: Submission) -> None:
    """End the workers of a batch whose stop request is stored."""
    if not submission.listed:  # the workers hear of the request, end their items, and leave
        await submission.cluster.tell(submission.identity.labels)
    elif (number := stopped_round(submission)) is not None:
        # A deletion that arrives late must not concern items that were retried meanwhile.
        await submission.cluster.delete(labels=submission.identity.round_labels(number))


def stopped_round(submission: Submission) -> int | None:
    """Return the round of workers that a stop ends; None if it lets items run, or a retry came."""
    requests = submission.requests.effect

    is_over = requests.all_stopped and requests.standing(UNNAMED).unwanted
    return requests.round if is_over else None


async def end_leftovers(submission: Submission) -> None:
    """End the workers of a stopped batch that a process left on the platform when it died."""
    if not submission.requests.all_stopped:
        return
    if await submission.cluster.find(labels=submission.identity.labels):
        await submission.requests.read_new()  # a retry request is stored before its workers start
        await end_workers(submission)
