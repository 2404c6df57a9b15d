"""The parts of an exception that leave its job. `tests/face/raising.py` has whole ones."""

from __future__ import annotations

import threading
from typing import Any, Self

import pytest

from kinetic._runner.protocol import failures, pickles
from kinetic._runner.protocol.wire import INLINE_BYTES


class Coded(Exception):
    """Its ``args`` differ from the parameters of its ``__init__``."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code, self.where = code, where


class Slotted(Exception):
    __slots__ = ("__own", "code")

    def __init__(self, *, code: int) -> None:
        self.code, self.__own = code, code + 1

    @property
    def own(self) -> int:
        return self.__own


class Failures(ExceptionGroup[Exception]):
    def __new__(cls, errors: list[Exception], *, stage: str) -> Self:
        group = super().__new__(cls, "failures", errors)
        group.stage = stage
        return group

    def __init__(self, errors: list[Exception], *, stage: str) -> None:
        self.stage = stage


class Reducing(Exception):
    """It defines how it is pickled: without its lock."""

    def __init__(self, code: int) -> None:
        super().__init__("held")
        self.code, self.lock = code, threading.Lock()

    def __reduce__(self) -> Any:
        return Reducing, (self.code,)


def transfer(error: BaseException) -> Any:
    """Pickle *error* as a job does, and load it as the client does."""
    return pickles.load(failures.dumps(error, INLINE_BYTES))


def with_cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_a_suppressed_context_is_left_out() -> None:
    hidden = Coded(2, where="here")
    hidden.__context__, hidden.__suppress_context__ = KeyError("first"), True
    received = transfer(hidden)
    assert (received.__context__, received.__suppress_context__) == (None, True)


def test_an_exception_with_its_own_reduce_method_is_pickled_by_it() -> None:
    received = transfer(Reducing(7))
    assert (received.code, type(received.lock)) == (7, type(threading.Lock()))
    assert not hasattr(received, "__notes__")


def test_an_attribute_that_cannot_be_pickled_is_left_out_and_named() -> None:
    error = with_cause(Coded(1, where="here"), Coded(2, where="there"))
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.__cause__.client = threading.Lock()  # type: ignore[union-attr]
    received = transfer(error)
    assert (received.code, received.__cause__.code, hasattr(received, "lock")) == (1, 2, False)
    assert "lock" in received.__notes__[-1] and "client" in received.__cause__.__notes__[-1]


def test_an_attribute_that_is_too_large_is_left_out_and_named() -> None:
    error = Coded(1, where="here")
    error.batch = b"x" * INLINE_BYTES  # type: ignore[attr-defined]
    received = transfer(error)
    assert (received.code, hasattr(received, "batch")) == (1, False)
    assert "batch" in received.__notes__[-1]


def test_an_argument_that_cannot_be_pickled_becomes_its_repr() -> None:
    received = transfer(ValueError("locked", threading.Lock()))
    assert type(received) is ValueError and received.args[0] == "locked"
    assert "lock" in received.args[1] and "args[1]" in received.__notes__[-1]


def test_a_long_chain_of_exceptions_that_cannot_be_pickled_arrives() -> None:
    def fail(code: int) -> None:
        error = Coded(code, where="here")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        try:
            raise error
        except Coded:
            if code:
                fail(code - 1)
            raise

    with pytest.raises(Coded) as caught:
        fail(40)
    received, codes = transfer(caught.value), list[int]()
    while received is not None:
        codes.append(received.code)
        received = received.__context__
    assert codes == [*range(41)]


def test_an_exception_in_a_value_keeps_its_class_and_its_attributes() -> None:
    values = [
        Coded(1, where="here"),
        Slotted(code=4),
        Failures([Coded(2, where="there")], stage="x"),
    ]
    coded, slotted, group = pickles.load(pickles.dumps(values))
    assert (coded.where, slotted.own, group.exceptions[0].code) == ("here", 5, 2)
