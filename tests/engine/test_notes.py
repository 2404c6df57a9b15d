"""Scalars of inputs and results are stored beside the pickles and are cheap to read."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kinetic import aio
from kinetic.aio._submissions.inputs import FOOTER_BYTES
from kinetic.aio.ports import Object, Phase
from kinetic.errors import WireError
from kinetic.testing import MemoryCluster, MemoryStore, carry_out, memory_platform
from tests.engine.world import VIRTUAL

pytestmark = VIRTUAL


class Counting(MemoryStore):
    """A store that counts the bytes read."""

    bytes = 0

    async def get(self, name: str, **options: Any) -> Object:
        found = await super().get(name, **options)
        self.bytes += len(found.body)
        return found


def train(lr: float, config: Any = None, *, seed: int = 0) -> dict[str, Any]:
    return {"loss": lr * 2, "seed": seed, "weights": object}


async def run_and_read_notes(inputs: list[Any], function: Any = train, **options: Any) -> Any:
    platform = memory_platform()
    async with aio.Client(backend="local", platform=platform) as client:
        batch = await client.run_async_map(function, inputs, **options)
        await batch.wait()
        internal = batch._batch
        found = await internal.inputs.notes(internal.manifest["parameters"])
        return found, await internal.submission.all_attempts(range(len(inputs))), platform.store


async def test_inputs_are_noted_by_the_names_of_the_parameters() -> None:
    inputs = [0.5, (0.1, {"layers": 2}), {"lr": 0.2, "seed": 3}, object]
    found, attempts, _ = await run_and_read_notes(inputs)
    assert found == {
        0: {"lr": 0.5},
        1: {"lr": 0.1, "config.layers": 2},
        2: {"lr": 0.2, "seed": 3},
    }
    outcome = attempts[2][1].outcome
    assert outcome.note == {"loss": 0.4, "seed": 3}
    assert attempts[2][1].claimed <= outcome.ended


async def test_a_failure_is_noted_in_words() -> None:
    _, attempts, _ = await run_and_read_notes([object], lambda lr: lr.nothing)
    assert attempts[0][1].outcome.note == {
        "error": "AttributeError: type object 'object' has no attribute 'nothing'"
    }


@pytest.mark.parametrize("length", [10, 40_000])
async def test_notes_are_read_without_the_inputs_and_verified(length: int) -> None:
    store = Counting()
    cluster = MemoryCluster(store, carry_out)
    platform = replace(memory_platform(), store=store, cluster=cluster)
    async with aio.Client(backend="local", platform=platform) as client:
        batch = await client.run_async_map(train, [(0.5, "x" * length)] * 20)
        await batch.wait()
    while any(seen.phase is not Phase.ENDED for seen in await cluster.find()):
        await asyncio.sleep(0.01)  # a worker that leaves reads from the store, too
    async with aio.Client(backend="local", platform=platform) as client:
        observer = await client.attach_batch(batch.group_id)
        internal = observer._batch
        internal.inputs._bodies.clear()
        parameters = internal.manifest["parameters"]
        store.requests.clear()
        store.bytes = 0
        assert len(await internal.inputs.notes(parameters)) == 20
        assert store.requests == {"get": 1}
        assert store.bytes <= FOOTER_BYTES
        name = next(stored.name for stored in await store.list("") if "/inputs/" in stored.name)
        content = await store.get(name)
        await store.delete([name])
        body = content.body.replace(b'"[0]":0.5', b'"[0]":0.6')
        assert body != content.body
        await store.create(name, body, content.metadata)
        internal.inputs._bodies.clear()
        with pytest.raises(WireError, match="is not what the submitter"):
            await internal.inputs.notes(parameters)


async def test_a_resumed_batch_names_its_inputs_by_the_same_parameters() -> None:
    platform = memory_platform()
    async with aio.Client(backend="local", platform=platform) as client:

        def inputs():
            yield 0.5
            raise RuntimeError("the file ended early")

        batch = await client.run_async_map(_first, inputs())
        with pytest.raises(RuntimeError, match="ended early"):
            await batch.wait()
        group = batch.group_id
    async with aio.Client(backend="local", platform=platform) as client:
        again = await (await client.attach_batch(group)).resume(inputs=[0.25])
        assert await again.results(cleanup=False) == [0.5, 0.25]
        internal = again._batch
        found = await internal.inputs.notes(internal.manifest["parameters"])
        assert found == {0: {"rate": 0.5}, 1: {"rate": 0.25}}


def _first(rate: float, *more: Any) -> float:
    return rate
