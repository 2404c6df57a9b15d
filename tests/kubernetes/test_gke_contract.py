"""The port's contract, on a real control plane."""

# ruff: noqa: F403 - every test of the suite, whichever there are
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
    made = Place(spare.pop(), lambda: spare.pop(), tmp_path)
    yield made
    for gate in made.gates:
        made.open(gate)
