"""What users are told of their jobs, by recordings of a real control plane and variants of them.

Each file in ``recorded/`` is one case: everything there was at some moments of
a Job's life, and what is expected at each: status, phase, reason, exit code,
outlook, and words that must be in what is told.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._runner.protocol.retry_budgets import INFRASTRUCTURE
from kinetic.aio.kubernetes.diagnosis.causes import Outlook
from kinetic.aio.kubernetes.diagnosis.facts import Pod, Seen, merged
from kinetic.aio.kubernetes.diagnosis.judge import judge, judge_pod, refused_request
from kinetic.aio.kubernetes.diagnosis.quantities import number, requests, shown
from kinetic.aio.ports import Phase
from kinetic.job_status import JobStatus, Reason
from tests.kubernetes.situations import check_any_order, row

RECORDED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "recorded").glob("*.json"))
}


def seen_of(case: dict[str, Any], upto: int | None = None) -> Seen:
    """What was seen after the first *upto* steps."""
    known = Seen()
    for step in case["steps"][:upto]:
        known = merged(known, now(case, step))
    return known


def now(case: dict[str, Any], step: dict[str, Any]) -> Seen:
    """One step alone, as somebody sees it who comes late."""
    nodes = [one["nodes"] for one in case["steps"] if "nodes" in one and one["t"] <= step["t"]]
    return Seen(
        job=step["job"],
        pods=step["pods"],
        events=step["events"],
        nodes=nodes[-1] if nodes else None,
        workload=case.get("workload"),
    )


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_job_is_told_as_it_should_be(name: str) -> None:
    case = RECORDED[name]
    if "answer" in case:
        verdicts = [refused_request(case["answer"])]
    else:
        verdicts = [judge(seen_of(case, upto + 1)) for upto in range(len(case["steps"]))]
    for verdict, expected in zip(verdicts, case["expected"], strict=True):
        assert row(verdict) == expected["verdict"], verdict.text
        for words in expected.get("told", ()):
            assert words in verdict.text


@pytest.mark.parametrize("name", [name for name, case in RECORDED.items() if "steps" in case])
def test_a_late_observer_says_the_same_status_unless_the_cause_is_gone(name: str) -> None:
    """Who attaches afterwards sees the last step only: never a success out of a failure."""
    case = RECORDED[name]
    verdict = judge(now(case, case["steps"][-1]))
    expected = case["expected"][-1]["verdict"]
    if case["steps"][-1]["job"] is not None:
        assert verdict.status.name == expected[0]
    else:
        assert verdict.status.name in ("NOT_FOUND", expected[0])
    assert verdict.outlook.name == expected[4]


@pytest.mark.parametrize("name", [name for name, case in RECORDED.items() if "steps" in case])
def test_a_pod_that_may_still_run_is_never_told_as_ended(name: str) -> None:
    case = RECORDED[name]
    for upto, step in enumerate(case["steps"]):
        statuses = [
            (status.get("state") or {}, pod["status"].get("phase"))
            for pod in step["pods"]
            for status in pod["status"].get("containerStatuses", ())
        ]
        one_program = ((step["job"] or {}).get("spec") or {}).get("completions", 1) == 1
        if one_program and any(
            "running" in state and phase == "Running" for state, phase in statuses
        ):
            assert judge(seen_of(case, upto + 1)).phase in (Phase.RUNNING, Phase.PENDING)


@pytest.mark.parametrize("name", [name for name, case in RECORDED.items() if "steps" in case])
def test_neither_order_nor_repetition_changes_what_is_told(name: str) -> None:
    check_any_order(seen_of(RECORDED[name]))


def test_what_the_platform_did_is_what_the_infrastructure_budget_is_for() -> None:
    """The reasons of disruptions are those that the rule about retries knows."""
    told = {
        name: {expected["verdict"][2] for expected in case["expected"]} - {None}
        for name, case in RECORDED.items()
    }
    for name in ("preempted", "gke-spot-preempted"):
        assert told[name] == {"PREEMPTED"}
    for name in ("evicted-api", "taint-eviction", "evicted-memory-pressure"):
        assert told[name] == {"EVICTED"}
    for name in ("node-deleted", "node-restarted"):
        assert told[name] == {"NODE_LOST"}
    reasons = {Reason.PREEMPTED, Reason.EVICTED, Reason.NODE_LOST}
    assert {reason.value for reason in reasons} == INFRASTRUCTURE
    assert told["evicted-emptydir-limit"] == {"OUT_OF_DISK"}, "a limit of its own is not"


# --- the same, said otherwise -------------------------------------------------------------


def alone(name: str, step: int = -1) -> Seen:
    """One moment of a recording, to be changed."""
    case = copy.deepcopy(RECORDED[name])
    return now(case, case["steps"][step])


def status_of(seen: Seen) -> dict[str, Any]:
    status: dict[str, Any] = seen.pods[-1]["status"]
    return status


def as_fields(seen: Seen) -> dict[str, Any]:
    names = ("job", "pods", "events", "nodes", "workload")
    return {name: getattr(seen, name) for name in names}


def test_the_autoscaler_at_its_limit_is_waited_for() -> None:
    seen = alone("gke-scale-up-not-triggered")
    for event in seen.events:
        if event["reason"] == "NotTriggerScaleUp":
            event["message"] = "pod didn't trigger scale-up: 1 max node group size reached"  # type: ignore[index]
    verdict = judge(seen)
    assert verdict.outlook is Outlook.OPEN
    assert "max node group size reached" in verdict.message


def test_what_was_last_said_about_scaling_counts() -> None:
    seen = alone("gke-scale-up-no-stock")
    assert "out of resources" in judge(seen).message
    events = [event for event in seen.events if event["reason"] != "TriggeredScaleUp"]
    again = {**next(e for e in seen.events if e["reason"] == "TriggeredScaleUp")}
    verdict = judge(Seen(**{**as_fields(seen), "events": [*events, again]}))
    assert "a node is being added" in verdict.message


def test_an_oom_kill_with_exit_code_0_is_a_success() -> None:
    seen = alone("success")
    status_of(seen)["containerStatuses"][0]["state"]["terminated"]["reason"] = "OOMKilled"
    verdict = judge(seen)
    assert verdict.status is JobStatus.SUCCEEDED
    assert "out of memory" in verdict.message


def test_a_disruption_is_not_forgotten_when_its_pod_and_its_node_are_gone() -> None:
    case = copy.deepcopy(RECORDED["preempted"])
    seen = seen_of(case, 4)
    after = merged(seen, Seen(job=case["steps"][4]["job"], nodes=[]))
    assert judge(after).reason is Reason.PREEMPTED


def test_a_pod_is_judged_without_regard_to_its_job() -> None:
    """An attempt is closed on evidence about its own pod, whatever the Job does next."""
    seen = alone("evicted-api", 3)
    assert judge(seen).phase is Phase.PENDING
    verdict = judge_pod(Pod(seen.pods[0], seen))
    assert (verdict.phase, verdict.reason) == (Phase.ENDED, Reason.EVICTED)
    assert verdict.executor == seen.pods[0]["metadata"]["uid"]


def test_a_suspended_job_has_not_failed_with_the_pods_it_lost() -> None:
    """Kueue takes its place back: the pods are stopped, and later others are made."""
    stopping = alone("job-deleted-foreground", 2)
    assert stopping.job is not None
    job = copy.deepcopy(stopping.job)
    del job["metadata"]["deletionTimestamp"]
    job["spec"]["suspend"] = True
    seen = Seen(job=job, pods=stopping.pods)
    verdict = judge(seen)
    assert (verdict.status, verdict.reason) == (JobStatus.RUNNING, Reason.QUEUED)
    ended = alone("job-deleted-foreground", 3)
    seen = merged(seen, Seen(job=job, pods=ended.pods))
    assert judge(seen).status is JobStatus.PENDING
    assert judge(seen).reason is Reason.QUEUED
    job = copy.deepcopy(job)
    job["spec"]["suspend"] = False
    job["status"] = {"conditions": [{"type": "Suspended", "status": "False"}]}
    assert judge(merged(seen, Seen(job=job))).status is JobStatus.PENDING


def test_a_deadline_before_the_program_ran_is_told_with_what_held_it() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
    seen = alone("image-not-found")
    assert seen.job is not None
    job = {**seen.job, "status": {"failed": 1, "conditions": [failed]}}
    verdict = judge(merged(seen, Seen(job=job)))
    assert (verdict.status, verdict.reason) == (JobStatus.FAILED, Reason.IMAGE_PULL)
    assert "before the program ever ran: the image" in verdict.message
    status_of(seen).update(phase="Failed", reason="DeadlineExceeded")
    verdict = judge(seen)
    assert (verdict.status, verdict.reason) == (JobStatus.FAILED, Reason.IMAGE_PULL)


def test_a_program_that_ends_well_while_it_is_evicted_has_succeeded() -> None:
    seen = alone("evicted-api", 3)
    status_of(seen)["phase"] = "Succeeded"
    status_of(seen)["containerStatuses"][0]["state"]["terminated"]["exitCode"] = 0
    verdict = judge(seen)
    assert verdict.status is JobStatus.SUCCEEDED
    assert "while the platform stopped it" in verdict.message


def test_what_an_affinity_asks_for_is_told() -> None:
    seen = alone("unsched-selector")
    spec = seen.pods[0]["spec"]
    spec.pop("nodeSelector")
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a", "b"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
    spec["affinity"] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}
    }
    assert "topology.kubernetes.io/zone=a or b" in judge(seen).message


def test_events_of_an_earlier_job_of_the_same_name_are_not_its_own() -> None:
    seen = alone("create-sa-missing")
    for event in seen.events:
        event["involvedObject"]["uid"] = "another"
    assert judge(seen).message == "no pod has been made yet"
    for event in seen.events:
        event["involvedObject"].pop("uid")
        event["lastTimestamp"] = "2001-01-01T00:00:00Z"  # type: ignore[index]
    assert judge(seen).message == "no pod has been made yet"


def test_a_job_that_nobody_has_seen_is_not_there() -> None:
    verdict = judge(Seen(name="kinetic-job-1"))
    assert (verdict.status, verdict.phase) == (JobStatus.NOT_FOUND, Phase.GONE)
    assert "kinetic-job-1" in verdict.message


def test_without_nodes_the_words_of_the_scheduler_must_do() -> None:
    seen = alone("unsched-gpu-busy", 0)
    verdict = judge(Seen(**{**as_fields(seen), "nodes": None}))
    assert (verdict.outlook, "in use" in verdict.message) == (Outlook.OPEN, True)
    seen = alone("unsched-memory")
    verdict = judge(Seen(**{**as_fields(seen), "nodes": None}))
    assert (verdict.outlook, "500Gi" in verdict.message) == (Outlook.BLOCKED, True)


# --- anything may be missing --------------------------------------------------------------

STEPS = [(case, step) for case in RECORDED.values() for step in case.get("steps", ())]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(STEPS), st.data())
def test_whatever_is_missing_there_is_a_verdict(
    chosen: tuple[dict[str, Any], dict[str, Any]], data: st.DataObject
) -> None:
    case, step = chosen
    step = copy.deepcopy(step)
    for _ in range(data.draw(st.integers(1, 4))):
        holes: list[Callable[[], object]] = []
        _collect(step, holes)
        if holes:
            data.draw(st.sampled_from(holes))()
    seen = Seen(
        job=step.get("job"),
        pods=step.get("pods") or (),
        events=step.get("events") or (),
        nodes=step.get("nodes"),
        workload=case.get("workload"),
    )
    for verdict in (judge(seen), judge(merged(seen, Seen()))):
        assert verdict.message
        assert len(verdict.text) < 4000


def _collect(value: Any, holes: list[Callable[[], object]]) -> None:
    """Ways to take something away, at any depth."""
    if isinstance(value, dict):
        for key in list(value):
            holes.append(lambda key=key: value.pop(key, None))
            holes.append(lambda key=key: value.__setitem__(key, None))
            _collect(value[key], holes)
    elif isinstance(value, list):
        for one in list(value):
            _collect(one, holes)
            holes.append(lambda one=one: value.remove(one) if one in value else None)


@settings(deadline=None)
@given(st.sampled_from(["500m", "2", "1.5", "64Mi", "2Gi", "1e3", "12E", "3k"]))
def test_a_quantity_is_a_number(text: str) -> None:
    assert number(text) > 0


def test_quantities_as_they_are_written_and_said() -> None:
    assert [number(one) for one in ("500m", "2Gi", "1M", "1e3", "x", None)] == [
        0.5, 2 * 1024**3, 1e6, 1e3, 0, 0,
    ]  # fmt: skip
    assert shown("memory", number("1536Mi")) == "1.5Gi of memory"
    assert shown("google.com/tpu", 1) == "1 TPU chip"


def test_a_pod_asks_for_what_its_containers_and_sidecars_ask() -> None:
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "4", "memory": "1Gi"}}},
            {"resources": {"limits": {"cpu": "500m"}}},
        ],
        "initContainers": [
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
        ],
        "overhead": {"cpu": "100m"},
    }
    assert requests(spec) == {"cpu": 3.6, "memory": 1024.0**3}
