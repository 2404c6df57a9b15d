"""A job's outcome ends the wait for it, but its process keeps the slot until it exits."""

from __future__ import annotations

import asyncio
import atexit
import os
from pathlib import Path

import pytest

from kinetic import aio
from kinetic.aio.local.supervisor import running
from tests.jobs import DEADLINE_S, eventually

from .conftest import alive


@pytest.fixture(autouse=True)
def one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "1")


@pytest.fixture(params=["fork", "fresh"])
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start jobs by fork and in a fresh interpreter."""
    monkeypatch.setenv("KINETIC_LOCAL_FRESH", str(int(request.param == "fresh")))


@pytest.fixture
def gate(tmp_path: Path) -> str:
    """A named pipe: opening it for reading blocks until a process opens it for writing."""
    os.mkfifo(path := tmp_path / "gate")
    return str(path)


def linger(gate: str) -> int:
    print("first line")
    atexit.register(os.open, gate, os.O_RDONLY)
    return os.getpid()


def wait_and_linger(before: str, gate: str) -> int:
    os.close(os.open(before, os.O_RDONLY))
    return linger(gate)


def exists(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def open_gate(path: str) -> bool:
    """Open the gate for waiting processes; return whether there were any."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


async def until_taken(home: Path) -> None:
    """Wait until the supervisor reports one running job and one waiting for a slot."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            supervisor = await running(home)
            assert supervisor is not None
            runs = {**supervisor.workers, **supervisor.jobs}.get("running")
            if runs == supervisor.jobs.get("pending") == 1:
                return
            await asyncio.sleep(0.01)


async def assert_slot_is_taken_until_it_leaves(
    client: aio.Client, home: Path, pid: int, gate: str
) -> None:
    assert alive(pid), "the process had ended before its job's result came"
    next_job = await client.submit(exists, pid)
    await until_taken(home)
    assert alive(pid)
    assert open_gate(gate)
    assert await next_job.result() is False


@pytest.mark.usefixtures("interpreter")
async def test_a_result_comes_while_its_process_still_leaves(home: Path, gate: str) -> None:
    async with aio.Client(backend="local") as client:
        job = await client.submit(linger, gate)
        pid = await job.result(timeout=DEADLINE_S, cleanup=False)
        await assert_slot_is_taken_until_it_leaves(client, home, pid, gate)


async def test_an_item_ends_while_its_process_still_leaves(
    home: Path, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home is long here: the supervisor's socket path exceeds the limit of a socket address."""
    home = home / ("long" * 30)
    monkeypatch.setenv("KINETIC_HOME", str(home))
    async with aio.Client(backend="local") as client:
        batch = await client.run_async_map(linger, [gate], progress=False)
        [pid] = await batch.results(cleanup=False)
        await assert_slot_is_taken_until_it_leaves(client, home, pid, gate)


async def test_an_attached_process_hears_of_the_result_while_the_job_leaves(
    home: Path, gate: str, tmp_path: Path
) -> None:
    os.mkfifo(before := tmp_path / "before")
    async with aio.Client(backend="local") as client, aio.Client(backend="local") as other:
        job = await client.submit(wait_and_linger, str(before), gate)
        attached = await other.attach(job.job_id)
        result = asyncio.create_task(attached.result(timeout=DEADLINE_S, cleanup=False))
        await eventually(lambda: open_gate(str(before)))
        pid = await result
        await assert_slot_is_taken_until_it_leaves(client, home, pid, gate)
