"""Which step follows from what is known of an attempt that has ended."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic._runner.protocol import wire
from kinetic.aio._engine.ending import Ask, Close, Facts, GiveUp, Step, decide
from kinetic.aio._engine.submission import Evidence
from kinetic.aio.ports import Observation, Phase

NAME = "attempt"
OPEN, CANCELLING = wire.ItemState.OPEN, wire.ItemState.CANCELLING


def seen(executor: str = "", phase: Phase = Phase.ENDED, name: str = NAME) -> Observation:
    return Observation(name=name, phase=phase, executor=executor)


def step(
    word: Observation | None,
    *,
    executor: str | None = None,
    state: wire.ItemState = OPEN,
    attempt: int = 1,
    closes: bool = True,
    **evidence: Any,
) -> Step | None:
    """Decide about attempt 1, which is reported as ended, of an item that is at *attempt*."""
    return decide(
        Facts(
            item=wire.Item(state, attempt),
            attempt=wire.Attempt(executor),
            name=NAME,
            evidence=Evidence(0, 1, word, **evidence),
            closes=closes,
        )
    )


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (step(seen("a"), executor="a"), Close),
        (step(seen("b"), executor="a"), None),
        (step(seen("a", name="another"), executor="a"), None),
        (step(seen("a"), executor="a", closes=False), None),
        (step(seen("a"), executor="a", closes=False, state=CANCELLING), Close),
        (step(seen("a"), executor="a", state=wire.ItemState.SUCCEEDED), None),
        (step(seen("a"), executor=None), Close),
        (step(seen(phase=Phase.RUNNING), executor=wire.VOID), Close),
        # A word that names no process is about the claimant only if the claim was known before.
        (step(None, executor="a"), Ask),
        (step(seen(), executor="a"), Ask),
        (step(None, executor="a", claimant="a"), Close),
        (step(seen(), executor="a", claimant="a"), Close),
        # No other attempt comes.
        (step(seen("b"), executor="a", final="over"), Close),
        (step(None, attempt=2, executor="a", final="over"), Close),
        (step(None, attempt=2, final="over"), GiveUp),
        (step(None, attempt=2), None),
        (step(None, attempt=2, state=CANCELLING), None),
        # It could not be launched.
        (step(None, refusal=ValueError("no quota")), Close),
        (step(None, refusal=ValueError("no quota"), executor="a"), None),
    ],
)
def test_the_next_step(got: Step | None, wanted: type[Step] | None) -> None:
    assert (None if got is None else type(got)) is wanted
