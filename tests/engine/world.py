"""A platform in memory on virtual time whose jobs wait for a gate, and fakes for its ports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from kinetic._runner.protocol import outcomes, wire
from kinetic.aio._preparing.inputs import Encoder
from kinetic.aio.platforms import Platform
from kinetic.testing import MemoryCluster, MemoryStore, Run, carry_out, memory_platform
from tests.engine.severed import on_loop_time

__all__ = [
    "PODS",
    "SETS",
    "VIRTUAL",
    "Passing",
    "World",
    "claim",
    "dies",
    "encoder",
    "left_on",
    "platform_with",
    "preempted",
    "until",
]

C = TypeVar("C", bound=MemoryCluster)

PODS = {"shows_items": False, "replaces": True}
"""For single jobs only: the flags of a cluster that replaces their pods."""

SETS = {"shows_items": False, "replaces": False}
"""For single jobs only: the flags of a cluster that replaces no set of pods."""

VIRTUAL = pytest.mark.looptime(noop_cycles=300)
"""Virtual time that lets pickling threads start before it jumps."""


class World:
    """A platform whose jobs wait for ``gate``, then do their *work*; ``starts`` counts them."""

    def __init__(self, work: Callable[[Run], Any] = carry_out) -> None:
        self.starts: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self._after = work
        self.platform: Platform = on_loop_time(memory_platform(self._work))

    async def _work(self, run: Run) -> int | None:
        self.starts[run.spec.name] += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            return 42
        code: int | None = await self._after(run)
        return code

    @property
    def store(self) -> MemoryStore:
        return self.platform.store  # type: ignore[return-value]

    @property
    def cluster(self) -> MemoryCluster:
        return self.platform.cluster  # type: ignore[return-value]

    @property
    def started(self) -> int:
        """Number of attempts that have started."""
        return self.starts.total()

    async def until_started(self, count: int) -> None:
        """Wait until *count* attempts have started."""
        await until(lambda: self.started >= count)


def platform_with(kind: type[C], work: Any = carry_out) -> tuple[Platform, C]:
    """Return a platform on the loop's time with a cluster of class *kind*, and that cluster."""
    plain = on_loop_time(memory_platform())
    cluster = kind(plain.store, work)
    return replace(plain, cluster=cluster), cluster


class Passing:
    """Pass every request on to a port; subclasses change some."""

    def __init__(self, port: Any) -> None:
        self.port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


def encoder() -> Encoder:
    """Return an encoder of plain inputs for a function with any parameters."""
    uploaded: Any = SimpleNamespace(call=SimpleNamespace(function=None))
    return Encoder(uploaded, "auto")


async def left_on(platform: Platform) -> list[str]:
    """Return the objects that submissions don't share, the secrets, and the jobs."""
    names = [stored.name for stored in await platform.store.list("")]
    own = [name for name in names if not name.startswith(("code/", "functions/", "data/"))]
    secrets: dict[str, bytes] = platform.cluster._secrets  # type: ignore[attr-defined]
    return own + [*secrets] + [seen.name for seen in await platform.cluster.find()]


async def claim(run: Run) -> None:
    """Claim the attempt, like its runner."""
    order = run.spec.order
    name = wire.attempt_key(order.scope, order.index, order.attempt, "claim")
    await run.store.create(name, b"", {"executor": run.executor})


async def dies(run: Run) -> int:
    """Claim the attempt and end without an outcome."""
    await claim(run)
    return 9


async def preempted(run: Run) -> int:
    """Claim the attempt and commit that the platform asked it to stop."""
    await claim(run)
    text = outcomes.ErrorText(
        qualname="", message="the job was asked to stop", traceback="", phase="execute"
    )
    body = outcomes.encode_error(text, None)
    outcome = wire.Outcome(
        wire.Kind.ERROR,
        reason="preempted",
        phase="execute",
        executor=run.executor,
        body=outcomes.digest(body.content),
    )
    order = run.spec.order
    attempt = (order.scope, order.index, order.attempt)
    assert isinstance(body.content, bytes)
    name = wire.attempt_key(*attempt, "outcome")
    await run.store.create(name, body.content, outcome.signed(run.spec.key, *attempt))
    return wire.EXIT_FINAL


async def until(condition: Callable[[], Any]) -> None:
    """Poll until *condition* is true, for at most 1000 virtual seconds."""
    async with asyncio.timeout(1000):
        while not condition():
            await asyncio.sleep(0.2)
