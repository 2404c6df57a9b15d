"""Verdicts and observations of jobs on several hosts."""

from __future__ import annotations

from typing import Any

import pytest

from kinetic.accelerators import parse
from kinetic.aio.kubernetes.diagnosis.causes import Cause, Outlook
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts
from kinetic.aio.kubernetes.manifests import Placement
from kinetic.aio.kubernetes.multihost import (
    GroupTable,
    judge_group,
    observation_of,
)
from kinetic.aio.kubernetes.observations import ENDED, text_of_end
from kinetic.aio.kubernetes.reflector import Changed, Listed
from kinetic.aio.kubernetes.sets import KINDS, WORKER_INDEX
from kinetic.aio.ports import Observation, Phase, Resources
from kinetic.job_status import Reason
from tests.kubernetes.orders import order, set_manifest

Json = dict[str, Any]
SPEC = order(name="grp-1-7-2", resources=Resources(accelerator=parse("cpu:hosts=3")))
BEGAN = "2026-01-01T00:00:02Z"
RUNNING: Json = {"running": {"startedAt": BEGAN}}


def the_set(life: str = "a", **metadata: Any) -> Json:
    manifest = set_manifest("lws", SPEC, Placement(namespace="ns", secret="s"), life=life)
    own = {"uid": f"set-{life}", "creationTimestamp": "2026-01-01T00:00:00Z"}
    annotations = {**manifest["metadata"]["annotations"], **metadata.pop("annotations", {})}
    merged = {**manifest["metadata"], **own, **metadata, "annotations": annotations}
    return {**manifest, "metadata": merged, "status": {}}


def ended(code: int, at: int = 10, reason: str = "Error") -> Json:
    moment = f"2026-01-01T00:00:{at:02}Z"
    end = {"exitCode": code, "reason": reason, "startedAt": BEGAN, "finishedAt": moment}
    return {"terminated": end}


def host(
    number: int, state: Json, *, last: Json | None = None, life: str = "a", **more: Any
) -> Json:
    """Make the pod of a host; with *last*, its container runs for the second time."""
    template = the_set(life)["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    phase = more.pop("phase", "Running")
    labels = {**template["metadata"]["labels"], WORKER_INDEX: str(number)}
    metadata = {
        **template["metadata"],
        "name": f"grp-1-7-2-0-{number}",
        "uid": f"pod-{number}{life}",
        "labels": labels,
        "creationTimestamp": f"2026-01-01T00:00:0{number + 1}Z",
        **more,
    }
    status = {"name": "kinetic", "state": state, "restartCount": int(last is not None)}
    status |= {"lastState": last} if last is not None else {}
    spec = {**template["spec"], "nodeName": "node", "restartPolicy": "Always"}
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": phase, "containerStatuses": [status]},
    }


def waiting(number: int) -> Json:
    """Make a pod that no node has room for."""
    pod = host(number, {}, phase="Pending")
    del pod["spec"]["nodeName"]
    message = "0/3 nodes are available: 3 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    pod["status"] = {"phase": "Pending", "conditions": [{**condition, "message": message}]}
    return pod


def group(*pods: Json, of: Json | None = None, **more: Any) -> JobFacts:
    """Make a set and its pods."""
    return JobFacts(job=of if of is not None else the_set(), pods=pods, name="grp-1-7-2", **more)


def observe(facts: JobFacts) -> Observation:
    return observation_of(facts, judge_group(facts))


def observed(*pods: Json, of: Json | None = None, **more: Any) -> Observation:
    return observe(group(*pods, of=of, **more))


def brief(observation: Observation) -> tuple[Phase, str, Reason | None]:
    return observation.phase, observation.executor, observation.reason


ALL = [host(number, RUNNING) for number in range(3)]


def test_a_set_without_pods_waits() -> None:
    found = observed()
    assert brief(found) == (Phase.PENDING, "", None)
    assert found.name == "grp-1-7-2"
    assert found.labels == SPEC.labels


def test_the_first_host_decides() -> None:
    assert brief(observed(*ALL)) == (Phase.RUNNING, "pod-0a", None)
    assert observed(*ALL[1:]).phase is Phase.RUNNING
    assert observed(waiting(0)).phase is Phase.PENDING


def test_the_message_says_why_another_host_does_not_start() -> None:
    found = observed(ALL[0], ALL[1], waiting(2))
    assert brief(found) == (Phase.RUNNING, "pod-0a", Reason.UNSCHEDULABLE)
    assert "host 2" in found.message


def test_a_host_that_dies_gives_the_running_set_a_reason() -> None:
    """Its container already runs again; what counts is how it ended the first time."""
    found = observed(ALL[0], host(1, RUNNING, last=ended(137, reason="OOMKilled")), ALL[2])
    assert brief(found) == (Phase.RUNNING, "pod-0a", Reason.OUT_OF_MEMORY)
    assert found.message.startswith("host 1 of 3: ")


