"""A log is told whole and once, whatever becomes of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from kinetic.aio._net.retry import RetryPolicy
from kinetic.aio._net.tokens import Fresh, TokenCache
from kinetic.aio.kubernetes.api import Api, Limits
from kinetic.aio.kubernetes.credentials import Access, ClusterCredentials
from kinetic.aio.kubernetes.gke import GkeCluster
from kinetic.aio.kubernetes.reflector import Rhythm
from kinetic.errors import NotFound, Unavailable
from tests.kubernetes.faults import FaultServer, cut
from tests.kubernetes.world import AT, World

LIMITS = Limits(idle_s=30.0, retry=RetryPolicy(total_s=30.0, first_s=0.005, longest_s=0.02))
"""The server is in this very process: when that stands still, both do, and it counts as silence."""

DEADLINE_S = 40.0
RHYTHM = Rhythm(first_pause_s=0.005, longest_pause_s=0.05)


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


async def log(cluster: GkeCluster, *, follow: bool = True, tail: int | None = None) -> list[str]:
    async with asyncio.timeout(DEADLINE_S):
        return [line async for line in cluster.logs("job-1", follow=follow, tail=tail)]


async def followed(cluster: GkeCluster, world: World, last: str) -> list[str]:
    """The whole log; its job ends when the line *last* was told."""
    told: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in cluster.logs("job-1", follow=True):
            told.append(line)
            if line == last:
                world.end(1)
    return told


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
    told = await followed(cluster, world, "third")
    assert told == ["second", "first", "first", "second", "third"]


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
    told = await followed(cluster, world, "last")
    await writing
    assert told == [*written, "last"]


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
    told = await log(cluster, follow=False)
    assert "".join(told) == line
    assert max(len(piece.encode()) for piece in told) <= 1 << 20


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
    told: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in cluster.logs("job-1", follow=True):
            told.append(line)
            if line == "last":
                world.end(1)
                server.always = world.handle
    assert told.pop() == "last"
    assert "".join(told) == "".join(f"{number:07} " * 128 for number in range(4000))


async def test_a_tail_is_cut_once(cluster: GkeCluster, world: World) -> None:
    world.run(1)
    world.write("00:00:00.0", b"c")
    world.write("00:00:01.0", b"a", b"b", b"c")
    world.log_faults += [("cut", 1), ("cut", 4)]
    telling = asyncio.create_task(log(cluster, tail=2))
    async with asyncio.timeout(DEADLINE_S):
        while len(world.log_queries) < 2:
            await asyncio.sleep(0.01)
    world.write("00:00:02.0", b"d")
    world.end(1)
    assert await telling == ["b", "c", "d"]
    assert "tailLines" not in world.log_queries[1]


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
    world.put("jobs", {**job, "spec": {**job["spec"], "completions": 2}})
    first = world.objects["pods"].pop("job-1-0-1")
    for index in ("0", "1"):
        labels = {"batch.kubernetes.io/job-completion-index": index}
        named = {"name": f"job-1-{index}", "uid": index}
        metadata = first["metadata"] | named
        metadata["labels"] = metadata["labels"] | labels
        world.put("pods", {**first, "metadata": metadata})
    world.write("00:00:01.0", b"a", b"b")
    told = await log(cluster, follow=False)
    assert sorted(told) == ["[0] a", "[0] b", "[1] a", "[1] b"]
    assert [line for line in told if line.startswith("[1]")] == ["[1] a", "[1] b"]


KUBELET = [
    b"unable to retrieve container logs for containerd://8a3b",
    b'failed to try resolving symlinks in path "/var/log/pods/p/job/0.log": lstat: no such file',
]


@pytest.mark.parametrize("words", KUBELET)
@pytest.mark.parametrize("follow", [True, False])
async def test_what_a_node_says_in_place_of_a_log_is_no_log(
    cluster: GkeCluster, server: FaultServer, world: World, words: bytes, follow: bool
) -> None:
    async def instead(request: web.BaseRequest) -> web.StreamResponse:
        if request.path.endswith("/log"):
            return web.Response(body=words)
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
