"""Whatever is done to a job's objects, its end is told: in time, to everybody, and truly."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.fixtures import Namespace, fresh_namespace
from tests.cluster.rights import permit_runner

from .endings import HELD, KINDS, Cell, Deed, Files, every_cell, pairwise, random_cells, wrongs

AT_ONCE = 16
"""Cells side by side: a pod takes two seconds, most of which nobody has a processor for."""


@pytest.fixture(params=KINDS)
def kind(
    request: pytest.FixtureRequest,
    configured: Namespace,
    groups: None,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """What carries the jobs."""
    kind = str(request.param)
    if kind in ("lws", "jobset"):
        monkeypatch.setenv("KINETIC_BACKEND", "pathways")
        monkeypatch.setenv("KINETIC_MULTIHOST", kind)
    configured.kubelet.fail_pull(HELD)
    return kind


async def played(cells: list[Cell], namespace: Namespace, folder: Path) -> str:
    """Carry out *cells*, each in a namespace of its own; what was wrong."""
    plane, kubelet = namespace.control_plane, namespace.kubelet
    with ExitStack() as stack:
        deeds: list[Deed] = []
        for number, cell in enumerate(cells):
            yours = stack.enter_context(fresh_namespace(plane, kubelet))
            (place := folder / str(number)).mkdir()
            deeds.append(Deed(cell, yours, Files(str(place))))
        if cells[0].kind == "lws":
            await asyncio.gather(*(asyncio.to_thread(permit_runner, x.namespace) for x in deeds))
        return await wrongs(deeds, AT_ONCE)


@pytest.mark.timeout(600)
async def test_any_two_things_together(kind: str, namespace: Namespace, tmp_path: Path) -> None:
    """Of what is done, when, to which kind, and who waits."""
    wrong = await played(pairwise(kind), namespace, tmp_path)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_everything_with_everything(kind: str, namespace: Namespace, tmp_path: Path) -> None:
    """The whole grid."""
    wrong = await played(every_cell(kind), namespace, tmp_path)
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1])
async def test_two_things_at_once(
    kind: str, seed: int, namespace: Namespace, tmp_path: Path
) -> None:
    """A hundred random rounds, a quarter of them for each kind; other seeds are other rounds."""
    cells = random_cells(kind, 100 // len(KINDS), seed)
    wrong = await played(cells, namespace, tmp_path)
    assert not wrong, wrong
