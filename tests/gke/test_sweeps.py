"""Test sweeps of pods: their metrics, pruning, and a submitter that dies."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio
from kinetic.aio.gcs.store import GcsStore
from kinetic.sweeps import State
from tests.cluster.fixtures import IMAGE, Namespace, on_cluster
from tests.scripts import Script
from tests.system.told import SEARCHER, check, check_told, note

optuna = pytest.importorskip("optuna", reason="needs Optuna: pip install 'kinetic-aio[optuna]'")
optuna.logging.set_verbosity(optuna.logging.ERROR)

DEADLINE_S = 150.0
RATES = [0.5, 2.0, 0.25, 3.0]


@on_cluster
def learns(rate: float) -> float:
    """Report without an end if the rate is over 1, else for a few seconds."""
    for step in range(100_000 if rate > 1 else 60):
        kinetic.report(step, {"loss": rate, "step": step})
        time.sleep(0.05)
    return rate


async def test_a_study_prunes_pods_by_their_metrics(client: aio.Client) -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))
    for rate in RATES:
        study.enqueue_trial({"rate": rate})
    space = {"rate": optuna.distributions.FloatDistribution(0, 9)}
    begun = time.monotonic()
    async with asyncio.timeout(DEADLINE_S):
        async with await client.sweep(
            learns, study, space, trials=4, max_concurrent=4, metric="loss", retries=1
        ) as sweep:
            seen = [trial async for trial in sweep]
    lasted_s = time.monotonic() - begun
    assert sorted(trial.number for trial in seen) == [0, 1, 2, 3]
    assert [trial.state for trial in sweep.trials()] == [State.COMPLETE, State.PRUNED] * 2
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"] * 2
    assert sweep.best.value == 0.25
    for trial, known in zip(sweep.trials(), study.trials, strict=True):
        last = 59 if trial.step is None else trial.step
        assert known.intermediate_values == dict.fromkeys(range(last + 1), RATES[trial.number])
    assert await sweep.batch.status_counts() == {"SUCCEEDED": 4}
    store = GcsStore(os.environ["KINETIC_STORE"])
    try:
        scope = f"batches/{sweep.batch.group_id}/metrics/"
        objects = await store.list(scope)
        # An attempt stores its reports at most once a second, each time in an object of its own.
        for number in range(4):
            slots = [
                info
                for info in objects
                if info.name.startswith(f"{scope}{number:08d}.0001.0") and info.metadata["mac"]
            ]
            assert 1 <= len(slots) <= lasted_s + 1
        assert {info.metageneration for info in objects} == {1}, "written once"
        pruned = [info.name for info in objects if info.name.endswith(".prune")]
        assert pruned == [f"{scope}{number:08d}.0001.prune" for number in (1, 3)]
        await sweep.batch.cleanup()
        assert await store.list("batches/") == []
    finally:
        await store.aclose()


async def test_a_named_sweep_of_pods_outlives_its_submitter(
    configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "SEARCH_ON", json.dumps({"accelerator": "cpu", "container_image": IMAGE, "cpu": 0.1})
    )
    project, marks = tmp_path / "project", tmp_path / "marks"
    project.mkdir()
    marks.mkdir()
    count, ended = 12, dict[int, Any]()

    def begun() -> Script:
        return Script(SEARCHER, "sqlite", marks, count, folder=project, deadline=DEADLINE_S)

    for before in (0, 3, 6):
        with begun() as submitter:
            await asyncio.to_thread(submitter.hear, "begun")
            for _ in range(before):
                await asyncio.to_thread(submitter.hear, "ended")
            submitter.kill()
        note(ended, submitter)
    with begun() as submitter:
        over = await asyncio.to_thread(submitter.hear, "over")
        note(ended, submitter)
    check(json.loads(over.partition(" ")[2]), ended, count)
    check_told(marks, is_stored=True)
    started = [path.name for path in marks.glob("grp-*")]
    assert len(started) == count and not [*marks.glob("twice.*")], "each trial ran once"
