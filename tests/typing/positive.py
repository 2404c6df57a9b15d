# pyright: strict
"""Correctly typed code: the type checkers must report no error here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, assert_type

import optuna

import kinetic
import kinetic.aio
import kinetic.collections
import kinetic.jobs
from kinetic import (
    BatchHandle,
    Cancelled,
    Completion,
    Data,
    Failed,
    JobHandle,
    JobStatus,
    Lost,
    Outcome,
    Progress,
    Pruned,
    RemoteFunction,
    Succeeded,
    sweeps,
)
from kinetic.collection import Collection


@kinetic.run(accelerator="tpu-v6e-8", spot=True, memory="4Gi", timeout=3600)
def train(rate: float, *, epochs: int = 3) -> list[float]:
    return [rate] * epochs


@kinetic.run
def bare(text: str) -> int:
    return len(text)


def data_stands_for_its_path_in_the_job(folder: Path) -> None:
    assert_type(bare(Data(folder)), int)
    assert_type(bare.run_async(Data("gs://bucket/words/", fuse=True)), JobHandle[int])
    assert_type(bare.run_async_map([Data(folder)]), BatchHandle[int, Data])


@kinetic.run("gpu-l4", "prebuilt", "repo", "zone", "project", ["A_*"], "cluster", "gke", "ns")
def positional() -> None: ...


@kinetic.run(volumes={"/data": Data("./data")}, backend="local")
async def fetch(url: str) -> bytes:
    return url.encode()


class Model:
    @kinetic.run(cpu=2)
    def fit(self, steps: int) -> float:
        return steps / 2

    @kinetic.run()
    async def score(self, text: str) -> int:
        return len(text)


def decorated_functions_keep_their_types(model: Model) -> None:
    assert_type(train(0.1), list[float])
    assert_type(train(0.1, epochs=2), list[float])
    assert_type(train.local(0.1), list[float])
    assert_type(train.options(accelerator="cpu", timeout=None)(0.1), list[float])
    assert_type(bare("x"), int)
    assert_type(bare.__name__, str)
    assert_type(model.fit(3), float)
    assert_type(model.fit.local(3), float)
    assert_type(model.fit.options(cpu=4).run_async(3), JobHandle[float])
    assert_type(model.fit.run_async(3).result(), float)
    plain: Callable[[str], int] = bare
    remote: RemoteFunction[[str], int] = bare
    assert_type(plain("x"), int)
    assert_type(remote("x"), int)


def handles_know_what_they_will_return() -> None:
    job = train.run_async(0.1, epochs=2)
    assert_type(job, JobHandle[list[float]])
    assert_type(job.result(timeout=3, on_status_change=print), list[float])
    assert_type(job.status(), JobStatus)
    assert_type(job.logs(follow=True), str | None)
    assert_type(kinetic.attach(job.job_id), JobHandle[Any])
    batch = train.run_async_map([0.1, 0.2], max_concurrent=None, name="sweep", tags={"a": "b"})
    assert_type(batch, BatchHandle[list[float], float])
    for ended in batch.as_completed(timeout=3):
        assert_type(ended, JobHandle[list[float]])
    iterator: Iterator[JobHandle[list[float]]] = batch.as_completed()
    stream: AsyncIterator[JobHandle[list[float]]] = batch.as_completed()
    print(iterator, stream)
    assert_type(batch.jobs, list[JobHandle[list[float]] | None])
    with batch as same:
        assert_type(same, BatchHandle[list[float], float])
    assert_type(batch.results(), list[list[float]])
    assert_type(batch.results(ordered=False, timeout=3), list[list[float]])
    assert_type(batch.results(return_exceptions=True), list[Any])
    assert_type(batch.resume(inputs=[0.3], seal=True), BatchHandle[list[float], float])
    assert_type(batch.retry_failed([1, 2]), int)
    assert_type(kinetic.list_batches(tags={"a": "b"}), list[BatchHandle[Any]])
    assert_type(kinetic.collect(), Collection)
    for progress in batch.progress():
        assert_type(progress, Progress)


def outcomes_know_what_they_hold() -> float:
    batch = train.run_async_map([0.1], progress=False)
    for completion in batch.outcomes(ordered=True):
        assert_type(completion, Completion[list[float], float])
        assert_type(completion.index, int)
        assert_type(completion.input, float)
        assert_type(completion.outcome, Outcome[list[float]])
        assert_type(completion.outcome.unwrap(), list[float])
        assert_type(completion.outcome.error, Exception | None)
    for index, given, outcome in batch.outcomes():
        match outcome:
            case Succeeded(value):
                assert_type(value, list[float])
            case Failed(error) | Cancelled(error) | Lost(error):
                assert_type(error, Exception)
            case Pruned(step, reported):
                assert_type(step, int)
                assert_type(reported, float | Mapping[str, float] | None)
        assert_type(given, float)
        print(index, given, outcome.ok)
        if isinstance(outcome, Succeeded):
            return outcome.value[0]
        raise outcome.error
    iterator: Iterator[Completion[list[float]]] = batch.outcomes()
    stream: AsyncIterator[Completion[list[float]]] = batch.outcomes()
    named: BatchHandle[list[float]] = batch
    print(iterator, stream, named)
    for completed in kinetic.attach_batch("grp-x").outcomes():
        assert_type(completed, Completion[Any])
        assert_type(completed.input, Any)
    return 0.0


def sweeps_yield_trials(study: optuna.Study) -> float:
    search = sweeps.RandomSearch({"rate": sweeps.Float(0, 1)}, pruner=sweeps.ASHA())
    with train.sweep(search, trials=3, max_concurrent=2, on_failure="retry") as sweep:
        for trial in sweep:
            assert_type(trial.value, float | None)
            assert_type(trial.state, sweeps.State)
    assert_type(train.sweep(study, {}, trials=None), kinetic.jobs.Sweep)
    train.sweep(study, lambda trial: {"rate": trial.suggest_float("rate", 0, 1)}, trials=1)
    return sweep.best.value or 0.0


def metrics_have_names() -> None:
    batch = train.run_async_map([0.1], prunable=True)
    for index, attempt, step, value in batch.metrics(timeout=1.0):
        assert_type(step, int)
        assert_type(value, float | Mapping[str, float])
        batch.prune(index, attempt)
    for metric in batch.job(0).metrics():
        assert_type(metric, kinetic.JobMetric)
    kinetic.report(1, 0.5)
    kinetic.report(2, {"loss": 0.5})
    assert_type(kinetic.should_stop(), bool)


async def metrics_are_the_same_in_asyncio(batch: kinetic.aio.BatchHandle[float]) -> None:
    async for metric in batch.metrics():
        assert_type(metric, kinetic.Metric)
        await batch.prune(metric.index)


async def inputs() -> AsyncIterator[tuple[float, int]]:
    yield 0.1, 3


def every_way_to_start_a_batch_keeps_the_type_of_its_inputs() -> None:
    for _, pair, _ in train.run_async_map(inputs(), input_mode="args").outcomes():
        assert_type(pair, tuple[float, int])
    for _, settings, _ in train.run_async_map([{"rate": 0.1}]).outcomes():
        assert_type(settings, dict[str, float])
    for _, url, _ in fetch.run_async_map(["u"]).outcomes():
        assert_type(url, str)
    for _, text, _ in kinetic.jobs.run_async_map(bare, ["u"]).outcomes():
        assert_type(text, str)
    for _, text, _ in kinetic.collections.map(bare.run_async, ["u"]).outcomes():
        assert_type(text, str)


async def coroutines_are_seen_through(model: Model) -> None:
    coroutine: Coroutine[Any, Any, bytes] = fetch("u")
    assert_type(await coroutine, bytes)
    assert_type(await fetch("u"), bytes)
    assert_type(await fetch.local("u"), bytes)
    assert_type(fetch.run_async("u"), JobHandle[bytes])
    assert_type(fetch.run_async_map(["u"]), BatchHandle[bytes, str])
    assert_type(await model.score("x"), int)
    assert_type(model.score.run_async("x"), JobHandle[int])
    assert_type(await train.run_async(0.1), list[float])


async def the_async_api_has_the_same_types() -> None:
    job = await kinetic.submit(train, 0.1, epochs=2)
    assert_type(job, kinetic.aio.JobHandle[list[float]])
    assert_type(await job, list[float])
    assert_type(await job.result(), list[float])
    assert_type(await kinetic.aio.submit(fetch, "u"), kinetic.aio.JobHandle[bytes])
    assert_type(await kinetic.aio.run(fetch, "u"), bytes)
    assert_type(await kinetic.aio.run(bare, "u"), int)
    async with kinetic.aio.Client() as client:
        assert_type(await (await client.submit(train, 0.1)).result(), list[float])
        assert_type(await client.run(len, "abc"), int)
        batch = await client.run_async_map(train, [0.1], max_concurrent=None)
        assert_type(batch, kinetic.aio.BatchHandle[list[float], float])
        assert_type(await client.run_async_map(fetch, ["u"]), kinetic.aio.BatchHandle[bytes, str])
        async for completion in batch.outcomes(ordered=True, timeout=3):
            assert_type(completion, Completion[list[float], float])
        async for progress in batch.progress():
            assert_type(progress, Progress)
        assert_type(await batch.results(), list[list[float]])
        assert_type(await batch.results(return_exceptions=True), list[Any])
        assert_type(await batch.resume(), kinetic.aio.BatchHandle[list[float], float])
        assert_type(await batch.retry_failed(), int)
        assert_type(await client.list_batches("n", limit=3), list[kinetic.aio.BatchHandle[Any]])
        await client.cleanup(batch.group_id)
    numbers = await kinetic.aio.run_async_map(fetch, ["u"], progress=True)
    async for index, url, outcome in numbers.outcomes():
        assert_type(index, int)
        assert_type(url, str)
        assert_type(outcome, Outcome[bytes])
    assert_type(await kinetic.aio.run_async_map(bare, ["u"]), kinetic.aio.BatchHandle[int, str])
    assert_type(await kinetic.aio.collect(), Collection)
    assert_type(await kinetic.aio.list_batches(), list[kinetic.aio.BatchHandle[Any]])


async def a_plain_function_gives_its_type_to_the_outcomes() -> None:
    def f(x: int) -> float:
        return x / 2

    batch = await kinetic.aio.run_async_map(f, [1, 2])
    async for completion in batch.outcomes():
        assert_type(completion, Completion[float, int])
        assert_type(completion.outcome, Outcome[float])


def load_model() -> Model:
    return Model()


@kinetic.run("cpu", isolation="worker", init={"model": load_model}, recycle=100)
def predict(number: int, *, model: Model) -> float:
    return model.fit.local(number)


def calls_leave_out_the_arguments_of_init() -> None:
    assert_type(predict(3), float)
    assert_type(predict.local(3), float)
    assert_type(predict.run_async(3), JobHandle[float])
    assert_type(predict.run_async_map([3]), BatchHandle[float, int])
    assert_type(train.options(init={"rate": lambda: 0.1})(epochs=2), list[float])
    assert_type(predict.options(init=None, timeout=3)(3), float)