def test_the_end_of_the_first_host_has_the_reason_of_the_host_that_failed_first() -> None:
    dead = host(1, RUNNING, last=ended(137, 10, "OOMKilled"))
    stopped = host(0, RUNNING, last=ended(143, 12))
    found = observed(stopped, dead, ALL[2])
    assert brief(found) == (Phase.ENDED, "pod-0a", Reason.OUT_OF_MEMORY)
    assert "host 1 of 3" in found.message


def test_a_replaced_leader_does_not_make_the_job_run_again() -> None:
    second = host(0, RUNNING, uid="pod-0b", creationTimestamp="2026-01-01T00:01:00Z")
    found = observed(second, deleted_pods=[ALL[0]])
    assert (found.phase, found.executor) == (Phase.ENDED, "pod-0a")


def test_a_set_that_is_deleted_runs_while_its_pods_run() -> None:
    going = the_set(deletionTimestamp="2026-01-01T00:02:00Z")
    for seen in (
        group(*ALL, of=going),
        JobFacts(pods=ALL, deleted_job=the_set(), name="grp-1-7-2"),
    ):
        found = observe(seen)
        assert (found.phase, found.executor) == (Phase.RUNNING, "pod-0a")
    nothing = observe(
        JobFacts(deleted_job=the_set(), deleted_pods=[host(0, ended(0), phase="Succeeded")])
    )
    assert brief(nothing) == (Phase.GONE, "pod-0a", None)
    assert observe(JobFacts(deleted_job=the_set())).phase is Phase.GONE


def test_a_set_that_a_client_ended_says_why() -> None:
    end = Cause(reason=Reason.UNSCHEDULABLE, summary="too large")
    ended_set = the_set(annotations={ENDED: text_of_end(end)})
    assert brief(observed(waiting(0), of=ended_set)) == (Phase.PENDING, "", Reason.UNSCHEDULABLE)
    found = observed(of=ended_set)
    assert (*brief(found), found.message) == (Phase.ENDED, "", Reason.UNSCHEDULABLE, "too large")


def test_a_pod_deleted_before_it_ran_is_explained_by_its_set_a_moment_later() -> None:
    """Sets and pods arrive over different watches, and either may be late."""
    going = waiting(0)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:02:00Z"
    assert observed(going).phase is Phase.PENDING
    assert observed(deleted_pods=[going]).phase is Phase.PENDING
    end = Cause(reason=Reason.UNSCHEDULABLE, summary="too large")
    ended_set = the_set(annotations={ENDED: text_of_end(end)})
    found = observed(of=ended_set, deleted_pods=[going])
    assert (*brief(found), found.message) == (Phase.ENDED, "", Reason.UNSCHEDULABLE, "too large")
    again = host(0, RUNNING, uid="pod-0b", creationTimestamp="2026-01-01T00:03:00Z")
    assert brief(observed(again, deleted_pods=[going])) == (Phase.RUNNING, "pod-0b", None)


def test_a_set_that_failed_without_pods_quotes_its_condition() -> None:
    failed = {"type": "Failed", "status": "True", "message": "jobset failed"}
    found = observed(of={**the_set(), "status": {"conditions": [failed]}})
    assert found.phase is Phase.ENDED
    assert "jobset failed" in found.message


def event(kind: str, name: str, message: str, at: str = "2026-01-01T00:00:05Z") -> Json:
    target = {"kind": kind, "name": name, "namespace": "ns", "uid": f"{kind}-{name}"}
    return {
        "reason": "FailedCreate",
        "message": message,
        "involvedObject": target,
        "firstTimestamp": at,
        "lastTimestamp": at,
    }


REFUSED = (
    'pods "grp-1-7-2-0" is forbidden: error looking up service account ns/kinetic: serviceaccount '
    '"kinetic" not found'
)


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        (
            "lws",
            ("StatefulSet", "grp-1-7-2"),
            f"create Pod grp-1-7-2-0 in StatefulSet grp-1-7-2 failed error: {REFUSED}",
        ),
        ("jobset", ("Job", "grp-1-7-2-host-0"), f"Error creating: {REFUSED}"),
    ],
)
def test_events_of_the_object_that_creates_the_pods_say_why_a_set_has_none(
    kind: str, target: tuple[str, str], message: str
) -> None:
    makers = KINDS[kind].makers("grp-1-7-2")
    found = observed(events=[event(*target, message)], makers=makers)
    assert brief(found) == (Phase.PENDING, "", Reason.SETUP)
    assert 'serviceaccount "kinetic" not found' in found.message
    before = event(*target, message, at="2025-12-31T23:59:59Z")  # an earlier set with that name
    other = event(target[0], "grp-1-7", message)
    assert observed(events=[before, other], makers=makers).reason is None


