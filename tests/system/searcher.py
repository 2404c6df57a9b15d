"""A sweep that tests kill at any moment; they copy this file into a project and run it.

Usage: ``searcher.py random|optuna|sqlite FOLDER COUNT``. It prints ``ready`` before it does
anything, then ``begun``, a line of JSON for each trial that ends, and ``over`` with all trials and
the states of the study. It writes what the optimizer is told into a file of its own. If the
function shouldn't run on this machine, the variable SEARCH_ON has its options as JSON.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kinetic
from kinetic.sweeps import ASHA, Choice, Float, RandomSearch

RETRIES = 50
"""The tests kill jobs, and no trial may fail of that alone."""

OPTIONS = json.loads(os.environ.get("SEARCH_ON", '{"backend": "local", "accelerator": "cpu"}'))


@kinetic.run(**OPTIONS)
def train(folder: str, rate: float) -> float:
    """Leave a mark for this attempt, and report five values; higher rates are worse."""
    name = f"{os.environ['KINETIC_JOB_ID']}.{os.environ['KINETIC_ATTEMPT']}"
    try:
        Path(folder, name).touch(exist_ok=False)
    except FileExistsError:
        Path(folder, f"twice.{name}").touch()
    for step in range(1, 6):
        kinetic.report(step, rate + 1 / step)
        time.sleep(0.03)
    return rate


def logged(tell: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """Return *tell*, which writes each call into the file of this process, once it has returned."""
    log = Path(folder, f"told.{os.getpid()}")

    def tell_and_log(trial: Any, *results: Any, **states: Any) -> Any:
        returned = tell(trial, *results, **states)
        number = trial if isinstance(trial, int) else trial.number
        (result,) = (*results, *states.values())
        shown = result.name if hasattr(result, "name") else result
        with log.open("a") as file:
            file.write(f"{json.dumps([number, shown])}\n")
        return returned

    return functools.wraps(tell)(tell_and_log)


def search(kind: str, folder: str) -> tuple[Any, Any]:
    """Return an optimizer or a study, and its space; a study in memory proposes at random."""
    if kind == "random":
        space = {"folder": Choice([folder]), "rate": Float(0, 1)}
        found: Any = RandomSearch(space, seed=7, pruner=ASHA())
        found.tell = logged(found.tell, folder)
        return found, None
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        storage="sqlite:///study.db" if kind == "sqlite" else None,
        study_name="study",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=7 if kind == "sqlite" else None),
        pruner=optuna.pruners.SuccessiveHalvingPruner(),
    )
    study.tell = logged(study.tell, folder)  # type: ignore[method-assign]
    return study, lambda trial: {"folder": folder, "rate": trial.suggest_float("rate", 0, 1)}


def main(kind: str, folder: str, count: int) -> None:
    optimizer, space = search(kind, folder)
    with train.sweep(
        optimizer,
        space,
        trials=count,
        max_concurrent=3,
        on_failure="retry",
        retries=RETRIES,
        name="valley",
        resume=True,
    ) as sweep:
        print("begun", sweep.batch.group_id, flush=True)
        for trial in sweep:
            print("ended", json.dumps(asdict(trial), default=repr), flush=True)
    trials = [asdict(trial) for trial in sweep.trials()]
    states = [] if kind == "random" else [trial.state.name for trial in optimizer.trials]
    summary = {"trials": trials, "study": states, "best": sweep.best.value}
    print("over", json.dumps(summary, default=repr), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    print("ready", flush=True)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
