"""Compare verdicts of the diagnosis."""

from __future__ import annotations

import copy
from dataclasses import replace

from kinetic.aio.kubernetes.diagnosis.causes import Diagnosis
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts
from kinetic.aio.kubernetes.diagnosis.judge import judge


def row(verdict: Diagnosis) -> list[object]:
    """Return the verdict in the form of the recordings."""
    reason = verdict.reason.name if verdict.reason is not None else None
    status, phase, outlook = verdict.status.name, verdict.phase.name, verdict.outlook.name
    return [status, phase, reason, verdict.exit_code, outlook]


def check_any_order(facts: JobFacts) -> None:
    """Check that order and repetition don't change the verdict."""
    verdict = judge(facts)
    twice = [copied for event in facts.events for copied in (event, copy.deepcopy(event))]
    for other in (
        replace(facts, pods=[*reversed(facts.pods)], deleted_pods=[*reversed(facts.deleted_pods)]),
        replace(facts, events=twice),
        replace(facts, nodes=facts.nodes and [*reversed(facts.nodes)]),
    ):
        again = judge(other)
        assert (row(again), again.executor) == (row(verdict), verdict.executor), again.text
