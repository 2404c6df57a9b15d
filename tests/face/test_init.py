"""Test ``init``: what `kinetic.run` refuses, what calls leave out, what ``f.local()`` does."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

import kinetic
from kinetic.errors import ConfigurationError
from kinetic.options import Options


def load() -> str:
    return "model"


def use(number: int, *, model: str) -> tuple[int, str]:
    return number, model


# --- the options ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"isolation": "thread"}, "isolation must be 'process' or 'worker', not 'thread'"),
        ({"isolation": None}, "isolation must be 'process' or 'worker', not None"),
        ({"recycle": 0, "isolation": "worker"}, "recycle must be an int of at least 1, or None"),
        ({"recycle": 2.5, "isolation": "worker"}, "not 2.5"),
        ({"recycle": 3}, "recycle=3 has no effect with isolation='process'.*'worker'"),
        ({"init": load}, "init must be a dict .*'model': load_model"),
        ({"init": [("model", load)]}, "init must be a dict"),
        ({"init": {3: load}}, "init has 3, which isn't the name of an argument"),
        ({"init": {"": load}}, "init has '', which"),
        ({"init": {"model": "model"}}, r"init\['model'\] must be a function, not 'model'"),
        ({"init": {"model": use}}, r"init\['model'\] must take no arguments: use\(number"),
    ],
)
def test_a_wrong_value_is_refused_when_decorating(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kinetic.run(**settings)


def test_init_is_a_copy_with_plain_functions() -> None:
    given: dict[str, Callable[[], Any]] = {"model": kinetic.run("cpu")(load)}
    options = Options(init=given)
    given.clear()
    assert options.init == {"model": load}
    assert Options(init=MappingProxyType({})).init is None


@pytest.mark.parametrize(
    ("function", "init", "message"),
    [
        (use, {"modle": load}, r"use\(number.* takes no keyword argument 'modle': did you mean"),
        (use, {"xyz": load}, "'xyz': it takes number, model"),
        (lambda model, /: model, {"model": load}, "takes no keyword argument 'model'"),
        (functools.partial(use, model="x"), {"model": load}, r"partial.* argument 'model', too"),
    ],
)
def test_a_function_that_cannot_take_an_argument_of_init_is_refused(
    function: Callable[..., Any], init: Mapping[str, Callable[[], Any]], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"init does not fit: .*{message}"):
        kinetic.run(init=init)(function)
    with pytest.raises(ConfigurationError, match=message):
        kinetic.run()(function).options(init=init)


def test_the_signature_of_the_function_stays() -> None:
    assert inspect.signature(kinetic.run(init={"model": load})(use)) == inspect.signature(use)


# --- f.local() ---


def test_a_local_call_makes_the_arguments_and_cleans_up_in_reverse() -> None:
    events: list[str] = []

    def connect() -> Iterator[str]:
        events.append("connect")
        yield "connection"
        events.append("disconnect")

    async def fetch() -> str:
        await asyncio.sleep(0)
        return "settings"

    async def subscribe() -> AsyncIterator[asyncio.AbstractEventLoop]:
        events.append("subscribe")
        yield (loop := asyncio.get_running_loop())
        assert asyncio.get_running_loop() is loop
        events.append("unsubscribe")

    init = {"model": load, "connection": connect, "settings": fetch, "loop": subscribe}

    @kinetic.run(init=init)
    def work(number: int, *, fails: bool = False, **given: Any) -> Any:
        events.append("work")
        if fails:
            raise ValueError("no")
        return number, given

    number, given = work.local(3)
    assert (number, given.pop("loop").is_closed()) == (3, True)
    assert given == {"model": "model", "connection": "connection", "settings": "settings"}
    expected = ["connect", "subscribe", "work", "unsubscribe", "disconnect"]
    assert events == expected
    with pytest.raises(ValueError, match="no"):
        work.local(3, fails=True)
    assert events == [*expected, *expected]


def test_what_init_makes_belongs_to_the_thread_of_a_local_call() -> None:
    @kinetic.run(init={"database": lambda: sqlite3.connect(":memory:")})
    def query(*, database: sqlite3.Connection) -> Any:
        with database:
            return threading.get_ident(), database.execute("select 1").fetchone()

    assert query.local() == (threading.get_ident(), (1,))


async def test_a_local_call_of_an_async_function_uses_its_event_loop() -> None:
    events: list[str] = []

    async def connect() -> AsyncIterator[Any]:
        yield asyncio.get_running_loop()
        events.append("disconnect")

    def open_file() -> Iterator[str]:
        yield "file"
        events.append("close")

    async def fetch() -> str:
        return "settings"

    @kinetic.run(init={"loop": connect, "file": open_file, "settings": fetch})
    async def work(number: int, **given: Any) -> Any:
        events.append("work")
        return number, given

    loop = asyncio.get_running_loop()
    assert await work.local(1) == (1, {"loop": loop, "file": "file", "settings": "settings"})
    assert events == ["work", "close", "disconnect"]


async def test_a_local_call_waits_for_coroutines_while_a_loop_runs() -> None:
    async def fetch() -> str:
        await asyncio.sleep(0)
        return "model"

    assert kinetic.run(init={"model": fetch})(use).local(1) == (1, "model")


def test_the_method_of_an_instance_gets_the_arguments_of_init() -> None:
    class Server:
        @kinetic.run(init={"model": load})
        def answer(self, text: str, model: str) -> tuple[str, str]:
            return text, model

    assert Server().answer.local("x") == ("x", "model")


@pytest.mark.parametrize("yields", [0, 2])
def test_a_generator_of_init_yields_once(yields: int) -> None:
    def generate() -> Iterator[str]:
        yield from ["model"] * yields

    message = "more than one value" if yields else "'model' yields no value"
    with pytest.raises(RuntimeError, match=message):
        kinetic.run(init={"model": generate})(use).local(1)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1,), {"model": "x"}, "init gives the argument 'model'; leave it out"),
        ((), {}, "missing a required argument: 'number'"),
        ((1, "x"), {}, "too many positional arguments"),
    ],
)
def test_a_local_call_that_does_not_fit_calls_no_function_of_init(
    args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    def refuse() -> str:
        raise AssertionError

    with pytest.raises(TypeError, match=message):
        kinetic.run(init={"model": refuse})(use).local(*args, **kwargs)


def test_an_argument_of_init_before_others_is_refused_by_its_position() -> None:
    @kinetic.run(init={"model": load})
    def wrong(model: str, number: int) -> None: ...

    with pytest.raises(TypeError, match=r"argument 1 of the call is 'model'.*the last parameter"):
        wrong.local(1)
    assert wrong.local(number=1) is None
