"""The rounds of workers on this machine: which worker starts, and which one is replaced.

A worker is a job of the supervisor's table, with its queue, slots, log, and folder. This module
knows which workers belong together. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kinetic._runner.protocol.workers import EXIT_DONE, EXIT_SURPLUS, WorkerId
from kinetic._supervisor.protocol import JobHeader

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""The pause before a replacement doubles with each worker that ended soon after its start."""

SOON_S = 5.0


class Start(NamedTuple):
    """Queue this worker after a pause, in seconds."""

    header: JobHeader
    body: bytes
    pause_s: float = 0.0


@dataclass(slots=True)
class _Rank:
    restarts: int = 0
    disruptions: int = 0
    quick_deaths: int = 0
    finished: bool = False


@dataclass(slots=True)
class Round:
    """One start of workers. ``header`` is that of each worker, with the name of the round."""

    header: JobHeader
    body: bytes
    number: int
    job: str
    over: bool = False
    ranks: list[_Rank] = field(default_factory=list[_Rank])

    def name(self, rank: int) -> str:
        """Return the name of the job of a worker; a replacement has another."""
        return f"{self.header.name}.{self.job}.{rank}.{self.ranks[rank].restarts}"

    def start(self, rank: int, pause_s: float = 0.0) -> Start:
        """Return how to start a worker."""
        state = self.ranks[rank]
        worker = WorkerId(self.number, self.job, rank, state.restarts, state.disruptions)
        header = replace(self.header, name=self.name(rank), worker=str(worker))
        return Start(header, self.body, pause_s)


class Rounds:
    """All rounds that this supervisor knows.

    Args:
        job: A text that differs between supervisors, so that no worker takes the claims of an
            earlier supervisor's workers for those of its own rank.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._rounds: dict[str, Round] = {}

    @property
    def single_worker(self) -> str:
        """The name of the only worker of a job without a batch; no worker replaces it."""
        return str(WorkerId(0, self._job, 0))

    def scale(self, header: JobHeader, body: bytes, number: int, workers: int) -> Iterator[Start]:
        """Begin a round, or add workers to one; fewer workers than it has change nothing."""
        self._rounds.setdefault(header.name, Round(header, body, number, self._job))
        yield from self.grow(header.name, workers)

    def grow(self, name: str, workers: int) -> Iterator[Start]:
        """Add workers to a round, unless it is over or unknown; see `scale`."""
        found = self._rounds.get(name)
        while found is not None and not found.over and len(found.ranks) < workers:
            found.ranks.append(_Rank())
            yield found.start(len(found.ranks) - 1)

    def count(self, name: str) -> int:
        """Return how many ranks a round has, with those that have left; 0 if it is over."""
        found = self._rounds.get(name)
        if found is None or found.over or all(it.finished for it in found.ranks):
            return 0
        return len(found.ranks)

    def delete(self, names: Collection[str], labels: Mapping[str, str] | None) -> list[str]:
        """Forget the rounds *names*, and those with *labels*; return the workers that must end."""
        ended = [
            name
            for name, it in self._rounds.items()
            if name in names or (labels is not None and labels.items() <= it.header.labels.items())
        ]
        return [worker for name in ended for worker in _close(self._rounds.pop(name))]

    def ended(self, name: str, status: int, ran_s: float) -> Start | list[str] | None:
        """Return what follows from the end of the worker *name*, which ran for *ran_s* seconds.

        This is how its replacement starts, or which other workers must end.
        """
        round_name, *numbers = name.rsplit(".", 3)
        found = self._rounds.get(round_name)
        if found is None or found.over:
            return None
        rank, restarts = int(numbers[1]), int(numbers[2])
        state = found.ranks[rank]
        if state.restarts != restarts:
            return None
        if status == EXIT_DONE:  # every item is final: nothing is left for the others
            state.finished = True
            return _close(found)
        if status == EXIT_SURPLUS:
            state.finished = True
            if all(it.finished for it in found.ranks):
                _close(found)
            return None
        state.restarts += 1
        state.quick_deaths = state.quick_deaths + 1 if ran_s < SOON_S else 0
        doubled = FIRST_PAUSE_S * 2 ** max(0, state.quick_deaths - 1)
        return found.start(rank, min(doubled, LONGEST_PAUSE_S) if state.quick_deaths else 0.0)


def _close(found: Round) -> list[str]:
    """Start no more workers of a round, and return the names of those that haven't finished.

    The round stays known, so that a late request doesn't begin it again; its secrets don't.
    """
    names = [found.name(rank) for rank, it in enumerate(found.ranks) if not it.finished]
    found.over, found.body = True, b""
    return names
