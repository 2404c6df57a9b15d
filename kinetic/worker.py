"""A worker of a batch, as `BatchHandle.workers` describes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker of a batch that waits or runs; it takes items one after another.

    Attributes:
        name: Names the worker, as `JobHandle.worker` does. A worker that replaces it has another
            name, and the same number.
        number: The place of the worker in its round, from 0.
        round: The number of the round, 0 for the first one. A round is one start of workers.
        restarts: How many workers it has replaced, because they had died.
        state: ``waiting``: the platform has no place for it yet. ``running``: it runs an item.
            ``idle``: it has no item at the moment.
        leaving: Whether `BatchHandle.scale` has asked it to leave; it first ends its item.
        reason: What a waiting worker waits for; empty if the platform hasn't said.
        item: The index of the item that it runs; None if it runs none.
        done: How many attempts it and the workers before it have ended.
    """

    name: str
    number: int
    round: int
    restarts: int
    state: Literal["waiting", "running", "idle"]
    leaving: bool
    reason: str
    item: int | None
    done: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)
