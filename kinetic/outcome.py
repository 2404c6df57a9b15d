"""How one item of a batch ended: a value, an error, a cancellation, or a loss."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    TypeVar,
)

from kinetic._tracebacks import own_frames_left_out
from kinetic.errors import Pruned

__all__ = ["Cancelled", "Completion", "Failed", "Lost", "Outcome", "Succeeded"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
if TYPE_CHECKING:  # a default needs Python 3.13, or a package that only type checkers need
    from typing_extensions import TypeVar as DefaultTypeVar

    X = DefaultTypeVar("X", default=Any)
else:
    X = TypeVar("X")


@dataclass(frozen=True)  # with slots, Python 3.11 can't call Succeeded[int](3)
class Succeeded(Generic[T_co]):
    """The function returned ``value``, which may itself be an exception."""

    value: T_co

    ok: ClassVar[Literal[True]] = True
    error: ClassVar[None] = None

    def unwrap(self) -> T_co:
        """Return the value."""
        return self.value


@dataclass(frozen=True, slots=True)
class _Unsuccessful:
    error: Exception

    ok: ClassVar[Literal[False]] = False

    @own_frames_left_out
    def unwrap(self) -> NoReturn:
        """Raise the error."""
        raise self.error


class Failed(_Unsuccessful):
    """The item has no value: ``error`` is the function's exception, or another failure.

    A `SubmissionError` means that the input could not be submitted and nothing ran.
    """

    __slots__ = ()


class Cancelled(_Unsuccessful):
    """The item was stopped before it had a value; ``error`` is a `JobCancelled`."""

    __slots__ = ()


class Lost(_Unsuccessful):
    """The item's process died without an outcome; ``error`` is a `JobLost` with the reason."""

    __slots__ = ()


Outcome: TypeAlias = Succeeded[T] | Failed | Cancelled | Lost | Pruned
"""The outcome of an item. ``match`` it, check ``.ok``, or get the value with ``.unwrap()``.

A `Pruned` is the outcome of an item that ended early; see `kinetic.BatchHandle.prune`.
"""


class Completion(NamedTuple, Generic[T, X]):
    """An item that ended: its index in the inputs, its input, and its outcome.

    The input is None if it can't be pickled, or can't be rebuilt in this process.
    """

    # A tuple has a method of that name, which this field replaces.
    index: int  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleMethodOverride]
    input: X
    outcome: Outcome[T]


if not TYPE_CHECKING:
    Completion.__class_getitem__ = classmethod(types.GenericAlias)  # accept one or two arguments
