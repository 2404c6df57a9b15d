"""Search with Optuna: four trials at once, weak ones pruned, resumed after Ctrl-C.

    python examples/optuna_search.py [TRIALS]

Optuna proposes a trial from the scores so far (ask) and learns from its score (tell). A trial
trains in rungs, and each rung is a job. After each rung, Optuna may prune the trial. After Ctrl-C,
run the same command again: it continues the study and repeats the interrupted trials.
"""

import asyncio
import sys
from collections.abc import Iterator

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import kinetic
from kinetic.aio import Client

RUNGS = 4
SPACE: dict[str, BaseDistribution] = {
    "rate": FloatDistribution(1e-5, 1e-2, log=True),
    "momentum": FloatDistribution(0, 0.99),
}
State = tuple[float, float, float, float]
START: State = (-1.2, 1.0, 0.0, 0.0)


@kinetic.run(backend="local", accelerator="cpu")
def descend(rate: float, momentum: float, state: State) -> tuple[float, State]:
    """Take 500 steps down Rosenbrock's valley; return the height, and the state to go on from."""
    x, y, dx, dy = state
    for _ in range(500):
        slope = 200 * (y - x * x)
        dx = momentum * dx - rate * (2 * (x - 1) - 2 * x * slope)
        dy = momentum * dy - rate * slope
        x, y = max(-5.0, min(5.0, x + dx)), max(-5.0, min(5.0, y + dy))
    return (1 - x) ** 2 + 100 * (y - x * x) ** 2, (x, y, dx, dy)


async def run_trials(client: Client, study: optuna.Study, remaining: Iterator[int]) -> None:
    """Ask for a trial, run its rungs, and tell its score, as long as *remaining* has items."""
    for _ in remaining:
        trial, state, height = study.ask(SPACE), START, 0.0
        for rung in range(RUNGS):
            height, state = await client.run(descend, **trial.params, state=state)
            trial.report(height, rung)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, height)


async def main(trials: int) -> None:
    study = optuna.create_study(
        study_name="valley",
        storage=JournalStorage(JournalFileBackend("optuna.journal")),
        sampler=optuna.samplers.TPESampler(constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        load_if_exists=True,
    )
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # interrupted by Ctrl-C
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    finished = len(study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED]))
    remaining = iter(range(trials - finished))  # all workers take from the same iterator
    async with Client(backend="local") as client, asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(run_trials(client, study, remaining))
    print(f"{trials} trials, {finished} of them in an earlier run")
    print(f"height {study.best_value:.2g} with {study.best_params}")


if __name__ == "__main__":
    asyncio.run(main(int([*sys.argv, "40"][1])))
