"""A watch makes things faster, correctness never depends on it: with real jobs on this machine.

Each notification of the supervisor is dropped, delayed or doubled in turn; the cases run side by
side, for what is dropped is found out after ten seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinetic import aio
from kinetic.aio.images.current import CurrentInterpreter
from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.local.store import DirectoryStore
from kinetic.aio.platforms import Platform
from tests.engine.notifications import FAULTS, Fault, Unreliable

ENDS_S = 100.0
LATE_S = 15.0
"""By then the first reading has been."""


def returns(x: int) -> int:
    return x


def raises(x: int) -> int:
    raise ValueError(x)


def exits(x: int) -> int:
    os._exit(3)


def is_killed(x: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def dies_once(x: int) -> int:
    if os.environ["KINETIC_ATTEMPT"] == "1":
        os._exit(3)
    return x


async def told(client: aio.Client, function: Callable[[int], int]) -> str:
    """What whoever waits for a job of *function*, or for three, hears in the end."""
    if function is dies_once:
        batch = await client.run_async_map(function, range(3), retries=1, progress=False)
        return str(await batch.results(cleanup=False))
    job = await client.submit(function, 3)
    try:
        return str(await job.result(cleanup=False))
    except Exception as exc:
        return type(exc).__name__


TRUTH = {
    returns: "3",
    raises: "ValueError",
    exits: "JobLost",
    is_killed: "JobLost",
    dies_once: "[0, 1, 2]",
}


async def played(home: Path, function: Callable[[int], int], fault: Fault) -> None:
    cluster: Any = Unreliable(LocalCluster(home), fault)
    images = CurrentInterpreter()
    store = DirectoryStore(home / "store")
    platform = Platform(store=store, images=images, cluster=cluster, marker="local-")
    async with aio.Client(backend="local", platform=platform) as client:
        try:
            async with asyncio.timeout(ENDS_S):
                heard = await told(client, function)
        except TimeoutError:
            heard = "nothing"
    assert heard == TRUTH[function], f"{function.__name__}: {heard} with {fault}"


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_no_single_notification_is_needed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "8")
    faults: list[Fault] = []
    async with asyncio.TaskGroup() as group:
        for function in TRUTH:
            await played(home, function, sound := Fault("dropped", -1))
            for what in FAULTS:
                for at in range(sound.told):
                    faults.append(fault := Fault(what, at, LATE_S))
                    group.create_task(played(home, function, fault))
    cases = sum(fault.happened for fault in faults)
    print(f"cases: {cases}")
    assert cases > 3 * len(TRUTH)
