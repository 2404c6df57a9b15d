"""A watch tells what is, whatever becomes of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio._net.tokens import Fresh, TokenCache
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.aio.kubernetes.credentials import Access, ClusterCredentials
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.manifests import START_TIMEOUT
from kinetic.aio.kubernetes.observations import ENDED, End
from kinetic.aio.kubernetes.pending import Patience as Waiting
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import AuthError
from kinetic.job_status import Reason
from tests.kubernetes.faults import FaultServer, status
from tests.kubernetes.places import watching
from tests.kubernetes.world import AT, World

RHYTHM = Rhythm(
    idle_s=0.3, brief_s=0.05, first_pause_s=0.005, longest_pause_s=0.05, longest_wish_s=0.05
)
LIMITS = Limits(idle_s=30.0, retry=RetryPolicy(total_s=30.0, first_s=0.005, longest_s=0.02))
"""The server is in this very process: when that stands still, both do, and it counts as silence."""

DEADLINE_S = 40.0
FAULTS = ("eof", "cut", "silent", "gone", "expired", "error", "broken", "garbage", "bookmark")


@pytest.fixture
async def server() -> AsyncIterator[FaultServer]:
    async with FaultServer() as running:
        yield running


@pytest.fixture
def world(server: FaultServer) -> World:
    made = World()
    server.always = made.handle
    return made


async def _fresh() -> Fresh[ClusterCredentials]:
    return Fresh(value=ClusterCredentials())


@pytest.fixture
async def cluster(server: FaultServer) -> AsyncIterator[GkeCluster]:
    access = Access(server=server.url, name="a test", passes=TokenCache(_fresh, "a test"))
    made = GkeCluster(Api(access, LIMITS), AT, rhythm=RHYTHM)
    yield made
    await made.aclose()


class Told:
    """What a watch has told so far."""

    def __init__(self, watch: AsyncIterator[Observation]) -> None:
        self._watch = watch
        self.words: list[tuple[str, Phase]] = []
        self.last: dict[str, Phase] = {}

    async def until(self, **wanted: Phase) -> None:
        """Read on until these were the last words about these jobs."""
        names = {name.replace("_", "-"): phase for name, phase in wanted.items()}
        async with asyncio.timeout(DEADLINE_S):
            while not names.items() <= self.last.items():
                self.seen = seen = await anext(self._watch)
                self.words.append((seen.name, seen.phase))
                self.last[seen.name] = seen.phase


@pytest.fixture
async def told(cluster: GkeCluster) -> AsyncIterator[Told]:
    async with watching(cluster, {}) as watch:
        yield Told(watch)


@pytest.mark.parametrize(
    "fault",
    ["eof", "cut", "silent", "error", "unauthorized", "stranger", "broken", "busy", "garbage"],
)
async def test_a_watch_that_breaks_goes_on_where_it_was(
    world: World, told: Told, fault: str
) -> None:
    for kind in ("jobs", "pods"):
        world.faults[kind].append(fault)
    world.run(1)
    await told.until(job_1=Phase.RUNNING)
    world.end(1)
    world.run(2)
    await told.until(job_1=Phase.ENDED, job_2=Phase.RUNNING)
    lists = 2 if fault in ("error", "unauthorized") else 1  # an error in a watch: read all anew
    assert {world.counts["list jobs"], world.counts["list pods"]} <= {1, lists}
    assert told.words.count(("job-1", Phase.ENDED)) == 1


@pytest.mark.parametrize("fault", ["gone", "expired"])
async def test_what_vanished_while_nobody_listened_is_told_as_gone(
    world: World, told: Told, fault: str
) -> None:
    for number in (1, 2, 3):
        world.run(number)
    await told.until(job_1=Phase.RUNNING, job_2=Phase.RUNNING, job_3=Phase.RUNNING)
    world.remove(1)
    for kind in ("jobs", "pods"):
        world.faults[kind] += ["cut", fault]
    world.end(2)
    await told.until(job_1=Phase.GONE, job_2=Phase.ENDED)
    assert told.last["job-3"] is Phase.RUNNING
    assert ("job-3", Phase.GONE) not in told.words


async def test_what_was_forgotten_is_listed_again(world: World, told: Told) -> None:
    world.run(1)
    world.run(2)
    for kind in ("jobs", "pods"):
        world.faults[kind] += ["eof"]
    await told.until(job_1=Phase.RUNNING, job_2=Phase.RUNNING)
    world.objects["jobs"].pop("job-1")  # and no event will ever tell
    world.objects["pods"].pop("job-1-0-1")
    world.run(3)
    world.version += 1  # whoever has been told of job 3 does not know this one either
    world.forget()
    world.faults["jobs"].append("cut")
    world.faults["pods"].append("cut")
    await told.until(job_1=Phase.GONE, job_3=Phase.RUNNING)


async def test_a_bookmark_is_where_the_next_watch_begins(world: World, told: Told) -> None:
    world.faults["jobs"].append("bookmark")
    world.run(1)
    await told.until(job_1=Phase.RUNNING)
    async with asyncio.timeout(DEADLINE_S):
        while len(world.since["jobs"]) < 2:  # the one that was told the bookmark has ended
            await asyncio.sleep(0.01)
    assert world.since["jobs"] == [world.version - 1, world.version]
    world.forget()  # whoever begins before it would have to list again
    world.faults["jobs"].append("cut")
    world.end(1)
    await told.until(job_1=Phase.ENDED)
    assert world.counts["list jobs"] == 1


@pytest.mark.parametrize("fault", ["twice", "old"])
async def test_events_that_come_again_change_nothing(world: World, told: Told, fault: str) -> None:
    world.run(1)
    await told.until(job_1=Phase.RUNNING)
    for kind in ("jobs", "pods"):
        world.faults[kind] += ["eof", fault]
    world.end(1)
    world.run(2)
    await told.until(job_1=Phase.ENDED, job_2=Phase.RUNNING)
    assert told.words.count(("job-1", Phase.ENDED)) == 1


@pytest.mark.parametrize("fault", ["eof", "gone", "expired"])
async def test_a_server_that_ends_each_watch_at_once_is_not_asked_in_a_hurry(
    world: World, server: FaultServer, fault: str
) -> None:
    access = Access(server=server.url, name="a test", passes=TokenCache(_fresh, "a test"))
    cluster = GkeCluster(Api(access, LIMITS), AT)
    world.faults["jobs"].extend([fault] * 1000)
    world.run(1)
    async with watching(cluster, {}) as watch:
        assert (await anext(watch)).name == "job-1"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await anext(watch)
    assert world.counts["watch jobs"] <= 8
    await cluster.aclose()


async def test_another_job_of_the_same_name_is_another(world: World, told: Told) -> None:
    world.run(1)
    await told.until(job_1=Phase.RUNNING)
    world.drop("jobs", "job-1")
    world.run(1, life=2)
    world.drop("pods", "job-1-0-1")
    world.end(1, life=2)
    await told.until(job_1=Phase.ENDED)
    assert ("job-1", Phase.GONE) not in told.words[-2:]


async def test_a_watch_that_may_not_be_says_so(server: FaultServer, cluster: GkeCluster) -> None:
    server.always = status(403, "Forbidden", 'User "ada" cannot list resource "jobs"')
    async with watching(cluster, {}) as watch:
        with pytest.raises(AuthError, match="ada"):
            await anext(watch)


async def test_a_closed_watch_leaves_nothing_behind(
    world: World, server: FaultServer, cluster: GkeCluster
) -> None:
    world.run(1)
    async with watching(cluster, {}) as watch:
        await anext(watch)
    async with asyncio.timeout(DEADLINE_S):
        while server.busy:
            await asyncio.sleep(0)
    assert not [one for one in asyncio.all_tasks() if "kinetic" in one.get_name()]


async def test_who_has_run_is_known_of_a_job_that_ends_while_the_watch_begins(
    world: World, server: FaultServer, told: Told
) -> None:
    """The answer about the jobs is newer than one about the pods that was asked for with it."""

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/jobs") and not world.counts["list jobs"]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    while not world.counts["list pods"]:
                        await asyncio.sleep(0.01)
            world.end(1)
        return await world.handle(request)

    server.always = slow
    world.run(1)
    world.faults["pods"].append("silent")
    await told.until(job_1=Phase.ENDED)
    assert told.seen.executor == "pod-1/1"


async def test_an_end_is_told_with_who_has_run_though_the_job_tells_of_it_first(
    world: World, told: Told
) -> None:
    """Jobs and pods come by different connections: one of them may be late."""
    world.run(1)
    await told.until(job_1=Phase.RUNNING)
    world.job(1, conditions=[{"type": "Complete", "status": "True"}])
    await told.until(job_1=Phase.ENDED)
    assert told.seen.executor == "pod-1/1"


async def test_why_a_job_never_began_is_told_though_its_pod_is_told_as_gone_first(
    world: World, told: Told
) -> None:
    """Who has ended it says so in the Job; its controller deletes the pod in the next moment."""
    job = world.job(1)
    waits = world.pod(1, phase="Pending", containerStatuses=[])
    await told.until(job_1=Phase.PENDING)
    gone = {**waits["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}
    world.put("pods", {**waits, "metadata": gone})
    world.drop("pods", waits["metadata"]["name"])
    world.run(2)
    await told.until(job_2=Phase.RUNNING)
    assert told.last["job-1"] is Phase.PENDING
    end = End(reason=Reason.UNSCHEDULABLE, message="waited longer than its start_timeout of 1 s")
    said = {**job["metadata"]["annotations"], ENDED: end.to_text()}
    failed = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    about = {**job["metadata"], "annotations": said}
    world.put("jobs", {**job, "metadata": about, "status": {"conditions": failed}})
    await told.until(job_1=Phase.ENDED)
    assert (told.seen.reason, told.seen.message) == (end.reason, end.message)


@pytest.mark.full
async def test_a_job_that_waits_in_vain_is_ended_once(world: World, server: FaultServer) -> None:
    """However late it is told: what it looks like until then may be a consequence of its end."""
    access = Access(server=server.url, name="a test", passes=TokenCache(_fresh, "a test"))
    cluster = GkeCluster(Api(access, LIMITS), AT, patience=Waiting(asked_s=0.5, least_s=0.0))
    job = world.job(1)
    about = {**job["metadata"]["annotations"], START_TIMEOUT: "0"}
    world.put("jobs", {**job, "metadata": {**job["metadata"], "annotations": about}})
    world.pod(1, phase="Pending", containerStatuses=[])
    end = f"PATCH /apis/batch/v1/namespaces/ns/jobs/{job['metadata']['name']}"

    def looked_again() -> bool:
        """Whether more was asked about it since."""
        _, ended, since = " ".join(server.paths).partition(end)
        return bool(ended) and "/events" in since

    async def read(watch: AsyncIterator[Observation]) -> None:
        async for _ in watch:
            pass

    async with asyncio.timeout(DEADLINE_S), watching(cluster, {}) as watch:
        reading = asyncio.create_task(read(watch))
        while end not in server.paths:
            await asyncio.sleep(0.01)
        while server.paths.count(end) < 2 and not looked_again():
            await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.wait({reading})
    assert server.paths.count(end) == 1
    await cluster.aclose()


async def test_whoever_reads_slowly_gets_the_latest(world: World, told: Told) -> None:
    world.run(1)
    await told.until(job_1=Phase.RUNNING)
    for number in range(2, 300):
        world.run(number)
    for number in range(2, 300):
        world.end(number)
    async with asyncio.timeout(DEADLINE_S):
        while world.counts["watch jobs"] < 1:
            await asyncio.sleep(0)
    await told.until(**{f"job_{number}": Phase.ENDED for number in range(2, 300)})


@pytest.mark.parametrize("seed", range(6))
async def test_after_any_course_of_faults_the_last_word_is_what_is(
    world: World, told: Told, seed: int
) -> None:
    chance = random.Random(seed)
    state: dict[int, Phase] = {}
    lives: dict[int, int] = {}
    for _ in range(60):
        number = chance.randrange(5)
        match state.get(number, Phase.GONE):
            case Phase.GONE:
                lives[number] = lives.get(number, 0) + 1
                world.run(number, lives[number])
                state[number] = Phase.RUNNING
            case Phase.RUNNING:
                world.end(number, lives[number])
                state[number] = Phase.ENDED
            case _:
                world.remove(number)
                state[number] = Phase.GONE
        if chance.random() < 0.5:
            world.faults[chance.choice(("jobs", "pods"))].append(chance.choice(FAULTS))
        if chance.random() < 0.1:
            world.forget()
        await asyncio.sleep(chance.choice((0, 0, 0.01)))
    world.run(9)
    wanted: dict[str, Any] = {"job_9": Phase.RUNNING}
    wanted |= {f"job_{n}": phase for n, phase in state.items() if phase is not Phase.GONE}
    await told.until(**wanted)
    world.end(9)
    left = [number for number, phase in state.items() if phase is Phase.GONE]
    known = {f"job_{n}": Phase.GONE for n in left if f"job-{n}" in told.last}
    await told.until(job_9=Phase.ENDED, **known)
