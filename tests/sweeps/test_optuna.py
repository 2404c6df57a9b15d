"""Test sweeps with a study of Optuna."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kinetic.errors import ConfigurationError
from tests.sweeps.jobs import fails_once, learns, returns, train

optuna = pytest.importorskip("optuna", reason="needs Optuna: pip install 'kinetic-aio[optuna]'")
optuna.logging.set_verbosity(optuna.logging.ERROR)

FLOAT, INT = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
DISTRIBUTIONS = {"rate": FLOAT(1e-5, 1e-1, log=True), "layers": INT(1, 4)}


def suggest(trial: Any) -> dict[str, Any]:
    return {
        "rate": trial.suggest_float("rate", 1e-5, 1e-1, log=True),
        "layers": trial.suggest_int("layers", 1, 4),
    }


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


@pytest.mark.parametrize("space", [suggest, DISTRIBUTIONS])
async def test_a_study_learns_the_values(local, space: Any) -> None:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    async with await local.sweep(train, study, space, trials=12, max_concurrent=3) as sweep:
        await sweep.wait()
    assert states(study) == ["COMPLETE"] * 12
    assert study.best_value == sweep.best.value and study.best_params == sweep.best.params
    assert [trial.params for trial in study.trials] == [trial.params for trial in sweep.trials()]


async def test_the_study_decides_what_is_pruned(local) -> None:
    study = optuna.create_study(
        direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=0.5, n_warmup_steps=3)
    )
    space = {"rate": FLOAT(0, 1)}
    async with await local.sweep(learns, study, space, trials=4, max_concurrent=4) as sweep:
        trials = [trial async for trial in sweep]
    for trial in trials:
        known = study.trials[trial.number]
        assert known.state.name.lower() == trial.state.value
        reported = known.intermediate_values
        assert reported == {
            step: pytest.approx(abs(trial.params["rate"] - 0.3) + 1 / step)
            for step in range(1, len(reported) + 1)
        }
    assert "RUNNING" not in states(study)


async def test_the_curve_of_a_trial_is_whole_when_it_is_told(local) -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1e9))
    async with await local.sweep(learns, study, {"rate": FLOAT(0, 1)}, trials=2) as sweep:
        await sweep.wait()
    assert [len(trial.intermediate_values) for trial in study.trials] == [50, 50]


async def test_a_failed_trial_is_a_failure_of_the_study(local, tmp_path: Path) -> None:
    study = optuna.create_study()

    def space(trial: Any) -> dict[str, Any]:
        return {"folder": str(tmp_path), "number": trial.suggest_int("number", 0, 99)}

    async with await local.sweep(fails_once, study, space, trials=2) as sweep:
        await sweep.wait()
    assert states(study) == ["FAIL", "FAIL"]


async def test_a_space_that_raises_leaves_no_trial_open(local) -> None:
    study = optuna.create_study()

    def space(trial: Any) -> dict[str, Any]:
        if trial.number == 3:
            raise LookupError("no such space")
        return {"value": trial.suggest_float("value", 0, 1)}

    with pytest.raises(LookupError, match="no such space") as caught:
        async with await local.sweep(returns, study, space, trials=9, max_concurrent=1) as sweep:
            await sweep.wait()
    assert "trial 3" in caught.value.__notes__[0]
    assert states(study) == ["COMPLETE"] * 3 + ["FAIL"]


async def test_leaving_the_block_leaves_no_trial_open(local) -> None:
    study = optuna.create_study()
    async with await local.sweep(train, study, suggest, trials=50, max_concurrent=4) as sweep:
        async for _ in sweep:
            break
    assert "RUNNING" not in states(study) and len(states(study)) < 50


async def test_a_sampler_that_has_no_more_points_ends_the_sweep(local) -> None:
    grid = {"value": [1.0, 2.0, 3.0]}
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(grid))
    space = {"value": FLOAT(1, 3)}
    async with await local.sweep(returns, study, space, trials=9, max_concurrent=1) as sweep:
        await sweep.wait()
    assert sorted(trial.value for trial in sweep.trials()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("study", "space"),
    [
        (optuna.create_study(), None),
        (optuna.create_study(), [1]),
        (optuna.create_study(directions=["minimize", "maximize"]), suggest),
    ],
)
async def test_a_wrong_study_or_space_is_refused(local, study: Any, space: Any) -> None:
    with pytest.raises(ConfigurationError):
        await local.sweep(train, study, space, trials=1)
