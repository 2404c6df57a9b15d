"""Kill any process at any moment: later reports are true, and no process or lock remains."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import psutil
import pytest

from kinetic import aio, errors
from kinetic.job_status import JobStatus
from tests.scripts import Script

from .conftest import DEADLINE_S, Report, Scene, ended, eventually, report_on, report_on_all, soon

VICTIM = Path(__file__).with_name("victim.py")
EVERYDAY, FULL, MORE = 4, 8, 60


def seeds() -> list[object]:
    full = [pytest.param(seed, marks=pytest.mark.full) for seed in range(EVERYDAY, FULL)]
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(FULL, MORE)]
    return [*range(EVERYDAY), *full, *slow]


def kill_one_of(scene: Scene, client: Script, kind: str, chance: random.Random) -> None:
    """Kill the client, or wait for a process of this *kind* and kill it."""
    if kind == "client":
        client.kill()
        return
    find = {
        "supervisor": lambda: [supervisor] if (supervisor := scene.supervisor()) else [],
        "parent": scene.parents,
        "job": scene.jobs,
    }[kind]
    try:
        chance.choice(eventually(find)).kill()
    except psutil.NoSuchProcess:
        return  # it ended first


@pytest.mark.parametrize("seed", seeds())
async def test_a_kill_at_any_moment(scene: Scene, seed: int) -> None:
    chance = random.Random(seed)
    victim = ("client", "supervisor", "parent", "job")[seed % 4]
    mode = chance.choice(["jobs", "batch"])
    held = scene.marks / "held.5"
    if victim == "job":
        held.touch()  # otherwise all jobs may end before the test finds one
    with scene.client(VICTIM, mode, scene.marks, 6, 0.05) as client:
        client.hear("ready")
        time.sleep(chance.uniform(0, 0.7) ** 1.5)
        kill_one_of(scene, client, victim, chance)
        held.unlink(missing_ok=True)
        if victim != "client":
            client.hear("over")
            client.kill()
        before = scene.committed()
        reports = await report_on_all(scene)
    check(reports, client, committed=before, died=victim)
    assert scene.started_twice() == []
    async with aio.Client(backend="local") as afterwards, asyncio.timeout(DEADLINE_S):
        assert await afterwards.run(abs, -1) == 1
    scene.assert_only_supervisor_left()


def check(reports: dict[str, Report], client: Script, *, committed: set[str], died: str) -> None:
    """Assert that the reports agree with each other, the store, and earlier reports."""
    lost: list[str] = []
    received = ended(client)
    for job_id, report in reports.items():
        if isinstance(report.end, int):
            assert report.status is JobStatus.SUCCEEDED and report.reason == ""
        elif isinstance(report.end, errors.SubmitterLost):
            assert died == "client"
            assert report.status is JobStatus.PENDING and "does not submit it" in report.reason
        else:
            assert isinstance(report.end, errors.JobLost), repr(report)
            assert report.status is JobStatus.FAILED and report.reason.startswith("lost: "), report
            lost.append(job_id)
        if job_id in received:
            assert received[job_id] in (str(report.end), type(report.end).__name__)
    assert committed <= {job_id for job_id, report in reports.items() if is_value(report)}
    if died == "client":
        submitted = {line.split()[1] for line in client.lines if line.startswith("submitted")}
        assert not {*lost} & submitted, "accepted jobs continue without their client"
        assert all("never started" in reports[job_id].reason for job_id in lost)
    assert died != "job" or len(lost) <= 1


def is_value(report: Report) -> bool:
    return isinstance(report.end, int)


STEPS = Path(__file__).with_name("steps.py")


OTHERS = [
    pytest.param(mode, marks=pytest.mark.full) for mode in ("cancel", "clean", "lazy", "remove")
]


@pytest.mark.parametrize("mode", ["submit", "batch", *OTHERS])
async def test_a_client_killed_at_every_step(
    scene: Scene, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "64")  # jobs of killed clients may keep their slots
    with scene.client(STEPS, mode, scene.marks) as client:
        client.hear("over")
    died = [line for line in client.lines if line.startswith("died")]
    assert len(died) >= 5, "a submission takes at least five steps"
    if mode == "cancel":  # batches with a request were already cancelled by their submitter
        await cancel(scene, [group for group in scene.submissions() if not scene.requests(group)])
    committed = scene.committed()
    reports = await report_on_all(scene)
    for job_id, report in reports.items():
        cleaned = mode == "remove" and job_id.startswith("grp-")
        match report.end:
            case int():
                assert report.status is JobStatus.SUCCEEDED
            case errors.SubmitterLost():
                assert report.status is JobStatus.PENDING and "does not submit it" in report.reason
            case errors.JobLost():
                assert mode in ("submit", "clean"), report
                assert report.status is JobStatus.FAILED and "never started" in report.reason
            case errors.JobCancelled():
                assert mode == "cancel" or cleaned, report
                assert report.status is JobStatus.NOT_FOUND
                assert report.reason.startswith("cancelled")
            case _:
                raise AssertionError(repr(report))
    assert committed <= {job_id for job_id, report in reports.items() if is_value(report)}
    assert scene.started_twice() == []
    if mode == "lazy":  # workers wait up to ten minutes for the inputs of a dead client
        await cancel(scene, scene.submissions())
    scene.assert_only_supervisor_left()


async def cancel(scene: Scene, groups: list[str]) -> None:
    """Cancel batches whose submitters are dead."""
    async with aio.Client(backend="local") as client, asyncio.timeout(DEADLINE_S):
        for group in groups:
            try:
                await (await client.attach_batch(group)).cancel()
            except errors.NotFound:
                continue  # its submitter died before it wrote the manifest


@pytest.mark.full
@pytest.mark.parametrize("victim", ["job", "parent", "supervisor"])
async def test_an_observer_hears_of_a_death_in_a_batch(scene: Scene, victim: str) -> None:
    with scene.client(VICTIM, "gated", scene.marks, 2, 0) as submitter:
        group = submitter.hear("submitted").split()[1]
        await soon(lambda: len(scene.started()) == 2)
        async with aio.Client() as client, asyncio.timeout(DEADLINE_S):
            batch = await client.attach_batch(group)
            waiting = [asyncio.create_task(job.result(cleanup=False)) for job in batch.jobs if job]
            kill_one_of(scene, submitter, victim, random.Random(1))
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().exception()
            assert isinstance(error, errors.JobLost), repr(error)
            cause = {"job": "SIGKILL", "parent": "parent process", "supervisor": "supervisor"}
            assert cause[victim] in str(error)
            (scene.marks / "go").touch()
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            lost = [end for end in ends if isinstance(end, errors.JobLost)]
            # A worker that hears of its supervisor's death in time ends its item as preempted, and
            # the item runs again.
            assert len(lost) in {"job": (1,), "parent": (2,), "supervisor": (1, 2)}[victim]
            assert not [it for it in ends if isinstance(it, BaseException) and it not in lost]
        submitter.hear("over")
    scene.assert_only_supervisor_left()


async def test_a_request_under_way_when_its_client_is_killed(scene: Scene) -> None:
    """If the supervisor answers too late, the request either takes full effect or none."""
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
        report = await report_on(await client.attach(job_id))
        assert report.end == 0 or "never started" in report.reason
    scene.assert_only_supervisor_left()
