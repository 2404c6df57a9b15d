"""Whatever is done to a job's objects, its end is told: in time, to everybody, and truly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.cluster.fixtures import Namespace, fresh_namespace
from tests.cluster.rights import permit_runner
from tests.engine.notifications import FAULTS, Fault

from .endings import HELD, KINDS, Cell, Deed, Files, every_cell, pairwise, random_cells, wrongs

AT_ONCE = 16
"""Cells side by side: a pod takes two seconds, most of which nobody has a processor for."""


SETS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("lws", "jobset")]


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


async def played(
    cells: list[Cell],
    namespace: Namespace,
    folder: Path,
    faults: Sequence[Fault | None] = (),
) -> str:
    """Carry out *cells*, each in a namespace of its own, with these *faults*; what was wrong."""
    plane, kubelet = namespace.control_plane, namespace.kubelet
    with ExitStack() as stack:
        deeds: list[Deed] = []
        for number, (cell, fault) in enumerate(zip_longest(cells, faults)):
            yours = stack.enter_context(fresh_namespace(plane, kubelet))
            (place := folder / str(number)).mkdir(parents=True)
            deeds.append(Deed(cell, yours, Files(str(place)), fault=fault))
        if cells[0].kind == "lws":
            await asyncio.gather(*(asyncio.to_thread(permit_runner, x.namespace) for x in deeds))
        return await wrongs(deeds, AT_ONCE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["item", "job", *SETS], indirect=True)
async def test_any_two_things_together(kind: str, namespace: Namespace, tmp_path: Path) -> None:
    """Of what is done, when, to which kind, and who waits."""
    wrong = await played(pairwise(kind), namespace, tmp_path)
    assert not wrong, wrong


def random_rounds(kind: str) -> list[Cell]:
    """Of a hundred random rounds, those of this kind."""
    return random_cells(kind, 100 // len(KINDS), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cells", [every_cell, random_rounds])
async def test_everything_with_everything_and_two_things_at_once(
    kind: str, cells: Callable[[str], list[Cell]], namespace: Namespace, tmp_path: Path
) -> None:
    wrong = await played(cells(kind), namespace, tmp_path)
    assert not wrong, wrong


LATE_S = 15.0
"""By then the first reading has been."""


OTHERS = [
    pytest.param(deed, kind, marks=pytest.mark.slow)
    for deed in ("pod deleted", "nothing done", "owner deleted")
    for kind in KINDS
    if (deed, kind) != ("pod deleted", "job")
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("deed", "kind"), [("pod deleted", "job"), *OTHERS], indirect=["kind"])
async def test_no_single_notification_is_needed(
    kind: str, deed: str, namespace: Namespace, tmp_path: Path
) -> None:
    """Each that comes while a job runs and ends is dropped, late, or told twice, in turn."""
    cell, sound = Cell(deed, "running", kind, "watching"), Fault("dropped", -1)
    wrong = await played([cell], namespace, tmp_path / "sound", [sound])
    assert not wrong, wrong
    faults = [Fault(what, at, LATE_S) for what in FAULTS for at in range(sound.count)]
    wrong = await played([cell] * len(faults), namespace, tmp_path / "faulty", faults)
    assert not wrong, wrong
    cases = sum(fault.happened for fault in faults)
    print(f"cases: {cases}")
    assert cases >= len(FAULTS)
