"""Have a study of Google Vizier propose the trials of a sweep."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from kinetic.sweeps.protocol import Direction, Proposal, State

__all__ = ["Vizier"]


class Vizier:
    """A ``vizier.service.clients.Study`` with one metric.

    Args:
        study: The study.
        prunes: Whether to ask Vizier, at each report, whether to stop the trial. Default: False.

    Example::

        study = clients.Study.from_study_config(config, owner="me", study_id="valley")
        search = kinetic.sweeps.Vizier(study)
    """

    def __init__(self, study: Any, *, prunes: bool = False) -> None:
        self._vizier: Any = importlib.import_module("vizier.service.pyvizier")
        config = study.materialize_study_config()
        metric = config.metric_information.item()
        integer = self._vizier.ParameterType.INTEGER
        parameters = config.search_space.parameters
        self._ints = [parameter.name for parameter in parameters if parameter.type == integer]
        self.direction = cast("Direction", metric.goal.name.lower())
        self.prunes = prunes
        self._study = study
        self._metric: str = metric.name
        self._open: dict[int, Any] = {}
        self._count = 0

    def ask(self) -> Proposal:
        """Implement `Optimizer`."""
        # Vizier gives one client the same trial until it has ended.
        (trial,) = self._study.suggest(count=1, client_id=f"kinetic trial {self._count}")
        self._count += 1
        self._open[trial.id] = trial
        ints = {name: int(trial.parameters[name]) for name in self._ints}
        return Proposal(trial.id, {**trial.parameters, **ints})

    def _measurement(self, value: float, step: int = 0) -> Any:
        return self._vizier.Measurement({self._metric: value}, steps=step)

    def tell(self, number: int, result: float | State) -> None:
        """Implement `Optimizer`."""
        trial = self._open.pop(number)
        match result:
            case State.PRUNED:
                trial.complete()  # with the last reported value
            case State.FAILED:
                trial.complete(infeasible_reason="the trial failed")
            case State():
                trial.delete()
            case value:
                trial.complete(self._measurement(value))

    def report(self, number: int, step: int, value: float) -> bool:
        """Implement `Optimizer`."""
        self._open[number].add_measurement(self._measurement(value, step))
        return bool(self._open[number].check_early_stopping())

    def adopt(self, params: Mapping[str, Any], memo: Any) -> Proposal:
        """Implement `Optimizer`."""
        self._study.request(self._vizier.TrialSuggestion(dict(params)))
        return self.ask()
