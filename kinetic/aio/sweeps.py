"""A sweep: an optimizer proposes the inputs of a batch, and learns from its outcomes.

The batch is the log. Each input has, beside the arguments, a label with what the optimizer was told
before it proposed them. So a later process can bring another optimizer into the same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeAlias, TypeVar, Unpack

from absl import logging

from kinetic._messages import one_line
from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE
from kinetic._tasks import one_loop_stream, release
from kinetic._tracebacks import of_the_caller
from kinetic.aio._net.retry import retry_forever
from kinetic.errors import (
    ConfigurationError,
    Conflict,
    NotFound,
    SubmissionError,
    SweepError,
    WireError,
)
from kinetic.options import MapOptions, MapSettings, check
from kinetic.outcome import Cancelled, Completion, Failed, Outcome, Succeeded
from kinetic.sweeps.optuna import Space, StudyOptimizer, is_study
from kinetic.sweeps.protocol import Optimizer, Proposal, State, Trial

if TYPE_CHECKING:
    from kinetic.aio.batch import BatchHandle
    from kinetic.aio.client import Client
    from kinetic.aio.ports import Store

__all__ = ["OnFailure", "Sweep", "start"]

P = ParamSpec("P")
T = TypeVar("T")

OnFailure: TypeAlias = Literal["tell", "retry", "ignore"]
"""What a sweep does with a failed trial."""

RETRIES = 2
"""How many times ``on_failure="retry"`` runs a failed trial again, unless you give ``retries``."""

MAX_REPEATS = 50
"""How many proposals in a row may equal open trials; then kinetic accepts one of them."""


class Sweep:
    """A search for the arguments with the best value: the trials, and the batch that runs them.

    An ``async with`` block stops unfinished trials when you leave it. ``async for`` yields each
    trial once, when it has ended, and first those of earlier processes. The sweep goes on also
    while you don't iterate. You get a sweep from `kinetic.aio.sweep`.

    Args:
        optimizer, trials, on_failure, limit: Set by the client; don't make a sweep yourself.

    Attributes:
        batch: The handle of the batch that runs the trials.

    Example::

        async with await kinetic.aio.sweep(train, search, trials=50) as sweep:
            async for trial in sweep:
                print(trial.params, trial.value)
        print(sweep.best)
    """

    batch: BatchHandle[Any, Any]

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        trials: int | None,
        on_failure: OnFailure,
        limit: int | None,
    ) -> None:
        self._optimizer = optimizer
        self._wanted = math.inf if trials is None else trials
        self._on_failure: OnFailure = on_failure
        self._limit = math.inf if limit is None else limit
        # The optimizer's methods run in this thread only, one after the other.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kinetic sweep")
        self._asked: dict[int, Proposal] = {}
        """The proposals of open trials; changed in the optimizer's thread only."""
        self._open_params: Counter[str] = Counter()
        """The parameters of the open trials, as text; changed in the optimizer's thread only."""
        self._trials: list[Trial] = []
        self._ended: list[int] = []
        self._told: list[int] = []
        """The trials that the optimizer was told since it last proposed one."""
        self._best: Trial | None = None
        self._first = 0
        """The number of the batch's first trial; other trials are in earlier batches."""
        self._cancelled = 0
        self._stopped = False
        self._error: Exception | None = None
        self._rebuilt = asyncio.Event()
        self._changed = asyncio.Event()
        self._retries: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        best = "" if self._best is None else f", best {self._best.value:g}"
        return f"<sweep {self.batch.group_id}: {len(self._ended)} trials ended{best}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        try:
            await self.batch.__aexit__(kind, error, trace)
        finally:
            await release(self._finish(), operation=f"ending the sweep {self.batch.group_id}")

    @property
    def best(self) -> Trial:
        """The complete trial with the best value so far; of equal values, the one ended first.

        Raises:
            SweepError: No trial is complete.
        """
        if self._best is not None:
            return self._best
        failed = next((trial for trial in self._trials if trial.error is not None), None)
        first = "" if failed is None else f"; trial {failed.number}: {one_line(str(failed.error))}"
        raise SweepError(f"no trial of {self.batch.group_id} has a value yet{first}")

    def trials(self) -> list[Trial]:
        """Return all trials so far, in the order of their numbers."""
        return [*self._trials]

    def stop(self) -> None:
        """Propose no more trials; open trials go on, and the iteration then ends."""
        self._stopped = True
        self._notify()

    async def wait(self) -> None:
        """Wait until every trial has ended.

        Raises:
            SubmitterLost: Another process continues the sweep.
            Exception: The optimizer, or the space, has raised it; a note names the trial.

        Cancelled: ends the wait; the sweep goes on.
        """
        assert self._following is not None
        await asyncio.wait({self._following})
        if self._error is not None:
            raise self._error

    @one_loop_stream
    async def __aiter__(self) -> AsyncGenerator[Trial, None]:
        position = 0
        while True:
            while position < len(self._ended):
                yield self._trials[self._ended[position]]
                position += 1
            if self._following is None or self._following.done():
                if self._error is not None:
                    raise self._error
                return
            await self._until_change()

    # --- waking ---

    def _notify(self, _: object = None) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_change(self) -> None:
        await self._changed.wait()

    # --- the optimizer ---

    async def _call(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method in the optimizer's thread; the calls run in the order of these calls."""
        call = functools.partial(method, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _ask(self, number: int) -> tuple[Proposal, int] | None:
        """Return a proposal that no open trial has, and how many were skipped; None at the end."""
        for skipped in range(MAX_REPEATS):
            proposal = self._optimizer.ask()
            if proposal is None:
                return None
            key = _key_of(proposal.params)
            if skipped == MAX_REPEATS - 1 or not self._open_params[key]:
                self._note_asked(number, proposal)
                return proposal, skipped
            self._optimizer.tell(proposal.number, State.CANCELLED)
        raise AssertionError("the loop returns")

    def _adopt(self, number: int, params: Mapping[str, Any], label: Mapping[str, Any]) -> None:
        """Have the optimizer take a trial of an earlier process."""
        for _ in range(label["skipped"]):
            if (skipped := self._optimizer.ask()) is not None:
                self._optimizer.tell(skipped.number, State.CANCELLED)
        proposal = self._optimizer.adopt(params, label["memo"])
        if proposal is not None and label["memo"] is None and proposal.params != params:
            self._optimizer.tell(proposal.number, State.CANCELLED)
            proposal = None
        if proposal is None:
            raise ConfigurationError(
                f"the optimizer can't propose trial {number} of an earlier process again, with "
                f"{one_line(repr(dict(params)), 200)}: continue the sweep with the space of that "
                "process, or give the new sweep another name"
            )
        self._note_asked(number, proposal)

    def _note_asked(self, number: int, proposal: Proposal) -> None:
        self._asked[number] = proposal
        self._open_params[_key_of(proposal.params)] += 1

    def _tell(self, number: int, result: float | State) -> None:
        proposal = self._asked.pop(number)
        self._open_params -= Counter([_key_of(proposal.params)])
        self._optimizer.tell(proposal.number, result)

    def _tell_cancelled(self) -> None:
        """Tell the optimizer that no open trial will have a value."""
        for number in [*self._asked]:
            with contextlib.suppress(Exception):  # tell it of the others, too
                self._tell(number, State.CANCELLED)

    # --- proposing ---

    async def _proposals(self) -> AsyncGenerator[tuple[dict[str, Any], dict[str, Any]], None]:
        """Yield an input of the batch, a label and arguments, whenever a place is free."""
        try:
            await self._rebuilt.wait()
            while not self._stopped and len(self._trials) - self._cancelled < self._wanted:
                if len(self._trials) - len(self._ended) >= self._limit:
                    await self._until_change()
                elif (proposed := await self._propose()) is None:
                    return
                else:
                    yield proposed
        except Exception as exc:
            self._fail(exc)
        while self._error is not None:
            if len(self._trials) == len(self._ended):
                raise self._error  # so that the batch has no end, and can be resumed
            await self._until_change()

    async def _propose(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        number, told = len(self._trials), self._told
        self._told = []
        try:
            asked = await self._call(self._ask, number)
        except Exception as exc:
            of_the_caller(exc)
            exc.add_note(f"the optimizer raised this when it should propose trial {number}")
            raise
        if asked is None:
            return None
        proposal, skipped = asked
        self._trials.append(Trial(number, dict(proposal.params)))
        label = {"trial": number, "told": told, "skipped": skipped, "memo": proposal.memo}
        return label, dict(proposal.params)

    def _fail(self, error: Exception) -> None:
        """Propose no more, and raise *error* when the open trials have ended."""
        self._error = self._error or error
        self.stop()

    # --- following ---

    def begin(self, batch: BatchHandle[Any, Any], *, rebuild: bool) -> None:
        """Follow the batch that runs the trials; *rebuild* its trials first."""
        self.batch, self._first = batch, len(self._trials)
        self._following = asyncio.create_task(
            self._follow(rebuild), name=f"kinetic sweep {batch.group_id}"
        )
        self._following.add_done_callback(self._notify)

    async def rebuilt(self) -> None:
        """Wait until the optimizer has the trials of earlier processes.

        Raises:
            ConfigurationError: The optimizer can't propose one of these trials.
        """
        waiting = asyncio.ensure_future(self._rebuilt.wait())
        assert self._following is not None
        await asyncio.wait({waiting, self._following}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self._rebuilt.is_set() and self._error is not None:
            raise self._error

    async def _follow(self, rebuild: bool) -> None:
        try:
            async with contextlib.aclosing(self.batch.outcomes()) as outcomes:
                if rebuild:
                    await self._rebuild(self.batch, outcomes)
                self._rebuilt.set()
                async for completion in outcomes:
                    await self._end(completion)
            while self._retries:
                await asyncio.wait(self._retries)
        except Exception as exc:
            self._fail(exc)
        finally:
            for task in self._retries:
                task.cancel()
            self._thread.shutdown(wait=False)

    async def read(self, batch: BatchHandle[Any, Any]) -> None:
        """Take the trials of an earlier batch, which has ended."""
        self._first = len(self._trials)
        async with contextlib.aclosing(batch.outcomes()) as outcomes:
            await self._rebuild(batch, outcomes)
            async for completion in outcomes:
                await self._end(completion)

    async def _rebuild(
        self,
        batch: BatchHandle[Any, Any],
        outcomes: AsyncGenerator[Completion[Any, Any], None],
    ) -> None:
        """Ask and tell the optimizer what the batch's inputs say, in the same order."""
        arrived: dict[int, Completion[Any, Any]] = {}
        for index in range(batch.stored):
            label, params = await batch.input(index)
            for number in label["told"]:
                while number not in arrived and number >= self._first:
                    completion = await anext(outcomes)
                    arrived[self._first + completion.index] = completion
                if (told := arrived.pop(number, None)) is not None:
                    await self._end(told)
            number = len(self._trials)
            await self._call(self._adopt, number, params, label)
            self._trials.append(Trial(number, params))
            self._told = []
        for _, completion in sorted(arrived.items()):
            await self._end(completion)

    async def _end(self, completion: Completion[Any, Any]) -> None:
        """Take the outcome of a trial, and tell the optimizer."""
        number = self._first + completion.index
        label = completion.input[0] if completion.input is not None else {"trial": number}
        if number >= len(self._trials) or label["trial"] != number:
            raise Conflict(
                f"another process has proposed item {completion.index} of {self.batch.group_id}; "
                "the trials go on: continue the sweep with resume=True"
            )
        outcome = completion.outcome
        if getattr(outcome.error, "reason", "") in INFRASTRUCTURE and not self._stopped:
            retry = asyncio.create_task(self._retry(completion))
            self._retries.add(retry)
            retry.add_done_callback(self._retries.discard)
        else:
            await self._record(number, outcome)

    async def _retry(self, completion: Completion[Any, Any]) -> None:
        """Run a preempted trial again, and wait for its outcome."""
        try:
            await self.batch.retry_failed([completion.index])
            job = await self.batch.job(completion.index)
            outcome: Outcome[Any]
            try:
                outcome = Succeeded(await job.result(cleanup=False))
            except Exception as exc:
                outcome = Failed(exc)
            await self._record(self._first + completion.index, outcome)
        except Exception as exc:
            self._fail(exc)

    async def _record(self, number: int, outcome: Outcome[Any]) -> None:
        trial = _ended_trial(self._trials[number], outcome)
        result = trial.state if trial.state is not State.COMPLETE else trial.value
        if trial.state is State.FAILED and self._on_failure == "ignore":
            result = State.CANCELLED
        assert result is not None
        self._told.append(number)
        try:
            await self._call(self._tell, number, result)
        except Exception as exc:
            of_the_caller(exc)
            exc.add_note(f"the optimizer raised this when it was told the result of trial {number}")
            self._fail(exc)
        self._trials[number] = trial
        self._ended.append(number)
        self._cancelled += trial.state is State.CANCELLED
        if trial.state is State.COMPLETE and self._is_best(trial):
            self._best = trial
        self._notify()

    def _is_best(self, trial: Trial) -> bool:
        if self._best is None:
            return True
        value, best = trial.value or 0.0, self._best.value or 0.0
        return value < best if self._optimizer.direction == "minimize" else value > best

    async def _finish(self) -> None:
        """At the end of the block, leave no trial open in the optimizer."""
        assert self._following is not None
        if not self.batch.finished:  # the batch was detached
            self._following.cancel()
        await asyncio.wait({self._following})
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._tell_cancelled)


def _key_of(params: Mapping[str, Any]) -> str:
    return repr(sorted(params.items()))


def _ended_trial(trial: Trial, outcome: Outcome[Any]) -> Trial:
    """Return the trial with the state, and the value or the error, that its outcome says."""
    error = outcome.error
    if error is None:
        value = outcome.unwrap()
        number = _number_of(value)
        if number is not None and math.isfinite(number):
            return replace(trial, state=State.COMPLETE, value=number)
        error = SweepError(
            f"trial {trial.number} returned {one_line(repr(value), 80)}, which isn't a finite "
            "number, so it has no value; the function of a sweep returns what to minimize or "
            "maximize"
        )
    elif isinstance(outcome, Cancelled):
        return replace(trial, state=State.CANCELLED, error=error)
    return replace(trial, state=State.FAILED, error=error)


def _number_of(value: Any) -> float | None:
    """Return a number, or a scalar of NumPy, JAX, or PyTorch, as a float; None for other values."""
    if getattr(value, "shape", ()) != () or isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except Exception:  # the object may raise anything
        return None


# --- beginning and continuing ---


async def start(
    client: Client,
    function: Callable[..., Any],
    optimizer: Any,
    space: Space | None,
    *,
    trials: int | None,
    on_failure: OnFailure,
    resume: bool,
    **options: Unpack[MapOptions],
) -> Sweep:
    """Start a sweep, or continue the one of that name."""
    settings = MapSettings.of(**options)
    check(trials=trials, on_failure=on_failure, resume=resume)
    name = settings.name
    if resume and name is None:
        raise ConfigurationError("resume=True needs the sweep's name: give name=")
    if "input_mode" in options:
        raise ConfigurationError("a sweep has no input_mode: parameters are keyword arguments")
    if on_failure == "retry" and not settings.retries:
        options["retries"] = RETRIES
    sweep = Sweep(
        _optimizer_of(optimizer, space, name),
        trials=trials,
        on_failure=on_failure,
        limit=settings.max_concurrent,
    )
    options["input_mode"] = "labelled"
    if name is None:
        batch = await client.run_async_map(function, sweep._proposals(), **options)
        sweep.begin(batch, rebuild=False)
        sweep._rebuilt.set()
        return sweep
    raise NotImplementedError


def _optimizer_of(optimizer: Any, space: Space | None, name: str | None) -> Optimizer:
    if is_study(optimizer):
        return StudyOptimizer(optimizer, space, name)
    if space is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} has its space already: omit the argument space"
        )
    if missing := [name for name in _METHODS if not hasattr(optimizer, name)]:
        raise ConfigurationError(
            f"{type(optimizer).__name__} isn't an optimizer: it has no {missing[0]}; pass a study "
            "of Optuna, or an object that follows kinetic.sweeps.Optimizer"
        )
    typed: Optimizer = optimizer
    return typed


_METHODS = ("direction", "ask", "tell", "report", "adopt")
