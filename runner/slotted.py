"""Classes with ``__slots__`` that go by value.

What cloudpickle makes of them has no slots, but a ``__dict__``; and what is in that cannot be
given to an object of the class it came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

__all__ = ["slotted"]


def slotted(defined: type, reduced: Any) -> Any:
    """What cloudpickle makes of a class that goes by value, with the slots of the class."""
    slots: Any = vars(defined).get("__slots__")
    match reduced:
        case (make, (kind, name, bases, {**facts}, *more), ({**state}, later), *rest) if (
            isinstance(slots, (str, tuple, list, dict))
            and make.__name__ == "_make_skeleton_class"
            and not issubclass(defined, tuple)  # a named one may have none, and needs none
        ):
            for slot in cast("Iterable[str]", [slots] if isinstance(slots, str) else slots):
                state.pop(_mangled(slot, defined.__name__), None)  # making the class makes it
            facts["__slots__"] = slots
            return (make, (kind, name, bases, facts, *more), (state, later), *rest)
        case _:
            return reduced


def _mangled(slot: str, owner: str) -> str:
    owner = owner.lstrip("_")
    private = slot.startswith("__") and not slot.endswith("__")
    return f"_{owner}{slot}" if private and owner else slot
