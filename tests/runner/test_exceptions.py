"""An exception that leaves a job is the same where it arrives, whatever its class is like."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Self

import pytest

from kinetic._runner.protocol import exceptions, pickles
from kinetic._runner.protocol.wire import INLINE_BYTES


class Coded(Exception):
    """Its ``args`` are not what its ``__init__`` takes, as of most classes."""

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


class Made(Exception):
    def __new__(cls, *, code: int) -> Self:
        return super().__new__(cls, code)

    def __init__(self, *, code: int) -> None:
        self.code = code


class Failures(ExceptionGroup[Exception]):
    def __new__(cls, found: list[Exception], *, stage: str) -> Self:
        made = super().__new__(cls, "failures", found)
        made.stage = stage
        return made

    def __init__(self, found: list[Exception], *, stage: str) -> None:
        self.stage = stage


class Holding(Exception):
    """It says how it is pickled: without the lock."""

    def __init__(self, code: int) -> None:
        super().__init__("held")
        self.code, self.lock = code, threading.Lock()

    def __reduce__(self) -> Any:
        return Holding, (self.code,)


def arrived(error: BaseException) -> Any:
    """*error* as it is on the other side."""
    return pickles.load(exceptions.dumps(error, INLINE_BYTES))


def caused(error: Exception, cause: Exception) -> Exception:
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
        Made(code=6),
        FileNotFoundError(2, "no such file", "a.txt"),
        ModuleNotFoundError("no module", name="absent"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_keeps_its_class_its_words_and_its_attributes(error: Exception) -> None:
    found = arrived(error)
    assert type(found) is type(error)
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
    for name in ("code", "own", "errno", "filename", "name", "reason"):
        assert getattr(found, name, None) == getattr(error, name, None)


def test_a_slot_is_an_attribute_too() -> None:
    error = Ranked("words")
    error.code = 3
    assert arrived(error).code == 3


def test_an_exception_group_keeps_what_it_groups() -> None:
    nested = ExceptionGroup("inner", [Coded(2, where="there")])
    found = arrived(Failures([Coded(1, where="here"), nested], stage="last"))
    assert (type(found), found.message, found.stage) == (Failures, "failures", "last")
    first, inner = found.exceptions
    assert (first.code, inner.exceptions[0].where) == (1, "there")


def test_what_caused_an_exception_comes_along() -> None:
    found = arrived(caused(ValueError("last"), Coded(1, where="here")))
    assert (type(found.__cause__), found.__cause__.code) == (Coded, 1)
    assert found.__suppress_context__
    later = Coded(2, where="here")
    later.__context__ = KeyError("first")
    found = arrived(later)
    assert (type(found.__context__), found.__suppress_context__) == (KeyError, False)


def test_what_a_traceback_would_not_show_stays() -> None:
    hidden = Coded(2, where="here")
    hidden.__context__, hidden.__suppress_context__ = KeyError("first"), True
    found = arrived(hidden)
    assert (found.__context__, found.__suppress_context__) == (None, True)


def test_notes_come_along() -> None:
    error = Coded(1, where="here")
    error.add_note("a note")
    assert arrived(error).__notes__ == ["a note"]


def test_an_exception_that_says_how_it_is_pickled_is_pickled_so() -> None:
    found = arrived(Holding(7))
    assert (found.code, type(found.lock)) == (7, type(threading.Lock()))
    assert not hasattr(found, "__notes__")


def test_an_attribute_that_cannot_be_pickled_is_left_out_and_named() -> None:
    error = caused(Coded(1, where="here"), Coded(2, where="there"))
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.__cause__.client = threading.Lock()  # type: ignore[union-attr]
    found = arrived(error)
    assert (found.code, found.__cause__.code, hasattr(found, "lock")) == (1, 2, False)
    assert "lock" in found.__notes__[-1] and "client" in found.__cause__.__notes__[-1]


def test_an_attribute_that_is_too_large_is_left_out_and_named() -> None:
    error = Coded(1, where="here")
    error.batch = b"x" * INLINE_BYTES  # type: ignore[attr-defined]
    found = arrived(error)
    assert (found.code, hasattr(found, "batch")) == (1, False)
    assert "batch" in found.__notes__[-1]


def test_an_argument_that_cannot_be_pickled_becomes_its_words() -> None:
    found = arrived(ValueError("locked", threading.Lock()))
    assert type(found) is ValueError and found.args[0] == "locked"
    assert "lock" in found.args[1] and "args[1]" in found.__notes__[-1]


def test_an_exception_that_refers_to_itself_arrives() -> None:
    error = Coded(1, where="here")
    error.root = error  # type: ignore[attr-defined]
    found = arrived(error)
    assert found.root is found


def test_an_exception_whose_class_cannot_be_pickled_is_refused() -> None:
    odd = type("Odd", (Exception,), {"lock": threading.Lock(), "__module__": "nowhere"})
    with pytest.raises(TypeError, match="lock"):
        exceptions.dumps(odd("words"), INLINE_BYTES)
