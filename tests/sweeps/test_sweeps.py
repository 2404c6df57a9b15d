"""Test sweeps in one process: proposals, values, failures, pruning, and their end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic.aio import Sweep
from kinetic.errors import ConfigurationError, PortalError, SweepError
from kinetic.sweeps import ASHA, Choice, Float, GridSearch, Int, Proposal, RandomSearch, State
from tests.sweeps.jobs import (
    GRID,
    SPACE,
    fails_once,
    goes_back,
    learns,
    returns,
    train,
    waits,
)

caller = contextvars.ContextVar("caller", default="none")


class Recorder:
    """An optimizer that proposes the params it is given, and records its calls."""

    direction = "minimize"
    prunes = False

    def __init__(self, *proposed: dict[str, Any], error: Exception | None = None) -> None:
        self.calls: list[tuple[str, int, Any]] = []
        self.threads: set[int] = set()
        self.callers: set[str] = set()
        self._proposed = proposed
        self._error = error
        self._count = 0

    def ask(self) -> Proposal | None:
        self.threads.add(threading.get_ident())
        self.callers.add(caller.get())
        if self._count == len(self._proposed):
            if self._error is not None:
                raise self._error
            return None
        self._count += 1
        self.calls.append(("ask", self._count - 1, None))
        return Proposal(self._count - 1, self._proposed[self._count - 1])

    def tell(self, number: int, result: float | State) -> None:
        self.threads.add(threading.get_ident())
        self.callers.add(caller.get())
        self.calls.append(("tell", number, result))

    def report(self, number: int, step: int, value: float) -> bool:
        raise AssertionError

    def adopt(self, params: Any, memo: Any) -> Proposal | None:
        return self.ask()

    @property
    def told(self) -> dict[int, Any]:
        told = [(number, result) for kind, number, result in self.calls if kind == "tell"]
        assert len({*dict(told)}) == len(told), "a trial was told twice"
        return dict(told)


async def test_a_sweep_proposes_trials_and_finds_the_best(local) -> None:
    search = RandomSearch(SPACE, seed=1)
    async with await local.sweep(train, search, trials=12, max_concurrent=3) as sweep:
        seen = [trial async for trial in sweep]
    assert sorted(trial.number for trial in seen) == [*range(12)]
    assert all(trial.value == train.local(**trial.params) for trial in seen)
    assert sweep.best == min(seen, key=lambda trial: trial.value)
    assert sweep.trials() == sorted(seen, key=lambda trial: trial.number)
    counts = await sweep.batch.status_counts()
    assert counts == {"SUCCEEDED": 12}
    assert [trial async for trial in sweep] == seen  # a second loop gets all of them again


async def test_the_highest_value_is_the_best_of_a_maximization(local) -> None:
    search = GridSearch(GRID, direction="maximize")
    async with await local.sweep(train, search, trials=None) as sweep:
        await sweep.wait()
    assert len(sweep.trials()) == 6 and sweep.best.params["layers"] == 3


async def test_each_sweep_of_one_search_begins_with_its_first_proposal(local) -> None:
    grid, random = GridSearch(GRID), RandomSearch(SPACE)
    for search, trials in ((grid, None), (random, 3)):
        found: list[list[Any]] = []
        for _ in range(2):
            async with await local.sweep(train, search, trials=trials) as sweep:
                await sweep.wait()
            found.append([trial.params for trial in sweep.trials()])
        assert found[0] == found[1] != []


async def test_the_optimizer_works_in_one_other_thread_and_in_the_context_of_the_caller(
    local,
) -> None:
    caller.set("this test")
    recorder = Recorder(*({"value": number} for number in range(8)))
    async with await local.sweep(returns, recorder, trials=None, max_concurrent=2) as sweep:
        await sweep.wait()
    assert len(recorder.threads) == 1 and threading.get_ident() not in recorder.threads
    assert recorder.callers == {"this test"}
    assert recorder.told == {number: number for number in range(8)}


def test_a_sweep_refuses_a_second_loop(small_project) -> None:
    async def start() -> Sweep:
        recorder = Recorder(*({"value": number} for number in range(9)))
        return await aio.sweep(returns, recorder, trials=None)

    async def use(begin: Callable[[Sweep], Awaitable[Any]]) -> None:
        with pytest.raises(PortalError, match="resume=True"):
            await begin(sweep)

    sweep = asyncio.run(start())
    for begin in (Sweep.wait, Sweep.__aenter__, lambda sweep: anext(aiter(sweep))):
        asyncio.run(use(begin))
    asyncio.run(aio.cleanup(sweep.batch.group_id))


async def test_a_trial_is_proposed_only_when_a_place_is_free(local, tmp_path: Path) -> None:
    recorder = Recorder(*({"folder": str(tmp_path), "number": n} for n in range(5)))
    async with await local.sweep(waits, recorder, trials=5, max_concurrent=2) as sweep:
        while len([*tmp_path.glob("ran.*")]) < 2:
            await asyncio.sleep(0.01)
        assert [call[0] for call in recorder.calls] == ["ask", "ask"]
        assert [trial.state for trial in sweep.trials()] == [State.RUNNING] * 2
        Path(tmp_path, "go").touch()
        await sweep.wait()
    open_now = most = 0
    for kind, _, _ in recorder.calls:
        open_now += 1 if kind == "ask" else -1
        most = max(most, open_now)
    assert most == 2 and len(recorder.told) == 5


@pytest.mark.parametrize("value", ["nan", "none", "array", "text", "raise"])
async def test_a_trial_without_a_number_fails_alone(local, value: str) -> None:
    recorder = Recorder({"value": 2.0}, {"value": value}, {"value": 1.0})
    async with await local.sweep(returns, recorder, trials=3) as sweep:
        trials = {trial.number: trial async for trial in sweep}
    assert [trials[number].value for number in range(3)] == [2.0, None, 1.0]
    assert trials[1].state is State.FAILED and recorder.told[1] is State.FAILED
    if value == "raise":
        assert isinstance(trials[1].error, ValueError)
    else:
        assert isinstance(trials[1].error, SweepError) and "trial 1 returned" in str(
            trials[1].error
        )
    assert sweep.best.number == 2


async def test_metric_names_the_number_in_a_dict(local) -> None:
    values = [{"loss": 3.0, "size": 1}, {"loss": 2.0, "size": 5}, {"size": 0}]
    recorder = Recorder(*({"value": value} for value in values))
    async with await local.sweep(returns, recorder, trials=3, metric="loss") as sweep:
        await sweep.wait()
    assert [trial.value for trial in sweep.trials()] == [3.0, 2.0, None]
    assert "no 'loss', as metric= says: there are size" in str(sweep.trials()[2].error)


async def test_a_dict_of_several_numbers_needs_a_metric(local) -> None:
    recorder = Recorder({"value": {"loss": 3.0, "size": 1}})
    async with await local.sweep(returns, recorder, trials=1) as sweep:
        await sweep.wait()
    with pytest.raises(SweepError, match="pass metric='loss' or metric='size'"):
        _ = sweep.best


async def test_a_number_that_is_not_in_a_dict_needs_no_metric(local) -> None:
    async with await local.sweep(returns, Recorder({"value": 2.0}), trials=1, metric="x") as sweep:
        await sweep.wait()
    assert sweep.best.value == 2.0


async def test_a_misspelt_metric_is_compared_with_the_names_in_the_dict(local) -> None:
    recorder = Recorder({"value": {"loss": 3.0}})
    async with await local.sweep(returns, recorder, trials=1, metric="los") as sweep:
        await sweep.wait()
    with pytest.raises(SweepError, match=r"no 'los', as metric= says: did you mean 'loss'\?"):
        _ = sweep.best
    curious = Curious({"value": 1.0})
    with pytest.raises(SweepError, match=r"reported .* no 'los', .*did you mean 'loss'\?"):
        async with await local.sweep(goes_back, curious, trials=1, metric="los") as sweep:
            await sweep.wait()


async def test_an_ignored_failure_teaches_the_optimizer_nothing(local) -> None:
    recorder = Recorder({"value": "raise"}, {"value": 1.0})
    async with await local.sweep(returns, recorder, trials=2, on_failure="ignore") as sweep:
        await sweep.wait()
    assert recorder.told == {0: State.CANCELLED, 1: 1.0}
    assert sweep.trials()[0].state is State.FAILED


async def test_a_failed_trial_runs_again_before_the_optimizer_learns_of_it(local, tmp_path) -> None:
    recorder = Recorder(*({"folder": str(tmp_path), "number": n} for n in range(3)))
    async with await local.sweep(fails_once, recorder, trials=3, on_failure="retry") as sweep:
        await sweep.wait()
    assert recorder.told == {0: 0.0, 1: 1.0, 2: 2.0}


async def test_no_trial_has_a_value(local) -> None:
    async with await local.sweep(returns, Recorder({"value": "nan"}), trials=1) as sweep:
        await sweep.wait()
    with pytest.raises(SweepError, match="trial 0 returned nan"):
        _ = sweep.best
    async with await local.sweep(returns, Recorder({"value": "raise"}), trials=1) as sweep:
        await sweep.wait()
    with pytest.raises(SweepError, match="; trial 0: ValueError: "):
        _ = sweep.best


async def test_an_optimizer_that_raises_ends_the_sweep_after_its_open_trials(
    local, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder({"value": 1.0}, {"value": 2.0}, error=KeyError("space"))
    seen = []
    with pytest.raises(KeyError, match="space") as caught:
        async with await local.sweep(returns, recorder, trials=9, name="space") as sweep:
            async for trial in sweep:
                seen += [trial.value]
    assert "trial 2" in caught.value.__notes__[0]
    assert sorted(seen) == [1.0, 2.0] and recorder.told == {0: 1.0, 1: 2.0}
    assert await sweep.batch.status_counts() == {"SUCCEEDED": 2}
    (stopped,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "resume=True" in stopped and "seal" not in stopped


async def test_an_optimizer_that_calls_next_on_an_exhausted_iterator_ends_the_sweep(local) -> None:
    recorder = Recorder({"value": 1.0}, error=StopIteration())
    async with await local.sweep(returns, recorder, trials=None, max_concurrent=1) as sweep:
        with pytest.raises(RuntimeError, match="the optimizer raised StopIteration"):
            await asyncio.wait_for(sweep.wait(), 30)
    assert recorder.told == {0: 1.0}


@pytest.mark.parametrize(
    "proposed",
    [{"value": 1.0}, Proposal(0, [("value", 1.0)]), Proposal(0, {"value": 1.0}, memo={1})],  # type: ignore[arg-type]
    ids=["dict", "pairs", "memo"],
)
async def test_an_optimizer_that_returns_no_proposal_ends_the_sweep(local, proposed) -> None:
    class Wrong(Recorder):
        def ask(self) -> Any:
            return proposed

    with pytest.raises(ConfigurationError, match=r"Proposal|JSON") as caught:
        async with await local.sweep(returns, Wrong(), trials=1) as sweep:
            await sweep.wait()
    assert "trial 0" in caught.value.__notes__[0]


async def test_an_optimizer_that_raises_when_told_ends_the_sweep(local) -> None:
    class Forgetful(Recorder):
        def tell(self, number: int, result: float | State) -> None:
            super().tell(number, result)
            if number == 1:
                raise KeyError("full")

    optimizer = Forgetful(*({"value": float(number)} for number in range(20)))
    with pytest.raises(KeyError) as caught:
        async with await local.sweep(returns, optimizer, trials=20, max_concurrent=2) as sweep:
            await sweep.wait()
    assert any("trial 1" in note for note in caught.value.__notes__)
    assert sweep.trials()[1].value == 1.0 and len(optimizer.told) == len(sweep.trials()) < 20


class Curious(Recorder):
    """A recorder that gets the reports, and whose answer may raise."""

    prunes = True

    def __init__(self, *proposed: dict[str, Any], answer: Callable[[], Any] = bool) -> None:
        super().__init__(*proposed)
        self._answer = answer

    def report(self, number: int, step: int, value: float) -> bool:
        self.calls.append(("report", number, (step, value)))
        return self._answer()


class Vague:
    """A value without a truth value, like an array of NumPy."""

    def __bool__(self) -> bool:
        raise KeyError("no room")


async def test_a_step_that_goes_back_never_reaches_the_optimizer(local) -> None:
    curious = Curious({"value": 1.0}, {"value": 2.0})
    async with await local.sweep(goes_back, curious, trials=2, metric="loss") as sweep:
        await sweep.wait()
    assert curious.told == {0: 1.0, 1: 2.0}
    for number, value in curious.told.items():
        curve = [what for kind, n, what in curious.calls if kind == "report" and n == number]
        assert curve == [(5, value), (6, value)]


@pytest.mark.parametrize("answer", [Vague().__bool__, Vague])
async def test_an_optimizer_that_raises_at_a_report_ends_the_sweep(local, answer) -> None:
    curious = Curious({"value": 1.0}, {"value": 2.0}, {"value": 3.0}, answer=answer)
    with pytest.raises(KeyError, match="no room") as caught:
        async with await local.sweep(
            goes_back, curious, trials=3, metric="loss", max_concurrent=1
        ) as sweep:
            await sweep.wait()
    (note,) = caught.value.__notes__
    assert "trial 0 reported step 5" in note
    assert sweep.trials()[0].value == 1.0, "its value isn't lost"


async def test_a_report_of_several_numbers_needs_the_name_of_one(local) -> None:
    curious = Curious({"value": 1.0}, {"value": 2.0})
    with pytest.raises(SweepError, match=r"trial 0 reported .*metric="):
        async with await local.sweep(goes_back, curious, trials=2, max_concurrent=1) as sweep:
            await sweep.wait()
    assert sweep.trials()[0].value == 1.0


async def test_stop_ends_the_proposals(local, tmp_path: Path) -> None:
    recorder = Recorder(*({"folder": str(tmp_path), "number": n} for n in range(99)))
    async with await local.sweep(waits, recorder, trials=None, max_concurrent=2) as sweep:
        while len([*tmp_path.glob("ran.*")]) < 2:
            await asyncio.sleep(0.01)
        sweep.stop()
        Path(tmp_path, "go").touch()
        assert len([trial async for trial in sweep]) == 2
    assert recorder.told == {0: 0.0, 1: 1.0}


async def test_leaving_the_block_cancels_the_open_trials(local, tmp_path: Path) -> None:
    recorder = Recorder(*({"folder": str(tmp_path), "number": n} for n in range(9)))
    async with await local.sweep(waits, recorder, trials=9, max_concurrent=2) as sweep:
        while len([*tmp_path.glob("ran.*")]) < 2:
            await asyncio.sleep(0.01)
    assert recorder.told == {0: State.CANCELLED, 1: State.CANCELLED}
    assert {trial.state for trial in sweep.trials()} == {State.CANCELLED}


async def test_open_trials_in_a_discrete_space_differ(local, tmp_path: Path) -> None:
    class Stubborn(Recorder):
        def ask(self) -> Proposal | None:
            self._count += 1
            self.calls.append(("ask", self._count - 1, None))
            number = (self._count - 1) // 3 % 4  # each point three times in a row
            return Proposal(self._count - 1, {"folder": str(tmp_path), "number": number})

    optimizer = Stubborn()
    async with await local.sweep(waits, optimizer, trials=5, max_concurrent=5) as sweep:
        while len(sweep.trials()) < 5:
            await asyncio.sleep(0.01)
        running = [trial.params["number"] for trial in sweep.trials()]
        Path(tmp_path, "go").touch()
        await sweep.wait()
    # There are four points, so the fifth trial repeats one: the space is exhausted.
    assert {*running[:4]} == {0, 1, 2, 3} and running[4] in running[:4]
    asked = sum(call[0] == "ask" for call in optimizer.calls)
    assert len(optimizer.told) == asked  # also those that were skipped


@pytest.mark.full
async def test_a_pruner_ends_weak_trials(local) -> None:
    search = RandomSearch({"rate": Float(0, 1)}, seed=2, pruner=ASHA(first=2))
    async with await local.sweep(learns, search, trials=12, max_concurrent=4) as sweep:
        await sweep.wait()
    trials = sweep.trials()
    pruned = [trial for trial in trials if trial.state is State.PRUNED]
    assert len(pruned) >= 3 and all(trial.step < 50 for trial in pruned)
    assert all(trial.value == abs(trial.params["rate"] - 0.3) + 1 / trial.step for trial in pruned)
    assert sweep.best.value == min(abs(trial.params["rate"] - 0.3) for trial in trials)


async def test_wrong_arguments_are_refused_before_anything_is_sent(local) -> None:
    search = RandomSearch(SPACE)
    for arguments, match in [
        ({"trials": 0}, "trials"),
        ({"trials": 1, "on_failure": "repeat"}, "on_failure"),
        ({"trials": 1, "resume": True}, "name="),
        ({"trials": 1, "resume": True, "name": ""}, "name="),
        ({"trials": 1, "input_mode": "args"}, "input_mode"),
        ({"trials": 1, "space": SPACE}, "space already"),
    ]:
        with pytest.raises(ConfigurationError, match=match):
            await local.sweep(train, search, **arguments)
    with pytest.raises(ConfigurationError, match=r"dict isn't an optimizer.* RandomSearch\(space"):
        await local.sweep(train, {}, trials=1)
    recorder = Recorder()
    recorder.direction = "min"
    with pytest.raises(ConfigurationError, match=r"direction must be .*'minimize'.*'min'"):
        await local.sweep(train, recorder, trials=1)
    with pytest.raises(TypeError, match="max_concurent"):
        await local.sweep(train, search, trials=1, max_concurent=1)
    assert await local.list_batches() == []


@pytest.mark.parametrize("trials", [2, None])
async def test_a_known_space_that_does_not_fit_the_function_is_refused(local, trials) -> None:
    for kind in (RandomSearch, GridSearch):
        for space in ({"layers": Int(1, 2)}, {"rat": Choice([0.1])} | GRID):
            with pytest.raises(ConfigurationError, match=r"\(.*\) do not fit train\(.*'rate?'"):
                await local.sweep(train, kind(space), trials=trials)
    assert await local.list_batches() == []


async def test_a_proposal_that_does_not_fit_the_function_ends_the_sweep(local) -> None:
    recorder = Recorder({"value": 1.0}, {"valeu": 2.0}, {"value": 3.0})
    with pytest.raises(ConfigurationError, match=r"\(valeu\) do not fit returns") as caught:
        async with await local.sweep(returns, recorder, trials=None) as sweep:
            await sweep.wait()
    assert any("trial 1" in note for note in caught.value.__notes__)
    assert [trial.value for trial in sweep.trials()] == [1.0]
    assert recorder.told == {0: 1.0, 1: State.CANCELLED}


async def test_a_report_page_shows_the_parameters(local, tmp_path: Path) -> None:
    search = GridSearch({"value": Choice([1.0, 2.0])})
    async with await local.sweep(returns, search, trials=None) as sweep:
        await sweep.wait()
        page = (await sweep.batch.report(tmp_path / "page.html")).read_text()
    assert "value" in page
