"""What an argument may be, each rule in the words in which its breach is refused."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from kinetic._words import one_line
from kinetic.errors import ConfigurationError

__all__ = ["Rule", "check", "check_indices"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value ``must be``, and how one tells."""

    words: str
    holds: Callable[[Any], bool]


def _int_of(least: int | None = None) -> Rule:
    words = "an int" if least is None else f"an int of at least {least}"
    return Rule(words, lambda value: _is_int(value) and (least is None or value >= least))


def _or_none(rule: Rule) -> Rule:
    return Rule(f"{rule.words}, or None", lambda value: value is None or rule.holds(value))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text_by_text(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    pairs = cast("Mapping[object, object]", value)
    return all(isinstance(one, str) for pair in pairs.items() for one in pair)


def _is_many(value: object) -> bool:
    """Whether it can be iterated over, and not only for being text, bytes or a dict."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return False
    # An object that only has __getitem__ is no Iterable by type, but iter() takes it.
    return isinstance(value, AsyncIterable | Iterable) or hasattr(value, "__getitem__")


_TEXT = Rule("text", lambda value: isinstance(value, str))
_ID = Rule("an id such as a handle has", lambda value: isinstance(value, str) and bool(value))
_FLAG = Rule("True or False", lambda value: isinstance(value, bool))
_WAIT = Rule("a number of seconds of at least 0", lambda value: _is_number(value) and value >= 0)
_SPAN = Rule(
    "a finite number of seconds greater than 0",
    lambda value: _is_number(value) and math.isfinite(value) and value > 0,
)
_TAGS = Rule("a dict of text by text, such as {'team': 'maths'}", _is_text_by_text)

_INPUTS = Rule(
    "an iterable with an input for each job (write [...] around a single one, .items() or "
    ".values() after a dict of many)",
    _is_many,
)

_RULES = {
    "attempt": _or_none(_int_of(1)),
    "batch_timeout": _or_none(_SPAN),
    "cancel_running_on_fail": _FLAG,
    "cleanup": _FLAG,
    "cluster": _or_none(_TEXT),
    "fail_fast": _FLAG,
    "force": _FLAG,
    "group_id": _ID,
    "index": _int_of(),
    "input_mode": _TEXT,
    "inputs": _INPUTS,
    "job_id": _ID,
    "limit": _or_none(_int_of(0)),
    "max_concurrent": _or_none(_int_of(1)),
    "n": _int_of(0),
    "name": _or_none(_TEXT),
    "ordered": _FLAG,
    "poll_interval": _SPAN,
    "poll_timeout": _or_none(_WAIT),
    "progress": _or_none(_FLAG),
    "project": _or_none(_TEXT),
    "retries": _int_of(0),
    "return_exceptions": _FLAG,
    "seal": _FLAG,
    "submission": _ID,
    "tags": _or_none(_TAGS),
    "timeout": _or_none(_WAIT),
    "window": _or_none(_int_of(1)),
}
"""By the name of the argument, which means the same wherever it is taken."""


def check(**values: object) -> None:
    """Refuse the first of the named *values* that is not what its name asks for.

    Raises:
        ConfigurationError: It names the argument, what it must be, and what it is.
    """
    for name, value in values.items():
        rule = _RULES[name]
        if not rule.holds(value):
            raise ConfigurationError(f"{name} must be {rule.words}, not {_shown(value)}")


def check_indices(indices: Any) -> list[int] | None:
    """The places of items in a batch, as a list; None stays None.

    Raises:
        ConfigurationError: They are no iterable, or one of them is no int.
    """
    if indices is None:
        return None
    if isinstance(indices, str | bytes) or not isinstance(indices, Iterable):
        raise ConfigurationError(
            f"indices must be an iterable of ints, such as [3], or None, not {_shown(indices)}"
        )
    listed: list[Any] = [*indices]
    for index in listed:
        if not _is_int(index):
            raise ConfigurationError(f"indices must be ints, not {_shown(index)}")
    return listed


def _shown(value: object) -> str:
    try:
        return one_line(repr(value), 80)
    except Exception:
        return f"a {type(value).__name__}"
