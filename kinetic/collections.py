"""`map`, keras-kinetic's name for starting a batch."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Unpack, cast

from kinetic._tracebacks import of_the_caller, own_frames_left_out
from kinetic.function import RemoteFunction
from kinetic.options import MapOptions, MapSettings, show_in_signature
from kinetic.outcome import X

if TYPE_CHECKING:
    from kinetic.jobs import BatchHandle

__all__ = ["map"]


@own_frames_left_out
@show_in_signature(MapSettings)
def map(
    submit_fn: Callable[..., Any],
    inputs: Iterable[X] | AsyncIterable[X],
    **options: Unpack[MapOptions],
) -> BatchHandle[Any, X]:
    """Run a function once for each input, as ``f.run_async_map(inputs, ...)`` does.

    Args:
        submit_fn: ``f.run_async`` of a decorated *f*, or *f* itself; also inside
            ``functools.partial``, whose arguments go before those of each input.
        inputs: One job runs for each input. Any iterable, also lazy, infinite, or async.
        input_mode: How an input becomes arguments. ``single``: the input is the only argument;
            ``args``: a sequence of arguments; ``kwargs``: a dict of arguments. ``auto``: a dict
            gives keyword arguments, a list or tuple gives positional arguments, and anything else
            is the only argument. ``labelled``: a
            pair of a label, which the function does not get, and a dict of keyword arguments.
        max_concurrent: How many jobs may be unfinished at once. None: no limit. On this
            machine: how many workers run the jobs, at most one for each slot.
        retries: How many times a failed item may run again.
        fail_fast: Start nothing more after the first failure.
        cancel_running_on_fail: With *fail_fast*, also stop the jobs that run.
        name, tags: `list_batches` finds the batch by this name and these tags.
        project, cluster: Where the batch runs. None: where the function's settings say.
        window: Limit of submitted items that your ``for`` loop has not read yet. None: no limit if
            the length of *inputs* is known, else twice *max_concurrent*.
        batch_timeout: Seconds for the whole batch; then kinetic cancels it.
        budget: US dollars, estimated by list prices. When ended attempts cost this much,
            nothing more starts; running attempts continue.
        prunable: Let `BatchHandle.prune` end attempts that call `kinetic.report`. Default: no.
        progress: Show a progress line while you wait. None: show it.

    Raises:
        ConfigurationError: An option is wrong, or *budget* is set and the machine has no known
            price, or *inputs* is an empty list, a string, or a dict. Or an input doesn't
            fit the function's parameters. If the length of *inputs* is unknown, only the job of
            such an input fails, with a `SubmissionError`.
        SubmissionError: The function or its project can't be shipped.
        TypeError: *submit_fn* doesn't come from a decorated function.

    kinetic archives the project and pickles the function once for all inputs, so it must know the
    function. It refuses any other callable that submits jobs.

    Example::

        batch = kinetic.collections.map(train.run_async, [0.1, 0.2, 0.3])
        print(batch.results())
    """
    from kinetic import jobs

    return jobs.run_async_map(_find_function(submit_fn), inputs, **options)


def _find_function(submit_fn: Any) -> Callable[..., Any]:
    """Return the decorated function that *submit_fn* submits."""
    if isinstance(submit_fn, functools.partial):
        function = _find_function(submit_fn.func)
        return functools.partial(function, *submit_fn.args, **submit_fn.keywords)
    if isinstance(submit_fn, RemoteFunction):
        return cast("RemoteFunction[..., Any]", submit_fn)
    owner: Any = getattr(submit_fn, "__self__", None)
    if isinstance(owner, RemoteFunction) and submit_fn == cast("Any", owner).run_async:
        return cast("RemoteFunction[..., Any]", owner)
    message = (
        f"kinetic.collections.map takes f.run_async of a function f that @kinetic.run has "
        f"decorated, not {submit_fn!r}; move what it does before it submits into f"
    )
    raise of_the_caller(TypeError(message))
