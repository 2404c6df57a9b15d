"""Whatever happens to a job's objects, every client sees its true end in time."""

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

from .endings import HELD, KINDS, Cell, Files, Trial, every_cell, pairwise, random_cells, run_all

AT_ONCE = 16
"""How many cells run at once; a pod takes two seconds and mostly waits for a processor."""


SETS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("lws", "jobset")]


@pytest.fixture(params=KINDS)
def kind(
    request: pytest.FixtureRequest,
    configured: Namespace,
    groups: None,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Configure and return the kind of object that carries the jobs."""
    kind = str(request.param)
    if kind in ("lws", "jobset"):
        monkeypatch.setenv("KINETIC_BACKEND", "pathways")
        monkeypatch.setenv("KINETIC_MULTIHOST", kind)
    configured.kubelet.fail_pull(HELD)
    return kind


async def run_cells(
    cells: list[Cell],
    namespace: Namespace,
    folder: Path,
    faults: Sequence[Fault | None] = (),
) -> str:
    """Run each cell in a separate namespace with its fault, and return a line for each failure."""
    plane, kubelet = namespace.control_plane, namespace.kubelet
    with ExitStack() as stack:
        trials: list[Trial] = []
        for number, (cell, fault) in enumerate(zip_longest(cells, faults)):
            own = stack.enter_context(fresh_namespace(plane, kubelet))
            (signals := folder / str(number)).mkdir(parents=True)
            trials.append(Trial(cell, own, Files(str(signals)), fault=fault))
        if cells[0].kind == "lws":
            await asyncio.gather(*(asyncio.to_thread(permit_runner, x.namespace) for x in trials))
        return await run_all(trials, AT_ONCE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["item", "job", *SETS], indirect=True)
async def test_any_two_things_together(kind: str, namespace: Namespace, tmp_path: Path) -> None:
    """Test each pair of action, moment, kind of job, and waiting client."""
    failures = await run_cells(pairwise(kind), namespace, tmp_path)
    assert not failures, failures


def random_rounds(kind: str) -> list[Cell]:
    """Return this kind's share of a hundred random cells with two actions."""
    return random_cells(kind, 100 // len(KINDS), seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cells", [every_cell, random_rounds])
async def test_everything_with_everything_and_two_things_at_once(
    kind: str, cells: Callable[[str], list[Cell]], namespace: Namespace, tmp_path: Path
) -> None:
    failures = await run_cells(cells(kind), namespace, tmp_path)
    assert not failures, failures


LATE_S = 15.0
"""How late a notification arrives: after the client has first read the state."""


OTHERS = [
    pytest.param(action, kind, marks=pytest.mark.slow)
    for action in ("pod deleted", "nothing done", "owner deleted")
    for kind in KINDS
    if (action, kind) != ("pod deleted", "job")
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("action", "kind"), [("pod deleted", "job"), *OTHERS], indirect=["kind"])
async def test_no_single_notification_is_needed(
    kind: str, action: str, namespace: Namespace, tmp_path: Path
) -> None:
    """Drop, delay, or repeat each notification of a job's run and end in turn."""
    cell, reliable = Cell(action, "running", kind, "watching"), Fault("dropped", -1)
    failures = await run_cells([cell], namespace, tmp_path / "reliable", [reliable])
    assert not failures, failures
    faults = [Fault(fault, at, LATE_S) for fault in FAULTS for at in range(reliable.count)]
    failures = await run_cells([cell] * len(faults), namespace, tmp_path / "faulty", faults)
    assert not failures, failures
    cases = sum(fault.happened for fault in faults)
    print(f"cases: {cases}")
    assert cases >= len(FAULTS)
