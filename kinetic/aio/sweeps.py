"""A sweep: an optimizer proposes the inputs of a batch, and learns from its outcomes.

The batch is the log. Each input has, beside the arguments, a label with the outcomes that the
optimizer received before it proposed them. So a later process can bring another optimizer into the
same state.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import json
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
)

from kinetic._binding import Binding
from kinetic._messages import handle_bundle, handle_repr, join_with_or, one_line, suggest
from kinetic._progress.standing import Goal
from kinetic._runner.protocol.frames import MALFORMED
from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE
from kinetic._tasks import AsyncOnly, one_loop_stream, release, require_loop, running_loop
from kinetic._tracebacks import of_the_caller
from kinetic.aio._net.retry import retry_forever
from kinetic.errors import (
    ConfigurationError,
    Conflict,
    JobCancelled,
    NotFound,
    Pruned,
    SweepError,
    WireError,
)
from kinetic.options import MapOptions, MapSettings, check, settings_of
from kinetic.outcome import Cancelled, Completion, Failed, Outcome, Succeeded
from kinetic.sweeps.optuna import StudyOptimizer, is_study
from kinetic.sweeps.protocol import Optimizer, Proposal, Space, State, Trial
from kinetic.sweeps.search import GridSearch, RandomSearch

if TYPE_CHECKING:
    from kinetic.aio.batch import BatchHandle
    from kinetic.aio.ports import Store

__all__ = ["OnFailure", "Sweep", "start"]

P = ParamSpec("P")
T = TypeVar("T")

_Begin: TypeAlias = Callable[[], Awaitable["BatchHandle[Any, Any]"]]

OnFailure: TypeAlias = Literal["tell", "retry", "ignore"]
"""What a sweep does with a failed trial."""

RETRIES = 2
"""How many times ``on_failure="retry"`` runs a failed trial again, unless you give ``retries``."""

CALLS_S = 0.01
"""How long the optimizer's thread makes calls before it returns their results, in seconds."""

FEW, GATHER_S = 64, 0.05
"""While less than 1/FEW of the places is free, wait this number of seconds for more of them: the
inputs that are proposed together are one object of the store."""

MAX_ASKED = 16
"""Maximum number of trials to ask for at once."""

MAX_REPEATS = 50
"""How many proposals in a row may equal open trials; then kinetic accepts one of them."""


class _Client(Protocol):
    """What a sweep needs of a client."""

    async def start_batch(
        self,
        function: Callable[..., Any],
        inputs: AsyncIterable[Any],
        settings: MapSettings,
        goal: Goal | None = None,
    ) -> BatchHandle[Any, Any]: ...

    async def attach_batch(
        self, group_id: str, project: str | None = None, cluster: str | None = None
    ) -> BatchHandle[Any, Any]: ...

    async def store_of(
        self, function: Callable[..., Any], project: str | None, cluster: str | None
    ) -> Store: ...


