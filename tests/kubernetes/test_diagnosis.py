# ruff: noqa: E501 - what the API says is one line each
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
from kinetic.aio.kubernetes.diagnosis.admission import refusal
from kinetic.aio.kubernetes.diagnosis.held import refused_request
from kinetic.aio.kubernetes.diagnosis.images import pull_failure
from kinetic.aio.kubernetes.diagnosis.judge import judge, judge_pod
from kinetic.aio.kubernetes.diagnosis.pods import Pod
from kinetic.aio.kubernetes.diagnosis.quantities import number, requests, shown
from kinetic.aio.kubernetes.diagnosis.verdict import Outlook, Seen, merged
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


@pytest.mark.parametrize(
    ("text", "outlook", "words"),
    [
        (
            (
                'failed to resolve reference "europe-docker.pkg.dev/p/r/i:1": unexpected status from '
                "HEAD request to https://europe-docker.pkg.dev/v2/p/r/i/manifests/1: 403 Forbidden"
            ),
            Outlook.BLOCKED,
            "reader role",
        ),
        (
            (
                "Error response from daemon: pull access denied for i, repository does not exist or "
                "may require 'docker login': denied: requested access to the resource is denied"
            ),
            Outlook.BLOCKED,
            "does not exist, or the nodes may not read it",
        ),
        ('manifest unknown: Failed to fetch "1"', Outlook.FINAL, "does not exist"),
        ("dial tcp: lookup registry.example: no such host", Outlook.BLOCKED, "cannot be reached"),
        ("x509: certificate signed by unknown authority", Outlook.BLOCKED, "cannot be reached"),
        (
            "toomanyrequests: You have reached your pull rate limit",
            Outlook.OPEN,
            "limits how often",
        ),
        ("write /var/lib/x: no space left on device", Outlook.BLOCKED, "no space left"),
        ("no matching manifest for linux/arm64 in the manifest list", Outlook.FINAL, "no variant"),
        ("something nobody has seen yet", Outlook.BLOCKED, "something nobody has seen yet"),
    ],
)
def test_registries_say_the_same_in_many_ways(text: str, outlook: Outlook, words: str) -> None:
    found = pull_failure("ImagePullBackOff", text, "europe-docker.pkg.dev/p/r/i:1", arch="arm64")
    assert found.outlook is outlook
    assert words in found.message + found.advice


def test_an_image_whose_name_sounds_like_an_error_is_not_judged_by_its_name() -> None:
    image = "registry.example/not-found/forbidden-403:timeout"
    text = f'failed to pull "{image}": {image}: manifest unknown'
    assert "does not exist" in pull_failure("ErrImagePull", text, image).message


@pytest.mark.parametrize(
    ("text", "reason", "outlook", "words"),
    [
        (
            (
                'pods "j-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2,'
                "pods=1, used: requests.nvidia.com/gpu=7,pods=4, limited: requests.nvidia.com/gpu=8,"
                "pods=10"
            ),
            Reason.QUOTA,
            Outlook.OPEN,
            "requests.nvidia.com/gpu 7 of 8",
        ),
        (
            (
                'jobs.batch "j" is forbidden: exceeded quota: team, requested: count/jobs.batch=1, '
                "used: count/jobs.batch=50, limited: count/jobs.batch=50"
            ),
            Reason.QUOTA,
            Outlook.OPEN,
            "used up",
        ),
        (
            (
                'pods "j-x" is forbidden: failed quota: team: must specify limits.memory for: '
                "main,proxy; requests.cpu for: main"
            ),
            Reason.QUOTA,
            Outlook.FINAL,
            "limits.memory",
        ),
        (
            (
                'pods "j-x" is forbidden: [minimum memory usage per Container is 256Mi, but request '
                "is 64Mi, maximum cpu usage per Pod is 4, but limit is 8]"
            ),
            Reason.REFUSED,
            Outlook.FINAL,
            "at least 256Mi of memory a container, 64Mi is asked",
        ),
        (
            (
                'pods "j-x" is forbidden: maximum memory usage per Container is 1Gi.  No limit is '
                "specified"
            ),
            Reason.REFUSED,
            Outlook.FINAL,
            "none is stated",
        ),
        (
            'admission webhook "policy.example.com" denied the request: images must come from us',
            Reason.REFUSED,
            Outlook.BLOCKED,
            "images must come from us",
        ),
        (
            (
                "jobs.batch \"j\" is forbidden: ValidatingAdmissionPolicy 'no-root' with binding "
                "'all' denied request: run as somebody"
            ),
            Reason.REFUSED,
            Outlook.BLOCKED,
            "run as somebody",
        ),
        (
            (
                'pods "j-x" is forbidden: unable to create new content in namespace ml because it is '
                "being terminated"
            ),
            Reason.CANCELLED,
            Outlook.FINAL,
            "the namespace ml is being deleted",
        ),
        (
            (
                'jobs.batch is forbidden: User "ada@example.com" cannot create resource "jobs" in API '
                'group "batch" in the namespace "ml"'
            ),
            Reason.REFUSED,
            Outlook.BLOCKED,
            "ada@example.com may not create jobs",
        ),
        (
            (
                'Job.batch "j" is invalid: spec.template.spec.restartPolicy: Required value: valid '
                'values: "OnFailure", "Never"'
            ),
            Reason.REFUSED,
            Outlook.FINAL,
            "spec.template.spec.restartPolicy",
        ),
        ("never heard of", Reason.REFUSED, Outlook.BLOCKED, "never heard of"),
    ],
)
def test_the_api_server_refuses_in_many_ways(
    text: str, reason: Reason, outlook: Outlook, words: str
) -> None:
    for prefix in ("", "Error creating: ", "create Pod j-0 in StatefulSet j failed error: "):
        found = refusal(prefix + text)
        assert "failed error" not in found.message
        assert (found.reason, found.outlook) == (reason, outlook)
        assert words in found.message


