"""Test that a sweep continues after its process has died, from the batch alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kinetic.aio import Client, _lease
from kinetic.errors import ConfigurationError, Conflict, NotFound, SubmitterLost
from kinetic.sweeps import Choice, Float, GridSearch, Int, RandomSearch, State
from tests.scripts import Script
from tests.sweeps.jobs import GRID, SPACE, train, waits

optuna = pytest.importorskip("optuna", reason="needs Optuna: pip install 'kinetic-aio[optuna]'")


VICTIM = Path(__file__).with_name("victim.py")


class Project:
    """A folder with the victim, whose sweeps keep their files in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def attempts(self) -> int:
        """How many attempts have run the function."""
        return len([*self.folder.glob("ran.*")])

    def run(self, *arguments: object) -> list[str]:
        """Run the victim to its end, and return the lines that it printed."""
        with Script(VICTIM, *arguments, folder=self.folder, deadline=110) as victim:
            status, out, errors = victim.end()
        assert status in (0, -9), out + errors
        return out.splitlines()

    def killed(self, *arguments: object) -> None:
        assert "{" not in "".join(self.run(*arguments))

    def finished(self, *arguments: object) -> dict[str, Any]:
        *_, summary, batch = self.run(*arguments)
        return json.loads(summary) | json.loads(batch)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.full
def test_a_study_keeps_no_trial_that_was_asked_for_and_never_stored(project: Project) -> None:
    project.killed("valley", "optuna-sqlite", 6, 3, -1)  # before the batch has an input
    project.killed("valley", "optuna-sqlite", 6, 3, -5)
    told = project.finished("valley", "optuna-sqlite", 6, 3)["told"]
    assert told.count("COMPLETE") == 6 and {*told} == {"COMPLETE", "FAIL"}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_the_proposals_are_those_of_a_sweep_that_was_not_killed(
    project: Project, kind: str
) -> None:
    whole = project.finished("whole", kind, 12, 1)
    project.killed("cut", kind, 12, 1, 3)
    project.killed("cut", kind, 12, 1, 8)
    cut = project.finished("cut", kind, 12, 1)
    assert cut["trials"] == whole["trials"]
    assert project.attempts == 24, "a trial ran twice, or never"
    # Once more: every trial has ended, and nothing runs again.
    assert project.finished("cut", kind, 12, 1)["batch"] == cut["batch"]
    assert project.attempts == 24