def test_a_job_set_that_is_refused_its_job_says_why() -> None:
    message = (
        'job "grp-1-7-2-host-0" creation failed with error: jobs.batch "grp-1-7-2-host-0" is '
        "forbidden: exceeded quota: team, requested: count/jobs.batch=1, "
        "used: count/jobs.batch=5, limited: count/jobs.batch=5"
    )
    refused = event("JobSet", "grp-1-7-2", message) | {"reason": "JobCreationFailed"}
    found = observed(events=[refused], makers=KINDS["jobset"].makers("grp-1-7-2"))
    assert brief(found) == (Phase.PENDING, "", Reason.QUOTA)
    assert "exceeded quota: team" in found.message


def gated(number: int, gate: str = "kueue.x-k8s.io/admission") -> Json:
    """Make a pod that Kueue's webhook holds with a scheduling gate."""
    pod = host(number, {}, phase="Pending")
    del pod["spec"]["nodeName"]
    pod["spec"]["schedulingGates"] = [{"name": gate}]
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    pod["status"] = {"phase": "Pending", "conditions": [condition]}
    return pod


def test_a_set_whose_pods_a_queue_holds_one_by_one_is_queued() -> None:
    queued = the_set(labels={"kueue.x-k8s.io/queue-name": "research"})
    found = observed(gated(0), gated(1), of=queued)
    assert brief(found) == (Phase.PENDING, "", Reason.QUEUED)
    assert "waiting in queue 'research'" in found.message
    quota = "insufficient unused quota for cpu in flavor f, 1 more needed"
    waits = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": quota}
    workload = {"spec": {"queueName": "research"}, "status": {"conditions": [waits]}}
    verdict = judge_group(
        JobFacts(job=queued, pods=[gated(0)], name="grp-1-7-2", workload=workload)
    )
    assert "cpu in flavor f, 1 more needed" in verdict.message
    assert verdict.outlook is Outlook.OPEN
    verdict = judge_group(
        JobFacts(job=queued, pods=[gated(0, "example.org/other")], name="grp-1-7-2")
    )
    assert verdict.outlook is Outlook.BLOCKED


# --- the table ---


def filled_table(*pods: Json) -> tuple[GroupTable, list[Phase]]:
    """Make a table with a set and its pods; return it with the phases it reports first."""
    table = GroupTable()
    table.feed(Listed(items=[the_set()], version="1"), pods=False)
    table.feed(Listed(items=[*pods], version="1"), pods=True)
    return table, [seen.phase for seen in table.news()]


def test_the_end_of_a_host_is_reported_once() -> None:
    table, phases = filled_table(*ALL)
    assert phases == [Phase.RUNNING]
    dead = host(1, RUNNING, last=ended(1))
    news: list[tuple[Phase, str]] = []
    for _ in range(2):
        table.feed(Changed(document=dead, deleted=False), pods=True)
        news += [(seen.phase, seen.executor) for seen in table.news()]
    assert news == [(Phase.RUNNING, "pod-0a")]


def test_a_set_is_gone_when_none_of_its_pods_is_left() -> None:
    table, _ = filled_table(*ALL)
    table.feed(Changed(document=the_set(), deleted=True), pods=False)
    (going,) = table.news()
    assert going.phase is Phase.RUNNING
    for pod in ALL:
        table.feed(Changed(document=pod, deleted=True), pods=True)
    (*_, last) = table.news()
    assert (last.phase, last.executor) == (Phase.GONE, "pod-0a")
    assert not table.entries


def test_pods_of_an_earlier_set_with_the_same_name_do_not_count() -> None:
    old = host(0, RUNNING, life="old")
    table, phases = filled_table(old)
    assert phases == [Phase.PENDING]
    table.feed(Changed(document=old, deleted=True), pods=True)
    table.feed(Changed(document=ALL[0], deleted=False), pods=True)
    assert [brief(seen) for seen in table.news()] == [(Phase.RUNNING, "pod-0a", None)]


def test_pods_are_not_reported_before_their_set() -> None:
    table = GroupTable()
    table.feed(Listed(items=[], version="1"), pods=False)
    table.feed(Listed(items=[*ALL], version="1"), pods=True)
    assert [*table.news()] == []
    table.feed(Changed(document=the_set(), deleted=False), pods=False)
    assert [seen.phase for seen in table.news()] == [Phase.RUNNING]


@pytest.mark.parametrize("reports_orphans", [True, False])
def test_pods_on_no_node_do_not_keep_their_deleted_set(reports_orphans: bool) -> None:
    table = GroupTable()
    table.reports_orphans = reports_orphans
    table.feed(Listed(items=[], version="1"), pods=False)
    orphan = waiting(0)
    table.feed(Listed(items=[orphan], version="1"), pods=True)
    assert [*table.news()] == []
    orphan["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:20Z"
    table.feed(Changed(document=orphan, deleted=False), pods=True)
    assert [*table.news()] == []
    table.feed(Changed(document=orphan, deleted=True), pods=True)
    assert [*table.news()] == []
    assert not table.entries
