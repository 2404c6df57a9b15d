"""The guards of conftest.py see what they are there to see."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.conftest import LoopGuard, end_processes, measure_waits, withheld_seconds
from tests.scripts import Program

WAITING = """
import signal, sys
signal.signal(signal.SIGTERM, signal.{})
print(flush=True)
sys.stdin.read()
"""


async def test_a_loop_that_is_held_fails_the_test(loop_guard: type[LoopGuard]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)held for \d+ ms.*sleep\(1\)"):
        with loop_guard():
            await asyncio.sleep(0)
            before, since = measure_waits(), time.monotonic()
            time.sleep(1)
            while time.monotonic() - since - withheld_seconds(before, measure_waits()) < 0.5:
                time.sleep(1)  # what the machine has withheld is taken off there, too


async def test_a_loop_that_waits_does_not(loop_guard: type[LoopGuard]) -> None:
    with loop_guard():
        await asyncio.to_thread(time.sleep, 0.2)


@pytest.mark.parametrize(("on_sigterm", "survives"), [("SIG_DFL", False), ("SIG_IGN", True)])
def test_a_process_that_outlives_its_test_is_named_and_killed(
    home: Path, on_sigterm: str, survives: bool
) -> None:
    with Program("-c", WAITING.format(on_sigterm)) as process:
        process.line()
        named = end_processes(home, deadline=1.0 if survives else 10.0)
        assert [str(process.pid) in line for line in named] == [True] * survives
        process.process.wait(10)  # by nothing else: its input is open


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="`-n 0`: there are no groups")
@pytest.mark.xdist_group("guards")
def test_tests_of_a_group_share_a_process(request: pytest.FixtureRequest) -> None:
    """A pytest that pytest-xdist does not know spreads them without a word."""
    assert request.node.nodeid.endswith("@guards")
