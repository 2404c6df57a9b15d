"""Run the cluster contract on a real control plane."""

# ruff: noqa: F403 - imports every test of the contract
from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kinetic.aio.kubernetes.gke import GkeCluster
from tests.contract.cluster import *
from tests.kubernetes import places
from tests.kubernetes.contract import Place


@pytest.fixture
async def place(place: places.Place, tmp_path: Path) -> AsyncIterator[Place]:
    spare: list[GkeCluster] = [await place.open(places.LENIENT), await place.open()]
    jobs_place = Place(spare.pop(), lambda: spare.pop(), tmp_path)
    yield jobs_place
    for gate in jobs_place.gates:
        jobs_place.open(gate)
