"""Batches under the name that keras-kinetic starts them by: `map`."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Unpack, cast

from kinetic.function import RemoteFunction
from kinetic.options import MapOptions, MapSettings, shows
from kinetic.outcome import X

if TYPE_CHECKING:
    from kinetic.jobs import BatchHandle

__all__ = ["map"]


@shows(MapSettings)
def map(
    submit_fn: Callable[..., Any],
    inputs: Iterable[X] | AsyncIterable[X],
    **options: Unpack[MapOptions],
) -> BatchHandle[Any, X]:
    """Run a function once for each of *inputs*: ``f.run_async_map(inputs, ...)``, spelled out.

    The project is archived and the function pickled once for all of them, so the
    function must be known: a callable that submits in ways of its own is refused.

    Args:
        submit_fn: ``f.run_async`` of a decorated *f*, or *f* itself; also inside
            ``functools.partial``, whose arguments go before those of each input.

    Raises:
        TypeError: *submit_fn* is something else.
        ConfigurationError: As `RemoteFunction.run_async_map`.
    """
    from kinetic import jobs

    return jobs.run_async_map(_submitted(submit_fn), inputs, **options)


def _submitted(submit_fn: Any) -> Callable[..., Any]:
    """The decorated function that *submit_fn* submits."""
    if isinstance(submit_fn, functools.partial):
        function = _submitted(submit_fn.func)
        return functools.partial(function, *submit_fn.args, **submit_fn.keywords)
    if isinstance(submit_fn, RemoteFunction):
        return cast("RemoteFunction[..., Any]", submit_fn)
    owner: Any = getattr(submit_fn, "__self__", None)
    if isinstance(owner, RemoteFunction) and submit_fn == cast("Any", owner).run_async:
        return cast("RemoteFunction[..., Any]", owner)
    raise TypeError(
        f"kinetic.collections.map takes f.run_async of a function f that @kinetic.run has "
        f"decorated, not {submit_fn!r}; what it does before it submits belongs into f"
    )
