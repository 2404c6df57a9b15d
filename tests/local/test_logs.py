"""A job's log: splitting it into lines, reading its tail, and following it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.logs import TAIL_BYTES, tail_offset
from kinetic.aio.ports import LONGEST_LINE, LogPieces
from kinetic.errors import BackendError, NotFound
from tests.jobs import DEADLINE_S, eventually, lines

from .conftest import marked, parents, run_job, signal_supervisor, spec

TEXT = st.text(st.sampled_from("aé\n€😀\r "), max_size=60)


def cut(data: bytes, positions: list[int]) -> list[bytes]:
    ends = sorted({min(position, len(data)) for position in positions} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def split_lines(parts: list[bytes]) -> list[str]:
    cutter = LogPieces()
    found = [piece for part in parts for piece in cutter.feed(part)]
    return [piece.text for piece in (*found, *cutter.feed(last=True))]


@settings(deadline=None)
@given(TEXT, st.lists(st.integers(0, 200)))
def test_lines_are_the_same_wherever_the_bytes_are_cut(text: str, positions: list[int]) -> None:
    expected = text.split("\n")
    assert split_lines(cut(text.encode(), positions)) == (
        expected if expected[-1] else expected[:-1]
    )


def test_what_is_no_utf8_is_replaced() -> None:
    assert split_lines([b"a\xff", b"b\nc\xe2\x82"]) == ["a�b", "c�"]


def test_an_endless_line_comes_in_pieces_of_whole_characters() -> None:
    text = "x" + "€" * (3 * LONGEST_LINE)
    for parts in ([text.encode()], cut(text.encode(), [*range(0, 10 * LONGEST_LINE, 65536)])):
        pieces = split_lines(parts)
        assert "".join(pieces) == text and len(pieces) == 10
        assert max(len(piece.encode()) for piece in pieces) <= LONGEST_LINE


async def test_a_line_of_1_mib_comes_whole_and_a_longer_one_in_pieces(
    cluster: LocalCluster,
) -> None:
    source = "for extra in (0, 1): print('é' * (1 << 19) + 'x' * extra)"
    await cluster.launch(spec("long", source))
    printed = await lines(cluster, "long", follow=True)
    assert [len(line.encode()) for line in printed] == [LONGEST_LINE, LONGEST_LINE, 1]


@settings(deadline=None)
@given(TEXT, st.integers(0, 6), st.sampled_from([1, 3, 65536]))
def test_the_tail_begins_where_its_first_line_does(text: str, count: int, block: int) -> None:
    content = text.encode() * (20_000 // block if block == 65536 else 1)
    fd = os.memfd_create("log")
    try:
        os.write(fd, content)
        offset = tail_offset(fd, count, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    whole = content.decode().split("\n")
    whole = whole if whole[-1] else whole[:-1]
    assert split_lines([content[offset:]]) == (whole[-count:] if count else [])


def test_a_long_tail_is_found_over_many_blocks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"%06d\n" % number for number in range(50_000)))
    end = log.stat().st_size
    with open(log, "rb") as file:
        for count in (1, 9362, 9363, 30_000, 50_000, 60_000):
            assert tail_offset(file.fileno(), count, 0, end) == max(0, 50_000 - count) * 7


def test_a_tail_reads_no_more_than_its_limit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (3 * TAIL_BYTES) + b"\nend\n")
    end = log.stat().st_size
    with open(log, "rb") as file:
        assert tail_offset(file.fileno(), 1, 0, end) == 3 * TAIL_BYTES + 1
        assert tail_offset(file.fileno(), 2, 0, end) == 2 * TAIL_BYTES + 5


async def test_following_starts_before_the_job_does(cluster: LocalCluster) -> None:
    hold = "import time; time.sleep(60)"
    for name in ("h1", "h2"):
        await cluster.launch(spec(name, hold))
    await cluster.launch(spec("queued", "print('here')"))
    assert await lines(cluster, "queued") == []
    follower = asyncio.create_task(lines(cluster, "queued", follow=True))
    await cluster.delete(names=["h1", "h2"])
    assert await follower == ["here"]


async def test_followers_of_a_deleted_job_hear_its_last_words(cluster: LocalCluster) -> None:
    source = (
        "import signal, sys, time\n"
        "def stop(*a):\n    print('last words'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('up')\nwhile True: time.sleep(0.05)"
    )
    await cluster.launch(spec("gone", source, grace=DEADLINE_S))  # enough for the last words
    printed: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in cluster.logs("gone", follow=True):
            printed.append(line)
            if line == "up":
                await cluster.delete(names=["gone"])
    assert printed[:2] == ["up", "last words"]
    with pytest.raises(NotFound):
        await lines(cluster, "gone")


async def test_following_survives_the_supervisor(cluster: LocalCluster, home: Path) -> None:
    await cluster.launch(spec("lost", "import time; print('up'); time.sleep(60)"))
    printed: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        async for line in cluster.logs("lost", follow=True):
            printed.append(line)
            signal_supervisor(home, signal.SIGKILL)
    assert printed == ["up"]
    assert await cluster.find(names=["lost"]) == []
    assert await lines(cluster, "lost") == ["up"]
    await eventually(lambda: not marked(home) or parents(home))


async def test_a_flood_of_output_does_not_hold_the_loop_up(
    cluster: LocalCluster, loop_guard: type
) -> None:
    await run_job(cluster, spec("flood", "print(('x' * 99 + '\\n') * 200_000, end='')"))
    with loop_guard():
        count = 0
        async for _ in cluster.logs("flood"):
            count += 1
    assert count == 200_000


async def test_a_log_that_is_no_file_any_more_is_an_error_of_the_platform(
    cluster: LocalCluster,
) -> None:
    log = "import os; path = os.readlink('/proc/self/fd/1')"
    await run_job(cluster, spec("odd", f"{log}; os.unlink(path); os.mkdir(path)"))
    with pytest.raises(BackendError, match="the log of odd"):
        await lines(cluster, "odd")
