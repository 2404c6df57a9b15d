"""Test the diagnosis of jobs with recordings of a real control plane.

A file in ``recorded/`` has all objects at some moments of a Job's life and the expected verdict at
each: status, phase, reason, exit code, outlook, and parts of the message. A file in
``recorded_ends/`` has patterns that the last message must and must not match, and may have the
reason. The expectations were written before the code ran on the recordings.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE
from kinetic.aio.kubernetes.diagnosis.admission import refused_request
from kinetic.aio.kubernetes.diagnosis.causes import Outlook
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts, Pod, merge_facts
from kinetic.aio.kubernetes.diagnosis.judge import judge, pod_state
from kinetic.aio.kubernetes.diagnosis.nodes import format_amount, parse_quantity, requests
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason
from tests.kubernetes.verdicts import check_any_order, row


def _recordings(folder: str) -> dict[str, dict[str, Any]]:
    files = sorted((Path(__file__).parent / folder).glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in files}


RECORDED, ENDS = _recordings("recorded"), _recordings("recorded_ends")
WITH_STEPS = [name for name, case in RECORDED.items() if "steps" in case]


def seen_of(case: dict[str, Any], upto: int | None = None) -> JobFacts:
    """Return what an observer has seen after the first *upto* steps."""
    known = JobFacts()
    for index in range(len(case["steps"]))[:upto]:
        known = merge_facts(known, now(case, index))
    return known


def now(case: dict[str, Any], index: int = -1) -> JobFacts:
    """Return what a late observer sees: one step alone, with the latest known nodes."""
    steps = case["steps"]
    step = steps[index]
    earlier = steps[: steps.index(step) + 1]
    nodes = [known["nodes"] for known in earlier if known.get("nodes") is not None]
    return JobFacts(
        job=step["job"],
        pods=step["pods"],
        events=step["events"],
        nodes=nodes[-1] if nodes else None,
        claims=step.get("claims") or (),
        workload=case.get("workload"),
    )


@pytest.mark.parametrize("name", WITH_STEPS)
def test_each_step_of_a_recording_has_its_cause(name: str) -> None:
    case = RECORDED[name]
    verdicts = [judge(seen_of(case, upto + 1)) for upto in range(len(case["steps"]))]
    for verdict, expected in zip(verdicts, case["expected"], strict=True):
        assert row(verdict) == expected["verdict"], verdict.text
        for part in expected.get("text", ()):
            assert part in verdict.text


@pytest.mark.parametrize("name", RECORDED.keys() - set(WITH_STEPS))
def test_a_refused_job_has_its_cause(name: str) -> None:
    case = RECORDED[name]
    (expected,) = case["expected"]
    cause = refused_request(case["answer"])
    assert [cause.reason and cause.reason.name, cause.outlook.name] == expected["verdict"][2::2]
    for part in expected["text"]:
        assert part in cause.text


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_recording_has_its_cause_and_advice(name: str) -> None:
    case = ENDS[name]
    expected = case["expected"]
    if "answer" in case:
        cause = refused_request(case["answer"])
        text, advice = cause.text, cause.next_step
    else:
        verdict = judge(seen_of(case))
        text, advice = verdict.text, verdict.advice
        assert verdict.status.name in expected["status"].split("|"), text
        reason = verdict.reason.name if verdict.reason is not None else None
        assert reason == expected.get("reason", reason), text
    for pattern in expected["cause"]:
        assert re.search(pattern, text, re.IGNORECASE), text
    for pattern in expected["never"]:
        assert not re.search(pattern, text, re.IGNORECASE), text
    for pattern in expected["advice"]:
        assert re.search(pattern, advice, re.IGNORECASE), text


@pytest.mark.parametrize("name", ["policy-on-jobs", "webhook-denies-job"])
def test_a_denied_job_may_be_accepted_later(name: str) -> None:
    """A batch that has started therefore pauses instead of failing its items."""
    assert refused_request(ENDS[name]["answer"]).outlook is Outlook.BLOCKED


@pytest.mark.parametrize("name", WITH_STEPS)
def test_a_late_observer_sees_the_same_status_unless_the_cause_is_gone(name: str) -> None:
    """An observer of the last step alone never sees a success in place of a failure."""
    case = RECORDED[name]
    verdict = judge(now(case))
    expected = case["expected"][-1]["verdict"]
    gone = case["steps"][-1]["job"] is None
    assert verdict.status.name in (expected[0], *["NOT_FOUND"] * gone)
    assert verdict.outlook.name == expected[4]


@pytest.mark.parametrize("name", WITH_STEPS)
def test_a_pod_that_may_still_run_has_not_ended(name: str) -> None:
    case = RECORDED[name]
    for upto, step in enumerate(case["steps"]):
        states = [
            status.get("state") or {}
            for pod in step["pods"]
            for status in pod["status"].get("containerStatuses", ())
            if pod["status"].get("phase") == "Running"
        ]
        if any("running" in state for state in states):
            assert judge(seen_of(case, upto + 1)).phase in (Phase.RUNNING, Phase.PENDING)


@pytest.mark.parametrize("case", [*RECORDED.values(), *ENDS.values()], ids=[*RECORDED, *ENDS])
def test_neither_order_nor_repetition_changes_the_verdict(case: dict[str, Any]) -> None:
    if "steps" in case:
        check_any_order(seen_of(case))


def test_the_infrastructure_budget_is_for_the_reasons_of_disruptions() -> None:
    found = {
        name: {expected["verdict"][2] for expected in case["expected"]} & {"OUT_OF_DISK"}
        for name, case in RECORDED.items()
    }
    reasons = {Reason.PREEMPTED, Reason.EVICTED, Reason.NODE_LOST}
    assert {reason.value for reason in reasons} == INFRASTRUCTURE
    assert found["evicted-emptydir-limit"], "the job's own limit isn't infrastructure"


# --- variants of recordings ---------------------------------------------------------------


def alone(name: str, step: int) -> JobFacts:
    """Return a copy of one moment of a recording that a test can change."""
    return now(copy.deepcopy(RECORDED[name]), step)


def test_a_disruption_is_not_forgotten_when_its_pod_and_its_node_are_gone() -> None:
    case = RECORDED["preempted"]
    after = merge_facts(seen_of(case, 4), JobFacts(job=case["steps"][4]["job"], nodes=[]))
    assert judge(after).reason is Reason.PREEMPTED


def test_a_pod_is_judged_without_its_job() -> None:
    """An attempt ends on evidence about its own pod, whatever the Job does next."""
    seen = alone("evicted-api", 3)
    assert judge(seen).phase is Phase.PENDING
    verdict = pod_state(Pod(seen.pods[0], seen))
    assert (verdict.phase, verdict.reason) == (Phase.ENDED, Reason.EVICTED)
    assert verdict.executor == seen.pods[0]["metadata"]["uid"]


def test_a_suspended_job_has_not_failed_with_the_pods_it_lost() -> None:
    """When Kueue reclaims its quota, the pods are stopped, and others are created later."""
    stopping, ended = (alone("job-deleted-foreground", step) for step in (2, 3))
    assert stopping.job is not None
    job: dict[str, Any] = {**stopping.job, "spec": {**stopping.job["spec"], "suspend": True}}
    job["metadata"] = {**job["metadata"], "deletionTimestamp": None}
    seen = JobFacts(job=job, pods=stopping.pods)
    assert (judge(seen).status, judge(seen).reason) == (JobStatus.RUNNING, Reason.QUEUED)
    seen = merge_facts(seen, JobFacts(job=job, pods=ended.pods))
    assert (judge(seen).status, judge(seen).reason) == (JobStatus.PENDING, Reason.QUEUED)
    assert pod_state(Pod(ended.pods[0], seen)).reason is Reason.PREEMPTED
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": "2100-01-01T00:00:00Z"}
    job = {**job, "spec": {**job["spec"], "suspend": False}, "status": {"conditions": [resumed]}}
    seen = merge_facts(seen, JobFacts(job=job))
    assert judge(seen).status is JobStatus.PENDING
    assert pod_state(Pod(ended.pods[0], seen)).reason is Reason.PREEMPTED
    resumed["lastTransitionTime"] = "2000-01-01T00:00:00Z"  # before the pod was created
    assert pod_state(Pod(ended.pods[0], seen)).reason is Reason.LOST


def test_a_job_that_was_never_seen_does_not_exist() -> None:
    verdict = judge(JobFacts(name="kinetic-job-1"))
    assert (verdict.status, verdict.phase) == (JobStatus.NOT_FOUND, Phase.GONE)
    assert "kinetic-job-1" in verdict.message


# --- anything may be missing --------------------------------------------------------------

STEPS = [(case, step) for case in RECORDED.values() for step in case.get("steps", ())]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(STEPS), st.data())
def test_there_is_a_verdict_whatever_is_missing(
    chosen: tuple[dict[str, Any], dict[str, Any]], data: st.DataObject
) -> None:
    case, step = chosen
    step = copy.deepcopy(step)
    for _ in range(data.draw(st.integers(1, 4))):
        holes: list[Callable[[], object]] = []
        _collect(step, holes)
        if holes:
            data.draw(st.sampled_from(holes))()
    seen = JobFacts(
        job=step.get("job"),
        pods=step.get("pods") or (),
        events=step.get("events") or (),
        nodes=step.get("nodes"),
        workload=case.get("workload"),
    )
    for verdict in (judge(seen), judge(merge_facts(seen, JobFacts()))):
        assert verdict.message
        assert len(verdict.text) < 4000


def _collect(value: Any, holes: list[Callable[[], object]]) -> None:
    """Collect functions that each remove or clear something, at any depth."""
    if isinstance(value, dict):
        for key in list(value):
            holes.append(lambda key=key: value.pop(key, None))
            holes.append(lambda key=key: value.__setitem__(key, None))
            _collect(value[key], holes)
    elif isinstance(value, list):
        for item in list(value):
            _collect(item, holes)
            holes.append(lambda item=item: value.remove(item) if item in value else None)


def test_quantities_are_read_and_shown() -> None:
    assert [parse_quantity(text) for text in ("500m", "2Gi", "1M", "1e3", "x", None)] == [
        0.5, 2 * 1024**3, 1e6, 1e3, 0, 0,
    ]  # fmt: skip
    assert format_amount("memory", parse_quantity("1536Mi")) == "1.5Gi of memory"
    assert format_amount("google.com/tpu", 1) == "1 TPU chip"


def test_a_pod_requests_what_its_containers_and_sidecars_request() -> None:
    sidecar = {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}
    containers = [
        {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "4", "memory": "1Gi"}}},
        {"resources": {"limits": {"cpu": "500m"}}},
    ]
    spec = {"containers": containers, "initContainers": [sidecar], "overhead": {"cpu": "100m"}}
    assert requests(spec) == {"cpu": 3.6, "memory": 1024.0**3}
