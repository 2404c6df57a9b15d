"""What a person is told at the end of a recording: status, cause and what to do next.

Each file in ``recorded_ends/`` is one case of a real node with the real
controllers, with what was to be told written down before the code was tried on
it: patterns that the cause and the advice must have, and some that must not be.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kinetic.aio.kubernetes.diagnosis.facts import Seen, merged
from kinetic.aio.kubernetes.diagnosis.judge import judge, refused_request
from tests.kubernetes.situations import check_any_order

RECORDED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "recorded_ends").glob("*.json"))
}


def seen_of(case: dict[str, Any]) -> Seen:
    """All that somebody knows who watched it from its beginning to its end."""
    known = Seen()
    for step in case["steps"]:
        now = Seen(
            job=step["job"], pods=step["pods"], events=step["events"], nodes=step.get("nodes")
        )
        known = merged(known, now)
    return known


@pytest.mark.parametrize("name", RECORDED)
def test_the_end_of_a_recording_is_told_as_a_person_needs_it(name: str) -> None:
    case = RECORDED[name]
    verdict = refused_request(case["answer"]) if "answer" in case else judge(seen_of(case))
    told = case["told"]
    assert verdict.status.name in told["status"].split("|"), verdict.text
    for pattern in told["cause"]:
        assert re.search(pattern, verdict.text, re.IGNORECASE), verdict.text
    for pattern in told["never"]:
        assert not re.search(pattern, verdict.text, re.IGNORECASE), verdict.text
    for pattern in told["advice"]:
        assert re.search(pattern, verdict.advice, re.IGNORECASE), verdict.text


@pytest.mark.parametrize("name", [name for name, case in RECORDED.items() if "steps" in case])
def test_neither_order_nor_repetition_changes_the_end(name: str) -> None:
    check_any_order(seen_of(RECORDED[name]))
