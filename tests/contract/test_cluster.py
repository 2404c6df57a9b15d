"""Run the contract suite on the clusters that need only this machine."""

# ruff: noqa: F403 - the whole suite
from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kinetic.aio.local.cluster import LocalCluster
from kinetic.aio.ports import Cluster
from kinetic.testing import MemoryCluster, MemoryStore
from tests.contract.cluster import *
from tests.contract.cluster import Place
from tests.orders import runner_with

STAND_IN = """
import json
import os

from .processes import tell_supervisor

def main(order, key, executor, place):
    tell_supervisor("called")
    facts = json.loads(order.client["facts"])
    print(*facts["lines"], sep="\\n", flush=True)
    if facts["gate"]:
        os.open(facts["gate"], os.O_RDONLY)
    print("last", flush=True)
    print(executor, flush=True)
    return facts["code"]
"""
"""Replacement for `kinetic._runner.job.attempt`."""


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runner_with(STAND_IN, tmp_path_factory.mktemp("stand-in"))


@pytest.fixture(params=["memory", "local"])
async def place(
    request: pytest.FixtureRequest, home: Path, runner: Path, tmp_path: Path
) -> AsyncIterator[Place]:
    opened: list[Cluster] = []

    def local() -> Cluster:
        environ = {**os.environ, "KINETIC_HOME": str(home), "KINETIC_LOCAL_SLOTS": "2"}
        opened.append(LocalCluster(home, environ, runner=runner))
        return opened[-1]

    if request.param == "local":
        made = Place(local(), local, tmp_path, keeps_secrets=False)
    else:
        cluster: Cluster = MemoryCluster(MemoryStore(), lambda run: made.work(run), slots=2)
        made = Place(cluster, lambda: cluster, tmp_path)
    yield made
    for opened_cluster in opened:
        await opened_cluster.aclose()
    for fd in made.open_files:
        os.close(fd)
