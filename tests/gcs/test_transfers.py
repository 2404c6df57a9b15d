"""Large transfers need little memory, survive faults, and leave nothing behind when they fail."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from kinetic.aio.gcs.http import EMULATOR, Limits
from kinetic.aio.gcs.store import GcsStore
from kinetic.errors import BackendError
from tests.gcs.conftest import QUICK
from tests.gcs.server import GcsServer

MIB = 1024 * 1024
BODY = b"".join(number.to_bytes(4, "big") for number in range(3 * MIB // 4))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a file of 3 MiB in which no two blocks are equal."""
    path = tmp_path / "source"
    path.write_bytes(BODY)
    return path


@pytest.mark.parametrize(
    "how",
    [{"at": MIB + 1}, {"at": MIB, "status": 308}, {"status": 404}, {"status": 410}],
    ids=["cut", "308", "404", "410"],
)
@pytest.mark.parametrize("in_memory", [True, False], ids=["bytes", "file"])
async def test_an_upload_continues_after_what_was_received_or_starts_again_if_that_is_lost(
    server: GcsServer,
    store: GcsStore,
    source: Path,
    how: dict[str, Any],
    in_memory: bool,
) -> None:
    server.fail("put", times=2, **how)
    assert await store.create("x", BODY if in_memory else source, shared=True)
    assert server.objects["x"].body == BODY
    assert server.objects["x"].custom_time
    starts = [int(part.removeprefix("bytes ").split("-")[0]) for part in server.ranges]
    assert starts == sorted({0, *starts})
    assert (server.requests["begin"], len(starts)) == ((1, 3) if "at" in how else (3, 1))


