"""Store and commit reports like the runner of a job."""

from __future__ import annotations

from kinetic._runner.protocol import frames, metrics, outcomes, wire
from kinetic._runner.protocol.metrics import Reports, Value
from kinetic.testing import Run
from kinetic.testing.attempts import commit
from tests.engine.world import claim

__all__ = ["store_slot", "succeed"]

Entries = list[tuple[int, Value]]


async def store_slot(
    run: Run, slot: int, entries: Entries, *, first: int = 0, writer: str = "w", key: bytes = b""
) -> None:
    """Store reports like the runner of *run*."""
    order = run.spec.order
    name = metrics.metrics_key(order.scope, order.index, order.attempt, slot)
    reports = Reports(writer, first, entries)
    await run.store.create(name, *reports.signed(key or run.spec.key, order.scope, name))


async def succeed(run: Run, entries: Entries, *, first: int = 0) -> int:
    """Commit a value, with *entries* as the reports that weren't stored."""
    await claim(run)
    content = outcomes.encode_value(1, "").content
    assert isinstance(content, bytes)
    body = frames.with_fields(content, {metrics.METRICS: Reports("w", first, entries).to_fields()})
    outcome = wire.Outcome(kind=wire.Kind.VALUE, phase="execute", metrics=True)
    return await commit(run, run.spec.order, outcome, body)