class Sweep(AsyncOnly):
    """A search for the arguments with the best value: the trials, and the batch that runs them.

    An ``async with`` block stops unfinished trials when you leave it. ``async for`` yields each
    trial once, when it has ended, and first those of earlier processes. The sweep also continues
    while you don't iterate. You get a sweep from `kinetic.aio.sweep`.

    Args:
        optimizer, binding, trials, on_failure, metric, limit: Set by the client; don't make a
            sweep yourself.

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
        binding: Binding,
        *,
        trials: int | None,
        on_failure: OnFailure,
        metric: str | None,
        limit: int | None,
    ) -> None:
        self._optimizer = optimizer
        self._binding = binding
        self._wanted = math.inf if trials is None else trials
        self._on_failure: OnFailure = on_failure
        self._metric = metric
        self._first_limit = limit
        # Python can't load this module in a thread that outlives the main thread.
        from concurrent.futures import ThreadPoolExecutor

        # The optimizer's methods run in this thread only, one after the other.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kinetic sweep")
        self._asked: dict[int, Proposal] = {}
        """The proposals of open trials; changed in the optimizer's thread only."""
        self._ask_error: Exception | None = None
        self._calls: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        """What the thread is to call, in this order."""
        self._is_calling = False
        self._open_params: Counter[str] = Counter()
        """The parameters of the open trials, as text; changed in the optimizer's thread only."""
        self._trials: list[Trial] = []
        self._ended: list[int] = []
        self._told: list[int] = []
        """The trials whose outcomes the optimizer received since its last proposal."""
        self._steps: dict[int, int] = {}
        """Open trial → the last step that the optimizer received."""
        self._best: Trial | None = None
        self._first = 0
        """The number of the batch's first trial; other trials are in earlier batches."""
        self._ready: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The inputs that are proposed, and that the batch hasn't taken yet."""
        self._cancelled = 0
        self._stopped = self._rebuilt = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        self._loop = running_loop()

    def __repr__(self) -> str:
        return handle_repr("Sweep", self.facts())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.bundle()

    def bundle(self) -> dict[str, str]:
        """Return what a notebook shows: the best trial so far, and the batch; internal."""
        shown = handle_bundle("Sweep", self.facts())
        batch = self.batch.bundle()["text/html"]
        is_over = self._following is None or self._following.done()
        return {**shown, "text/html": shown["text/html"] + batch + (self._overview() * is_over)}

    def _overview(self) -> str:
        """Return HTML with the best trials and a plot of all values; any thread may call this."""
        from kinetic.sweeps import _overview  # only a notebook needs it

        ended = [self._trials[number] for number in [*self._ended]]
        return _overview.overview(ended, self._optimizer.direction)

    def facts(self) -> dict[str, object]:
        """Return what is known, for display; internal."""
        pruned = sum(trial.state is State.PRUNED for trial in self._trials)
        batch, ended = self.batch.group_id, len(self._ended)
        facts: dict[str, object] = {"batch": batch, "ended": ended, "pruned": pruned}
        if self._best is not None:
            params = ", ".join(f"{name}={value!r}" for name, value in self._best.params.items())
            facts |= {"best": self._best.value, "trial": self._best.number, "params": params}
        return facts

    async def __aenter__(self) -> Self:
        self._require_loop()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._require_loop()
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
        message = f"no trial of {self.batch.group_id} has a value yet"
        if failed is not None and isinstance(failed.error, SweepError):
            message += f"; {failed.error}"  # it begins with the number of the trial
        elif failed is not None:
            text = f"{type(failed.error).__name__}: {failed.error}".removesuffix(": ")
            message += f"; trial {failed.number}: {one_line(text)}"
        raise SweepError(message)

    def trials(self) -> list[Trial]:
        """Return all trials so far, in the order of their numbers."""
        return [*self._trials]

    def stop(self) -> None:
        """Propose no more trials; open trials continue, and the iteration then ends."""
        self._stopped = True
        self._notify()

    async def wait(self) -> None:
        """Wait until every trial has ended.

        Raises:
            SubmitterLost: Another process continues the sweep.
            Exception: The optimizer, or the space, has raised it; a note names the trial.

        Cancelled: ends the wait; the sweep continues.
        """
        self._require_loop()
        if self._following is not None:
            await asyncio.wait({self._following})
        if self._error is not None:
            raise self._error

    @one_loop_stream
    async def __aiter__(self) -> AsyncGenerator[Trial, None]:
        self._require_loop()
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

    def _require_loop(self) -> None:
        remedy = "give it a name, and continue it here with resume=True"
        require_loop(self._loop, f"the sweep {self.batch.group_id}", remedy)

    # --- waking ---

    def _notify(self, _: object = None) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_change(self) -> None:
        await self._changed.wait()

    # --- the optimizer ---

    async def _call(self, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method in the optimizer's thread; the calls run in the order of these calls."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        run = contextvars.copy_context().run  # the thread has no context of the caller
        self._calls.append((result, functools.partial(run, method, *args, **kwargs)))
        if not self._is_calling:
            self._begin_calls()
        return await result

    def _begin_calls(self) -> None:
        """Have the thread make the waiting calls; each switch between threads costs time."""
        loop, made = asyncio.get_running_loop(), list[tuple[asyncio.Future[Any], Any, Any]]()

        def make_calls() -> None:
            until = time.monotonic() + CALLS_S
            while self._calls and time.monotonic() < until:
                result, call = self._calls.popleft()
                try:
                    made.append((result, call(), None))
                except BaseException as exc:
                    error: BaseException = exc
                    # SystemExit would end the loop, and a future refuses StopIteration.
                    if isinstance(exc, StopIteration) or not isinstance(exc, Exception):
                        error = RuntimeError(f"the optimizer raised {exc!r}")
                        error.__cause__ = exc
                    made.append((result, None, error))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver)

        def deliver() -> None:
            self._is_calling = False
            for result, value, error in made:
                if result.done():
                    continue
                if error is None:
                    result.set_result(value)
                else:
                    result.set_exception(error)
            if self._calls and not self._is_calling:
                self._begin_calls()

        self._thread.submit(make_calls)
        self._is_calling = True

    def _ask(self, number: int, count: int) -> list[tuple[Proposal, int]]:
        """Return proposals that no open trial has, and how many were skipped before each.

        There are *count*, or fewer if the optimizer has no more.
        """
        asked: list[tuple[Proposal, int]] = []
        while len(asked) < count:
            try:
                proposed = self._ask_one()
            except Exception as exc:
                if exc is not self._ask_error:
                    of_the_caller(exc)
                    name = f"trial {number + len(asked)}"
                    exc.add_note(f"this happened when kinetic asked the optimizer for {name}")
                if not asked:
                    raise
                self._ask_error = exc
                break
            if proposed is None:
                break
            self._note_asked(number + len(asked), proposed[0])
            asked.append(proposed)
        return asked

    def _ask_one(self) -> tuple[Proposal, int] | None:
        if self._ask_error is not None:
            raise self._ask_error
        skipped = 0
        while (proposal := _checked(self._optimizer.ask())) is not None:
            try:
                _require_fit(self._binding, proposal.params)
                _require_json(proposal.memo)
            except ConfigurationError:
                self._optimizer.tell(proposal.number, State.CANCELLED)
                raise
            if skipped == MAX_REPEATS or not self._open_params[_key_of(proposal.params)]:
                return proposal, skipped
            self._optimizer.tell(proposal.number, State.CANCELLED)
            skipped += 1
        return None

    def _adopt(self, number: int, params: Mapping[str, Any], label: Mapping[str, Any]) -> None:
        """Have the optimizer take a trial of an earlier process."""
        for _ in range(label["skipped"]):
            if (skipped := _checked(self._optimizer.ask())) is not None:
                self._optimizer.tell(skipped.number, State.CANCELLED)
        try:
            proposal = _checked(self._optimizer.adopt(params, label["memo"]))
        except Exception as exc:
            of_the_caller(exc)
            exc.add_note(f"the optimizer raised this when it was to adopt trial {number}")
            raise
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

    async def abandon(self) -> None:
        """Tell the optimizer that what `is_over` has asked it for won't run; internal."""
        for label, _ in self._ready:
            await self._call(self._tell, label["trial"], State.CANCELLED)

    def _tell_cancelled(self) -> None:
        """Tell the optimizer that no open trial will have a value."""
        for number in [*self._asked]:
            with contextlib.suppress(Exception):  # tell it about the other trials
                self._tell(number, State.CANCELLED)

    # --- proposing ---

    async def proposals(self) -> AsyncGenerator[tuple[dict[str, Any], dict[str, Any]], None]:
        """Yield an input of the batch, a label and arguments, when a place is free; internal."""
        try:
            while not self._rebuilt and self._error is None:
                await self._until_change()
            while self._ready:
                yield self._ready.pop(0)
            while not self._stopped and self._is_short:
                changed = self._changed
                if self._open_count < self._limit:
                    if self._limit - self._open_count < self._limit / FEW:
                        await asyncio.sleep(GATHER_S)
                    proposed = await self._propose()
                    for label, params in proposed:
                        yield label, params
                    if proposed:
                        continue
                    if not self._open_count:
                        return
                await changed.wait()
        except Exception as exc:
            self._fail(exc)
        while self._error is not None:
            if not self._open_count or self._following is None or self._following.done():
                # So that the batch has no end, and can be resumed.
                message = f"no more trials are proposed: {self._error!r}"
                if self._following is not None and self.batch.name:
                    message += "; to continue the sweep, run its program again with resume=True"
                raise SweepError(message) from self._error
            await self._until_change()

    async def is_over(self) -> bool:
        """Return whether there is nothing to propose, while no trial is open; internal.

        The next `proposals` begin with what the optimizer has proposed for the answer.
        """
        if self._is_short and not self._ready:
            self._ready = await self._propose()
        return not self._ready

    @property
    def _is_short(self) -> bool:
        """Whether more trials are wanted than were proposed."""
        return len(self._trials) - self._cancelled < self._wanted

    @property
    def _limit(self) -> float:
        """How many trials may be open at once."""
        limit = self._first_limit if self._following is None else self.batch.max_concurrent
        return math.inf if limit is None else limit

    @property
    def _open_count(self) -> int:
        return len(self._trials) - len(self._ended)

    async def _propose(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Ask for as many trials as there are places; none if the optimizer has no more."""
        number, told = len(self._trials), [*self._told]
        wanted = self._wanted - (number - self._cancelled)
        count = int(min(wanted, self._limit - self._open_count, MAX_ASKED))
        asked = await self._call(self._ask, number, count)
        inputs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for proposal, skipped in asked:
            number = len(self._trials)
            self._trials.append(Trial(number, dict(proposal.params)))
            label = {"trial": number, "told": told, "skipped": skipped, "memo": proposal.memo}
            inputs.append((label, dict(proposal.params)))
            self._told, told = self._told[len(told) :], []
        return inputs

    def _fail(self, error: Exception) -> None:
        """Propose no more, and raise *error* when the open trials have ended."""
        self._error = self._error or error
        self.stop()

    # --- following ---

    async def follow(
        self,
        batch: BatchHandle[Any, Any],
        *,
        rebuild: bool = False,
        begin_next: _Begin | None = None,
    ) -> None:
        """Follow the batch that runs the trials; *rebuild* its trials first; internal.

        If that batch takes no more inputs, *begin_next* begins another one for the missing trials.

        Raises:
            ConfigurationError: The optimizer can't propose one of these trials.
        """
        self._take(batch)
        self._following = asyncio.create_task(
            self._follow(rebuild, begin_next), name=f"kinetic sweep {batch.group_id}"
        )
        self._following.add_done_callback(self._notify)
        while not (self._rebuilt or self._following.done()):
            await self._until_change()
        if not self._rebuilt and self._error is not None:
            raise self._error

    def _take(self, batch: BatchHandle[Any, Any]) -> None:
        self.batch, self._first = batch, len(self._trials) - len(self._ready)

    async def _follow(self, rebuild: bool, begin_next: _Begin | None) -> None:
        try:
            await self._follow_batch(rebuild)
            if begin_next is not None and not self._stopped and not await self.is_over():
                self._rebuilt = False  # nothing runs before the batch's ID is stored
                self._take(await begin_next())
                await self._follow_batch(rebuild=False)
        except Exception as exc:
            self._fail(exc)
        finally:
            self._thread.shutdown(wait=False)

    async def _follow_batch(self, rebuild: bool) -> None:
        reports: asyncio.Task[None] | None = None
        try:
            async with (
                self.batch.show(self._overview),
                contextlib.aclosing(self.batch.outcomes()) as outcomes,
            ):
                if rebuild:
                    await self._rebuild(self.batch, outcomes)
                if isinstance(self._optimizer, StudyOptimizer):
                    await self._call(self._optimizer.end_unknown)
                self._rebuilt = True
                self._notify()
                if _prunes(self._optimizer):
                    reports = asyncio.create_task(self._follow_reports(), name="kinetic reports")
                async for completion in outcomes:
                    ending = asyncio.create_task(self._end(completion), name="kinetic trial")
                    self._tasks.add(ending)
                    ending.add_done_callback(self._note_failure)
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except Exception as exc:
            self._fail(exc)
        finally:
            tasks = {*self._tasks, *filter(None, [reports])}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    async def _follow_reports(self) -> None:
        """Pass on what the jobs report, and prune the trials that the optimizer wants to end."""
        try:
            async with contextlib.aclosing(self.batch.metrics()) as reported:
                async for index, attempt, step, value in reported:
                    if await self._report(self._first + index, step, value):
                        await self.batch.prune(index, attempt)
        except Exception as exc:
            self._fail(exc)

    async def _report(self, number: int, step: int, value: float | Mapping[str, float]) -> bool:
        """Report a value to the optimizer once; return whether to prune the trial."""
        # If an attempt repeats the steps of an earlier one, the optimizer keeps the earlier values.
        is_new = number < len(self._trials) and step > self._steps.get(number, -1)
        if not is_new or self._trials[number].state is not State.RUNNING:
            return False
        self._steps[number] = step
        reported = _number_of(value, self._metric)
        if reported is None:
            why = _lack_of(value, self._metric) or (
                ': name the number to use, as in sweep(..., metric="loss")'
            )
            raise SweepError(f"trial {number} reported {one_line(repr(value), 80)}{why}")
        try:
            return await self._call(self._report_to_optimizer, number, step, reported)
        except Exception as exc:
            of_the_caller(exc)
            exc.add_note(f"the optimizer raised this when trial {number} reported step {step}")
            raise

    def _report_to_optimizer(self, number: int, step: int, value: float) -> bool:
        proposal = self._asked.get(number)
        return proposal is not None and bool(self._optimizer.report(proposal.number, step, value))

    async def read(self, batch: BatchHandle[Any, Any]) -> None:
        """Take the trials of an earlier batch, which has ended; internal."""
        self.batch, self._first = batch, len(self._trials)
        async with contextlib.aclosing(batch.outcomes()) as outcomes:
            await self._rebuild(batch, outcomes)
            rest = [completion async for completion in outcomes]
        for completion in sorted(rest, key=lambda completion: completion.index):
            await self._end(completion)
        if isinstance(self._optimizer, GridSearch):  # no other point can take this one's place
            for trial in self._trials[self._first :]:
                if trial.state is State.CANCELLED:
                    await self._call(self._optimizer.put_back, trial.params)

    async def _rebuild(
        self, batch: BatchHandle[Any, Any], outcomes: AsyncGenerator[Completion[Any, Any], None]
    ) -> None:
        """Ask and tell the optimizer what the batch's inputs say, in the same order."""
        arrived: dict[int, Completion[Any, Any]] = {}
        for index in range(batch.stored):
            try:
                label, params = await batch.input(index)
            except NotFound as exc:
                raise NotFound(
                    f"trial {len(self._trials)} can't be read, because results() or cleanup() has "
                    f"removed the inputs of {batch.group_id}: clean it up to begin the sweep anew, "
                    "or give the new sweep another name"
                ) from exc
            # They count the trials of earlier batches, too, which may have been cleaned up since.
            moved = len(self._trials) - label["trial"]
            for number in (number + moved for number in label["told"]):
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

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

    async def _end(self, completion: Completion[Any, Any]) -> None:
        """Take the outcome of a trial, and tell the optimizer."""
        number = self._first + completion.index
        if number >= len(self._trials):
            raise Conflict(
                f"another process has proposed item {completion.index} of {self.batch.group_id}; "
                "the trials continue: resume the sweep with resume=True"
            )
        outcome = completion.outcome
        is_preempted = getattr(outcome.error, "reason", "") in INFRASTRUCTURE
        if is_preempted and not self._stopped and not self.batch.finished:
            outcome = await self._run_again(completion.index)
        await self._record(number, outcome)

    async def _run_again(self, index: int) -> Outcome[Any]:
        """Run a preempted trial again, and return its outcome."""
        await self.batch.retry_failed([index])
        job = await self.batch.job(index)
        try:
            return Succeeded(await job.result(cleanup=False))
        except Pruned as pruned:
            return pruned
        except JobCancelled as exc:
            return Cancelled(exc)
        except Exception as exc:
            return Failed(exc)

    async def _record(self, number: int, outcome: Outcome[Any]) -> None:
        """Tell the optimizer the outcome of a trial, after all that the trial has reported."""
        try:
            if _prunes(self._optimizer):
                # What a trial has reported last, the stream of reports may not have brought yet.
                job = await self.batch.job(number - self._first)
                async with contextlib.aclosing(job.metrics()) as reported:
                    async for _, step, value in reported:
                        await self._report(number, step, value)
            trial = _ended_trial(self._trials[number], outcome, self._metric)
            result = trial.value if trial.state is State.COMPLETE else trial.state
            if trial.state is State.FAILED and self._on_failure == "ignore":
                result = State.CANCELLED
            assert result is not None
            self._told.append(number)
            try:
                await self._call(self._tell, number, result)
            except Exception as exc:
                of_the_caller(exc)
                exc.add_note(f"the optimizer raised this when it was told of trial {number}")
                raise
        except Exception as exc:
            trial = _ended_trial(self._trials[number], outcome, self._metric)
            self._fail(exc)
        self._note_ended(trial)

    def _note_ended(self, trial: Trial) -> None:
        self._trials[trial.number] = trial
        self._steps.pop(trial.number, None)
        self._ended.append(trial.number)
        self._cancelled += trial.state is State.CANCELLED
        sign = 1.0 if self._optimizer.direction == "minimize" else -1.0
        value, best = sign * (trial.value or 0.0), math.inf
        if self._best is not None:
            best = sign * (self._best.value or 0.0)
        if trial.state is State.COMPLETE and value < best:  # of equal ones, the first stays
            self._best = trial
        self._notify()

    async def _finish(self) -> None:
        """At the end of the block, leave no trial open in the optimizer."""
        if self._following is None:
            return
        if not self.batch.finished:  # it was detached, so its trials are still open
            self._following.cancel()
            return
        await asyncio.wait({self._following})
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._tell_cancelled)
        for trial in self._trials:  # the batch didn't take its input
            if trial.state is State.RUNNING:
                self._note_ended(replace(trial, state=State.CANCELLED))


