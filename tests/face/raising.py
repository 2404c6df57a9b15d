"""A script: raise each kind of exception here and in jobs, and print the kinds that differ.

Plain calls and handles take turns; with the argument "both", each kind arrives in both ways. A test
runs this script in an empty project; see test_exceptions.py.
"""

from __future__ import annotations

import abc
import argparse
import asyncio
import concurrent.futures
import concurrent.futures.process
import copyreg
import dataclasses
import decimal
import enum
import http.client
import io
import json
import queue
import re
import socket
import sqlite3
import ssl
import struct
import subprocess
import sys
import threading
import urllib.error
import xml.etree.ElementTree
import zlib
from collections.abc import Callable
from email.message import Message
from typing import Any, Generic, Self, TypeVar

import attrs
import click
import numpy
import numpy.exceptions
import pydantic
import requests
import sqlalchemy.exc

import kinetic
from kinetic import errors

T = TypeVar("T")
KINDS: dict[str, Callable[[], object]] = {}


def raises(**made: Callable[[], BaseException]) -> None:
    """Add a kind that raises what a function makes."""
    for name, make in made.items():

        def raise_it(make: Callable[[], BaseException] = make) -> None:
            raise make()

        KINDS[name] = raise_it


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OtherParameters(Exception):
    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code, self.where = code, where


class WithoutInit(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


class Slotted(Exception):
    __slots__ = ("__own", "code")

    def __init__(self, *, code: int) -> None:
        self.code, self.__own = code, code + 1

    def __str__(self) -> str:
        return f"{self.code} {self.__own}"


class SlottedByHand(Exception):
    __slots__ = ("code",)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    key: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenKeywordOnly(LookupError):
    key: str
    seen: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Unhashable(Exception):
    code: int


@attrs.define(kw_only=True)
class Defined(Exception):
    code: int


@attrs.frozen
class AttrsFrozen(Exception):
    code: int


class SetNothing(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.__dict__["code"] = code

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"can't set {name}")


class GetsFromInner(Exception):
    """Like `urllib.error.HTTPError`, it delegates to an attribute that a copy may lack."""

    def __init__(self, inner: object) -> None:
        super().__init__("delegates")
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class Reducing(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("held")
        self.code, self.lock = code, threading.Lock()

    def __reduce__(self) -> Any:
        return Reducing, (self.code,)


class ReducingWrongly(Exception):
    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(code, where)
        self.code, self.where = code, where

    def __reduce__(self) -> Any:
        return ReducingWrongly, (self.code,)


class SettingState(Exception):
    def __init__(self) -> None:
        super().__init__("stateful")
        self.count = 1

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class Registered(Exception):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host}:{port}")
        self.host, self.port = host, port


copyreg.pickle(Registered, lambda error: (Registered, (error.host, error.port)))


class MadeByNew(Exception):
    def __new__(cls, *, code: int) -> Self:
        return super().__new__(cls, code)

    def __init__(self, *, code: int) -> None:
        self.code = code


class Refused(ConnectionRefusedError):
    def __init__(self, *, host: str) -> None:
        super().__init__(111, "refused", host)


class Undecodable(UnicodeDecodeError):
    def __init__(self, where: str) -> None:  # it doesn't call the base's
        self.where = where

    def __str__(self) -> str:
        return self.where


class Aborted(BaseException):
    def __init__(self, *, code: int) -> None:
        self.code = code


class Failures(ExceptionGroup[Exception]):
    def __new__(cls, failures: list[Exception], *, stage: str) -> Self:
        group = super().__new__(cls, "failures", failures)
        group.stage = stage
        return group

    def __init__(self, failures: list[Exception], *, stage: str) -> None:
        self.stage = stage


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __str__


class Incomparable(Exception):
    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]


class Empty(Exception):
    def __len__(self) -> int:
        return 0


class Color(enum.Enum):
    RED = 1


