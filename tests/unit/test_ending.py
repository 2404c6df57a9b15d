"""Test which step follows from the facts about an attempt that has ended."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.outcomes import Death
from kinetic.aio._engine.ending import Ask, GiveUp, Step, decide, error_for_waiters
from kinetic.aio._submissions.submission import Evidence
from kinetic.aio.ports import Observation, Phase
from kinetic.errors import NotFound, WireError

NAME = "attempt"
OPEN, CANCELLING = wire.ItemState.OPEN, wire.ItemState.CANCELLING


def observed(executor: str = "", phase: Phase = Phase.ENDED, name: str = NAME) -> Observation:
    return Observation(name=name, phase=phase, executor=executor)


def step(
    observation: Observation | None,
    *,
    executor: str | None = None,
    state: wire.ItemState = OPEN,
    attempt: int = 1,
    closes: bool = True,
    **evidence: Any,
) -> Step | None:
    """Decide about attempt 1, which has ended, of an item whose current attempt is *attempt*."""
    return decide(
        wire.Item(state, attempt),
        wire.Attempt(executor),
        NAME,
        Evidence(0, 1, observation, **evidence),
        closes=closes,
    )


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (step(observed("a"), executor="a"), Death),
        (step(observed("b"), executor="a"), None),
        (step(observed("a", name="another"), executor="a"), None),
        (step(observed("a"), executor="a", closes=False), None),
        (step(observed("a"), executor="a", closes=False, state=CANCELLING), Death),
        (step(observed("a"), executor="a", state=wire.ItemState.SUCCEEDED), None),
        (step(observed("a"), executor=None), Death),
        (step(observed(phase=Phase.RUNNING), executor=wire.VOID), Death),
        # An observation without an executor is about the claimant only if it was known before.
        (step(None, executor="a"), Ask),
        (step(observed(), executor="a"), Ask),
        (step(None, executor="a", claimant="a"), Death),
        (step(observed(), executor="a", claimant="a"), Death),
        # The item gets no other attempt.
        (step(observed("b"), executor="a", final="over"), Death),
        (step(None, attempt=2, executor="a", final="over"), Death),
        (step(None, attempt=2, final="over"), GiveUp),
        (step(None, attempt=2), None),
        (step(None, attempt=2, state=CANCELLING), None),
        # The attempt could not be launched.
        (step(None, refusal=ValueError("no quota")), Death),
        (step(None, refusal=ValueError("no quota"), executor="a"), None),
    ],
)
def test_the_next_step(got: Step | None, expected: type[Step] | None) -> None:
    assert (None if got is None else type(got)) is expected


@pytest.mark.parametrize(
    ("error", "warnings"), [(NotFound("cleaned up"), 0), (WireError("damaged"), 1)]
)
def test_a_removed_object_is_no_warning(
    error: Exception, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert error_for_waiters("the end of it", error, 0.0) is error
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == warnings
