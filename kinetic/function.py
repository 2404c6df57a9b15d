"""The decorator, which makes a function run in a job when it's called."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import sys
import types
import typing
import warnings
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

from kinetic._binding import Binding
from kinetic._tracebacks import count_own_frames, of_the_caller, own_frames_left_out
from kinetic.data import JOB_VARIABLE, with_paths
from kinetic.options import (
    MapOptions,
    MapSettings,
    Options,
    OtherOptions,
    RunOptions,
    refuse_unknown,
    show_in_signature,
)
from kinetic.outcome import X

if TYPE_CHECKING:
    from kinetic.data import Data
    from kinetic.jobs import BatchHandle, JobHandle, Sweep
    from kinetic.sweeps.protocol import Optimizer, Space, Study

__all__ = ["Decorator", "InitDecorator", "RemoteCallable", "RemoteFunction", "run"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
Owner = TypeVar("Owner")

if TYPE_CHECKING:

    class _FunctionAttributes(Generic[R_co]):
        __name__: str
        __qualname__: str
        __wrapped__: Callable[..., R_co]

else:

    class _FunctionAttributes(Generic[R_co]):
        """The base class at run time. Python would take annotations here for the function's."""

        __slots__ = ()


_NAMES_ELSEWHERE = {
    **dict.fromkeys(("map", "map_async", "starmap"), "run_async_map(inputs)"),
    **dict.fromkeys(("apply_async", "delay", "remote", "spawn", "submit"), "run_async(...)"),
}
"""How other libraries call the methods of such a function, and what to call here."""