@pytest.mark.full
async def test_one_name_has_one_live_sweep(local: Client, tmp_path: Path) -> None:
    search = RandomSearch({"folder": _only(str(tmp_path)), "number": Int(1, 99)})
    async with Client(backend="local") as other:
        async with await local.sweep(waits, search, trials=3, name="one") as sweep:
            for resume in (False, True):
                with pytest.raises(Conflict):
                    await other.sweep(waits, search, trials=3, name="one", resume=resume)
            Path(tmp_path, "go").touch()
            assert len([trial async for trial in sweep]) == 3
    assert len(await local.list_batches()) == 1


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_sweep_that_ends_while_another_process_waits_for_it_is_continued(
    local: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    search = {"folder": _only(str(tmp_path)), "number": Int(1, 99)}
    asked, acquire = asyncio.Event(), _lease.acquire

    async def noted(*args: Any, **settings: Any) -> Any:
        asked.set()
        return await acquire(*args, **settings)

    monkeypatch.setattr(_lease, "acquire", noted)
    monkeypatch.setattr(_lease, "LOOK_S", 0.05)

    async def resume() -> list[State]:
        async with await local.sweep(
            waits, RandomSearch(search), trials=3, max_concurrent=1, name="one", resume=True
        ) as second:
            await second.wait()
        return [trial.state for trial in second.trials()]

    async with Client(backend="local") as other:
        async with await other.sweep(
            waits, RandomSearch(search), trials=3, max_concurrent=1, name="one"
        ) as first:
            while not [*tmp_path.glob("ran.*")]:
                await asyncio.sleep(0.01)
            resumed = asyncio.create_task(resume())
            await asyncio.wait(
                {resumed, asyncio.create_task(asked.wait())}, return_when="FIRST_COMPLETED"
            )
            assert not first.batch.sealed
            if not is_cut:
                Path(tmp_path, "go").touch()
                await first.wait()
        Path(tmp_path, "go").touch()
        states = await resumed
    assert states == [State.CANCELLED] * is_cut + [State.COMPLETE] * 3
    assert len(await local.list_batches()) == 1 + is_cut


def _only(value: Any) -> Any:
    from kinetic.sweeps import Choice

    return Choice([value])


async def test_two_sweeps_that_begin_at_once_have_two_names(local: Client) -> None:
    def begin() -> Any:
        return local.sweep(train, RandomSearch(SPACE), trials=2, name="same", resume=True)

    begun = await asyncio.gather(*(begin() for _ in range(4)), return_exceptions=True)
    sweeps = [sweep for sweep in begun if not isinstance(sweep, Exception)]
    assert len(sweeps) == 1 and all(isinstance(e, Conflict) for e in begun if e not in sweeps)
    await sweeps[0].wait()
    assert len(await local.list_batches()) == 1


@pytest.mark.parametrize("name", ["again", "\ud800"])
async def test_a_name_is_free_again_when_its_sweep_has_ended(local: Client, name: str) -> None:
    batches = set()
    for _ in range(2):
        async with await local.sweep(train, RandomSearch(SPACE), trials=2, name=name) as sweep:
            await sweep.wait()
        batches.add(sweep.batch.group_id)
    assert len(batches) == 2 and len(sweep.trials()) == 2


async def test_a_killed_sweep_says_how_to_continue(project: Project) -> None:
    await asyncio.to_thread(project.killed, "valley", "random", 14, 3, 4)
    async with Client(backend="local") as client:
        [batch] = await client.list_batches(name="valley")
        with pytest.raises(SubmitterLost, match="run its program again with resume=True") as caught:
            await batch.results(timeout=60)
    assert "--seal" not in str(caught.value)


async def test_a_cancelled_sweep_continues_with_other_trials(
    local: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="absl")
    space = {"folder": _only(str(tmp_path)), "number": Int(1, 99)}
    async with await local.sweep(waits, RandomSearch(space), trials=4, name="cut") as first:
        while len([*tmp_path.glob("ran.*")]) < 2:
            await asyncio.sleep(0.01)
    assert "To continue the sweep: run its program again with resume=True" in caplog.text
    Path(tmp_path, "go").touch()
    assert {trial.state for trial in first.trials()} == {State.CANCELLED}
    async with await local.sweep(
        waits, RandomSearch(space), trials=4, name="cut", resume=True
    ) as second:
        await second.wait()
    assert "of the first call" not in caplog.text, "it has a new batch"
    states = [trial.state for trial in second.trials()]
    assert states == [State.CANCELLED] * 4 + [State.COMPLETE] * 4
    numbers = [trial.params["number"] for trial in second.trials()]
    assert len({*numbers}) == 8
    # A third process has the trials of both batches, and may add more.
    async with await local.sweep(
        waits, RandomSearch(space), trials=5, name="cut", resume=True
    ) as third:
        await third.wait()
    assert [trial.params["number"] for trial in third.trials()][:8] == numbers
    assert third.trials()[8].state is State.COMPLETE and third.best.value == min(
        trial.value for trial in third.trials() if trial.value is not None
    )


async def test_a_sweep_whose_space_is_exhausted_begins_no_further_batch(local: Client) -> None:
    for _ in range(3):
        async with await local.sweep(
            train, GridSearch(GRID), trials=None, name="grid", resume=True
        ) as sweep:
            assert len([trial async for trial in sweep]) == 6
    assert len(await local.list_batches()) == 1


async def test_a_cancelled_grid_continues_with_all_of_its_points(
    local: Client, tmp_path: Path
) -> None:
    grid = GridSearch({"folder": Choice([str(tmp_path)]), "number": Int(1, 3)})
    async with await local.sweep(waits, grid, trials=None, max_concurrent=2, name="cut") as first:
        while len([*tmp_path.glob("ran.*")]) < 2:
            await asyncio.sleep(0.01)
    Path(tmp_path, "go").touch()
    assert [trial.state for trial in first.trials()] == [State.CANCELLED] * 2
    for _ in range(2):
        async with await local.sweep(waits, grid, trials=None, name="cut", resume=True) as second:
            await second.wait()
        values = [trial.value for trial in second.trials()]
        assert sorted(filter(None, values)) == [1, 2, 3] and values[:2] == [None, None]


async def test_more_trials_join_a_sweep_that_has_proposed_all_of_its_own(
    local: Client, tmp_path: Path
) -> None:
    space = {"folder": _only(str(tmp_path)), "number": Int(1, 99)}
    async with Client(backend="local") as other:
        first = await other.sweep(waits, RandomSearch(space), trials=2, name="more")
        while not first.batch.sealed:
            await asyncio.sleep(0.01)
        await first.batch.detach()
    async with await local.sweep(
        waits, RandomSearch(space), trials=5, name="more", resume=True
    ) as sweep:
        Path(tmp_path, "go").touch()
        assert len([trial async for trial in sweep]) == 5
    assert {trial.state for trial in sweep.trials()} == {State.COMPLETE}
    assert len(await local.list_batches()) == 2


async def test_a_sweep_continues_without_the_trials_of_a_batch_that_was_cleaned_up(
    local: Client,
) -> None:
    params = []
    for trials in (2, 4, 5):
        async with await local.sweep(
            train, RandomSearch(SPACE), trials=trials, max_concurrent=1, name="some", resume=True
        ) as sweep:
            await sweep.wait()
        params.append([trial.params for trial in sweep.trials()])
        if trials == 4:
            _, first = await local.list_batches()
            await first.cleanup()
    assert params[2][:2] == params[1][2:] and len(params[2]) == 5


async def test_a_changed_space_is_refused_while_trials_run(
    local: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def space(first: int) -> dict[str, Any]:
        return {"folder": _only(str(tmp_path)), "number": Int(first, 99)}

    async with Client(backend="local") as other:
        first = await other.sweep(waits, RandomSearch(space(1)), trials=4, name="live")
        while len([*tmp_path.glob("ran.*")]) < 2:
            await asyncio.sleep(0.01)
        await first.batch.detach()
    with pytest.raises(ConfigurationError, match="trial 0"):
        await local.sweep(waits, RandomSearch(space(99)), trials=4, name="live", resume=True)
    async with await local.sweep(
        waits, RandomSearch(space(1)), trials=4, name="live", resume=True
    ) as sweep:
        Path(tmp_path, "go").touch()
        await sweep.wait()
    assert [trial.state for trial in sweep.trials()] == [State.COMPLETE] * 4
    assert "the project's files of the first call" in caplog.text


async def test_a_sweep_whose_results_are_collected_says_how_to_go_on(local: Client) -> None:
    async with Client(backend="local") as other:
        async with await other.sweep(train, RandomSearch(SPACE), trials=2, name="gone") as sweep:
            await sweep.wait()
        await sweep.batch.results()

    async def resume() -> int:
        search = RandomSearch(SPACE)
        async with await local.sweep(train, search, trials=3, name="gone", resume=True) as again:
            return len([trial async for trial in again])

    with pytest.raises(NotFound, match=r"trial 0 can't be read.*clean it up"):
        await resume()
    await (await local.attach_batch(sweep.batch.group_id)).cleanup()
    assert await resume() == 3


async def test_an_optimizer_that_raises_when_it_adopts_a_trial_is_named(local: Client) -> None:
    class Forgetful(RandomSearch):
        def adopt(self, params: Any, memo: Any) -> Any:
            if params["layers"] == layers:
                raise KeyError("unknown")
            return super().adopt(params, memo)

    async with await local.sweep(train, RandomSearch(SPACE), trials=3, name="adopt") as sweep:
        await sweep.wait()
    layers = sweep.trials()[2].params["layers"]
    number = [trial.params["layers"] for trial in sweep.trials()].index(layers)
    with pytest.raises(KeyError, match="unknown") as caught:
        await local.sweep(train, Forgetful(SPACE), trials=4, name="adopt", resume=True)
    assert f"trial {number}" in caught.value.__notes__[0]


async def test_a_changed_space_is_refused_and_nothing_is_lost(local: Client) -> None:
    async with await local.sweep(train, RandomSearch(SPACE), trials=3, name="space") as sweep:
        await sweep.wait()
    changed = RandomSearch({"rate": Float(0.5, 1), "layers": Int(1, 4)})
    with pytest.raises(ConfigurationError, match="trial 0"):
        await local.sweep(train, changed, trials=5, name="space", resume=True)
    with pytest.raises(ConfigurationError, match="minimize"):
        opposite = RandomSearch(SPACE, direction="maximize")
        await local.sweep(train, opposite, trials=5, name="space", resume=True)
    async with await local.sweep(
        train, RandomSearch(SPACE), trials=5, name="space", resume=True
    ) as sweep:
        await sweep.wait()
    assert [trial.state for trial in sweep.trials()] == [State.COMPLETE] * 5