@pytest.mark.parametrize(
    ("reason", "message", "outlook", "words"),
    [
        (
            "WaitingForQuota",
            (
                "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor "
                "f, 1 more needed"
            ),
            Outlook.OPEN,
            "1 more CPUs of quota needed",
        ),
        (
            "ExceedsMaxQuota",
            (
                "couldn't assign flavors to pod set main: insufficient quota for cpu in flavor f, "
                "request > maximum capacity (8 > 2)"
            ),
            Outlook.FINAL,
            "can never hold it",
        ),
        ("Misconfigured", "LocalQueue nosuch doesn't exist", Outlook.BLOCKED, "nosuch"),
    ],
)
def test_why_a_queue_holds_a_job_stands_on_its_workload(
    reason: str, message: str, outlook: Outlook, words: str
) -> None:
    seen = alone("kueue-waiting")
    assert seen.workload is not None
    condition = {"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}
    seen.workload["status"]["conditions"] = [condition]
    verdict = judge(seen)
    assert (verdict.status, verdict.outlook) == (JobStatus.PENDING, outlook)
    assert words in verdict.message


def test_a_workload_without_conditions_is_further_back_in_the_queue() -> None:
    seen = alone("kueue-waiting")
    assert seen.workload is not None
    seen.workload["status"] = {}
    assert "queue 'research': others are before it" in judge(seen).message


def test_no_node_is_only_final_where_none_can_be_added() -> None:
    seen = alone("unsched-tpu-count")
    assert judge(seen).outlook is Outlook.BLOCKED
    assert judge(merged(seen, Seen(**{**as_fields(seen), "growing": False}))).definite
    assert not judge(merged(seen, Seen(**{**as_fields(seen), "growing": True}))).definite


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


@pytest.mark.parametrize(
    ("code", "reason", "words"),
    [
        (134, Reason.USER_ERROR, "SIGABRT"),
        (135, Reason.USER_ERROR, "SIGBUS"),
        (130, Reason.LOST, "SIGINT"),
        (143, Reason.LOST, "SIGTERM"),
        (126, Reason.USER_ERROR, "may not be executed"),
        (255, Reason.USER_ERROR, "exit code 255"),
    ],
)
def test_exit_codes_are_told_by_name(code: int, reason: Reason, words: str) -> None:
    seen = alone("exit-nonzero")
    status_of(seen)["containerStatuses"][0]["state"]["terminated"]["exitCode"] = code
    verdict = judge(seen)
    assert (verdict.reason, verdict.exit_code) == (reason, code)
    assert words in verdict.message


def test_an_oom_kill_with_exit_code_0_is_a_success() -> None:
    seen = alone("success")
    status_of(seen)["containerStatuses"][0]["state"]["terminated"]["reason"] = "OOMKilled"
    verdict = judge(seen)
    assert verdict.status is JobStatus.SUCCEEDED
    assert "killed for want of memory" in verdict.message


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


def test_a_sidecar_that_fails_holds_the_program_only_before_it_started() -> None:
    seen = alone("sidecar-success", 0)
    looping = {"waiting": {"reason": "CrashLoopBackOff"}}
    status = status_of(seen)["initContainerStatuses"][0]
    status.update(state=looping, lastState={"terminated": {"exitCode": 1, "reason": "Error"}})
    verdict = judge(seen)
    assert (verdict.status, verdict.reason) == (JobStatus.PENDING, Reason.SETUP)
    assert "'fuse' fails each time" in verdict.message
    running = alone("sidecar-success", 1)
    status_of(running)["initContainerStatuses"][0].update(state=looping)
    assert judge(running).status is JobStatus.RUNNING
    assert judge(running).reason is None


def test_a_program_that_ends_well_while_it_is_evicted_has_succeeded() -> None:
    seen = alone("evicted-api", 3)
    status_of(seen)["phase"] = "Succeeded"
    status_of(seen)["containerStatuses"][0]["state"]["terminated"]["exitCode"] = 0
    verdict = judge(seen)
    assert verdict.status is JobStatus.SUCCEEDED
    assert "while the platform stopped it" in verdict.message


def test_a_namespace_that_is_being_deleted_is_named() -> None:
    case = RECORDED["namespace-deleted"]
    ending = {"metadata": {"name": "ml"}, "status": {"phase": "Terminating"}}
    seen = merged(seen_of(case, 4), Seen(job=case["steps"][4]["job"], namespace=ending))
    verdict = judge(seen)
    assert (verdict.status, verdict.reason) == (JobStatus.NOT_FOUND, Reason.CANCELLED)
    assert "namespace" in verdict.message


@pytest.mark.parametrize(
    ("said", "outlook", "words"),
    [
        (
            "0/4 nodes are available: 4 node(s) didn't match pod anti-affinity rules.",
            Outlook.OPEN,
            "anti-affinity",
        ),
        (
            "0/4 nodes are available: 1 node(s) had volume node affinity conflict.",
            Outlook.BLOCKED,
            "volume node affinity conflict",
        ),
        (
            "0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            Outlook.BLOCKED,
            "not bound to a volume",
        ),
    ],
)
def test_other_obstacles_than_room_are_told_in_the_words_of_the_scheduler(
    said: str, outlook: Outlook, words: str
) -> None:
    seen = alone("unsched-gpu-busy", 0)
    for condition in status_of(seen)["conditions"]:
        condition["message"] = said
    verdict = judge(seen)
    assert verdict.outlook is outlook
    assert words in verdict.message


def test_what_an_affinity_asks_for_is_told() -> None:
    seen = alone("unsched-selector")
    spec = seen.pods[0]["spec"]
    spec.pop("nodeSelector")
    zone = {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["a", "b"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
    spec["affinity"] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}
    }
    assert "topology.kubernetes.io/zone In a or b" in judge(seen).message


def test_events_of_an_earlier_job_of_the_same_name_are_not_its_own() -> None:
    seen = alone("create-sa-missing")
    for event in seen.events:
        event["involvedObject"]["uid"] = "another"
    assert judge(seen).message == "no pod has been made yet"
    for event in seen.events:
        event["involvedObject"].pop("uid")
        event["lastTimestamp"] = "2001-01-01T00:00:00Z"  # type: ignore[index]
    assert judge(seen).message == "no pod has been made yet"


def test_an_index_that_is_tried_again_has_not_failed() -> None:
    seen = alone("policy-failindex", 1)
    status_of(seen)["containerStatuses"][0]["state"]["terminated"]["exitCode"] = 43
    verdict = judge(seen)
    assert verdict.status is JobStatus.PENDING
    assert not verdict.definite


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


def test_a_pod_asks_for_the_most_that_its_containers_need_at_once() -> None:
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "4", "memory": "1Gi"}}},
            {"resources": {"limits": {"cpu": "500m"}}},
        ],
        "initContainers": [
            {"resources": {"requests": {"cpu": "8"}}},
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
        ],
        "overhead": {"cpu": "100m"},
    }
    assert requests(spec) == {"cpu": 8.1, "memory": 1024.0**3}
