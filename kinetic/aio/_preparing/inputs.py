"""Turn the inputs of a batch into calls, and pickle each call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple

from kinetic._binding import Binding
from kinetic._packing import payload
from kinetic._packing.payload import pickle_plain_call
from kinetic._runner.protocol import notes
from kinetic.aio._preparing.calls import UploadedCall
from kinetic.data import Data
from kinetic.errors import ConfigurationError, KineticError, SubmissionError

CHUNK_ITEMS = 100
CHUNK_BYTES = 8 * 1024 * 1024
"""Maximum number of inputs in a chunk, and the size at which a chunk gets no more inputs."""


class EncodedInput(NamedTuple):
    """One input as bytes, before it gets its index.

    ``value`` is the user's object, which the user may change later. ``mode`` is ``s`` if the input
    is the single argument, ``a`` if its elements are the arguments, and ``k`` if its items are the
    keyword arguments. With ``l``, a ``label``, which the function doesn't get, comes with the
    keyword arguments. ``data`` are the `Data` that only this input has. ``error`` says why the
    input can't be submitted. ``note`` has the scalars of the input.
    """

    value: Any
    content: bytes
    digest: str
    mode: str
    data: tuple[Data, ...] = ()
    error: Exception | None = None
    note: notes.Note | None = None
    label: Any = None


def first_chunk(inputs: Sequence[EncodedInput]) -> Sequence[EncodedInput]:
    """Return the inputs at the beginning of *inputs* that fit into one chunk."""
    size = 0
    for count, encoded in enumerate(inputs[:CHUNK_ITEMS], start=1):
        size += len(encoded.content)
        if size >= CHUNK_BYTES:
            return inputs[:count]
    return inputs[:CHUNK_ITEMS]


def call_mode_of(value: Any, mode: str) -> str:
    """Return how the function is called with *value*: one of `INPUT_MODES`, but not ``auto``."""
    if mode != "auto":
        return mode
    kind: Any = value.__class__
    if issubclass(kind, dict):
        is_name = (isinstance(it, str) and it.isidentifier() and not iskeyword(it) for it in value)
        return "kwargs" if all(is_name) else "single"
    return "args" if issubclass(kind, (list, tuple)) else "single"


def as_call(value: Any, mode: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for one input."""
    mode = call_mode_of(value, mode)
    if mode == "single":
        return (value,), {}
    needs = f'input_mode="{mode}" needs'
    arguments = _without_label(value) if mode == "labelled" else value
    kind: Any = arguments.__class__
    if mode == "args":
        if not issubclass(kind, (list, tuple)):
            raise ConfigurationError(f"{needs} lists or tuples, not {kind.__name__}")
        return (*arguments,), {}
    if not issubclass(kind, dict):
        needed = "a dict after the label" if mode == "labelled" else "dicts"
        raise ConfigurationError(f"{needs} {needed}, not {kind.__name__}")
    for key in arguments:
        if not isinstance(key, str):
            raise ConfigurationError(f"{needs} string keys, not {type(key).__name__}")
    return (), {**arguments}


def _without_label(value: Any) -> Any:
    """Return the keyword arguments in an input of ``input_mode="labelled"``."""
    kind: Any = value.__class__
    if not issubclass(kind, (list, tuple)) or len(value) != 2:
        raise ConfigurationError(
            'input_mode="labelled" needs pairs of a label and a dict, not ' + kind.__name__
        )
    label, arguments = value
    try:
        json.dumps(label)
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(f"the label {label!r} can't be written as JSON: {exc}") from None
    return arguments


def _misfit(binding: Binding, value: Any, mode: str) -> str:
    """Return why the function can't be called with this input; empty if it can."""
    call_mode = call_mode_of(value, mode)
    misfit = binding.find_mismatch(*as_call(value, call_mode))
    if not misfit:
        return ""
    if call_mode in ("args", "kwargs") and not binding.find_mismatch((value,), {}):
        explanation = "each element becomes an argument"
        if call_mode == "kwargs":
            explanation = "the items of a dict become keyword arguments"
        misfit += (
            f'; {explanation}; input_mode="single" passes the whole input as the only argument'
        )
    return misfit


def check_inputs(
    function: Callable[..., Any],
    values: Iterable[Any],
    mode: str,
    init: Collection[str] | None = None,
) -> None:
    """Refuse a list of inputs unless the function can be called with every one of them.

    *mode* is the batch's ``input_mode``. The option ``init`` gives the arguments named *init*.
    """
    binding = Binding(function, init)
    for position, value in enumerate(values):
        misfit = ""
        try:
            misfit = _misfit(binding, value, mode)
        except ConfigurationError as exc:
            raise ConfigurationError(f"input {position}: {exc}. Nothing was sent") from None
        except (KineticError, ValueError, TypeError):  # `encode` reports what its methods raise
            continue
        if misfit:
            raise ConfigurationError(f"input {position} does not fit {misfit}. Nothing was sent")


_EMPTY_DIGEST = hashlib.sha256().hexdigest()

_Pickled = tuple[bytes, str, tuple[Data, ...]]
"""One input's pickle, the pickle's digest, and the `Data` that only this input has."""


class Encoder:
    """Pickle the inputs of a batch one by one, so that each has the value that it had when pulled.

    *mode* is the batch's ``input_mode``. Any thread may call the methods.
    """

    def __init__(self, uploaded: UploadedCall, mode: str) -> None:
        self._uploaded = uploaded
        self._mode = mode
        call = uploaded.call
        self._binding = None if call.function is None else Binding(call.function, call.options.init)

    def encode(self, value: Any) -> EncodedInput:
        """Pickle one input, or keep the error in the result; this blocks if the input is large."""
        encoded = self.encode_small(value) or self._encode(value, self._pickle)
        assert encoded is not None  # `_pickle` takes every input
        return encoded

    def encode_small(self, value: Any) -> EncodedInput | None:
        """Pickle one input without blocking; None if it's large or has an object of other types."""

        def pickle_small(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pickled | None:
            if (content := pickle_plain_call(args, kwargs)) is None:
                return None
            return content, hashlib.sha256(content).hexdigest(), ()

        return self._encode(value, pickle_small)

    def _encode(
        self, value: Any, dump: Callable[[tuple[Any, ...], dict[str, Any]], _Pickled | None]
    ) -> EncodedInput | None:
        call_mode = call_mode_of(value, self._mode)
        try:
            args, kwargs = as_call(value, call_mode)
            if self._binding is not None and self._binding.find_mismatch(args, kwargs):
                misfit = _misfit(self._binding, value, self._mode)
                raise SubmissionError(f"the input does not fit {misfit}")
            if (pickled := dump(args, kwargs)) is None:
                return None
            content, digest, data = pickled
            note = notes.note_of_call(args, kwargs)
            label = value[0] if call_mode == "labelled" else None
        except (KineticError, ValueError, TypeError) as exc:
            error = SubmissionError(str(exc)) if isinstance(exc, ConfigurationError) else exc
            return EncodedInput(value, b"", _EMPTY_DIGEST, call_mode[0], error=error)
        return EncodedInput(value, content, digest, call_mode[0], data, note=note, label=label)

    def _pickle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Pickled:
        uploaded, call = self._uploaded, self._uploaded.call
        table = payload.DataTable(uploaded.data_table)
        pickled = payload.dump_arguments(
            args, kwargs, uploaded.project, table, None, call.name, function=call.function
        )
        assert isinstance(pickled.content, bytes)  # without a spool, it stays in memory
        new_data = tuple(table.items)[len(uploaded.data_table) :]
        return pickled.content, pickled.digest, new_data
