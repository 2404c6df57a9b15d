"""Keeps count of the `Data` of a call, and refuses them where a path cannot stand."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kinetic._pack import culprit
from kinetic._pack.culprit import Part, isa
from kinetic.errors import DataError

if TYPE_CHECKING:
    from kinetic.data import Data

__all__ = ["DataTable", "refuse_hidden"]


class DataTable:
    """The `Data` of a call, each once, in the order in which they were met."""

    def __init__(self, start: Sequence[Data] = ()) -> None:
        self._places: dict[int, int] = {}
        self._items: list[Data] = []
        for data in start:
            # One object under two volumes has a place for each.
            self._places.setdefault(id(data), len(self._items))
            self._items.append(data)

    @property
    def items(self) -> tuple[Data, ...]:
        """The number of each is its place here."""
        return tuple(self._items)

    def index(self, data: Data) -> int:
        """The number of *data*, which is this very object and not an equal one."""
        if (place := self._places.get(id(data))) is None:
            place = self._places[id(data)] = len(self._items)
            self._items.append(data)
        return place


def refuse_hidden(parts: Sequence[Part], what: str) -> None:
    """Refuse a `Data` in a set or as a key: paths differ from job to job.

    Raises:
        DataError: There is one; the message says where.
    """
    seen: set[int] = set()
    stack = list(reversed(parts))
    while stack:
        part = stack.pop()
        if id(part.value) in seen:
            continue
        seen.add(id(part.value))
        _refuse_in(part, what)
        inside = _inside(part.value)
        stack.extend(Part(part.label + one.label, one.value) for one in reversed(inside))


def _refuse_in(part: Part, what: str) -> None:
    from kinetic.data import Data

    if isa(part.value, set, frozenset):
        place = "in a set"
    elif isa(part.value, dict):
        place = "as a key of a dict"
    else:
        return
    hidden: list[Any] = list(part.value)
    for one in hidden:
        if isinstance(one, Data):
            raise DataError(
                f"{what}: {part.label} has a Data {place}, where no path can stand for it. "
                "Use a list, or make it a value of a dict.",
                path=one.path,
            )


def _inside(value: Any) -> list[Part]:
    if isa(value, dict):
        inside = [Part(f"[{key!r}]", item) for key, item in value.items()]
        return inside + [Part(" (a key)", key) for key in value if isa(key, tuple)]
    if isa(value, list, tuple, set, frozenset, collections.deque):
        return [Part(f"[{place}]", item) for place, item in enumerate(value)]
    if isa(value, types.FunctionType):
        return [Part(f", {one.label}", one.value) for one in culprit.captured(value)]
    if isa(value, functools.partial):
        return list(culprit.parts_of_partial(value))
    if isa(value, type, types.ModuleType):
        return []
    attributes: dict[str, Any] = getattr(value, "__dict__", None) or {}
    return [Part(f".{name}", item) for name, item in attributes.items()]
