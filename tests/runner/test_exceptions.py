"""Exceptions survive the way from the job to the client, however their class is written."""

from __future__ import annotations

import dataclasses
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


class Ranked(Exception):
    __slots__ = ("code",)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Refused(OSError):
    def __init__(self, *, host: str) -> None:
        super().__init__(111, "refused", host)


class MadeByNew(Exception):
    def __new__(cls, *, code: int) -> Self:
        return super().__new__(cls, code)

    def __init__(self, *, code: int) -> None:
        self.code = code


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


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        KeyError("key"),
        Coded(3, where="here"),
        Slotted(code=4),
        Frozen(5),
        Refused(host="there"),
        MadeByNew(code=6),
        FileNotFoundError(2, "no such file", "a.txt"),
        ModuleNotFoundError("no module", name="absent"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_keeps_its_class_its_message_and_its_attributes(error: Exception) -> None:
    received = transfer(error)
    assert type(received) is type(error)
    assert (str(received), received.args, vars(received)) == (str(error), error.args, vars(error))
    for name in ("code", "own", "errno", "filename", "name", "reason"):
        assert getattr(received, name, None) == getattr(error, name, None)


def test_an_attribute_in_a_slot_is_kept() -> None:
    error = Ranked("words")
    error.code = 3
    assert transfer(error).code == 3


def test_an_exception_group_keeps_its_exceptions() -> None:
    nested = ExceptionGroup("inner", [Coded(2, where="there")])
    received = transfer(Failures([Coded(1, where="here"), nested], stage="last"))
    assert (type(received), received.message, received.stage) == (Failures, "failures", "last")
    first, inner = received.exceptions
    assert (first.code, inner.exceptions[0].where) == (1, "there")


def test_the_cause_and_the_context_of_an_exception_are_kept() -> None:
    received = transfer(with_cause(ValueError("last"), Coded(1, where="here")))
    assert (type(received.__cause__), received.__cause__.code) == (Coded, 1)
    assert received.__suppress_context__
    error = Coded(2, where="here")
    error.__context__ = KeyError("first")
    received = transfer(error)
    assert (type(received.__context__), received.__suppress_context__) == (KeyError, False)


def test_a_suppressed_context_is_left_out() -> None:
    hidden = Coded(2, where="here")
    hidden.__context__, hidden.__suppress_context__ = KeyError("first"), True
    received = transfer(hidden)
    assert (received.__context__, received.__suppress_context__) == (None, True)


def test_notes_are_kept() -> None:
    error = Coded(1, where="here")
    error.add_note("a note")
    assert transfer(error).__notes__ == ["a note"]


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


def test_an_exception_that_refers_to_itself_arrives() -> None:
    error = Coded(1, where="here")
    error.root = error  # type: ignore[attr-defined]
    received = transfer(error)
    assert received.root is received


def test_an_exception_whose_class_cannot_be_pickled_is_refused() -> None:
    odd = type("Odd", (Exception,), {"lock": threading.Lock(), "__module__": "nowhere"})
    with pytest.raises(TypeError, match="lock"):
        failures.dumps(odd("words"), INLINE_BYTES)


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


def test_what_a_built_in_class_keeps_outside_the_dict_is_kept() -> None:
    denied = PermissionError(13, "denied")
    denied.filename = "a.txt"
    assert transfer(denied).filename == "a.txt"
    assert transfer(NameError("undefined", name="first")).name == "first"
