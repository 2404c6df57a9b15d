"""Search for the best arguments of a function: what proposes trials, and what a trial is.

`kinetic.RemoteFunction.sweep` and `kinetic.aio.sweep` run a sweep. They take a study of Optuna, an
optimizer of this package, or an object of yours that follows `Optimizer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kinetic.sweeps.protocol import Direction, Optimizer, Proposal, Space, State, Study, Trial
from kinetic.sweeps.search import ASHA, Choice, Domain, Float, GridSearch, Int, RandomSearch

if TYPE_CHECKING:
    from kinetic.sweeps.ax import Ax
    from kinetic.sweeps.nevergrad import Nevergrad
    from kinetic.sweeps.vizier import Vizier

__all__ = [
    "ASHA",
    "Ax",
    "Choice",
    "Direction",
    "Domain",
    "Float",
    "GridSearch",
    "Int",
    "Nevergrad",
    "Optimizer",
    "Proposal",
    "RandomSearch",
    "Space",
    "State",
    "Study",
    "Trial",
    "Vizier",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in ("Ax", "Nevergrad", "Vizier"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"kinetic.sweeps.{name.lower()}"), name)
