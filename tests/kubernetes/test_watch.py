"""Watches and logs are complete and free of repetition, whatever happens to connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta, timezone
from typing import Any

import pytest
from aiohttp import web

from kinetic.aio._net.retry import RetryPolicy, growing_pauses
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.aio.kubernetes.diagnosis.causes import Cause
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.manifests import HOSTS, START_TIMEOUT
from kinetic.aio.kubernetes.observations import ENDED, text_of_end
from kinetic.aio.kubernetes.pending import Patience as Waiting
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import AuthError, NotFound, Unavailable
from kinetic.job_status import Reason
from tests.jobs import watching
from tests.kubernetes.faults import FaultServer, anonymous, cut, status
from tests.kubernetes.world import AT, World

RHYTHM = Rhythm(
    idle_s=0.3, brief_s=0.05, first_pause_s=0.005, longest_pause_s=0.05, longest_retry_after_s=0.05
)
LIMITS = Limits(
    idle_s=30.0, retry=RetryPolicy(total_s=30.0, first_pause_s=0.005, longest_pause_s=0.02)
)
"""Long limits: server and client share a process, so when it stalls, the client sees silence."""

DEADLINE_S = 40.0
FAULTS = ("eof", "cut", "silent", "gone", "expired", "error", "broken", "garbage", "bookmark")


@pytest.fixture
async def cluster(server: FaultServer) -> AsyncIterator[GkeCluster]:
    cluster = GkeCluster(Api(anonymous(server), LIMITS), AT, rhythm=RHYTHM)
    yield cluster
    await cluster.aclose()


class Received:
    """The observations of a watch so far."""

    def __init__(self, watch: AsyncIterator[Observation]) -> None:
        self._watch = watch
        self.phases: list[tuple[str, Phase]] = []
        self.last: dict[str, Phase] = {}

    async def until(self, **wanted: Phase) -> None:
        """Read until these are the latest phases of these jobs."""
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
async def test_a_watch_that_breaks_resumes_where_it_was(
    world: World, received: Received, fault: str
) -> None:
    for kind in ("jobs", "pods"):
        world.faults[kind].append(fault)
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    world.end(1)
    world.run(2)
    await received.until(job_1=Phase.ENDED, job_2=Phase.RUNNING)
    lists = 2 if fault in ("error", "unauthorized") else 1  # an error event requires a new list
    assert {world.counts["list jobs"], world.counts["list pods"]} <= {1, lists}
    assert received.phases.count(("job-1", Phase.ENDED)) == 1


@pytest.mark.parametrize("fault", ["gone", "expired"])
async def test_a_job_deleted_while_the_watch_was_down_is_reported_as_gone(
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


async def test_the_next_watch_starts_at_the_bookmark(world: World, received: Received) -> None:
    world.faults["jobs"].append("bookmark")
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    async with asyncio.timeout(DEADLINE_S):
        while len(world.since["jobs"]) < 2:  # until the watch with the bookmark has ended
            await asyncio.sleep(0.01)
    assert world.since["jobs"] == [world.version - 1, world.version]
    world.forget()  # a watch that started earlier would have to list again
    world.faults["jobs"].append("cut")
    world.end(1)
    await received.until(job_1=Phase.ENDED)
    assert world.counts["list jobs"] == 1


@pytest.mark.parametrize("fault", ["twice", "old"])
async def test_repeated_events_change_nothing(world: World, received: Received, fault: str) -> None:
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    for kind in ("jobs", "pods"):
        world.faults[kind] += ["eof", fault]
    world.end(1)
    world.run(2)
    await received.until(job_1=Phase.ENDED, job_2=Phase.RUNNING)
    assert received.phases.count(("job-1", Phase.ENDED)) == 1


@pytest.mark.parametrize("fault", ["eof", "gone", "expired"])
async def test_a_server_that_ends_each_watch_at_once_gets_few_requests(
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


async def test_a_new_job_with_the_same_name_replaces_the_first(
    world: World, received: Received
) -> None:
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    world.drop("jobs", "job-1")
    world.run(1, life=2)
    world.drop("pods", "job-1-0-1")
    world.end(1, life=2)
    await received.until(job_1=Phase.ENDED)
    assert ("job-1", Phase.GONE) not in received.phases[-2:]


async def test_a_forbidden_watch_raises(server: FaultServer, cluster: GkeCluster) -> None:
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
    assert not [task for task in asyncio.all_tasks() if "kinetic" in task.get_name()]


async def test_a_job_that_ends_while_the_watch_starts_has_its_executor(
    world: World, server: FaultServer, received: Received
) -> None:
    """The list of jobs is newer than the list of pods that was requested with it."""

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


async def test_an_end_that_the_job_reports_before_its_pod_has_the_executor(
    world: World, received: Received
) -> None:
    """Jobs and pods arrive over different connections, and either may be late."""
    world.run(1)
    await received.until(job_1=Phase.RUNNING)
    world.job(1, conditions=[{"type": "Complete", "status": "True"}])
    await received.until(job_1=Phase.ENDED)
    assert received.seen.executor == "pod-1/1"


async def test_the_reason_a_job_never_started_arrives_after_its_pod_is_gone(
    world: World, received: Received
) -> None:
    """The client that ends a job writes the reason into the Job; then the pod is deleted."""
    job = world.job(1)
    waits = world.pod(1, phase="Pending", containerStatuses=[])
    await received.until(job_1=Phase.PENDING)
    gone = {**waits["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}
    world.put("pods", {**waits, "metadata": gone})
    world.drop("pods", waits["metadata"]["name"])
    world.run(2)
    await received.until(job_2=Phase.RUNNING)
    assert received.last["job-1"] is Phase.PENDING
    end = Cause(reason=Reason.UNSCHEDULABLE, summary="waited longer than its start_timeout of 1 s")
    annotations = {**job["metadata"]["annotations"], ENDED: text_of_end(end)}
    failed = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    metadata = {**job["metadata"], "annotations": annotations}
    world.put("jobs", {**job, "metadata": metadata, "status": {"conditions": failed}})
    await received.until(job_1=Phase.ENDED)
    assert (received.seen.reason, received.seen.message) == (end.reason, end.summary)


@pytest.mark.full
async def test_a_job_that_waits_in_vain_is_ended_once(world: World, server: FaultServer) -> None:
    """Until the end arrives, the job's state may already be a consequence of that end."""
    cluster = GkeCluster(
        Api(anonymous(server), LIMITS), AT, patience=Waiting(asked_s=0.5, least_s=0.0)
    )
    job = world.job(1)
    annotations = {**job["metadata"]["annotations"], START_TIMEOUT: "0"}
    world.put("jobs", {**job, "metadata": {**job["metadata"], "annotations": annotations}})
    world.pod(1, phase="Pending", containerStatuses=[])
    end = f"PATCH /apis/batch/v1/namespaces/ns/jobs/{job['metadata']['name']}"

    def looked_again() -> bool:
        """Return whether the client has asked for the job's events since it ended the job."""
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


