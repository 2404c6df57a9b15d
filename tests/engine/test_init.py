"""Test what a submission does with the options ``isolation``, ``init``, and ``recycle``."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from kinetic._runner.protocol import pickles
from kinetic._runner.worker.session import Session
from kinetic.aio._submissions.manifest import uploaded_call_of
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import JobSpec
from kinetic.testing import MemoryCluster, carry_out, memory_platform
from tests.engine.severed import on_loop_time

pytestmark = pytest.mark.looptime(noop_cycles=300)


def load() -> str:
    return "model"


def use(number: int, model: str = "default") -> tuple[int, str]:
    return number, model


warm = kinetic.run("cpu", isolation="worker", init={"model": load}, recycle=3)(use)


class IdleWorkers(MemoryCluster):
    """Workers that take no item."""

    async def scale(self, job: JobSpec, *, number: int, ranks: range) -> int:
        return ranks.stop


@pytest.fixture
async def platform() -> Platform:
    """Return a platform that accepts the options, and runs nothing."""
    plain = on_loop_time(memory_platform())
    return dataclasses.replace(plain, cluster=IdleWorkers(plain.store, carry_out))


async def test_a_manifest_says_how_workers_run_the_items(
    client: aio.Client, platform: Platform
) -> None:
    batch = await client.run_async_map(warm, [1, 2])
    manifest = json.loads(json.dumps(batch._batch.manifest))
    uploaded = uploaded_call_of(manifest, {})
    assert uploaded.call.options.isolation == "worker"
    assert uploaded.call.options.recycle == 3
    assert uploaded.init is not None
    assert uploaded.init.name in uploaded.shared_names
    session = Session(b"", (await platform.store.get(uploaded.init.name)).body, (), stays=True)
    session.begin(pickles.load)
    assert session.values == {"model": "model"}


async def test_without_these_options_each_item_has_a_process(client: aio.Client) -> None:
    batch = await client.run_async_map(use, [1])
    manifest = json.loads(json.dumps(batch._batch.manifest))
    uploaded = uploaded_call_of(manifest, {})
    assert (uploaded.init, uploaded.call.options.isolation) == (None, "process")
    assert uploaded.call.options.recycle is None


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([{"number": 1, "model": "x"}], "init gives the argument 'model'; leave it out"),
        ([(1, "x")], "argument 2 of the call is 'model', which init gives"),
        ([{"modle": 1}], "'number'"),
    ],
)
async def test_an_input_leaves_out_the_arguments_of_init(
    client: aio.Client, platform: Platform, inputs: list[Any], message: str
) -> None:
    assert (await client.run_async_map(warm, [1])).submission_failures == {}
    before = await platform.store.list("")
    with pytest.raises(errors.ConfigurationError, match=f"input 0 does not fit .*{message}"):
        await client.run_async_map(warm, inputs)
    assert await platform.store.list("") == before
    lazy = await client.run_async_map(warm, iter([*inputs, 2]))
    first = await anext(lazy.outcomes())
    assert first.index == 0 and isinstance(first.outcome.error, errors.SubmissionError)
    assert message in str(first.outcome.error)
    assert [*lazy.submission_failures] == [0]


async def test_a_call_leaves_out_the_arguments_of_init(client: aio.Client) -> None:
    def require(number: int, *, model: str) -> None: ...

    for call in (client.submit, client.run):
        with pytest.raises(TypeError, match="init gives the argument 'model'"):
            await call(warm, 1, model="x")
        with pytest.raises(TypeError, match="missing a required argument: 'number'"):
            await call(kinetic.run("cpu", init={"model": load})(require))
    assert await client.run(warm, 1) == (1, "model")


async def test_the_fake_platform_calls_init_and_shows_no_frames_of_kinetic() -> None:
    def divide(number: int, *, model: str) -> float:
        return number / 0

    async with aio.Client(platform=on_loop_time(memory_platform())) as client:
        batch = await client.run_async_map(warm, [1, 2])
        assert await batch.results() == [(1, "model"), (2, "model")]
        with pytest.raises(ZeroDivisionError) as caught:
            await client.run(kinetic.run("cpu", init={"model": load})(divide), 1)
    assert "return number / 0" in caught.value.__notes__[0]
    assert f"{os.sep}kinetic{os.sep}" not in caught.value.__notes__[0].replace(os.getcwd(), "")


async def test_init_travels_with_what_it_captures(client: aio.Client, platform: Platform) -> None:
    lock = threading.Lock()

    def unpicklable() -> Any:
        return lock

    bad = warm.options(init={"model": unpicklable})
    with pytest.raises(errors.PackError, match=r"init\['model'\].*lock.*cannot be pickled"):
        await client.run_async_map(bad, [1])
    assert await platform.store.list("") == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"isolation": "worker"}, "isolation='worker'"),
        ({"isolation": "worker", "recycle": 2, "init": {"model": load}}, "isolation='worker'"),
        ({"init": {"model": load}}, "init"),
    ],
)
async def test_a_platform_that_replaces_no_workers_refuses_the_options(
    options: dict[str, Any], named: str
) -> None:
    plain = on_loop_time(memory_platform())
    cluster = MemoryCluster(plain.store, carry_out, replaces=False)
    platform = dataclasses.replace(plain, cluster=cluster)
    function = kinetic.run("cpu", **options)(use)
    async with aio.Client(platform=platform) as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.run_async_map(function, [1]),
            lambda: client.submit(function, 1),
        ]
        for call in calls:
            with pytest.raises(errors.ConfigurationError) as caught:
                await call()
            assert str(caught.value).startswith(f"{named} works on backend='local'")
    assert await platform.store.list("") == []


async def test_one_line_says_that_init_runs_for_each_item_of_a_batch(
    client: aio.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def cold(number: int, model: str = "") -> int:
        return number

    function = kinetic.run("cpu", init={"model": load})(cold)
    assert await client.run(function, 1) == 1
    await client.run_async_map(function.options(isolation="worker"), [1])
    assert "init" not in caplog.text
    for _ in range(2):
        await client.run_async_map(function, [1])
    [line] = [message for message in caplog.messages if "init" in message]
    assert line.startswith("cold: init runs for each item")
