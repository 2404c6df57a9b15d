"""Kill the processes of a named sweep at any moment, continue it to its end, and lose nothing.

Each seed is a sweep. Its kills hit the submitter, and before it often another process.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from typing import Any

import psutil
import pytest

from tests.system.told import SEARCHER, check, check_told, note

from .conftest import Scene

KINDS = ("random", "optuna", "sqlite")
COUNT = 60
FULL, MORE, KILLS = 2, 36, 6
"""Submitters killed per sweep. Before each, a supervisor, a warm parent, or a job is killed, four
times on average: about 60 kills with the full tier, and more than 500 with both tiers."""


def seeds() -> list[object]:
    full = [pytest.param(seed, marks=pytest.mark.full) for seed in range(FULL)]
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(FULL, MORE)]
    return [*full, *slow]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds())
def test_a_named_sweep_outlives_all_of_its_processes(scene: Scene, seed: int) -> None:
    chance, kind = random.Random(seed), KINDS[seed % 3]
    ended: dict[int, Any] = {}
    killed: Counter[str] = Counter()
    for _ in range(KILLS):
        with scene.client(SEARCHER, kind, scene.marks, COUNT) as submitter:
            # mostly while trials run, sometimes while the sweep begins or continues
            submitter.hear("ready" if chance.random() < 0.25 else "begun")
            time.sleep(chance.uniform(0, 0.4))
            while chance.random() < 0.8:
                killed[kill_another(scene, chance)] += 1
                time.sleep(chance.uniform(0, 0.4))
            submitter.kill()
            killed["submitter"] += 1
        note(ended, submitter)
    with scene.client(SEARCHER, kind, scene.marks, COUNT) as submitter:
        summary = json.loads(submitter.hear("over").partition(" ")[2])
        note(ended, submitter)
    print(dict(killed))
    check(summary, ended, COUNT)
    check_told(scene.marks, is_stored=kind == "sqlite")
    check_attempts(scene)
    scene.assert_only_supervisor_left()


def kill_another(scene: Scene, chance: random.Random) -> str:
    """Kill the supervisor, a warm parent, or a job, and return what it was, or ``nothing``."""
    victim = chance.choice(["supervisor", "parent", "job"])
    find = {
        "supervisor": lambda: [*filter(None, [scene.supervisor()])],
        "parent": scene.parents,
        "job": scene.jobs,
    }[victim]
    give_up_at = time.monotonic() + 2
    while time.monotonic() < give_up_at:
        with contextlib.suppress(IndexError, psutil.NoSuchProcess):
            chance.choice(find()).kill()
            return victim
        time.sleep(0.005)
    return "nothing"  # the sweep hasn't begun, or it is over


def check_attempts(scene: Scene) -> None:
    """Check that no attempt ran twice, and that each trial has one outcome."""
    assert scene.started_twice() == []
    marks = [mark for mark in scene.started() if mark.startswith("grp-")]
    assert len({mark.rpartition("-")[0] for mark in marks}) == 1, "the sweep is one batch"
    values: Counter[int] = Counter()
    for index, _ in scene.values("batches/"):
        values[index] += 1
    assert values == dict.fromkeys(range(COUNT), 1)
