"""The trials of a sweep, and the protocol of the optimizers that propose them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

__all__ = ["Direction", "Optimizer", "Proposal", "Space", "State", "Study", "Trial"]

Direction = Literal["minimize", "maximize"]
"""Whether the lowest value of a trial is the best, or the highest."""


class State(enum.StrEnum):
    """The state of a trial; every state but ``RUNNING`` is final."""

    RUNNING = "running"
    """The trial was proposed, and has not ended."""
    COMPLETE = "complete"
    """The function returned a finite number."""
    PRUNED = "pruned"
    """The pruner ended the trial early."""
    FAILED = "failed"
    """The function raised, or returned something else than a finite number; or its job was lost."""
    CANCELLED = "cancelled"
    """The trial was stopped, or its failure is ignored: the optimizer learns nothing from it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of the function in a sweep.

    ``number`` counts the trials from 0. ``params`` are the keyword arguments. ``value`` is what the
    function returned, or a pruned trial's last report; None without one. ``step`` is the step of a
    pruned trial's last report. ``error`` says why a failed or cancelled trial has no value.
    """

    number: int
    params: Mapping[str, Any]
    state: State = State.RUNNING
    value: float | None = None
    step: int | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """What an optimizer proposes.

    ``number`` is the optimizer's own number of the trial, by which kinetic tells it the result.
    ``params`` are the keyword arguments of the function. ``memo`` is a value for JSON that the
    optimizer gets back in `Optimizer.adopt`; None if the parameters are enough.
    """

    number: int
    params: Mapping[str, Any]
    memo: Any = None


class Study(Protocol):
    """A study of Optuna, for type checkers, which may not have Optuna."""

    @property
    def directions(self) -> Sequence[Any]: ...

    @property
    def best_trials(self) -> Sequence[Any]: ...


Space = Callable[[Any], Mapping[str, Any]] | Mapping[str, Any]
"""The space of a study: a function of a trial that returns the parameters, or distributions."""


class Optimizer(Protocol):
    """What proposes the trials of a sweep, and learns from their values.

    kinetic calls the methods one after the other, in one thread that does nothing else. An
    exception of a method ends the proposals; running trials continue. If an optimizer has an
    attribute ``prunes`` that is false, kinetic never calls `report`. An attribute ``rungs``, a pair
    of the first rung and the ratio of a rung to the one before, says by which steps reports and
    progress count pruned trials. Default: (1, 2).
    """

    direction: Direction

    def ask(self) -> Proposal | None:
        """Propose a trial.

        None: there is nothing to propose until an open trial ends; without open trials, the sweep
        is over.
        """
        ...

    def tell(self, number: int, result: float | State, /) -> None:
        """Take the value of a trial, or the state in which it ended without one.

        kinetic calls this once for each trial, when it has ended.
        """
        ...

    def report(self, number: int, step: int, value: float, /) -> bool:
        """Take an intermediate value of a running trial; return whether to prune the trial."""
        ...

    def adopt(self, params: Mapping[str, Any], memo: Any, /) -> Proposal | None:
        """Take a trial that this optimizer, in an earlier process, has proposed.

        When a sweep continues, kinetic calls this in place of `ask`, in the order of that process.
        ``return self.ask()`` is enough if the same results lead to the same proposals. Return None,
        or other parameters, if you can't propose this trial: kinetic then raises an error.
        """
        ...
