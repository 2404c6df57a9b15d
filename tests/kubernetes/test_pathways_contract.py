"""Run the cluster contract on a real control plane, with a JobSet of one host for each job."""

# ruff: noqa: F403 - imports every test of the contract
from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kinetic.aio.kubernetes.pathways import PathwaysCluster
from tests.contract.cluster import *
from tests.kubernetes import places
from tests.kubernetes.contract import Place

pytestmark = pytest.mark.usefixtures("groups")


@pytest.fixture  # type: ignore[no-redef]
async def place(place: places.Place, tmp_path: Path) -> AsyncIterator[Place]:
    lenient = await place.open_groups("jobset", patience=places.LENIENT)
    spare: list[PathwaysCluster] = [lenient, await place.open_groups("jobset")]
    jobs_place = Place(spare.pop(), lambda: spare.pop(), tmp_path)
    yield jobs_place
    for gate in jobs_place.gates:
        jobs_place.open(gate)
