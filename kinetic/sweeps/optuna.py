"""The optimizer that a study of Optuna is."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, cast

from kinetic.errors import ConfigurationError
from kinetic.sweeps.protocol import Direction, Proposal, Space, State

__all__ = ["StudyOptimizer", "is_study"]


def is_study(optimizer: object) -> bool:
    """Return whether *optimizer* is a study of Optuna; doesn't import Optuna."""
    names = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(optimizer).__mro__)
    return ("optuna", "Study") in names


class StudyOptimizer:
    """Have a study of Optuna propose the trials.

    If the *sweep* has a name, its trials have this name in their user attributes: the storage of
    the study may outlive the process.

    Raises:
        ConfigurationError: *space* is neither a function nor a dict, or the study has several
            directions.
    """

    def __init__(self, study: Any, space: Space | None, sweep: str | None = None) -> None:
        if not (callable(space) or isinstance(space, Mapping)):
            raise ConfigurationError(
                "a sweep with a study needs a space: a function of the trial that returns the "
                f"parameters, or a dict of distributions; not {space!r}"
            )
        if len(study.directions) != 1:
            raise ConfigurationError(
                f"the study has {len(study.directions)} directions, and a sweep has one value for "
                "each trial: create the study with one direction"
            )
        self.direction: Direction = cast("Direction", study.direction.name.lower())
        self.prunes = type(study.pruner).__name__ != "NopPruner"
        self._study = study
        self._space = space
        self._states = importlib.import_module("optuna.trial").TrialState
        self._open: dict[int, Any] = {}
        self._known_steps: dict[int, Collection[int]] = {}
        """Open trial → the steps that an earlier process has reported to the study's storage."""
        self._over = False
        self._sweep = sweep

    def ask(self) -> Proposal | None:
        """Implement `Optimizer`."""
        return None if self._over else self._ask()

    def _ask(self) -> Proposal:
        if self._sweep is not None and not self._study.get_trials(False, (self._states.WAITING,)):
            # One write creates the trial with its mark, so that a crash leaves none without it.
            self._study.enqueue_trial({}, user_attrs={"kinetic": self._sweep})
        if callable(self._space):
            trial = self._study.ask()
            try:
                params = self._space(trial)
                if not isinstance(cast("object", params), Mapping):
                    raise ConfigurationError(
                        f"the space must return a dict of parameters, not {params!r}"
                    )
            except BaseException:
                self._study.tell(trial, state=self._states.FAIL)
                raise
        else:
            trial = self._study.ask(dict(self._space))
            params = trial.params
        self._open[trial.number] = trial
        if self._sweep is not None and "kinetic" not in trial.user_attrs:  # you enqueued it
            trial.set_user_attr("kinetic", self._sweep)
        return Proposal(trial.number, params, {"number": trial.number, "suggested": trial.params})

    def tell(self, number: int, result: float | State) -> None:
        """Implement `Optimizer`."""
        trial = self._open.pop(number)
        self._known_steps.pop(number, None)
        if trial is None:  # the study's storage has kept the result
            return
        try:
            match result:
                case State.PRUNED:
                    self._study.tell(trial, state=self._states.PRUNED)
                case State():
                    self._study.tell(trial, state=self._states.FAIL)
                case value:
                    self._study.tell(trial, value)
        except RuntimeError as exc:
            # A sampler with finitely many points calls this method after the last one.
            if "Study.stop" not in str(exc):
                raise
            self._over = True

    def report(self, number: int, step: int, value: float) -> bool:
        """Implement `Optimizer`."""
        trial = self._open.get(number)
        if trial is None:
            return False
        if step not in self._known_steps.get(number, ()):
            trial.report(value, step)
        return bool(trial.should_prune())

    def adopt(self, params: Mapping[str, Any], memo: Any) -> Proposal | None:
        """Implement `Optimizer`.

        The sampler proposes, so that its random numbers continue as in the earlier process. The
        trial nevertheless gets the parameters of the earlier one, as the sampler may have no seed.
        """
        number, suggested = memo["number"], memo["suggested"]
        known = self._study.get_trials(deepcopy=False)
        if number < len(known) and known[number].params == suggested:
            # The study's storage has outlived the process, so the study has the trial already.
            # The sampler draws numbers: one with a seed would otherwise repeat its first trials.
            for name, distribution in known[number].distributions.items():
                with suppress(Exception):  # not every sampler samples single parameters
                    self._study.sampler.sample_independent(
                        self._study, known[number], name, distribution
                    )
            is_open = not known[number].state.is_finished()
            trial_id = known[number]._trial_id
            self._known_steps[number] = {*known[number].intermediate_values}
            self._open[number] = (
                importlib.import_module("optuna").Trial(self._study, trial_id) if is_open else None
            )
            return Proposal(number, params, memo)
        sampler = self._study.sampler
        self._study.sampler = _Repeated(sampler, suggested)
        try:
            proposal = self._ask()
        finally:
            self._study.sampler = sampler
        if proposal.memo["suggested"] == suggested:
            return proposal
        self.tell(proposal.number, State.CANCELLED)
        return None

    def end_unknown(self) -> None:
        """End the trials that an earlier process has asked for, and then not started.

        Call it only while no other process runs the sweep of this name.
        """
        if self._sweep is None:
            return
        for trial in self._study.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
            if trial.user_attrs.get("kinetic") == self._sweep and trial.number not in self._open:
                self._study.tell(trial.number, state=self._states.FAIL)


class _Repeated:
    """A sampler that samples as another one, and then suggests the values of an earlier trial."""

    def __init__(self, sampler: Any, suggested: Mapping[str, Any]) -> None:
        self._sampler = sampler
        self._suggested = suggested

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def sample_relative(self, study: Any, trial: Any, space: Mapping[str, Any]) -> dict[str, Any]:
        sampled = self._sampler.sample_relative(study, trial, space)
        return {name: self._repeat(name, value, space[name]) for name, value in sampled.items()}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        value = self._sampler.sample_independent(study, trial, name, distribution)
        return self._repeat(name, value, distribution)

    def _repeat(self, name: str, value: Any, distribution: Any) -> Any:
        """Return the earlier value, if it is in the distribution; otherwise the sampled one."""
        if name not in self._suggested:
            return value
        earlier = self._suggested[name]
        choices = getattr(distribution, "choices", None)
        if choices is not None:
            return earlier if earlier in choices else value
        return earlier if distribution.low <= earlier <= distribution.high else value