class Of(Exception, Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


class Abstract(Exception, abc.ABC):
    code: int

    @property
    @abc.abstractmethod
    def text(self) -> str: ...


class Concrete(Abstract):
    text = "concrete"  # type: ignore[assignment]


class Both(KeyError, AttributeError):
    pass


class Point(pydantic.BaseModel):
    x: int


class Outer:
    class Inner(Exception):
        pass

    class Frozen(Exception):
        """A global has the same name, and so has a class in a function; see `namesakes`."""


def namesakes() -> list[type[Exception]]:
    class Point(Exception):
        pass

    class Slotted(LookupError):
        pass

    return [Point, Slotted]


NAMESAKES = namesakes()


class Exit(SystemExit):
    pass


def with_array() -> BaseException:
    error = OtherParameters(1, "here")
    error.array = numpy.arange(3)  # type: ignore[attr-defined]
    return error


def with_slot() -> BaseException:
    error = SlottedByHand("words")
    error.code = 3
    return error


def with_itself() -> BaseException:
    error = KeywordOnly(code=1)
    error.root = error  # type: ignore[attr-defined]
    return error


def with_notes(error: BaseException) -> BaseException:
    error.add_note("a note")
    error.add_note("another")
    return error


def with_file_name() -> BaseException:
    error = PermissionError(13, "denied")
    error.filename = "a.txt"
    return error


def response() -> requests.Response:
    found = requests.Response()
    found.status_code, found._content, found.url = 404, b"absent", "http://h/"
    return found


raises(
    plain=lambda: ValueError("plain"),
    without_args=lambda: RuntimeError(),
    many_args=lambda: IndexError("a", 2, None, (3,)),
    key=lambda: KeyError("key"),
    enum_arg=lambda: ValueError(Color.RED),
    keyword_only=lambda: KeywordOnly(code=1),
    other_parameters=lambda: OtherParameters(1, "here"),
    without_init=lambda: WithoutInit(1),
    slotted=lambda: Slotted(code=1),
    slot_set=with_slot,
    frozen=lambda: Frozen("k"),
    frozen_keyword_only=lambda: FrozenKeywordOnly(key="k", seen=[1]),
    unhashable=lambda: Unhashable(1),
    attrs_defined=lambda: Defined(code=1),
    attrs_frozen=lambda: AttrsFrozen(1),
    set_nothing=lambda: SetNothing(1),
    gets_from_inner=lambda: GetsFromInner([1]),
    reducing=lambda: Reducing(1),
    reducing_with_notes=lambda: with_notes(Reducing(1)),
    reducing_wrongly=lambda: ReducingWrongly(1, where="here"),
    setting_state=lambda: SettingState(),
    registered=lambda: Registered("h", 1),
    made_by_new=lambda: MadeByNew(code=1),
    os_error_subclass=lambda: Refused(host="h"),
    os_error_two_files=lambda: OSError(18, "cross-device", "a", None, "b"),
    os_error_file_name_set=with_file_name,
    unicode_encode=lambda: UnicodeEncodeError("ascii", "ä", 0, 1, "ordinal"),
    unicode_subclass=lambda: Undecodable("here"),
    import_error=lambda: ImportError("m", name="n", path="p"),
    stop_iteration=lambda: StopIteration(3),
    stop_async_iteration=lambda: StopAsyncIteration(3),
    memory=lambda: MemoryError("much"),
    timeout=lambda: TimeoutError("late"),
    own_base=lambda: Aborted(code=1),
    plain_base=lambda: BaseException("base"),
    base_group=lambda: BaseExceptionGroup("g", [KeyboardInterrupt(), Aborted(code=2)]),
    nested_group=lambda: ExceptionGroup("g", [ValueError(1), ExceptionGroup("h", [Frozen("k")])]),
    group_subclass=lambda: Failures([KeywordOnly(code=1)], stage="last"),
    notes=lambda: with_notes(KeywordOnly(code=1)),
    notes_of_frozen=lambda: with_notes(Frozen("k")),
    unprintable=lambda: Unprintable("a"),
    incomparable=lambda: Incomparable("a"),
    empty=lambda: Empty("a"),
    generic=lambda: Of[int](3),
    abstract=lambda: Concrete("a"),
    two_bases=lambda: Both("a"),
    nested_class=lambda: Outer.Inner("a"),
    nested_namesake=lambda: Outer.Frozen("a"),
    local_namesake_of_no_exception=lambda: NAMESAKES[0]("a"),
    local_namesake=lambda: NAMESAKES[1]("a"),
    array_attribute=with_array,
    itself=with_itself,
    odd_syntax_error=lambda: SyntaxError("odd", ("f", "one", "two", "text")),
    called_process=lambda: subprocess.CalledProcessError(3, ["ls"], b"out", b"err"),
    timeout_expired=lambda: subprocess.TimeoutExpired(["ls"], 1.5, b"out"),
    http_error=lambda: urllib.error.HTTPError("http://h", 404, "no", Message(), io.BytesIO(b"b")),
    url_error=lambda: urllib.error.URLError(OSError(111, "refused")),
    requests_http=lambda: requests.HTTPError("404", response=response()),
    requests_connection=lambda: requests.ConnectionError(
        OSError(1, "no"), request=requests.Request("GET", "http://h").prepare()
    ),
    incomplete_read=lambda: asyncio.IncompleteReadError(b"ab", 3),
    http_incomplete=lambda: http.client.IncompleteRead(b"ab", 3),
    sqlalchemy_error=lambda: sqlalchemy.exc.IntegrityError("insert", {"a": 1}, ValueError("dup")),
    click_usage=lambda: click.UsageError("no such option"),
    argument=lambda: argparse.ArgumentError(None, "bad"),
    axis=lambda: numpy.exceptions.AxisError(3, 2),
    linalg=lambda: numpy.linalg.LinAlgError("singular"),
    queue_empty=lambda: queue.Empty(),
    resolver=lambda: socket.gaierror(-2, "unknown"),
    ssl_error=lambda: ssl.SSLError(1, "bad"),
    futures_cancelled=lambda: concurrent.futures.CancelledError(),
    broken_pool=lambda: concurrent.futures.process.BrokenProcessPool("ended"),
    warning=lambda: DeprecationWarning("old"),
    system_exit=lambda: SystemExit(3),
    own_exit=lambda: Exit(3),
    interrupt=lambda: KeyboardInterrupt(),
    generator_exit=lambda: GeneratorExit(),
    cancelled=lambda: asyncio.CancelledError("why"),
)


def recurse() -> None:
    recurse()


def generator_stops() -> None:
    def stops() -> Any:
        raise StopIteration
        yield

    next(stops())


def cause() -> None:
    try:
        raise Frozen("k")
    except Frozen as exc:
        raise KeywordOnly(code=1) from exc


def context() -> None:
    try:
        try:
            raise Aborted(code=1)
        finally:
            raise Frozen("k")
    finally:
        raise Slotted(code=1)


def hidden_context() -> None:
    try:
        raise ValueError("hidden")
    except ValueError:
        raise KeywordOnly(code=1) from None


def local_class() -> None:
    class Local(Exception):
        pass

    raise Local("a")


KINDS.update(
    recursion=recurse,
    generator_stops=generator_stops,
    cause=cause,
    context=context,
    hidden_context=hidden_context,
    local_class=local_class,
    zero_division=lambda: 1 // 0,
    file_not_found=lambda: open("absent"),  # noqa: SIM115
    unicode_decode=lambda: b"\xff".decode(),
    syntax=lambda: compile("a b", "f.py", "exec"),
    no_module=lambda: __import__("absent_module"),
    name=lambda: absent_name,  # type: ignore[name-defined]  # noqa: F821
    attribute=lambda: "text".absent,  # type: ignore[attr-defined]
    json=lambda: json.loads("{"),
    xml=lambda: xml.etree.ElementTree.fromstring("<a>"),
    regex=lambda: re.compile("("),
    pydantic=lambda: Point(x="q"),  # type: ignore[arg-type]
    decimal=lambda: decimal.Decimal(1) / 0,
    zlib=lambda: zlib.decompress(b"x"),
    struct=lambda: struct.unpack("i", b"x"),
    sqlite=lambda: sqlite3.connect(":memory:").execute("select absent"),
    frozen_field=lambda: setattr(Frozen("k"), "key", "l"),
)

NOT_RAISED = ("system_exit", "own_exit", "interrupt", "generator_exit", "cancelled")
NOT_COMPARED = ("lock", "fp", "file", "obj", "response", "request", "array", "root", "_closer")


def describe(error: BaseException | None, seen: tuple[int, ...] = ()) -> Any:
    """Return the facts of an exception that its copy must share."""
    if error is None or id(error) in seen:
        return None
    seen = (*seen, id(error))

    def plain(value: Any) -> Any:
        if isinstance(value, BaseException):
            return describe(value, seen)
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value if value == value and "object at 0x" not in repr(value) else None

    try:
        text = str(error)
    except ZeroDivisionError:
        text = "unprintable"
    facts = {"type": type(error).__qualname__, "text": text}
    if not isinstance(error, pydantic.ValidationError):  # its own pickling doesn't keep its `args`
        facts["args"] = plain(error.args)
    attributes = {name: value for name, value in vars(error).items() if name not in NOT_COMPARED}
    notes = [note for note in attributes.pop("__notes__", ()) if not note.startswith(SENT_NOTES)]
    facts["notes"], facts["attributes"] = notes, plain([*attributes.values()])
    for name in MEMBERS:
        try:
            facts[name] = plain(object.__getattribute__(error, name))
        except AttributeError:
            facts[name] = None
    facts["cause"] = describe(error.__cause__, seen)
    hidden = facts["hidden"] = error.__suppress_context__
    facts["context"] = None if hidden else describe(error.__context__, seen)
    return facts


SENT_NOTES = ("Remote traceback of", "The job couldn't send these parts")
MEMBERS = (
    *("code", "where", "key", "errno", "strerror", "filename", "filename2", "name", "path", "msg"),
    *("lineno", "offset", "text", "encoding", "start", "end", "reason", "value", "stage"),
    *("exceptions", "message", "returncode", "cmd", "stderr", "output", "partial", "expected"),
)


def caught(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as exc:
        return exc
    return None


def is_right(name: str, direct: BaseException | None, received: BaseException | None) -> bool:
    if name in NOT_RAISED:
        expected = type(direct).__qualname__
        return isinstance(received, errors.JobFailed) and received.remote_type.endswith(expected)
    is_class = name == "local_class" or type(received) is type(direct)
    return is_class and describe(received) == describe(direct)


def main() -> None:
    remote = kinetic.run(backend="local", accelerator="cpu")
    both = "both" in sys.argv
    jobs = {name: remote(KINDS[name]).run_async() for name in [*KINDS][:: 1 if both else 2]}
    for name, kind in KINDS.items():
        direct = caught(kind)
        received = {"handle": caught(jobs[name].result)} if name in jobs else {}
        if both or not received:
            received["call"] = caught(remote(kind))
        for way, error in received.items():
            if not is_right(name, direct, error):
                print(f"{name}, {way}: {error!r}\n  {describe(direct)}\n  {describe(error)}")
    print(len(KINDS), "kinds")


if __name__ == "__main__":
    main()
