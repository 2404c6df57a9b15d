"""Kill the processes of a named sweep at any moment, continue it to its end, and lose nothing.

Each seed is a sweep. Its kills hit the submitter, and before it often another process.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import Client, Scene

SEARCHER = Path(__file__).with_name("searcher.py")
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


def note(ended: dict[int, Any], submitter: Client) -> None:
    """Add the trials that a process has reported; none may differ from an earlier report."""
    for line in submitter.lines:
        if line.startswith("ended") and line.endswith("}"):  # a kill may cut the last line
            trial = json.loads(line.partition(" ")[2])
            assert ended.setdefault(trial["number"], trial) == trial, "a trial has changed"


def check(summary: Any, ended: dict[int, Any], count: int) -> None:
    """Check that every trial has ended well, and is what earlier processes have reported."""
    trials = summary["trials"]
    assert [trial["number"] for trial in trials] == [*range(count)]
    assert {trial["state"] for trial in trials} <= {"complete", "pruned"}
    assert {trial["number"]: trial for trial in trials} == ended
    assert len({trial["params"]["rate"] for trial in trials}) == count, "proposed twice"
    complete = [trial for trial in trials if trial["state"] == "complete"]
    assert all(trial["value"] == trial["params"]["rate"] for trial in complete)
    assert summary["best"] == min(trial["value"] for trial in complete)
    if summary["study"]:
        states = Counter(summary["study"])
        # A trial that a process asked for and didn't start is a failure of the study.
        assert states["COMPLETE"] + states["PRUNED"] == count
        assert {*states} <= {"COMPLETE", "PRUNED", "FAIL"}


def check_told(folder: Path, *, is_stored: bool) -> None:
    """Check that no process has told its study a trial twice, nor two processes a stored study."""
    told: Counter[int] = Counter()
    for log in folder.glob("told.*"):
        numbers = [json.loads(line)[0] for line in log.read_text().splitlines()]
        assert len({*numbers}) == len(numbers), f"{log.name} has told a trial twice"
        told.update(numbers)
    assert not is_stored or {*told.values()} == {1}, "two processes have told the same trial"


def check_attempts(scene: Scene) -> None:
    """Check that no attempt ran twice, and that each trial has one outcome."""
    assert scene.started_twice() == []
    marks = [mark for mark in scene.started() if mark.startswith("grp-")]
    assert len({mark.rpartition("-")[0] for mark in marks}) == 1, "the sweep is one batch"
    values: Counter[int] = Counter()
    for path in (scene.home / "store" / "batches").glob("*/attempts/*/*.outcome"):
        match = re.search(r"(\d+)\.\d+\.outcome$", path.name)
        if match is not None and b'\\"kind\\":\\"value\\"' in path.read_bytes():
            values[int(match[1])] += 1
    assert values == dict.fromkeys(range(COUNT), 1)