async def test_a_transfer_may_fail_again_and_again_if_it_advances(
    server: GcsServer, tmp_path: Path, source: Path
) -> None:
    """Four failures take longer than retries may take without progress."""
    shaky = replace(QUICK, retry=replace(QUICK.retry, total_s=0.2))
    async with aclosing(GcsStore("gs://kn-test", {EMULATOR: server.url}, limits=shaky)) as store:
        fault = server.fail("put", times=4, at=MIB // 2, stall=True, stall_s=0.1)
        assert await store.create("x", source)
        assert not fault.times
        fault = server.fail("media", times=4, at=MIB // 2, stall=True, stall_s=0.1)
        await store.fetch("x", tmp_path / "copy")
        assert not fault.times
    assert (tmp_path / "copy").read_bytes() == server.objects["x"].body == BODY


async def test_an_upload_fails_when_the_service_receives_nothing(
    server: GcsServer, hasty: GcsStore, source: Path
) -> None:
    fault = server.fail("put", times=10**6, at=0, status=308)
    with pytest.raises(BackendError, match="308"):
        await hasty.create("x", source)
    assert fault.seen > 1


@pytest.mark.parametrize(
    "silent",
    [{"stall_s": 0.1}, pytest.param({}, marks=pytest.mark.full)],
    ids=["cut", "until the kernel gives up"],
)
async def test_an_upload_that_stalls_is_sent_again(
    server: GcsServer, source: Path, silent: dict[str, float]
) -> None:
    """First aiohttp sends it on a new connection, then the store sends it again."""
    hasty = replace(QUICK, idle_s=0.5, retry=replace(QUICK.retry, total_s=0.3))
    source.write_bytes(BODY * 8)
    for mebibytes in (1, 12):  # further apart than the connection's buffers are large
        server.fail("put", at=mebibytes * MIB, stall=True, **silent)
    async with aclosing(GcsStore("gs://kn-test", {EMULATOR: server.url}, limits=hasty)) as store:
        assert await store.create("x", source)
    assert server.objects["x"].body == BODY * 8
    assert server.requests["put"] == 3


async def test_an_upload_whose_last_reply_is_lost_is_found_complete(
    server: GcsServer, store: GcsStore, source: Path
) -> None:
    server.fail("put", times=2, late=True)  # twice: aiohttp repeats requests on a used connection
    assert await store.create("x", source, {"k": "v"})
    assert server.requests["begin"] == server.requests["ask"] == 1
    assert dict((await store.get("x")).metadata) == {"k": "v"}


@pytest.mark.parametrize("cut", [True, False], ids=["second try", "first try"])
async def test_an_upload_that_ends_second_does_not_overwrite(
    server: GcsServer, store: GcsStore, source: Path, cut: bool
) -> None:
    fault = server.fail("put", at=MIB) if cut else server.fail("begin", late=True)
    slow = asyncio.create_task(store.create("x", source))
    while not fault.seen:
        await asyncio.sleep(0)
    held = server.fail("begin", times=10**6, status=503)  # holds it until the other has ended
    assert await store.create("x", b"faster")
    held.times = 0
    assert not await slow
    assert server.objects["x"].body == b"faster"


async def test_an_upload_cancelled_before_its_content_leaves_no_object(
    server: GcsServer, store: GcsStore, source: Path
) -> None:
    uploading = asyncio.create_task(store.create("x", source))
    while not server.requests["begin"]:
        await asyncio.sleep(0)
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    assert server.objects == {}
    assert server.requests["put"] <= 1


async def test_a_file_that_shrinks_during_its_upload_fails_it_and_leaves_no_object(
    server: GcsServer, wary: GcsStore, source: Path
) -> None:
    fault = server.fail("put", at=MIB)
    uploading = asyncio.create_task(wary.create("x", source))
    while not fault.seen:
        await asyncio.sleep(0)
    source.write_bytes(b"short")
    with pytest.raises(BackendError, match=r"source changed"):
        await uploading
    assert server.objects == {}


async def test_the_error_names_a_missing_file(store: GcsStore, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="nowhere"):
        await store.create("x", tmp_path / "nowhere")


@pytest.mark.parametrize("way", ["get", "fetch"])
async def test_a_download_that_is_cut_starts_again_or_continues(
    server: GcsServer, store: GcsStore, tmp_path: Path, source: Path, way: str
) -> None:
    await store.create("x", source)
    server.fail("media", times=3, at=700_000)
    if way == "get":
        assert (await store.get("x")).body == BODY
    else:
        await store.fetch("x", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == BODY
        assert server.ranges[-3:] == [f"bytes={700_000 * number}-" for number in (1, 2, 3)]
    assert server.requests["media"] == 4


def open_below(folder: Path) -> list[str]:
    """Return the files in *folder* that this process has open."""
    paths = [file.path for file in psutil.Process().open_files()]
    return [path for path in paths if path.startswith(str(folder))]


@pytest.mark.parametrize("way", ["create", "fetch"])
async def test_a_cancelled_transfer_leaves_no_file_open(
    server: GcsServer, store: GcsStore, tmp_path: Path, source: Path, way: str
) -> None:
    await store.create("x", source)
    kind = {"create": "put", "fetch": "media"}[way]
    stalled = server.fail(kind, times=10, at=700_000, stall=True)
    transfer: Any = (
        store.create("y", source) if way == "create" else store.fetch("x", tmp_path / "copy")
    )
    moving = asyncio.create_task(transfer)
    while not stalled.seen:
        await asyncio.sleep(0)
    assert open_below(tmp_path)
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert not open_below(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert {*server.objects} == {"x"}


async def test_an_upload_cancelled_as_it_begins_leaves_no_file_open(
    store: GcsStore, tmp_path: Path, source: Path
) -> None:
    for steps in range(20):
        moving = asyncio.create_task(store.create(f"y{steps}", source))
        for _ in range(steps):
            await asyncio.sleep(0)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        await asyncio.get_running_loop().run_in_executor(None, int)  # queued behind its thread work
        assert not open_below(tmp_path)


async def test_large_and_small_uploads_share_few_connections(
    server: GcsServer, source: Path
) -> None:
    limits = Limits(connections=8, transfers=2, piece_bytes=64 * 1024)
    store = GcsStore("gs://kn-test", {EMULATOR: server.url}, limits=limits)
    large = [store.create(f"large {number}", source) for number in range(10)]
    small = [store.create(f"small {number}", b"") for number in range(200)]
    assert await asyncio.gather(*large, *small) == [True] * 210
    assert server.most <= 8
    await store.aclose()


CHILD = """
import asyncio, json, resource, sys
from pathlib import Path
from kinetic.aio.gcs.store import GcsStore

async def main(endpoint, source, copy):
    store = GcsStore("gs://kn-test", {"STORAGE_EMULATOR_HOST": endpoint})
    await store.create("warm", b"")
    await store.get("warm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await store.create("x", Path(source))
    between = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await store.fetch("x", Path(copy))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await store.aclose()
    print(json.dumps([between - before, after - before]))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.full
async def test_a_quarter_of_a_gigabyte_takes_little_memory(
    server: GcsServer, tmp_path: Path
) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    block = bytes(range(256)) * 4096
    with source.open("wb") as file:
        for number in range(256):
            file.write(number.to_bytes(4, "big") + block[4:])
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, server.url, str(source), str(copy),
        stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    output, _ = await child.communicate()
    assert child.returncode == 0
    units = 1 if sys.platform == "darwin" else 1024
    up, both = (count * units for count in json.loads(output))
    assert up < 24 * MIB and both < 48 * MIB, (up / MIB, both / MIB)
    assert copy.stat().st_size == 256 * MIB
    with source.open("rb") as first, copy.open("rb") as second:
        while block := first.read(MIB):
            assert block == second.read(MIB)
