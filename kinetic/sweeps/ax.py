"""Have a client of Ax propose the trials of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinetic.sweeps.protocol import Direction, Proposal, State

__all__ = ["Ax"]


class Ax:
    """An ``ax.api.client.Client`` whose experiment and optimization are configured.

    Ax decides by its early-stopping strategy which trials to prune.

    Args:
        client: The client.
        metric: The name of the metric in the client's objective.
        direction: Whether the objective minimizes or maximizes it. Default: ``minimize``.
        prunes: Whether to ask Ax, at each report, whether to stop the trial. Default: False.

    Example::

        client.configure_optimization(objective="-loss")
        search = kinetic.sweeps.Ax(client, metric="loss")
    """

    def __init__(
        self, client: Any, *, metric: str, direction: Direction = "minimize", prunes: bool = False
    ) -> None:
        self.direction: Direction = direction
        self.prunes = prunes
        self._client = client
        self._metric = metric

    def ask(self) -> Proposal | None:
        """Implement `Optimizer`; Ax may wait for values before it proposes more."""
        for number, params in self._client.get_next_trials(max_trials=1).items():
            return Proposal(number, params)
        return None

    def tell(self, number: int, result: float | State) -> None:
        """Implement `Optimizer`."""
        match result:
            case State.PRUNED:
                self._client.mark_trial_early_stopped(number)
            case State.FAILED:
                self._client.mark_trial_failed(number)
            case State():
                self._client.mark_trial_abandoned(number)
            case value:
                self._client.complete_trial(number, raw_data={self._metric: value})

    def report(self, number: int, step: int, value: float) -> bool:
        """Implement `Optimizer`."""
        self._client.attach_data(number, raw_data={self._metric: value}, progression=step)
        return bool(self._client.should_stop_trial_early(number))

    def adopt(self, params: Mapping[str, Any], memo: Any) -> Proposal:
        """Implement `Optimizer`: attach the trial, because a new proposal may take seconds."""
        return Proposal(self._client.attach_trial(parameters=dict(params)), params)
