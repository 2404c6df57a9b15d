"""Decides how a large plain value is cut into slices that are pickled one by one.

The C pickler keeps every interpreter thread waiting while the table of what it
has met grows, and so do pickling and rebuilding one long string. A slice has a
small table of its own. Slices know nothing of each other, so a value may be
cut only where nothing in it that can change is referred to from elsewhere:
what was one object must stay one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import Any, cast

__all__ = ["FEW", "KINDS", "LONG", "divide", "parts"]

KINDS: frozenset[type] = frozenset({list, tuple, dict, set, frozenset, str})
"""The types, but not their subclasses, of what can be cut."""

FEW = 32
"""A container of fewer elements is never cut."""

LONG = 1024 * 1024
"""The characters from which on a string is cut."""

_SCALARS: frozenset[type] = frozenset({type(None), bool, int, float})  # no table has these
_TEXTS: frozenset[type] = frozenset({str, bytes})
_ATOMS = _SCALARS | _TEXTS
_CONTAINERS = KINDS - {str}
_FIXED: frozenset[type] = frozenset({tuple, frozenset})

# Weights, about the bytes of a pickle, with more for what a pickler's table has: 10,000 entries
# are some 3 ms.
_SCALAR, _ENTRY = 8, 48
_SLICE = 512 * 1024
_HEAVY = 1024  # a text; one that others have too would be in the slice of each
_TOGETHER = 64  # elements that are looked at in one go
_INSIDE = 128 * 1024  # of what is looked at, at one depth
_DEPTH = 20
_TOO_MUCH, _NOT_PLAIN = 2.0**60, math.inf
_OTHERS = 16  # elements that are not plain: so many, and one of so many


class _NotPlainError(Exception):
    """Something in the value has to be pickled with all the rest."""


class _TooMuchError(Exception):
    """There is more in it than should be looked at, or pickled, in one go."""


def divide(value: Any) -> list[int] | None:
    """How many elements each slice of *value* has; None if it cannot be cut.

    A negative number stands for so many elements (fewer than `FEW`) that have
    to be pickled with the rest of the world: the loop variable left over from
    the making of a list refers to one of its elements, too.

    *value* is of one of `KINDS`. Each element is looked at, in a worker thread.
    """
    kind = type(cast("object", value))
    if kind is str:
        return [LONG] * -(-len(value) // LONG)
    columns: list[Iterator[Any]] = [iter(value)]
    if kind is dict:
        columns.append(iter(value.values()))
    counts: list[int] = []
    count = elements = others = 0
    weight = 0.0
    while (together := [list(islice(column, _TOGETHER)) for column in columns])[0]:
        size = len(together[0])
        elements += size
        if (added := _weight_together(together)) <= _SLICE:
            alone = []
        else:
            alone = _one_by_one(together, merged=added == _NOT_PLAIN)
            others -= sum(number for number in alone if number < 0)
            if others > (0 if kind in _FIXED else _OTHERS + elements // _OTHERS):
                return None  # what cannot change cannot be made before what refers to it, either
        if count and (alone or weight + added > _SLICE):
            counts.append(count)
            count, weight = 0, 0.0
        if alone:
            counts += alone
        else:
            count, weight = count + size, weight + added
    return [*counts, count] if count else counts


def parts(value: Any, counts: Iterable[int]) -> Iterator[Any]:
    """The slices: lists of the elements, dicts for a dict, strings for a string."""
    kind = type(cast("object", value))
    if kind is str:
        place = 0
        for count in counts:
            yield value[place : place + count]
            place += count
        return
    elements: Iterator[Any] = iter(value.items() if kind is dict else value)
    for count in counts:
        part = islice(elements, abs(count))
        yield dict(part) if kind is dict else list(part)


def _weight_together(columns: list[list[Any]]) -> float:
    # Until an exception is gone, its traceback refers to what was looked at.
    try:
        return sum(_weight(column, _DEPTH) for column in columns)
    except _NotPlainError:
        return _NOT_PLAIN
    except _TooMuchError:
        return _TOO_MUCH


def _one_by_one(columns: list[list[Any]], *, merged: bool) -> list[int]:
    """The slices of a few elements of which some are not plain or, not to be *merged*, large."""
    plain = [
        all(_is_plain(column[place : place + 1]) for column in columns)
        for place in range(len(columns[0]))
    ]
    counts: list[int] = []
    for is_plain, group in groupby(plain):
        size = len(list(group))
        if is_plain:
            counts += [size] if merged else [1] * size
        else:
            counts += [-min(_OTHERS, size - start) for start in range(0, size, _OTHERS)]
    return counts


def _is_plain(one: list[Any]) -> bool:
    try:
        _weight(one, _DEPTH, slack=1)
    except (_NotPlainError, _TooMuchError):
        return False
    return True


def _weight(values: list[Any], depth: int, slack: int = 0) -> int:
    """The weight of *values*, a list whose elements are referred to by their container, by
    this list, and by *slack* lists of the caller's.
    """
    kinds = set(map(type, values))
    if kinds <= _SCALARS:
        return _SCALAR * len(values)
    if kinds <= _TEXTS and max(sizes := list(map(len, values))) < _HEAVY:
        return _ENTRY * len(values) + sum(sizes)
    if not (kinds <= _ATOMS | _CONTAINERS and depth):
        raise _NotPlainError
    heavy = [value for value in values if type(value) in _TEXTS and len(value) >= _HEAVY]
    if heavy and max(_references(heavy)) > _SOLE + slack:
        raise _NotPlainError
    containers: list[Any] = [value for value in values if type(value) in _CONTAINERS]
    if _are_shared(containers, slack):
        raise _NotPlainError
    if sum(map(len, containers)) > _INSIDE:
        raise _TooMuchError
    texts = [value for value in values if type(value) in _TEXTS]
    own = _SCALAR * len(values) + _ENTRY * (len(texts) + len(containers)) + sum(map(len, texts))
    named: Iterator[Any] = (one.values() for one in containers if _is_dict(one))
    inside: list[Any] = [*chain.from_iterable(containers), *chain.from_iterable(named)]
    return own + _weight(inside, depth - 1)


def _are_shared(containers: list[Any], slack: int) -> bool:
    """Whether others may refer to one of *containers*, or to what can change in it."""
    if not containers or max(references := _references(containers)) <= _SOLE + slack:
        return False
    return any(
        count > _SOLE + slack and not (type(one) in _FIXED and _ATOMS.issuperset(map(type, one)))
        for one, count in zip(containers, references, strict=True)
    )


def _is_dict(value: object) -> bool:
    return type(value) is dict


def _references(values: list[Any]) -> list[int]:
    return list(map(sys.getrefcount, values))


_SOLE = _references([*[[]]])[0] + 2
"""The references to what one container has, while it is in two lists here as well."""
