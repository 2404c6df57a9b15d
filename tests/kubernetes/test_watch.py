"""A watch and a log tell what is, whole and once, whatever becomes of their connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.manifests import HOSTS, START_TIMEOUT
from kinetic.aio.kubernetes.observations import ENDED, End
from kinetic.aio.kubernetes.pending import Patience as Waiting
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import AuthError, NotFound, Unavailable
from kinetic.job_status import Reason
from tests.kubernetes.faults import FaultServer, anonymous, cut, status
from tests.kubernetes.places import watching
from tests.kubernetes.world import AT, World

RHYTHM = Rhythm(
    idle_s=0.3, brief_s=0.05, first_pause_s=0.005, longest_pause_s=0.05, longest_retry_after_s=0.05
)
LIMITS = Limits(
    idle_s=30.0, retry=RetryPolicy(total_s=30.0, first_pause_s=0.005, longest_pause_s=0.02)
)
"""The server is in this very process: when that stands still, both do, and it counts as silence."""

DEADLINE_S = 40.0
FAULTS = ("eof", "cut", "silent", "gone", "expired", "error", "broken", "garbage", "bookmark")


@pytest.fixture
async def cluster(server: FaultServer) -> AsyncIterator[GkeCluster]:
    made = GkeCluster(Api(anonymous(server), LIMITS), AT, rhythm=RHYTHM)
    yield made
    await made.aclose()


class Received:
    """The observations of a watch so far."""

    def __init__(self, watch: AsyncIterator[Observation]) -> None:
        self._watch = watch
        self.phases: list[tuple[str, Phase]] = []
        self.last: dict[str, Phase] = {}

    async def until(self, **wanted: Phase) -> None:
        """Read on until these are the last phases of these jobs."""
        names = {name.replace("_", "-"): phase for name, phase in wanted.items()}
        async with asyncio.timeout(DEADLINE_S):
            while not names.items() <= self.last.items():
                self.seen = seen = await anext(self._watch)
                self.phases.append((seen.name, seen.phase))
                self.last[seen.name] = seen.phase


@pytest.fixture
async def received(cluster: GkeCluster) -> AsyncIterator[Received]:
    async with watching(cluster, {}) as watch:
        yield Received(watch)


@pytest.mark.parametrize(
    "fault",
    ["eof", "cut", "silent", "error", "unauthorized", "stranger", "broken", "busy", "garbage"],
)
async def test_a_watch_that_breaks_goes_on_where_it_was(
    world: World, received: Received, fault: str
) -> None:
    for kind in ("jobs", "pods"):
        world.faults[kind].append(fault)
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    world.end(1)
    world.run(2)
    await received.until(job_1=Phase.ENDED, job_2=Phase.RUNNING)
    lists = 2 if fault in ("error", "unauthorized") else 1  # an error in a watch: read all anew
    assert {world.counts["list jobs"], world.counts["list pods"]} <= {1, lists}
    assert received.phases.count(("job-1", Phase.ENDED)) == 1


@pytest.mark.parametrize("fault", ["gone", "expired"])
async def test_what_vanished_while_nobody_listened_is_told_as_gone(
    world: World, received: Received, fault: str
) -> None:
    for number in (1, 2, 3):
        world.run(number)
    await received.until(job_1=Phase.RUNNING, job_2=Phase.RUNNING, job_3=Phase.RUNNING)
    world.remove(1)
    for kind in ("jobs", "pods"):
        world.faults[kind] += ["cut", fault]
    world.end(2)
    await received.until(job_1=Phase.GONE, job_2=Phase.ENDED)
    assert received.last["job-3"] is Phase.RUNNING
    assert ("job-3", Phase.GONE) not in received.phases


async def test_a_bookmark_is_where_the_next_watch_begins(world: World, received: Received) -> None:
    world.faults["jobs"].append("bookmark")
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    async with asyncio.timeout(DEADLINE_S):
        while len(world.since["jobs"]) < 2:  # the one that got the bookmark has ended
            await asyncio.sleep(0.01)
    assert world.since["jobs"] == [world.version - 1, world.version]
    world.forget()  # whoever begins before it would have to list again
    world.faults["jobs"].append("cut")
    world.end(1)
    await received.until(job_1=Phase.ENDED)
    assert world.counts["list jobs"] == 1


@pytest.mark.parametrize("fault", ["twice", "old"])
async def test_events_that_come_again_change_nothing(
    world: World, received: Received, fault: str
) -> None:
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    for kind in ("jobs", "pods"):
        world.faults[kind] += ["eof", fault]
    world.end(1)
    world.run(2)
    await received.until(job_1=Phase.ENDED, job_2=Phase.RUNNING)
    assert received.phases.count(("job-1", Phase.ENDED)) == 1


@pytest.mark.parametrize("fault", ["eof", "gone", "expired"])
async def test_a_server_that_ends_each_watch_at_once_is_not_asked_in_a_hurry(
    world: World, server: FaultServer, fault: str
) -> None:
    cluster = GkeCluster(Api(anonymous(server), LIMITS), AT)
    world.faults["jobs"].extend([fault] * 1000)
    world.run(1)
    async with watching(cluster, {}) as watch:
        assert (await anext(watch)).name == "job-1"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await anext(watch)
    assert world.counts["watch jobs"] <= 8
    await cluster.aclose()


async def test_another_job_of_the_same_name_is_another(world: World, received: Received) -> None:
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    world.drop("jobs", "job-1")
    world.run(1, life=2)
    world.drop("pods", "job-1-0-1")
    world.end(1, life=2)
    await received.until(job_1=Phase.ENDED)
    assert ("job-1", Phase.GONE) not in received.phases[-2:]


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
    world: World, server: FaultServer, received: Received
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
    await received.until(job_1=Phase.ENDED)
    assert received.seen.executor == "pod-1/1"


async def test_an_end_is_told_with_who_has_run_though_the_job_tells_of_it_first(
    world: World, received: Received
) -> None:
    """Jobs and pods come by different connections: one of them may be late."""
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    world.job(1, conditions=[{"type": "Complete", "status": "True"}])
    await received.until(job_1=Phase.ENDED)
    assert received.seen.executor == "pod-1/1"


async def test_why_a_job_never_began_is_told_though_its_pod_is_told_as_gone_first(
    world: World, received: Received
) -> None:
    """Who has ended it says so in the Job; its controller deletes the pod in the next moment."""
    job = world.job(1)
    waits = world.pod(1, phase="Pending", containerStatuses=[])
    await received.until(job_1=Phase.PENDING)
    gone = {**waits["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}
    world.put("pods", {**waits, "metadata": gone})
    world.drop("pods", waits["metadata"]["name"])
    world.run(2)
    await received.until(job_2=Phase.RUNNING)
    assert received.last["job-1"] is Phase.PENDING
    end = End(reason=Reason.UNSCHEDULABLE, message="waited longer than its start_timeout of 1 s")
    annotations = {**job["metadata"]["annotations"], ENDED: end.to_text()}
    failed = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    about = {**job["metadata"], "annotations": annotations}
    world.put("jobs", {**job, "metadata": about, "status": {"conditions": failed}})
    await received.until(job_1=Phase.ENDED)
    assert (received.seen.reason, received.seen.message) == (end.reason, end.message)


@pytest.mark.full
async def test_a_job_that_waits_in_vain_is_ended_once(world: World, server: FaultServer) -> None:
    """However late it is told: what it looks like until then may be a consequence of its end."""
    cluster = GkeCluster(
        Api(anonymous(server), LIMITS), AT, patience=Waiting(asked_s=0.5, least_s=0.0)
    )
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


async def test_whoever_reads_slowly_gets_the_latest(world: World, received: Received) -> None:
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    for number in range(2, 300):
        world.run(number)
    for number in range(2, 300):
        world.end(number)
    async with asyncio.timeout(DEADLINE_S):
        while world.counts["watch jobs"] < 1:
            await asyncio.sleep(0)
    await received.until(**{f"job_{number}": Phase.ENDED for number in range(2, 300)})


@pytest.mark.parametrize("seed", range(6))
async def test_after_any_course_of_faults_the_last_word_is_what_is(
    world: World, received: Received, seed: int
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
    await received.until(**wanted)
    world.end(9)
    left = [number for number, phase in state.items() if phase is Phase.GONE]
    known = {f"job_{n}": Phase.GONE for n in left if f"job-{n}" in received.last}
    await received.until(job_9=Phase.ENDED, **known)


# --- logs ---


async def log(cluster: GkeCluster, *, follow: bool = True, tail: int | None = None) -> list[str]:
    async with asyncio.timeout(DEADLINE_S):
        return [line async for line in cluster.logs("job-1", follow=follow, tail=tail)]


async def followed(cluster: GkeCluster, world: World, last: str) -> list[str]:
    """The whole log; its job ends when the line *last* has come."""
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in cluster.logs("job-1", follow=True):
            lines.append(line)
            if line == last:
                world.end(1)
    return lines


@pytest.mark.parametrize("fault", ["cut", "eof", "broken"])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
async def test_a_log_that_breaks_goes_on_without_loss_or_repetition(
    cluster: GkeCluster, world: World, fault: str, after: int
) -> None:
    world.run(1)
    world.write("00:00:01.5", b"a", b"b", b"b")
    world.write("00:00:02.1", b"c", b"b")
    world.write("00:00:07.0", b"d")
    world.log_faults += [(fault, after), (fault, 1), ("cut", 2)]
    assert await followed(cluster, world, "d") == ["a", "b", "b", "c", "b", "d"]


async def test_lines_out_of_order_are_all_told(cluster: GkeCluster, world: World) -> None:
    world.run(1)
    world.write("00:00:02.000000009", b"second")
    world.write("00:00:01.999999999", b"first", b"first")
    world.write("00:00:02.000000009", b"second", b"third")
    world.log_faults += [("cut", 1), ("eof", 2), ("cut", 2)]
    lines = await followed(cluster, world, "third")
    assert lines == ["second", "first", "first", "second", "third"]


@pytest.mark.parametrize("seed", range(8))
async def test_any_log_is_told_whole_and_once(cluster: GkeCluster, world: World, seed: int) -> None:
    chance = random.Random(seed)
    world.run(1)
    written: list[str] = []

    async def write() -> None:
        second = 0
        for _ in range(60):
            second += chance.choice((0, 0, 0, 1, 2))
            lines = [chance.choice("abc") for _ in range(chance.randrange(1, 4))]
            world.write(f"00:{second // 60:02d}:{second % 60:02d}.0", *map(str.encode, lines))
            written.extend(lines)
            if chance.random() < 0.4:
                world.log_faults.append((chance.choice(("cut", "eof")), chance.randrange(1, 6)))
            await asyncio.sleep(chance.choice((0, 0, 0.01)))
        world.write("00:59:00.0", b"last")
        world.log_faults.clear()

    writing = asyncio.create_task(write())
    lines = await followed(cluster, world, "last")
    await writing
    assert lines == [*written, "last"]


async def test_what_a_program_writes_is_text_whatever_it_is(
    cluster: GkeCluster, world: World
) -> None:
    world.run(1)
    world.write(
        "00:00:01.0", b"[bold]x[/bold]", b"\xff\x00\x1b[31m", b"", b"a\rb", b"2026-01-01T x"
    )
    world.end(1)
    assert await log(cluster) == [
        "[bold]x[/bold]",
        "\ufffd\x00\x1b[31m",
        "",
        "a\rb",
        "2026-01-01T x",
    ]


async def test_an_endless_line_comes_in_pieces(cluster: GkeCluster, world: World) -> None:
    world.run(1)
    line = "ü" * (3 << 20)
    world.write("00:00:01.0", line.encode())
    world.end(1)
    lines = await log(cluster, follow=False)
    assert "".join(lines) == line
    assert max(len(piece.encode()) for piece in lines) <= 1 << 20


PIECE = 1 << 20


def _long_line(server: FaultServer, world: World, sizes: list[int], *, ends: bytes) -> None:
    """Of a line of the last of *sizes*, in KiB, each connection tells so much, and is cut."""
    left = iter(sizes)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.endswith("/log"):
            return await world.handle(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"2026-01-01T00:00:01.0Z ")
        for number in range(size := next(left)):
            await response.write(b"%07d " % number * 128)
        await asyncio.sleep(0.01)  # what was written is on its way
        if size < sizes[-1]:
            return cut(request)
        await response.write(ends)
        return response

    server.always = handle


async def test_a_line_without_an_end_takes_no_memory(
    server: FaultServer, cluster: GkeCluster, world: World
) -> None:
    world.run(1)
    world.end(1)
    _long_line(server, world, [64 * 1024], ends=b"")
    size, last = 0, ""
    tracemalloc.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            async for line in cluster.logs("job-1"):
                size, last = size + len(line), line
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == 64 * PIECE and last.endswith("0065535 ")
    assert most < 16 * PIECE


@pytest.mark.parametrize("after", [[1], [1500], [1500, 3500], [3500, 1500, 2500]])
async def test_a_line_that_breaks_in_the_middle_is_told_once(
    server: FaultServer, cluster: GkeCluster, world: World, after: list[int]
) -> None:
    world.run(1)
    _long_line(server, world, [*after, 4000], ends=b"\n2026-01-01T00:00:01.0Z last\n")
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in cluster.logs("job-1", follow=True):
            lines.append(line)
            if line == "last":
                world.end(1)
                server.always = world.handle
    assert lines.pop() == "last"
    assert "".join(lines) == "".join(f"{number:07} " * 128 for number in range(4000))


async def test_the_log_of_a_node_that_does_not_answer_is_given_up(
    cluster: GkeCluster, world: World
) -> None:
    world.run(1)
    world.end(1)
    world.log_faults += [("broken", 0)] * 20
    with pytest.raises(Unavailable):
        await log(cluster, follow=False)


async def test_lines_of_several_pods_say_whose_they_are(cluster: GkeCluster, world: World) -> None:
    world.run(1)
    job = world.objects["jobs"]["job-1"]
    annotations = {**job["metadata"]["annotations"], HOSTS: "2"}
    world.put("jobs", {**job, "metadata": {**job["metadata"], "annotations": annotations}})
    first = world.objects["pods"].pop("job-1-0-1")
    for index in ("0", "1"):
        labels = {"batch.kubernetes.io/job-completion-index": index}
        named = {"name": f"job-1-{index}", "uid": index}
        metadata = first["metadata"] | named
        metadata["labels"] = metadata["labels"] | labels
        world.put("pods", {**first, "metadata": metadata})
    world.write("00:00:01.0", b"a", b"b")
    lines = await log(cluster, follow=False)
    assert sorted(lines) == ["[0] a", "[0] b", "[1] a", "[1] b"]
    assert [line for line in lines if line.startswith("[1]")] == ["[1] a", "[1] b"]


KUBELET = [
    b"unable to retrieve container logs for containerd://8a3b",
    b'failed to try resolving symlinks in path "/var/log/pods/p/job/0.log": lstat: no such file',
]


@pytest.mark.parametrize("text", KUBELET)
@pytest.mark.parametrize("follow", [True, False])
async def test_what_a_node_says_in_place_of_a_log_is_no_log(
    cluster: GkeCluster, server: FaultServer, world: World, text: bytes, follow: bool
) -> None:
    async def instead(request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/log"):
            return web.Response(body=text)
        return await world.handle(request)

    server.always = instead
    world.run(1)
    world.end(1)
    if not follow:
        with pytest.raises(NotFound, match="removed the log"):
            await log(cluster, follow=False)
    else:
        with contextlib.suppress(NotFound):
            assert await log(cluster) == []


async def test_a_program_may_say_what_a_node_says(cluster: GkeCluster, world: World) -> None:
    world.run(1)
    world.write("00:00:01.0", *KUBELET)
    world.end(1)
    assert await log(cluster) == [line.decode() for line in KUBELET]
