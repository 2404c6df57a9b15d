"""Rounds of workers: the Job, what a table makes of its pods, and growing it."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import pytest

from kinetic._labels import KIND, WORKER
from kinetic._runner.protocol.marks import mark, parse_mark
from kinetic._runner.protocol.workers import Crew, Terms, WorkerId
from kinetic.aio.kubernetes.diagnosis.facts import JobFacts
from kinetic.aio.kubernetes.manifests import FAILURE_COUNTS, RANK, Placement
from kinetic.aio.kubernetes.reflector import Changed, Listed
from kinetic.aio.kubernetes.rounds import extension, growth, round_manifest, size_of
from kinetic.aio.kubernetes.tables import Table
from kinetic.aio.ports import JobSpec, Observation, Phase
from kinetic.job_status import Reason
from tests.kubernetes.orders import order

Json = dict[str, Any]
AT = Placement(namespace="ml", secret="grp-1")
CREW = Crew(terms=Terms(workers=3), outputs="gs://b/outputs", created=1.0)
NAME = "grp-1-r0"


def spec() -> JobSpec:
    labels = {KIND: WORKER, "kinetic.dev/submission": "grp-1", "kinetic.dev/round": "0"}
    return order(name=NAME, labels=labels, timeout=None, start_timeout=None, crew=CREW)


def manifest(workers: int = 3, at: Placement = AT) -> Json:
    return round_manifest(spec(), number=0, workers=workers, placement=at)


def test_each_worker_is_an_index_that_is_replaced_until_it_says_that_it_leaves() -> None:
    job = manifest()["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    assert job["backoffLimit"] == job["backoffLimitPerIndex"] == 2**31 - 1
    assert job["podReplacementPolicy"] == "Failed"
    assert job["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    leaves, disrupted = job["podFailurePolicy"]["rules"]
    assert (leaves["action"], leaves["onExitCodes"]["values"]) == ("FailIndex", [42, 44])
    assert disrupted["action"] == "Ignore"
    pod = job["template"]["spec"]
    assert "activeDeadlineSeconds" not in pod and "subdomain" not in pod


def test_a_worker_learns_its_name_and_its_crew() -> None:
    container = manifest()["spec"]["template"]["spec"]["containers"][0]
    found = {item["name"]: item.get("value") for item in container["env"]}
    assert Crew.decode(found["KINETIC_CREW"].replace("$$", "$")) == CREW
    assert found["KINETIC_ROUND"] == "0"


def test_a_deadline_ends_a_round_a_minute_after_its_time_and_later_after_a_retry() -> None:
    crew = replace(CREW, terms=Terms(workers=3, lifetime_s=100.0))
    job = round_manifest(replace(spec(), crew=crew), number=0, workers=3, placement=AT)
    assert job["spec"]["activeDeadlineSeconds"] == 160
    assert "activeDeadlineSeconds" not in manifest()["spec"]
    assert extension(job, 100.0) == {}  # the time begins with the Job's start
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=30)
    job["status"] = {"startTime": began.isoformat()}
    change = extension(job, 100.0)["spec"]["activeDeadlineSeconds"]
    assert 190 <= change <= 200
    assert extension({**job, "spec": {}}, 100.0) == {}


def test_a_queue_may_admit_a_part_of_a_round() -> None:
    metadata = manifest(at=replace(AT, queue="team"))["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert metadata["annotations"]["kueue.x-k8s.io/job-min-parallelism"] == "1"


def test_a_queue_takes_a_round_of_one_worker() -> None:
    """Kueue refuses a Job whose least number of pods isn't below its number of pods."""
    metadata = manifest(1, at=replace(AT, queue="team"))["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert not any(key.startswith("kueue.x-k8s.io/") for key in metadata["annotations"])


@pytest.mark.parametrize(
    ("conditions", "metadata", "size"),
    [
        ([], {}, 3),
        ([{"type": "Suspended", "status": "True"}], {}, 3),
        ([{"type": "Complete", "status": "True"}], {}, 0),
        ([{"type": "SuccessCriteriaMet", "status": "True"}], {}, 0),
        ([{"type": "Failed", "status": "True"}], {}, 0),
        ([{"type": "Failed", "status": "False"}], {}, 3),
        ([], {"deletionTimestamp": "2026-01-01T00:00:00Z"}, 0),
    ],
)
def test_a_round_has_workers_until_its_job_is_over(
    conditions: list[Json], metadata: Json, size: int
) -> None:
    job = {"metadata": metadata, "spec": {"completions": 3}, "status": {"conditions": conditions}}
    assert size_of(job) == size


def test_a_round_grows_only_from_the_version_that_was_read() -> None:
    change = growth({"metadata": {"resourceVersion": "7"}}, 5)
    assert change["metadata"] == {"resourceVersion": "7"}
    assert change["spec"] == {"completions": 5, "parallelism": 5}


# --- the table ---


class Rounds:
    """A table with one round, and the last observation of each worker."""

    def __init__(self) -> None:
        self.table = Table()
        self.last: dict[str, Observation] = {}
        self.job: Json = {**manifest(2), "status": {}}
        self.job["metadata"] |= {"uid": "job", "creationTimestamp": "2026-01-01T00:00:00Z"}
        self.table.feed(Listed(items=[self.job], version="1"), pods=False)
        self.table.feed(Listed(items=[], version="1"), pods=True)
        self.read()

    def read(self) -> list[Observation]:
        found = [*self.table.news()]
        self.last |= {it.name.removeprefix(f"{NAME}.job."): it for it in found}
        return found

    def put_job(self, *, deleted: bool = False, **status: Any) -> list[Observation]:
        self.job = {**self.job, "status": status}
        self.table.feed(Changed(document=self.job, deleted=deleted), pods=False)
        return self.read()

    def resize(self, workers: int) -> None:
        self.job["spec"] = {**self.job["spec"], "completions": workers, "parallelism": workers}
        self.put_job(active=2)

    def suspend(self, suspended: bool) -> None:
        self.job["spec"] = {**self.job["spec"], "suspend": suspended}
        self.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
        self.put_job(conditions=[{"type": "Suspended", "status": str(suspended)}])

    def put_pod(self, rank: int, failures: int, state: Json, phase: str) -> list[Observation]:
        return self.feed_pod(self.pod(rank, failures, state, phase))

    def feed_pod(self, pod: Json, *, deleted: bool = False) -> list[Observation]:
        self.table.feed(Changed(document=pod, deleted=deleted), pods=True)
        return self.read()

    def list_pods(self, *pods: Json) -> list[Observation]:
        self.table.feed(Listed(items=[*pods], version="2"), pods=True)
        return self.read()

    def pod(
        self, rank: int, failures: int, state: Json, phase: str, *, disruptions: int = 0
    ) -> Json:
        template = self.job["spec"]["template"]
        metadata = {
            **template["metadata"],
            "name": f"{NAME}-{rank}-{failures}",
            "uid": f"pod-{rank}-{failures}",
            "creationTimestamp": f"2026-01-01T00:00:0{failures}Z",
            "labels": {**template["metadata"]["labels"], RANK: str(rank)},
            "annotations": {
                **template["metadata"]["annotations"],
                FAILURE_COUNTS[0]: str(failures - disruptions),
                FAILURE_COUNTS[1]: str(disruptions),
            },
            "ownerReferences": [{"name": NAME, "uid": "job", "controller": True}],
        }
        status = {"phase": phase, "containerStatuses": [{"name": "kinetic", "state": state}]}
        pod_spec = {**template["spec"], "nodeName": "n" if state else None}
        return {"metadata": metadata, "spec": pod_spec, "status": status}

    def phases(self) -> dict[str, Phase]:
        return {name: it.phase for name, it in sorted(self.last.items())}


RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def ended(code: int) -> Json:
    return {"terminated": {"exitCode": code, "startedAt": "2026-01-01T00:00:00Z"}}


def test_each_rank_is_a_worker_of_its_own() -> None:
    rounds = Rounds()
    assert rounds.phases() == {"0.0": Phase.PENDING, "1.0": Phase.PENDING}
    (seen,) = rounds.put_pod(1, 0, RUNNING, "Running")
    assert (seen.phase, seen.executor) == (Phase.RUNNING, "pod-1-0")
    assert seen.labels == spec().labels
    assert rounds.phases() == {"0.0": Phase.PENDING, "1.0": Phase.RUNNING}
    name = seen.name.removeprefix(f"{NAME}.")
    assert WorkerId.parse(f"0.{name}.0") == WorkerId(0, "job", 1, 0, 0)


def test_a_worker_that_died_has_a_replacement_that_waits() -> None:
    rounds = Rounds()
    rounds.put_pod(0, 0, RUNNING, "Running")
    rounds.put_pod(0, 0, ended(43), "Failed")
    assert rounds.phases() == {"0.0": Phase.ENDED, "0.1": Phase.PENDING, "1.0": Phase.PENDING}
    assert rounds.last["0.0"].exit_code == 43
    assert not rounds.last["0.0"].last
    rounds.put_pod(0, 1, RUNNING, "Running")
    assert rounds.last["0.1"].executor == "pod-0-1"


@pytest.mark.parametrize(
    ("disruptions", "reason"), [(1, Reason.PREEMPTED), (0, Reason.LOST)], ids=["spot", "by hand"]
)
def test_how_a_worker_ended_unseen_is_known_from_the_one_in_its_place(
    disruptions: int, reason: Reason
) -> None:
    """Kubernetes removes the pods of a node that is gone; a client's machine may sleep then."""
    rounds = Rounds()
    rounds.put_pod(0, 0, RUNNING, "Running")
    rounds.list_pods(rounds.pod(0, 1, {}, "Pending", disruptions=disruptions))
    ended, waiting = rounds.last["0.0"], rounds.last["0.1"]
    assert (ended.phase, ended.reason, ended.executor) == (Phase.ENDED, reason, "pod-0-0")
    assert (waiting.phase, waiting.disruptions) == (Phase.PENDING, disruptions)


def test_a_worker_that_leaves_is_not_replaced() -> None:
    rounds = Rounds()
    rounds.put_pod(0, 0, ended(44), "Failed")
    assert rounds.phases() == {"0.0": Phase.ENDED, "1.0": Phase.PENDING}
    assert rounds.last["0.0"].exit_code == 44


def test_a_complete_round_has_no_workers() -> None:
    rounds = Rounds()
    rounds.put_pod(0, 0, ended(0), "Succeeded")
    rounds.put_job(conditions=[{"type": "Complete", "status": "True"}])
    assert rounds.phases() == {"0.0": Phase.ENDED, "1.0": Phase.ENDED}
    rounds.put_job(deleted=True)
    assert rounds.phases() == {"0.0": Phase.GONE, "1.0": Phase.GONE}


def test_counters_of_the_job_change_no_worker() -> None:
    rounds = Rounds()
    rounds.put_pod(0, 0, RUNNING, "Running")
    assert rounds.put_job(active=2, ready=1) == []
    assert not rounds.table.has_changes


def test_a_round_that_grows_has_more_workers() -> None:
    rounds = Rounds()
    rounds.resize(3)
    assert rounds.phases() == dict.fromkeys(("0.0", "1.0", "2.0"), Phase.PENDING)


def test_workers_of_a_resumed_round_have_the_numbers_of_the_suspended_ones() -> None:
    rounds = Rounds()
    first = rounds.pod(0, 0, RUNNING, "Running")
    rounds.feed_pod(first)
    rounds.suspend(True)
    deletion = {"deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 60}
    stopped = rounds.pod(0, 0, ended(43), "Failed")
    stopped["metadata"] |= deletion
    rounds.feed_pod(stopped, deleted=True)
    assert rounds.phases() == {"0.0": Phase.ENDED, "0.1": Phase.PENDING, "1.0": Phase.PENDING}
    rounds.suspend(False)
    second = rounds.pod(0, 0, RUNNING, "Running")
    second["metadata"] |= {"uid": "second", "creationTimestamp": "2026-01-01T00:02:00Z"}
    rounds.feed_pod(second)
    assert rounds.phases() == {"0.0": Phase.RUNNING, "0.1": Phase.GONE, "1.0": Phase.PENDING}
    assert rounds.last["0.0"].executor == "second"


def test_all_ranks_of_a_suspended_round_wait_for_the_same() -> None:
    rounds = Rounds()
    rounds.suspend(True)
    why = {"type": "QuotaReserved", "status": "False", "message": "1 more needed"}
    workload = {"spec": {"queueName": "team"}, "status": {"conditions": [why]}}
    rounds.table.learn(f"{NAME}/0", JobFacts(workload=workload))
    assert ["1 more needed" in it.message for it in rounds.read()] == [True, True]


def test_a_round_that_a_queue_shrinks_has_fewer_workers() -> None:
    """Kueue admits a part of a round, takes it back, and may admit another part later."""
    rounds = Rounds()
    rounds.resize(1)
    assert rounds.phases() == {"0.0": Phase.PENDING, "1.0": Phase.GONE}
    rounds.resize(2)
    assert rounds.phases() == {"0.0": Phase.PENDING, "1.0": Phase.PENDING}
    rounds.put_pod(1, 0, RUNNING, "Running")
    rounds.resize(1)
    assert rounds.phases() == {"0.0": Phase.PENDING, "1.0": Phase.RUNNING}  # its pod may run
    rounds.put_pod(1, 0, ended(43), "Failed")
    assert rounds.phases() == {"0.0": Phase.PENDING, "1.0": Phase.GONE}
    rounds.put_pod(0, 0, ended(44), "Failed")
    rounds.put_job(deleted=True)
    assert rounds.phases() == {"0.0": Phase.GONE, "1.0": Phase.GONE}


# --- marks ---


def test_a_mark_says_which_item_begins() -> None:
    line = mark(b"k" * 32, "batches/grp-1/", "grp-1-12", 3, "has ended")
    assert parse_mark(line) == ("grp-1", 12, 3, True)
    assert parse_mark(line.replace("has ended", "begins")) == ("grp-1", 12, 3, False)
    assert parse_mark(line + " ") is None
    assert parse_mark("attempt 3") is None
    assert mark(b"x" * 32, "batches/grp-1/", "grp-1-12", 3, "has ended") != line