def _checked(proposed: Any) -> Proposal | None:
    """Return what an optimizer has proposed; raise `ConfigurationError` if it is no proposal."""
    match proposed:
        case None | Proposal(params=Mapping()):
            return proposed
        case _:
            raise ConfigurationError(
                "an optimizer must return kinetic.sweeps.Proposal(number, params) with a dict of "
                f"arguments, or None, not {one_line(repr(proposed), 80)}"
            )


def _require_json(memo: Any) -> None:
    """Raise `ConfigurationError` if a label can't have this memo."""
    try:
        json.dumps(memo)
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(f"the memo of a proposal can't be written as JSON: {exc}") from exc


def _key_of(params: Mapping[str, Any]) -> str:
    return repr(sorted(params.items()))


def _require_fit(binding: Binding, params: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` if the function can't be called with these arguments."""
    if misfit := binding.find_mismatch((), dict(params)):
        names = ", ".join(map(str, params)) or "none"
        raise ConfigurationError(f"the parameters of the space ({names}) do not fit {misfit}")


def _prunes(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "prunes", True))


def _ended_trial(trial: Trial, outcome: Outcome[Any], metric: str | None) -> Trial:
    """Return the trial with the state, and the value or the error, that its outcome says."""
    match outcome:
        case Succeeded(value):
            number = _number_of(value, metric)
            if number is not None and math.isfinite(number):
                return replace(trial, state=State.COMPLETE, value=number)
            why = _lack_of(value, metric) or (
                ", which isn't a finite number, so it has no value. Return what to minimize or "
                "maximize, or a dict with it, and name it by metric="
            )
            error: Exception = SweepError(
                f"trial {trial.number} returned {one_line(repr(value), 80)}{why}"
            )
        case Pruned(step=step, value=reported):
            number = None if reported is None else _number_of(reported, metric)
            return replace(trial, state=State.PRUNED, value=number, step=step)
        case Cancelled(error=error):
            return replace(trial, state=State.CANCELLED, error=error)
        case _:
            error = outcome.error
    return replace(trial, state=State.FAILED, error=error)


def _number_of(value: Any, metric: str | None) -> float | None:
    """Return a number, or a scalar of NumPy, JAX, or PyTorch, as a float; None for other values.

    Of a dict, return the number named *metric*, or else the only one.
    """
    if isinstance(value, Mapping):
        numbers = cast("Mapping[str, Any]", value)
        if metric is None and len(numbers) == 1:
            metric = next(iter(numbers))
        value = numbers.get(metric or "")
    if getattr(value, "shape", ()) != () or isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except Exception:  # the object may raise anything
        return None


def _lack_of(value: Any, metric: str | None) -> str:
    """Return the end of a sentence: the number that a dict lacks; empty if *value* isn't one."""
    if not isinstance(value, Mapping) or metric in value:
        return ""
    names = [str(name) for name in cast("Mapping[str, Any]", value)]
    if metric is None and len(names) > 1:
        choice = join_with_or(f"metric={name!r}" for name in names)
        return f", which has {len(names)} values: pass {one_line(choice)}"
    if metric is None:
        return ""
    return f", which has no {metric!r}, as metric= says: {suggest(metric, names)}"


# --- beginning and continuing ---


@dataclass(frozen=True, slots=True)
class _Record:
    """The object of a sweep's name: the IDs of its batches, of which all but the last have ended.

    ``generation`` is that of the stored object; 0 if there is none.
    """

    name: str
    batches: Sequence[str]
    direction: str
    generation: int = 0

    @classmethod
    async def read(cls, store: Store, name: str) -> Self | None:
        """Return the stored record; None if there is none."""
        key = _record_key(name)
        try:
            stored = await retry_forever(lambda: store.get(key), f"reading {key}")
        except NotFound:
            return None
        try:
            fields = json.loads(stored.body)
            return cls(name, fields["batches"], fields["direction"], stored.generation)
        except MALFORMED as exc:
            raise WireError(f"{key}, of the sweep {name!r}, is damaged: delete it") from exc

    async def write(self, store: Store) -> None:
        """Store this record in place of that of its generation.

        Raises:
            Conflict: Another process has stored one since.
        """
        key = _record_key(self.name)
        fields = {"name": self.name, "batches": [*self.batches], "direction": self.direction}
        body = json.dumps(fields).encode()
        if generation := self.generation:
            replacing = functools.partial(store.replace, key, body, generation=generation)
            await retry_forever(replacing, f"writing {key}")
        elif await retry_forever(lambda: store.begin(key, body), f"writing {key}") is None:
            raise Conflict(f"another process has begun the sweep {self.name!r}")


def _record_key(name: str) -> str:
    return f"sweeps/{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()}"


async def start(
    client: _Client,
    function: Callable[..., Any],
    optimizer: Any,
    space: Space | None,
    *,
    trials: int | None,
    on_failure: OnFailure,
    metric: str | None,
    resume: bool,
    **options: Unpack[MapOptions],
) -> Sweep:
    """Start a sweep, or continue the one of that name; see `Client.sweep`."""
    check(trials=trials, on_failure=on_failure, metric=metric, resume=resume)
    settings = MapSettings.of(**options)
    name = settings.name or None
    if resume and name is None:
        raise ConfigurationError("resume=True continues the sweep of a name: give name=")
    if "input_mode" in options:
        raise ConfigurationError("a sweep takes no input_mode: its inputs are keyword arguments")
    checked = _optimizer_of(optimizer, space, name)
    settings = replace(
        settings,
        input_mode="labelled",
        prunable=settings.prunable or _prunes(checked),
        retries=settings.retries or (RETRIES if on_failure == "retry" else 0),
    )
    first, reduction = getattr(checked, "rungs", None) or (1, 2)
    goal = Goal(direction=checked.direction, metric=metric, first=first, reduction=reduction)
    plain, function_options = settings_of(function)
    binding = Binding(plain, function_options.init)
    known = optimizer.space if isinstance(optimizer, RandomSearch | GridSearch) else space
    if not (known is None or callable(known)):
        _require_fit(binding, known)
    limit = settings.max_concurrent
    sweep = Sweep(
        checked, binding, trials=trials, on_failure=on_failure, metric=metric, limit=limit
    )
    if name is None:
        await sweep.follow(await client.start_batch(function, sweep.proposals(), settings, goal))
        return sweep
    store = await client.store_of(function, settings.project, settings.cluster)
    record = await _Record.read(store, name)
    batches = await _attach(client, record, settings) if record is not None else []
    if not resume:
        if batches and not batches[-1].finished:
            raise Conflict(
                f"the sweep {name!r} ({batches[-1].group_id}) has not ended: continue it with "
                "resume=True, end it by `kinetic batches cancel`, or take another name"
            )
        batches = []
    elif record is not None and record.direction != checked.direction:
        raise ConfigurationError(
            f"the sweep {name!r} was begun to {record.direction} its value, and the optimizer is "
            f"to {checked.direction} it: continue the sweep with the direction of its begin"
        )

    async def begin() -> BatchHandle[Any, Any]:
        batch = await client.start_batch(function, sweep.proposals(), settings, goal)
        try:
            ids = [earlier.group_id for earlier in (*batches, batch)]
            generation = record.generation if record is not None else 0
            await _Record(name, ids, checked.direction, generation).write(store)
        except BaseException:
            await release(batch.cleanup(), operation=f"removing {batch.group_id}")
            raise
        return batch

    current = batches[-1] if batches and not batches[-1].finished else None
    try:
        for batch in batches:
            if batch is not current:
                await sweep.read(batch)
        if current is not None:
            await current.resume_alone(None if current.sealed else sweep.proposals())
            begin_next = begin if current.sealed else None  # perhaps since the line before
            await sweep.follow(current, rebuild=True, begin_next=begin_next)
        elif not batches or not await sweep.is_over():
            await sweep.follow(await begin())
    except BaseException:
        await release(sweep.abandon(), operation=f"ending the proposals of {name!r}")
        raise
    return sweep


async def _attach(
    client: _Client, record: _Record, settings: MapSettings
) -> list[BatchHandle[Any, Any]]:
    """Return the batches of a sweep.

    Raises:
        WireError: The record has the ID of another batch.
    """
    batches: list[BatchHandle[Any, Any]] = []
    for group_id in record.batches:
        with contextlib.suppress(NotFound):  # it was cleaned up
            batch = await client.attach_batch(group_id, settings.project, settings.cluster)
            if batch.name != record.name:  # the record isn't signed
                raise WireError(f"{group_id} isn't a batch of the sweep {record.name!r}")
            batches.append(batch)
    return batches


def _optimizer_of(optimizer: Any, space: Space | None, name: str | None) -> Optimizer:
    if is_study(optimizer):
        return StudyOptimizer(optimizer, space, name)
    if space is not None:
        raise ConfigurationError(
            f"{type(optimizer).__name__} has its space already: omit the argument space"
        )
    if missing := [method for method in _METHODS if not hasattr(optimizer, method)]:
        raise ConfigurationError(
            f"{type(optimizer).__name__} isn't an optimizer: it has no {missing[0]}; pass "
            "RandomSearch(space), GridSearch(space), a study of Optuna, or an object that follows "
            "kinetic.sweeps.Optimizer"
        )
    if type(optimizer) in (RandomSearch, GridSearch):
        optimizer = optimizer.begun()  # another sweep may use it, too
    check(direction=optimizer.direction)
    typed: Optimizer = optimizer
    return typed


_METHODS = ("direction", "ask", "tell", "report", "adopt")
