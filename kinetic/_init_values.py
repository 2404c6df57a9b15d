"""Call a function in this process with the arguments that the functions of ``init`` make.

A worker's interpreter does the same (`runner/worker/session.py`), but for many calls.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

_UNSET: Any = object()


def call(
    function: Callable[..., Any],
    init: Mapping[str, Callable[[], Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return the value of *function*; then finish the generators of *init*, the last one first.

    An event loop in another thread runs coroutines, because this thread may have a loop that runs.
    """
    with contextlib.ExitStack() as stack:
        portal: Any = None

        def run_async(coroutine_function: Callable[[Any], Any], argument: Any) -> Any:
            nonlocal portal
            if portal is None:
                from anyio.from_thread import start_blocking_portal

                portal = stack.enter_context(start_blocking_portal())
            return portal.call(coroutine_function, argument)

        values: dict[str, Any] = {}
        for argument, make in init.items():
            value = make()
            if inspect.isgeneratorfunction(make):
                stack.callback(_finish, value)
                value = next(value, _UNSET)
            elif inspect.isasyncgenfunction(make):
                generator, value = value, run_async(_next_async, value)
                stack.callback(run_async, _finish_async, generator)
            elif inspect.isawaitable(value):
                value = run_async(_await_value, value)
            values[argument] = _checked(value, argument)
        return function(*args, **kwargs, **values)


async def call_async(
    function: Callable[..., Any],
    init: Mapping[str, Callable[[], Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Do what `call` does for a coroutine function, in the running event loop."""
    async with contextlib.AsyncExitStack() as stack:
        values: dict[str, Any] = {}
        for argument, make in init.items():
            value = make()
            if inspect.isgeneratorfunction(make):
                stack.callback(_finish, value)
                value = next(value, _UNSET)
            elif inspect.isasyncgenfunction(make):
                stack.push_async_callback(_finish_async, value)
                value = await _next_async(value)
            elif inspect.isawaitable(value):
                value = await value
            values[argument] = _checked(value, argument)
        return await function(*args, **kwargs, **values)


def _checked(value: Any, argument: str) -> Any:
    if value is _UNSET:
        raise RuntimeError(f"the generator function for {argument!r} yields no value")
    return value


def _finish(generator: Any) -> None:
    if next(generator, _UNSET) is not _UNSET:
        raise RuntimeError(_MORE)


async def _finish_async(generator: Any) -> None:
    if await _next_async(generator) is not _UNSET:
        raise RuntimeError(_MORE)


_MORE = "a generator function of init= yields more than one value"


async def _next_async(generator: Any) -> Any:
    return await anext(generator, _UNSET)


async def _await_value(value: Any) -> Any:
    return await value
