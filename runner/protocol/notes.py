"""Notes: the scalars in a value, stored beside its pickle, so that a report needn't unpickle it.

A note is one flat mapping of names to numbers, Booleans, None, and short strings, at most
`NOTE_BYTES` of JSON. Reading a note needs no extra request. The note of a result or an error is in
the signed header of its outcome. The note of an input is in the signed footer of its chunk.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

Scalar = bool | int | float | str | None
Note = Mapping[str, Scalar]

NOTE_BYTES = 1024
MAX_TEXT, MAX_ERROR_TEXT = 100, 300
"""Maximum characters of a string, and of the text of an error."""

MAX_DEPTH, MAX_ELEMENTS, MAX_ENTRIES = 3, 16, 64
"""Maximum levels of nesting, elements of a sequence, and entries; a note leaves out the rest."""

RESULT = "result"
"""The name of a result that is a scalar itself."""

ERROR = "error"

_compact = json.JSONEncoder(separators=(",", ":")).encode
_TEXTUAL = {math.inf: "inf", -math.inf: "-inf"}


def note_of_result(value: Any) -> Note | None:
    """Return the note of a function's result, of any type; None if it has no scalars.

    A scalar is named ``result``. The scalars in a dict, a dataclass, or a named tuple keep their
    names. Those in a short list or tuple are named ``[0]``, ``[1]``, …
    """
    return None if value is None else _build_note(value)


def note_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Note | None:
    """Return the note of a call's arguments; positional ones are named ``[0]``, ``[1]``, …"""
    named = {f"[{position}]": value for position, value in enumerate(args[:MAX_ENTRIES])}
    return _build_note(named | dict(kwargs))


def note_of_error(qualname: str, message: str) -> Note:
    """Return the note of an exception: its type and the start of its message, in one string."""
    text = f"{qualname}: {message}" if qualname and message else qualname or message
    note: Note = {ERROR: text[:MAX_ERROR_TEXT]}
    # In JSON, a character may take 6 or 12 bytes.
    return note if len(_compact(note)) <= NOTE_BYTES else {ERROR: text[: MAX_ERROR_TEXT // 4]}


def read(parsed: object) -> Note:
    """Read a note from JSON; leave out entries that aren't scalars."""
    if not isinstance(parsed, dict):
        return {}
    entries = cast("dict[object, object]", parsed).items()
    return {
        name: value
        for name, value in entries
        if isinstance(name, str) and (value is None or isinstance(value, (bool, int, float, str)))
    }


def _build_note(value: Any) -> Note | None:
    """Return the note of *value*, cut to `NOTE_BYTES`; None if it has no scalars."""
    note: dict[str, Scalar] = {}
    with contextlib.suppress(Exception):  # the user's object may raise anything
        _gather(note, "", value, MAX_DEPTH)
    if len(_compact(note)) > NOTE_BYTES:
        note = _limit_size(note)
    return note or None


def _limit_size(note: Note) -> dict[str, Scalar]:
    """Return the entries that fit, in order; leave out those that don't."""
    remaining, kept = NOTE_BYTES - 2, dict[str, Scalar]()
    for name, value in note.items():
        size = len(_compact({name: value})) - 1  # a comma replaces two braces
        if size <= remaining:
            remaining -= size
            kept[name] = value
    return kept


def _gather(note: dict[str, Scalar], path: str, value: Any, depth: int) -> None:
    """Add the scalars in *value* to *note*; *path* is the value's name, empty for the whole."""
    if len(note) >= MAX_ENTRIES:
        return
    cls: type[Any] = type(cast("object", value))
    if hasattr(cls, "item") and getattr(value, "shape", None) == ():
        value = value.item()  # a scalar of NumPy, JAX, or PyTorch
        cls = type(cast("object", value))
    name = path or RESULT
    if value is None or cls is bool:
        note[name] = value
    elif issubclass(cls, str):
        note[name] = str.__getitem__(value, slice(MAX_TEXT))
    elif issubclass(cls, int):
        if int.bit_length(value) < 64:
            note[name] = int.__index__(value)
    elif issubclass(cls, float):
        number = float.__float__(value)
        note[name] = number if math.isfinite(number) else _TEXTUAL.get(number, "nan")
    elif depth:
        for label, element in _named_elements(cls, value):
            joined = f"{path}{label}" if label[:1] == "[" or not path else f"{path}.{label}"
            _gather(note, joined, element, depth - 1)


def _named_elements(cls: Any, value: Any) -> Iterable[tuple[str, Any]]:
    """Return (name, element) pairs: dict keys, fields, or ``[position]``; none for other values."""
    if issubclass(cls, dict):
        entries = dict[Any, Any].items(value)  # not a subclass's own `items`
        return [(key[:MAX_TEXT], element) for key, element in entries if isinstance(key, str)]
    names: Any = getattr(cls, "_fields", None)
    if names is not None and issubclass(cls, tuple):
        return zip(names, value, strict=True)
    if issubclass(cls, (list, tuple)):
        elements = value if len(value) <= MAX_ELEMENTS else ()
        return [(f"[{position}]", element) for position, element in enumerate(elements)]
    if hasattr(cls, "__dataclass_fields__"):
        return [(key, getattr(value, key)) for key in cls.__dataclass_fields__ if key[:1] != "_"]
    return ()
