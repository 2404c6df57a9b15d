"""Store the scalars of a value beside its pickle, so that a report needn't unpickle anything.

A note is one flat mapping of names to numbers, Booleans, None, and short strings, at most
`NOTE_BYTES` of JSON. Reading a note needs no extra request. The note of a result or an error is in
the signed header of its outcome, the note of an input in the signed footer of its chunk.
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
TEXT, ERROR_TEXT = 100, 300
"""Maximum characters of a text, and of the message of an error."""

DEPTH, ELEMENTS, ENTRIES = 3, 16, 64
"""Leave out deeper nesting, longer sequences, and further entries."""

RESULT = "result"
"""The name of a result that is a scalar itself."""

ERROR = "error"

_compact = json.JSONEncoder(separators=(",", ":")).encode
_TEXTUAL = {math.inf: "inf", -math.inf: "-inf"}


def note_of_result(value: Any) -> Note | None:
    """Return the note of a function's result, of any type; None for no note.

    A scalar is named ``result``. The scalars in a dict, a dataclass, or a named tuple keep their
    names. Those in a short list or tuple are named ``[0]``, ``[1]``, …
    """
    return None if value is None else _bounded(value)


def note_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Note | None:
    """Return the notes of arguments; positional ones are named ``[0]``, ``[1]``, …"""
    named = {f"[{place}]": value for place, value in enumerate(args[:ENTRIES])}
    return _bounded(named | dict(kwargs))


def note_of_error(qualname: str, message: str) -> Note:
    """Return the note of an exception: its type and the start of its message, in one string."""
    words = f"{qualname}: {message}" if qualname and message else qualname or message
    note: Note = {ERROR: words[:ERROR_TEXT]}
    # In JSON, a character may take 6 or 12 bytes.
    return note if len(_compact(note)) <= NOTE_BYTES else {ERROR: words[: ERROR_TEXT // 4]}


def read(parsed: object) -> Note:
    """Read a note from JSON; leave out entries that aren't scalars."""
    if not isinstance(parsed, dict):
        return {}
    entries = cast("dict[object, object]", parsed).items()
    return {
        name: one
        for name, one in entries
        if isinstance(name, str) and (one is None or isinstance(one, (bool, int, float, str)))
    }


def _bounded(value: Any) -> Note | None:
    note: dict[str, Scalar] = {}
    with contextlib.suppress(Exception):  # the user's object may raise anything
        _gather(note, "", value, DEPTH)
    if len(_compact(note)) > NOTE_BYTES:
        note = _fitting(note)
    return note or None


def _fitting(note: Note) -> dict[str, Scalar]:
    """Return the entries that fit, in order; leave out those that don't."""
    left, kept = NOTE_BYTES - 2, dict[str, Scalar]()
    for name, one in note.items():
        size = len(_compact({name: one})) - 1  # a comma replaces two braces
        if size <= left:
            left -= size
            kept[name] = one
    return kept


def _gather(note: dict[str, Scalar], path: str, value: Any, depth: int) -> None:
    """Add the scalars in *value* to *note*; *path* is the value's name, empty for the whole."""
    if len(note) >= ENTRIES:
        return
    kind: type[Any] = type(cast("object", value))
    name = path or RESULT
    if value is None or kind is bool:
        note[name] = value
    elif issubclass(kind, str):
        note[name] = str.__getitem__(value, slice(TEXT))
    elif issubclass(kind, int):
        if int.bit_length(value) < 64:
            note[name] = int.__index__(value)
    elif issubclass(kind, float):
        number = float.__float__(value)
        note[name] = number if math.isfinite(number) else _TEXTUAL.get(number, "nan")
    elif depth:
        for inside, one in _parts(kind, value):
            joined = f"{path}{inside}" if inside[:1] == "[" or not path else f"{path}.{inside}"
            _gather(note, joined, one, depth - 1)


def _parts(kind: Any, value: Any) -> Iterable[tuple[str, Any]]:
    """Return the elements of a container by name."""
    if issubclass(kind, dict):
        entries = dict[Any, Any].items(value)  # even if a subclass overrides them
        return [(key[:TEXT], one) for key, one in entries if isinstance(key, str)]
    names: Any = getattr(kind, "_fields", None)
    if names is not None and issubclass(kind, tuple):
        return zip(names, value, strict=True)
    if issubclass(kind, (list, tuple)):
        few = value if len(value) <= ELEMENTS else ()
        return [(f"[{place}]", one) for place, one in enumerate(few)]
    if hasattr(kind, "__dataclass_fields__"):
        return [(key, getattr(value, key)) for key in kind.__dataclass_fields__ if key[:1] != "_"]
    if hasattr(kind, "item") and getattr(value, "shape", None) == ():
        return [("", value.item())]  # a number of NumPy, JAX or PyTorch
    return ()