@pytest.mark.parametrize("seed", range(6))
async def test_after_any_sequence_of_faults_the_last_report_is_true(
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
    """Read the whole log; end the job when the line *last* arrives."""
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in cluster.logs("job-1", follow=True):
            lines.append(line)
            if line == last:
                world.end(1)
    return lines


@pytest.mark.parametrize("fault", ["cut", "eof", "broken"])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
async def test_a_log_that_breaks_resumes_without_loss_or_repetition(
    cluster: GkeCluster, world: World, fault: str, after: int
) -> None:
    world.run(1)
    world.write("00:00:01.5", b"a", b"b", b"b")
    world.write("00:00:02.1", b"c", b"b")
    world.write("00:00:07.0", b"d")
    world.log_faults += [(fault, after), (fault, 1), ("cut", 2)]
    assert await followed(cluster, world, "d") == ["a", "b", "b", "c", "b", "d"]


@pytest.mark.parametrize("hours", [5.5, -5, 0])
async def test_a_log_in_the_time_zone_of_its_node_resumes(
    cluster: GkeCluster, world: World, hours: float
) -> None:
    world.time_zone = timezone(timedelta(hours=hours))
    world.run(1)
    world.write("00:00:01.5", b"a", b"b", b"b")
    world.write("00:00:07.0", b"c")
    world.log_faults += [("cut", 2), ("eof", 3)]
    assert await followed(cluster, world, "c") == ["a", "b", "b", "c"]
    assert [query.get("sinceTime") for query in world.log_queries[:2]] == [
        None,
        "2026-01-01T00:00:00Z",
    ]


async def test_lines_out_of_order_all_arrive(cluster: GkeCluster, world: World) -> None:
    world.run(1)
    world.write("00:00:02.000000009", b"second")
    world.write("00:00:01.999999999", b"first", b"first")
    world.write("00:00:02.000000009", b"second", b"third")
    world.log_faults += [("cut", 1), ("eof", 2), ("cut", 2)]
    lines = await followed(cluster, world, "third")
    assert lines == ["second", "first", "first", "second", "third"]


@pytest.mark.parametrize("seed", range(8))
async def test_every_line_of_a_log_arrives_once(
    cluster: GkeCluster, world: World, seed: int
) -> None:
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


async def test_any_output_of_a_program_becomes_text(cluster: GkeCluster, world: World) -> None:
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


async def test_a_very_long_line_arrives_in_pieces(cluster: GkeCluster, world: World) -> None:
    world.run(1)
    line = "ü" * (3 << 20)
    world.write("00:00:01.0", line.encode())
    world.end(1)
    lines = await log(cluster, follow=False)
    assert "".join(lines) == line
    assert max(len(piece.encode()) for piece in lines) <= 1 << 20


PIECE = 1 << 20


def _long_line(server: FaultServer, world: World, sizes: list[int], *, ends: bytes) -> None:
    """Serve a line of `sizes[-1]` KiB; earlier connections are cut after *sizes* KiB each."""
    left = iter(sizes)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if not request.path.endswith("/log"):
            return await world.handle(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"2026-01-01T00:00:01.0Z ")
        for number in range(size := next(left)):
            await response.write(b"%07d " % number * 128)
        await asyncio.sleep(0.01)  # lets the client receive what was written
        if size < sizes[-1]:
            return cut(request)
        await response.write(ends)
        return response

    server.always = handle


@pytest.mark.full
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
async def test_a_line_that_breaks_in_the_middle_arrives_once(
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


async def test_reading_a_log_fails_when_its_node_does_not_answer(
    cluster: GkeCluster, world: World
) -> None:
    world.run(1)
    world.end(1)
    world.log_faults += [("broken", 0)] * 20
    with pytest.raises(Unavailable):
        await log(cluster, follow=False)


async def test_lines_of_several_pods_have_the_hosts_number(
    cluster: GkeCluster, world: World
) -> None:
    world.run(1)
    job = world.objects["jobs"]["job-1"]
    annotations = {**job["metadata"]["annotations"], HOSTS: "2"}
    world.put("jobs", {**job, "metadata": {**job["metadata"], "annotations": annotations}})
    first = world.objects["pods"].pop("job-1-0-1")
    for index in ("0", "1"):
        labels = {"batch.kubernetes.io/job-completion-index": index}
        metadata = first["metadata"] | {"name": f"job-1-{index}", "uid": index}
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
async def test_a_nodes_error_in_place_of_a_log_is_not_taken_for_a_log(
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


async def test_a_program_may_print_what_a_node_says(cluster: GkeCluster, world: World) -> None:
    world.run(1)
    world.write("00:00:01.0", *KUBELET)
    world.end(1)
    assert await log(cluster) == [line.decode() for line in KUBELET]


@dataclass(frozen=True, kw_only=True)
class CountingRhythm(Rhythm):
    """Count how often the pauses start short again."""

    starts: list[int] = field(default_factory=list[int])

    def pauses(self) -> Iterator[float]:
        self.starts.append(1)
        return growing_pauses(0.005, 0.05)


@pytest.mark.parametrize(
    "note",
    [
        b"failed to create fsnotify watcher: too many open files",
        b"failed to watch directory: no space left on device\n",
        b"unable to retrieve container logs for containerd://8a3b",
    ],
)
async def test_a_line_of_the_kubelet_comes_once_with_its_mark_and_requests_slow_down(
    server: FaultServer, world: World, note: bytes
) -> None:
    rhythm = CountingRhythm()
    cluster = GkeCluster(Api(anonymous(server), LIMITS), AT, rhythm=rhythm)
    world.kubelet_note = note
    world.run(1)
    world.write("00:00:01.0", b"0")
    lines: list[str] = []
    async with asyncio.timeout(DEADLINE_S), contextlib.aclosing(cluster) as opened:
        rhythm.starts.clear()
        async for line in opened.logs("job-1", follow=True):
            lines.append(line)
            if line.isdigit() and (number := int(line) + 1) < 6:
                world.write(f"00:00:{number + 1:02d}.0", str(number).encode())
            elif line == "5":
                world.end(1)
    text = note.decode().strip()
    assert [line for line in lines if line.isdigit()] == ["0", "1", "2", "3", "4", "5"]
    assert [line for line in lines if not line.isdigit()] == [f"[kubelet] {text}"]
    assert len(world.log_queries) > 5
    assert len(rhythm.starts) <= 2  # for the wait and the log


async def test_an_unfinished_line_before_the_kubelets_own_arrives_whole_and_once(
    cluster: GkeCluster, world: World
) -> None:
    """The program has printed a part of a line when the kubelet fails."""
    world.run(1)
    world.write("00:00:01.0", b"a")
    world.kubelet_note = b"2026-01-01T00:00:02.0Z hal" + b"failed to watch directory: no space"

    async def finish() -> None:
        while len(world.log_queries) < 3:
            await asyncio.sleep(0.005)
        world.write("00:00:02.0", b"half of it")
        world.end(1)

    finishing = asyncio.create_task(finish())
    lines = await log(cluster)
    await finishing
    assert lines == ["a", "half of it"]
