"""Have an optimizer of Nevergrad propose the trials of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinetic.sweeps.protocol import Direction, Proposal, State

__all__ = ["Nevergrad"]


class Nevergrad:
    """An optimizer of Nevergrad whose parametrization is a ``Dict``, or an ``Instrumentation``.

    Nevergrad has no pruning, and learns nothing from a trial without a value.

    Args:
        optimizer: Such as ``ng.optimizers.NGOpt(parametrization, budget=100)``.
        direction: Whether the lowest value is the best, or the highest. Default: ``minimize``.

    Example::

        space = ng.p.Dict(rate=ng.p.Log(lower=1e-5, upper=1e-1))
        search = kinetic.sweeps.Nevergrad(ng.optimizers.NGOpt(space, budget=100, num_workers=8))
    """

    prunes = False

    def __init__(self, optimizer: Any, *, direction: Direction = "minimize") -> None:
        self.direction: Direction = direction
        self._optimizer = optimizer
        self._open: dict[int, Any] = {}
        self._count = 0

    def ask(self) -> Proposal:
        """Implement `Optimizer`."""
        return self._begin(self._optimizer.ask())

    def _begin(self, candidate: Any) -> Proposal:
        self._open[self._count] = candidate
        self._count += 1
        is_dict = isinstance(candidate.value, dict)
        params: Any = candidate.value if is_dict else candidate.kwargs
        return Proposal(self._count - 1, params)

    def tell(self, number: int, result: float | State) -> None:
        """Implement `Optimizer`."""
        candidate = self._open.pop(number)
        if not isinstance(result, State):
            self._optimizer.tell(candidate, result if self.direction == "minimize" else -result)

    def report(self, number: int, step: int, value: float) -> bool:
        """Implement `Optimizer`."""
        return False

    def adopt(self, params: Mapping[str, Any], memo: Any) -> Proposal:
        """Implement `Optimizer`: propose again, and use another candidate if it differs."""
        proposal = self.ask()
        if proposal.params == params:
            return proposal
        candidate = self._open.pop(proposal.number)
        plain = dict(params)
        value = plain if isinstance(candidate.value, dict) else ((), plain)
        # The conversion to Nevergrad's own numbers and back may round.
        again = self._begin(self._optimizer.parametrization.spawn_child(new_value=value))
        return Proposal(again.number, params)