class RemoteFunction(_FunctionAttributes[R_co], Generic[P, R_co]):
    """A function with the settings of its jobs; `run` creates it.

    A call runs the function in a job and returns the function's value. Inside a job, a call runs
    the function directly, and kinetic refuses to start other jobs. `pickle` writes this object by
    its name, as it writes a function. cloudpickle and dill write the plain function.
    """

    # The settings are in slots, because functools.wraps copies the instance's dict to a wrapper.
    __slots__ = (
        *("__dict__", "__weakref__", "_is_async", "_options", "_plain", "_receiver", "_unbound"),
    )

    def __init__(self, function: Callable[P, R_co], options: Options) -> None:
        self._plain: Callable[..., R_co] = function
        self._options = options
        self._receiver: tuple[Any, ...] = ()  # of a bound method: its instance
        self._unbound: RemoteFunction[..., R_co] | None = None  # of a bound method: its function
        self._is_async = _is_async(function)
        _copy_metadata(self, function)
        if self._is_async and sys.version_info >= (3, 12):
            inspect.markcoroutinefunction(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Python 3.14 computes annotations on access, so `_copy_metadata` can't copy them.
            if name == "__annotations__":
                return _unwrap_partials(self._plain).__annotations__
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _NAMES_ELSEWHERE:
                message += f": call {_NAMES_ELSEWHERE[name]}"
            raise AttributeError(message, name=name, obj=self)

    @own_frames_left_out
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function in a job, print its output, and return its value.

        The call owns the job: Ctrl-C cancels and removes it. An ``async def`` returns a coroutine
        to await in any loop; cancelling the await cancels the job. Inside a job, the call runs the
        function directly.

        Args:
            args, kwargs: The function's own arguments; kinetic pickles them.

        Raises:
            SubmissionError: The job could not be submitted.
            JobError: The job has no value.
            Exception: The exception that the function raised.
        """
        if JOB_VARIABLE in os.environ:
            from kinetic._runner.protocol import stand_ins

            stand_ins.refuse_during_import(f"{self.__name__}()")
            return self.local(*args, **kwargs)
        from kinetic import aio, jobs

        function: Callable[..., Any] = self._unbound or self
        submit_and_wait: Callable[..., Any] = aio.run if self._is_async else jobs.run
        value: R_co = submit_and_wait(function, *self._receiver, *args, **kwargs)
        return value

    @overload
    def run_async(
        self: RemoteFunction[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> JobHandle[T]: ...

    @overload
    def run_async(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R_co]: ...

    @own_frames_left_out
    def run_async(self, /, *args: Any, **kwargs: Any) -> JobHandle[Any]:
        """Start the function in a job and return the job's handle.

        Returns when the platform has accepted the job; the job may start later.

        Args:
            args, kwargs: The function's own arguments; kinetic pickles them.

        Raises:
            SubmissionError: The job could not be submitted.

        If you press Ctrl-C during this call, kinetic removes the job.

        Example::

            job = train.run_async(0.1)
            loss = job.result()
        """
        from kinetic import jobs

        return jobs.submit(self._unbound or self, *self._receiver, *args, **kwargs)

    @overload
    def run_async_map(
        self: RemoteFunction[..., Coroutine[Any, Any, T]],
        inputs: Iterable[X] | AsyncIterable[X],
        **options: Unpack[MapOptions],
    ) -> BatchHandle[T, X]: ...

    @overload
    def run_async_map(
        self,
        inputs: Iterable[X] | AsyncIterable[X],
        **options: Unpack[MapOptions],
    ) -> BatchHandle[R_co, X]: ...

    @own_frames_left_out
    @show_in_signature(MapSettings)
    def run_async_map(
        self,
        inputs: Iterable[Any] | AsyncIterable[Any],
        **options: Unpack[MapOptions],
    ) -> BatchHandle[Any]:
        """Run the function once for each input, and return the batch's handle.

        kinetic pickles each input, and uploads its `Data`, before it pulls the next one. If the
        length of *inputs* is known, it does so for all inputs before this method returns. So later
        changes to an input have no effect.

        Args:
            inputs: One job runs for each input. Any iterable, also lazy, infinite, or async.
            input_mode: How an input becomes arguments. ``single``: the input is the only argument;
                ``args``: a sequence of arguments; ``kwargs``: a dict of arguments. ``auto``: a dict
                gives keyword arguments, a list or tuple gives positional arguments, and anything
                else is the only argument. ``labelled``: a
                pair of a label, which the function does not get, and a dict of keyword arguments.
            max_concurrent: How many jobs may be unfinished at once. None: no limit. On this
                machine: how many workers run the jobs, at most one for each slot.
            retries: How many times a failed item may run again.
            fail_fast: Start nothing more after the first failure.
            cancel_running_on_fail: With *fail_fast*, also stop the jobs that run.
            name, tags: `list_batches` finds the batch by this name and these tags.
            project, cluster: Where the batch runs. None: where the function's settings say.
            window: Limit of submitted items that your ``for`` loop has not read yet. None: no limit
                if the length of *inputs* is known, else twice *max_concurrent*.
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

        If you press Ctrl-C during this call, kinetic removes the batch. When your script ends, its
        process first submits the rest of the inputs; Ctrl-C then ends the process at once.

        Example::

            with train.run_async_map([0.1, 0.2, 0.3], retries=2) as batch:
                for index, rate, outcome in batch.outcomes():
                    print(rate, outcome.unwrap())
        """
        from kinetic import jobs

        return jobs.run_async_map(self, inputs, **options)

    @own_frames_left_out
    def sweep(
        self,
        optimizer: Optimizer | Study,
        space: Space | None = None,
        *,
        trials: int | None,
        on_failure: Literal["tell", "retry", "ignore"] = "tell",
        metric: str | None = None,
        resume: bool = False,
        **options: Unpack[MapOptions],
    ) -> Sweep:
        """Search for the arguments with the best value, and return the sweep.

        The optimizer proposes a trial whenever a job may start, and learns each value when the job
        has ended. Its methods run in a thread of their own, one after the other.

        Args:
            optimizer: A study of Optuna, or an optimizer of `kinetic.sweeps`, or of yours.
            space: For a study: a function of the trial that returns the keyword arguments, or a
                dict of distributions. Other optimizers have their space already: None.
            trials: How many trials to run; cancelled ones don't count. None: as many as the
                optimizer proposes.
            on_failure: What to do when a trial fails. ``tell``: tell the optimizer. ``retry``: run
                the trial again, *retries* times (default: 2), and then tell. ``ignore``: tell the
                optimizer that the trial was cancelled. kinetic runs a preempted trial again in any
                case.
            metric: The number to use if the function returns, or reports, a dict. None: the only
                number in it. It has no effect on a number that isn't in a dict.
            resume: Continue the sweep of this *name*, or begin it if there is none. Default: False.
            options: Those of `run_async_map`, except ``input_mode``.

        Raises:
            ConfigurationError: An argument is wrong, or the function doesn't take the parameters of
                the space. Or the optimizer can't propose the trials of the sweep to continue: its
                space has changed.
            Conflict: Another process runs the sweep of this name, or that sweep hasn't ended and
                *resume* is false.
            SubmissionError: The function or its project can't be shipped.

        If you press Ctrl-C during this call, kinetic cancels the trials.

        Example::

            space = {"rate": kinetic.sweeps.Float(1e-5, 1e-1, log=True)}
            with train.sweep(kinetic.sweeps.RandomSearch(space), trials=50) as sweep:
                for trial in sweep:
                    print(trial.number, trial.params, trial.value)
            print(sweep.best)
        """
        from kinetic import jobs

        return jobs.sweep(
            self,
            optimizer,
            space,
            trials=trials,
            on_failure=on_failure,
            metric=metric,
            resume=resume,
            **options,
        )

    def local(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the undecorated function in this process.

        It gets the path of each local `Data`, not of a copy. The functions of ``init`` make their
        arguments for this call; afterwards, their generators continue behind the ``yield``. The
        call fails if a generator does.

        Raises:
            DataError: An argument has a `Data` that isn't local.
        """
        args, kwargs = with_paths((args, kwargs))
        if (init := self._options.init) is None:
            return self._plain(*self._receiver, *args, **kwargs)
        from kinetic import _init_values

        given = (*self._receiver, *args)
        if misfit := Binding(self._plain, init).find_mismatch(given, kwargs):
            raise TypeError(misfit)
        call: Any = _init_values.call_async if self._is_async else _init_values.call
        value: R_co = call(self._plain, init, given, kwargs)
        return value

    @overload
    def options(
        self, *, init: Mapping[str, Callable[[], Any]], **changes: Unpack[OtherOptions]
    ) -> RemoteFunction[..., R_co]: ...

    @overload
    def options(self, **changes: Unpack[RunOptions]) -> Self: ...

    @own_frames_left_out
    def options(self, **changes: Unpack[RunOptions]) -> Any:
        """Return the same function with other settings; this object keeps its settings.

        Args:
            changes: The settings to change; see `run`.

        Raises:
            ConfigurationError: A value is wrong, or the function has no parameter for ``init``.
            TypeError: There is no such setting.
        """
        settings = self._options.changed(**changes)
        settings.check_init(self._plain)
        if {"spot", "debug"} & changes.keys():
            _warn_of_preemption(settings)
        changed = type(self)(self._plain, settings)
        return changed._bound_to(*self._receiver) if self._receiver else changed

    @property
    def __kinetic__(self) -> Options:
        """The settings of the function's jobs."""
        return self._options

    @overload
    def __get__(self, instance: None, owner: type[object] | None = None) -> Self: ...

    @overload
    def __get__(
        self: RemoteFunction[Concatenate[Owner, Q], T],
        instance: Owner,
        owner: type[object] | None = None,
    ) -> RemoteFunction[Q, T]: ...

    def __get__(self, instance: object, owner: type[object] | None = None) -> Any:
        """Return the method of *instance*, which becomes the first argument."""
        return self if instance is None else self._bound_to(instance)

    def _bound_to(self, receiver: object) -> Self:
        bound = type(self)(self._plain, self._options)
        bound._receiver, bound._unbound = (receiver,), self
        bound.__wrapped__ = types.MethodType(self._plain, receiver)
        return bound

    def __repr__(self) -> str:
        return f"<kinetic function {self.__qualname__} on {self._options.accelerator}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        from kinetic._runner.protocol import stand_ins

        if (named := stand_ins.find_named(self)) is None:
            # typing.cast returns its second argument, so a process unpickles this without kinetic.
            return typing.cast, (None, self.__wrapped__)
        if named is self:
            return self.__qualname__
        changes = {name: getattr(self._options, name) for name in RunOptions.__annotations__}
        return operator.methodcaller("options", **changes), (named,)


RemoteCallable = RemoteFunction
"""keras-kinetic's name for `RemoteFunction`."""


class Decorator(Protocol):
    """The decorator that ``run(...)`` returns."""

    def __call__(self, function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


class InitDecorator(Protocol):
    """The decorator that ``run(init=..., ...)`` returns; type checkers then check no arguments."""

    def __call__(self, function: Callable[..., R], /) -> RemoteFunction[..., R]: ...


@overload
def run(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def run(
    accelerator: str = "tpu-v5e-1",
    container_image: str | None = None,
    base_image_repo: str | None = None,
    zone: str | None = None,
    project: str | None = None,
    capture_env_vars: list[str] | tuple[str, ...] | None = None,
    cluster: str | None = None,
    backend: str | None = None,
    namespace: str | None = None,
    volumes: dict[str, Data] | None = None,
    spot: bool = False,
    output_dir: str | None = None,
    debug: bool = False,
    *,
    timeout: float | None = None,
    start_timeout: float | None = None,
    cpu: float | None = None,
    memory: str | int | None = None,
    isolation: Literal["process", "worker"] = "process",
    init: None = None,
    recycle: int | None = None,
) -> Decorator: ...


@overload
def run(
    accelerator: str = "tpu-v5e-1",
    container_image: str | None = None,
    base_image_repo: str | None = None,
    zone: str | None = None,
    project: str | None = None,
    capture_env_vars: list[str] | tuple[str, ...] | None = None,
    cluster: str | None = None,
    backend: str | None = None,
    namespace: str | None = None,
    volumes: dict[str, Data] | None = None,
    spot: bool = False,
    output_dir: str | None = None,
    debug: bool = False,
    *,
    timeout: float | None = None,
    start_timeout: float | None = None,
    cpu: float | None = None,
    memory: str | int | None = None,
    isolation: Literal["process", "worker"] = "process",
    init: Mapping[str, Callable[[], Any]],
    recycle: int | None = None,
) -> InitDecorator: ...


@own_frames_left_out
@show_in_signature(Options)
def run(*args: Any, **settings: Any) -> Any:
    """Decorate a function so that calling it runs it on an accelerator.

    ``@kinetic.run`` without parentheses takes every default. The decorated function *f* has:

    - ``f(...)``: run it in a job, print its output, and return its value.
    - ``f.run_async(...)``: start it and return a `JobHandle` at once.
    - ``f.run_async_map(inputs, ...)``: run it once per input and return a `BatchHandle`.
    - ``f.sweep(optimizer, ...)``: search for the best arguments and return a `Sweep`.
    - ``f.local(...)``: call the undecorated function here.
    - ``f.options(...)``: a copy with other settings.

    Args:
        accelerator: The hardware, such as ``tpu-v6e-8``, ``gpu-a100x4``, ``l4:spot``, ``cpu``.
        container_image: ``bundled`` or None: an image with the project's dependencies.
            ``prebuilt``: an image that installs them when the job starts. Or the name of an image
            with Python; if it lacks kinetic's runner, the job installs the runner first.
        base_image_repo: Where the base images for ``prebuilt`` are.
        zone, project, cluster, namespace: Where the job runs.
        capture_env_vars: Environment variables to pass on: names, or their
            beginnings followed by ``*``; read when the function is called.
        backend: ``gke``, ``pathways``, or ``local``. None: kinetic chooses by your settings.
        volumes: Absolute paths and their content: ``{"/data": Data("./data")}``.
        spot: Use spot machines, which are cheaper and may be preempted.
        output_dir: Where jobs write files to keep; see ``KINETIC_OUTPUT_DIR``.
        debug: Have the job wait for a debugger before it calls the function.
        timeout: Seconds that one attempt may run, counted from the call of the function.
        start_timeout: Seconds that one attempt may wait to start.
        cpu, memory: Processors, and bytes or text such as ``4Gi``, for the job.
        isolation: ``process``: each item of a batch has a process of its own. ``worker``: items run
            one after another in one interpreter, so that models and compiled code stay.
        init: Functions that make arguments: ``{"model": load_model}``. Calls leave these arguments
            out. Each process, or interpreter with ``isolation="worker"``, calls them once. What
            a generator function has after its ``yield`` runs at the end.
        recycle: With ``isolation="worker"``: start a new interpreter after this many items.

    ``isolation="worker"``, ``init``, and ``recycle`` work on ``local`` and ``gke``, not on several
    hosts.

    Raises:
        ConfigurationError: A value is wrong, or the function has no parameter for ``init``.
        TypeError: The decorated object isn't a function, or ``volumes`` isn't a dict of `Data`.

    Example::

        @kinetic.run(accelerator="cpu")
        def train(rate):
            return 1 - rate

        print(train(0.1))
        job = train.run_async(0.2)
        losses = train.run_async_map([0.1, 0.2, 0.3]).results()
    """
    refuse_unknown(settings, Options, "kinetic.run has no setting")
    arguments = inspect.signature(Options).bind(*args, **settings).arguments
    decorated: object = arguments.get("accelerator")  # in ``@kinetic.run``
    if callable(decorated) or hasattr(type(decorated), "__get__"):  # such as a property
        plain = _require_runnable(arguments.pop("accelerator"))
        if Options(**arguments) != Options():
            message = "kinetic.run(function) takes no settings: write kinetic.run(...)(function)"
            raise of_the_caller(TypeError(message))
        return RemoteFunction(plain, Options())
    options = Options(**arguments)
    _warn_of_preemption(options)

    @own_frames_left_out
    def decorate(function: Callable[P, R], /) -> RemoteFunction[P, R]:
        options.check_init(_require_runnable(function))
        return RemoteFunction(function, options)

    return decorate


def _warn_of_preemption(settings: Options) -> None:
    if settings.debug and settings.spot:
        warnings.warn(
            "debug=True with spot=True: the machine may be preempted while you debug on it",
            UserWarning,
            stacklevel=count_own_frames(),
        )


def _require_runnable(function: Callable[P, R]) -> Callable[P, R]:
    """Return *function*, or raise `TypeError` if it can't run in a job."""
    if reason := _reason_for_refusal(function):
        raise of_the_caller(TypeError(reason))
    return function


def _reason_for_refusal(function: object) -> str:
    """Return why *function* can't run in a job, and what to do; empty if it can."""
    name = getattr(function, "__name__", repr(function))
    kind = type(function).__name__
    if kind in ("classmethod", "staticmethod"):
        return f"@kinetic.run goes below @{kind}, next to the function it decorates"
    if isinstance(function, RemoteFunction):
        return f"{name} is decorated already; use {name}.options(...) for other settings"
    if isinstance(function, type):
        return f"kinetic.run can't run the class {name}; decorate a function that uses it"
    if hasattr(function, "cache_clear") and hasattr(function, "cache_info"):
        return f"{name} has a cache, which jobs don't share; put @kinetic.run below @cache"
    if not callable(function):
        return f"kinetic.run decorates functions, not {kind}"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return f"{name} is a generator, which can't leave its process; return a list"
    return ""


def _copy_metadata(wrapper: RemoteFunction[..., Any], function: Callable[..., Any]) -> None:
    """Do what functools.update_wrapper does, also for callables without a name.

    Attributes of the function don't replace those of `RemoteFunction`.
    """
    inner = _unwrap_partials(function)
    if not hasattr(inner, "__name__"):
        wrapper.__name__ = wrapper.__qualname__ = type(inner).__name__
        wrapper.__module__ = type(inner).__module__
    functools.update_wrapper(wrapper, inner, updated=())
    if isinstance(inner, types.FunctionType):
        own_names = dir(RemoteFunction)
        wrapper.__dict__.update(
            {name: value for name, value in vars(inner).items() if name not in own_names}
        )
    wrapper.__wrapped__ = function


def _unwrap_partials(function: Any) -> Any:
    """Return the function inside partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_async(function: object) -> bool:
    call = getattr(type(function), "__call__", None)  # noqa: B004  # an instance may be async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
