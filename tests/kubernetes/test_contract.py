"""Run the cluster contract on a real control plane, with a pod or a JobSet for each job."""

# ruff: noqa: F403 - imports every test of the contract
from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.cluster import *
from tests.kubernetes import places
from tests.kubernetes.contract import Place


@pytest.fixture(params=["pod", "jobset"])
async def place(
    place: places.Place, groups: None, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Place]:
    if request.param == "pod":
        lenient, strict = await place.open(places.LENIENT), await place.open()
    else:
        lenient = await place.open_groups("jobset", patience=places.LENIENT)
        strict = await place.open_groups("jobset")
    spare = [lenient, strict]
    jobs_place = Place(spare.pop(), spare.pop, tmp_path)
    yield jobs_place
    for gate in jobs_place.gates:
        jobs_place.open(gate)
