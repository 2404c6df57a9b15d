"""The short way to pickle a call: plain values need no pickler of ours."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, cast

from kinetic._runner import frames

__all__ = ["plain_call"]

PLAIN = frozenset({type(None), bool, int, float})
TEXT = frozenset({str, bytes})
LONGEST, MOST = 4096, 64
"""Characters of a text, and values in the containers of a call; pickling more holds the loop up."""


def plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    """The container of ``(args, kwargs)``, or None when they take more than this.

    Exactly what the long way makes of numbers and short texts, alone and in
    lists, tuples and dicts: none of them is code, `Data`, or large.
    """
    if len(args) == 1 and not kwargs and type(args[0]) in PLAIN and _is_small(args[0]):
        return _packed((args, kwargs))
    left = [MOST]
    if _are_plain(args, left) and _are_plain(kwargs, left) and _are_plain(kwargs.values(), left):
        return _packed((args, kwargs))
    return None


def _packed(call: Any) -> bytes:
    return frames.pack_one(pickle.dumps(call, protocol=5))


def _are_plain(values: Iterable[object], left: list[int], depth: int = 4) -> bool:
    for one in values:
        left[0] -= 1
        if left[0] < 0:
            return False
        kind, value = type(one), cast("Any", one)  # what it says of its class may be a lie
        if kind in PLAIN:
            if not _is_small(value):
                return False
        elif kind in TEXT:
            if len(value) > LONGEST:
                return False
        elif depth == 0:
            return False
        elif kind is list or kind is tuple:
            if not _are_plain(value, left, depth - 1):
                return False
        elif kind is dict:
            inside = (*value, *value.values())
            if not _are_plain(inside, left, depth - 1):
                return False
        else:
            return False
    return True


def _is_small(number: object) -> bool:
    return type(number) is not int or -(1 << 63) <= number < 1 << 63
