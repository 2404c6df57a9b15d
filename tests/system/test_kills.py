"""Kill anybody at any moment: afterwards everybody tells the truth, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import psutil
import pytest

from kinetic import aio, errors
from kinetic.job_status import JobStatus

from .conftest import DEADLINE_S, Client, Scene, Word, eventually, soon, truth, word_of

VICTIM = Path(__file__).with_name("victim.py")
EVERYDAY, FULL, MORE = 4, 8, 60


def seeds() -> list[object]:
    full = [pytest.param(seed, marks=pytest.mark.full) for seed in range(EVERYDAY, FULL)]
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(FULL, MORE)]
    return [*range(EVERYDAY), *full, *slow]


def kill_one_of(scene: Scene, client: Client, who: str, chance: random.Random) -> None:
    """Kill the client, or one of the processes of this kind as soon as there is one."""
    if who == "client":
        client.kill()
        return
    find = {
        "supervisor": lambda: [one] if (one := scene.supervisor()) else [],
        "parent": scene.parents,
        "job": scene.jobs,
    }[who]
    try:
        chance.choice(eventually(find)).kill()
    except psutil.NoSuchProcess:
        return  # it was faster


@pytest.mark.parametrize("seed", seeds())
async def test_a_kill_at_any_moment(scene: Scene, seed: int) -> None:
    chance = random.Random(seed)
    who = ("client", "supervisor", "parent", "job")[seed % 4]
    mode = chance.choice(["jobs", "batch"])
    held = scene.marks / "held.5"
    if who == "job":
        held.touch()  # else all may have ended before there is a look at them
    with scene.client(VICTIM, mode, scene.marks, 6, 0.05) as client:
        client.hear("ready")
        time.sleep(chance.uniform(0, 0.7) ** 1.5)
        kill_one_of(scene, client, who, chance)
        held.unlink(missing_ok=True)
        if who != "client":
            client.hear("over")
            client.kill()
        before = scene.committed()
        said = await truth(scene)
    check(said, client, committed=before, died=who)
    assert scene.started_twice() == []
    async with aio.Client(backend="local") as afterwards, asyncio.timeout(DEADLINE_S):
        assert await afterwards.run(abs, -1) == 1
    scene.nobody_else()


def check(said: dict[str, Word], client: Client, *, committed: set[str], died: str) -> None:
    """Assert that the reports agree with each other, the store, and earlier reports."""
    lost: list[str] = []
    told = client.ended()
    for job_id, word in said.items():
        if isinstance(word.end, int):
            assert word.status is JobStatus.SUCCEEDED and word.reason == ""
        elif isinstance(word.end, errors.SubmitterLost):
            assert died == "client"
            assert word.status is JobStatus.PENDING and "does not submit it" in word.reason
        else:
            assert isinstance(word.end, errors.JobLost), repr(word)
            assert word.status is JobStatus.FAILED and word.reason.startswith("lost: "), word
            lost.append(job_id)
        if job_id in told:
            assert told[job_id] in (str(word.end), type(word.end).__name__)
    assert committed <= {job_id for job_id, word in said.items() if isinstance(word.end, int)}
    if died == "client":
        assert not {*lost} & {*client.submitted()}, "what was accepted goes on without it"
        assert all("never started" in said[job_id].reason for job_id in lost)
    assert died != "job" or len(lost) <= 1


STEPS = Path(__file__).with_name("steps.py")


OTHERS = [
    pytest.param(mode, marks=pytest.mark.full) for mode in ("cancel", "clean", "lazy", "remove")
]


@pytest.mark.parametrize("mode", ["submit", "batch", *OTHERS])
async def test_a_client_killed_at_every_step(
    scene: Scene, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "64")  # jobs of the dead may go on
    with scene.client(STEPS, mode, scene.marks) as client:
        client.hear("over")
    died = [line for line in client.lines if line.startswith("died")]
    assert len(died) >= 5, "its steps"
    if mode == "cancel":  # those that came to asking for it need no help
        await cancel(scene, [group for group in scene.submissions() if not scene.requests(group)])
    committed = scene.committed()
    said = await truth(scene)
    for job_id, word in said.items():
        cleaned = mode == "remove" and job_id.startswith("grp-")
        match word.end:
            case int():
                assert word.status is JobStatus.SUCCEEDED
            case errors.SubmitterLost():
                assert word.status is JobStatus.PENDING and "does not submit it" in word.reason
            case errors.JobLost():
                assert mode in ("submit", "clean"), word
                assert word.status is JobStatus.FAILED and "never started" in word.reason
            case errors.JobCancelled():
                assert mode == "cancel" or cleaned, word
                assert word.status is JobStatus.NOT_FOUND and word.reason.startswith("cancelled")
            case _:
                raise AssertionError(repr(word))
    assert committed <= {job_id for job_id, word in said.items() if isinstance(word.end, int)}
    assert scene.started_twice() == []
    scene.nobody_else()


async def cancel(scene: Scene, groups: list[str]) -> None:
    """Cancel batches whose submitters are dead."""
    async with aio.Client(backend="local") as client, asyncio.timeout(DEADLINE_S):
        for group in groups:
            try:
                await (await client.attach_batch(group)).cancel()
            except errors.NotFound:
                continue  # it had not come that far


async def test_a_batch_whose_submitter_is_killed_is_told_as_what_it_is(scene: Scene) -> None:
    with scene.client(VICTIM, "gated", scene.marks, 6, 0) as submitter:
        group = submitter.hear("submitted").split()[1]
        async with aio.Client() as client, asyncio.timeout(DEADLINE_S):
            batch = await client.attach_batch(group)
            collecting = asyncio.create_task(batch.results(return_exceptions=True))
            waiting = [asyncio.create_task(job.result(cleanup=False)) for job in batch.jobs if job]
            (scene.marks / "go.0").touch()
            assert await waiting[0] == 0
            await soon(lambda: len(scene.started()) == 3)
            submitter.kill()
            with pytest.raises(errors.SubmitterLost, match=f"process {submitter.process.pid}"):
                await collecting
            (scene.marks / "go").touch()
            assert [await waiting[1], await waiting[2]] == [1, 4], "what ran goes on"
            for waits in (batch.wait, batch.results):
                with pytest.raises(errors.SubmitterLost):
                    await waits()
            for index in (3, 4, 5):
                with pytest.raises(errors.SubmitterLost, match="3 of its items"):
                    await waiting[index]
                again = await client.attach(f"{group}-{index}")
                with pytest.raises(errors.SubmitterLost):
                    await again.result()
            assert await batch.status_counts() == {"SUCCEEDED": 3, "PENDING": 3}
            await batch.cancel()
            assert await batch.status_counts() == {"SUCCEEDED": 3, "NOT_FOUND": 3}
            values = await batch.results(return_exceptions=True)
            assert values[:3] == [0, 1, 4]
            assert {type(value) for value in values[3:]} == {errors.JobCancelled}
    scene.nobody_else()


@pytest.mark.parametrize("who", ["job", "parent", "supervisor"])
async def test_an_observer_hears_of_a_death_in_a_batch(scene: Scene, who: str) -> None:
    with scene.client(VICTIM, "gated", scene.marks, 2, 0) as submitter:
        group = submitter.hear("submitted").split()[1]
        await soon(lambda: len(scene.started()) == 2)
        async with aio.Client() as client, asyncio.timeout(DEADLINE_S):
            batch = await client.attach_batch(group)
            waiting = [asyncio.create_task(job.result(cleanup=False)) for job in batch.jobs if job]
            kill_one_of(scene, submitter, who, random.Random(1))
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().exception()
            assert isinstance(error, errors.JobLost), repr(error)
            words = {"job": "SIGKILL", "parent": "parent process", "supervisor": "supervisor"}
            assert words[who] in str(error)
            (scene.marks / "go").touch()
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert len([one for one in ends if isinstance(one, errors.JobLost)]) == (
                1 if who == "job" else 2
            )
        submitter.hear("over")
    scene.nobody_else()


async def test_a_request_under_way_when_its_client_is_killed(scene: Scene) -> None:
    """The supervisor was too slow to answer it; it counts all the same, or never happened."""
    async with aio.Client(backend="local") as client, asyncio.timeout(DEADLINE_S):
        assert await client.run(abs, -1) == 1
        supervisor = scene.supervisor()
        assert supervisor is not None
        supervisor.suspend()
        try:
            with scene.client(VICTIM, "jobs", scene.marks, 1, 0) as victim:
                inputs = scene.home / "store" / "jobs"
                await soon(lambda: [*inputs.glob("*/inputs/*")])
                victim.kill()
        finally:
            supervisor.resume()
        [job_id] = scene.submissions()
        word = await word_of(await client.attach(job_id))
        assert word.end == 0 or "never started" in word.reason
    scene.nobody_else()
