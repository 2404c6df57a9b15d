"""A sweep that tests kill: ``victim.py NAME OPTIMIZER TRIALS MAX_CONCURRENT [KILL_AFTER]``.

It prints a line for each trial that ends, and kills itself after the given number of them. With a
number below 0, it kills itself when Optuna is asked for the trial of that number. At the end it
prints the numbers, parameters, and states of all trials, and the states in the study.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import kinetic
from kinetic.sweeps import Choice, Float, Int, RandomSearch

FOLDER = os.getcwd()
SPACE = {"rate": Float(1e-5, 1e-1, log=True), "layers": Int(1, 4), "folder": Choice([FOLDER])}


@kinetic.run(backend="local", accelerator="cpu")
def train(rate: float, layers: int, folder: str) -> float:
    Path(folder, f"ran.{rate}.{os.urandom(4).hex()}").touch()
    return (rate - 0.01) ** 2 + layers


def optuna_space(trial: Any, kill_at: int = 0) -> dict[str, Any]:
    if kill_at and trial.number == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return {
        "rate": trial.suggest_float("rate", 1e-5, 1e-1, log=True),
        "layers": trial.suggest_int("layers", 1, 4),
        "folder": FOLDER,
    }


def main(name: str, kind: str, trials: int, limit: int, kill_after: int) -> None:
    optimizer: Any = RandomSearch(SPACE, seed=7)
    space = None
    if kind.startswith("optuna"):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(n_startup_trials=4, seed=7)
        storage = "sqlite:///study.db" if kind == "optuna-sqlite" else None
        optimizer = optuna.create_study(
            sampler=sampler, storage=storage, study_name="study", load_if_exists=True
        )
        space = functools.partial(optuna_space, kill_at=-kill_after)
    with train.sweep(
        optimizer, space, trials=trials, max_concurrent=limit, name=name, resume=True
    ) as sweep:
        for count, trial in enumerate(sweep, 1):
            print(trial.number, flush=True)
            if count == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
    ended = [(trial.number, dict(trial.params), trial.state.value) for trial in sweep.trials()]
    told = [trial.state.name for trial in optimizer.trials] if space else []
    print(json.dumps({"trials": ended, "told": told, "best": sweep.best.number}))
    print(json.dumps({"batch": sweep.batch.group_id}))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, [*sys.argv[3:], "0"][:3]))
