"""Test sweeps with the optimizers of Ax, Nevergrad, and Vizier, where these are installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kinetic.aio import Client
from kinetic.sweeps import Ax, Nevergrad, State, Vizier
from tests.sweeps.jobs import learns, train, waits

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(600),  # the import of Ax alone may take minutes
    # These packages, and those that they need, use much that is deprecated.
    pytest.mark.filterwarnings("default"),
]

Names = dict[str, tuple[float, float]]


def make_ax(space: Names, *, prunes: bool = False) -> Any:
    pytest.importorskip("ax.api.client", reason="needs Ax: pip install ax-platform")
    from ax.api.client import Client as AxClient
    from ax.api.configs import RangeParameterConfig

    client = AxClient(random_seed=1)
    client.configure_experiment(
        [
            RangeParameterConfig(
                name=name,
                bounds=bounds,
                parameter_type="int" if isinstance(bounds[0], int) else "float",
            )
            for name, bounds in space.items()
        ]
    )
    client.configure_optimization(objective="-loss")
    return Ax(client, metric="loss", prunes=prunes)


def make_nevergrad(space: Names, *, prunes: bool = False) -> Any:
    ng = pytest.importorskip("nevergrad", reason="needs Nevergrad: pip install nevergrad")
    parametrization = ng.p.Dict(
        **{
            name: ng.p.Scalar(lower=low, upper=high).set_integer_casting()
            if isinstance(low, int)
            else ng.p.Scalar(lower=low, upper=high)
            for name, (low, high) in space.items()
        }
    )
    parametrization.random_state.seed(1)
    return Nevergrad(ng.optimizers.OnePlusOne(parametrization, budget=100, num_workers=4))


def make_vizier(space: Names, *, prunes: bool = False) -> Any:
    pytest.importorskip(
        "vizier.service.clients", reason="needs Vizier: pip install 'google-vizier[jax]'"
    )
    from vizier.service import clients, pyvizier

    config = pyvizier.StudyConfig(algorithm="RANDOM_SEARCH")
    for name, (low, high) in space.items():
        add = config.search_space.root
        (add.add_int_param if isinstance(low, int) else add.add_float_param)(name, low, high)
    config.metric_information.append(
        pyvizier.MetricInformation("loss", goal=pyvizier.ObjectiveMetricGoal.MINIMIZE)
    )
    name = f"study-{id(config)}"
    return Vizier(
        clients.Study.from_study_config(config, owner="tests", study_id=name), prunes=prunes
    )


MAKERS = [make_ax, make_nevergrad, make_vizier]
SPACE: Names = {"rate": (0.001, 0.1), "layers": (1, 4)}


@pytest.fixture(params=MAKERS, ids=["ax", "nevergrad", "vizier"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    maker: Callable[..., Any] = request.param
    maker(SPACE)  # skip the test before it starts a supervisor
    return maker


async def test_a_sweep_continues_with_another_optimizer(
    local: Client, make: Callable[..., Any]
) -> None:
    options: Any = {"max_concurrent": 2, "name": "adapted", "resume": True}
    async with await local.sweep(train, make(SPACE), trials=3, **options) as first:
        await first.wait()
    assert [trial.state for trial in first.trials()] == [State.COMPLETE] * 3
    assert all(type(trial.params["layers"]) is int for trial in first.trials())
    async with await local.sweep(train, make(SPACE), trials=5, **options) as second:
        await second.wait()
    assert second.trials()[:3] == first.trials()
    assert [trial.state for trial in second.trials()] == [State.COMPLETE] * 5
    assert second.best.value == min(trial.value for trial in second.trials() if trial.value)
    rates = {trial.params["rate"] for trial in second.trials()}
    assert len(rates) == 5, "the optimizer learned that it has proposed the first trials"


async def test_running_trials_are_adopted(
    local: Client, make: Callable[..., Any], tmp_path: Path
) -> None:
    class InFolder:
        """The optimizer with an argument more, which the jobs need."""

        def __init__(self) -> None:
            self._optimizer = make({"number": (1, 99)})
            self.direction, self.prunes = self._optimizer.direction, False
            self.tell, self.report = self._optimizer.tell, self._optimizer.report

        def _with_folder(self, proposal: Any) -> Any:
            return type(proposal)(proposal.number, {**proposal.params, "folder": str(tmp_path)})

        def ask(self) -> Any:
            return self._with_folder(self._optimizer.ask())

        def adopt(self, params: Any, memo: Any) -> Any:
            plain = {"number": params["number"]}
            return self._with_folder(self._optimizer.adopt(plain, memo))

    options: Any = {"trials": 3, "max_concurrent": 2, "name": "running", "resume": True}
    async with Client(backend="local") as other:
        first = await other.sweep(waits, InFolder(), **options)
        while len([*tmp_path.glob("ran.*")]) < 2:
            await asyncio.sleep(0.01)
        await first.batch.detach()
    async with await local.sweep(waits, InFolder(), **options) as second:
        Path(tmp_path, "go").touch()
        await second.wait()
    assert [trial.state for trial in second.trials()] == [State.COMPLETE] * 3
    assert [trial.params for trial in second.trials()[:2]] == [
        trial.params for trial in first.trials()[:2]
    ]
    assert len([*tmp_path.glob("ran.*")]) == 3


@pytest.mark.parametrize("make", [make_ax, make_vizier])
async def test_reports_and_failures_reach_the_optimizer(
    local: Client, make: Callable[..., Any]
) -> None:
    """Whether the optimizer prunes is its own decision; no call of it may fail."""
    optimizer = make({"rate": (0.0, 1.0)}, prunes=True)
    async with await local.sweep(learns, optimizer, trials=3, max_concurrent=2) as sweep:
        await sweep.wait()
    assert {trial.state for trial in sweep.trials()} <= {State.COMPLETE, State.PRUNED}
    async with await local.sweep(train, optimizer, trials=1, on_failure="tell") as sweep:
        await sweep.wait()
    assert sweep.trials()[0].state is State.FAILED, "the function has another argument"
