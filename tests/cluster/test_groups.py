"""The stand-ins for LeaderWorkerSet and JobSet make pods as those projects' documents say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.fixtures import Namespace
from tests.cluster.orders import Json, Watched, follow_until, job, pod

SETS = "leaderworkerset.x-k8s.io/v1/leaderworkersets"
NAME = "leaderworkerset.sigs.k8s.io/name"
TOLD = """
import json, os, socket, time
names = ('LWS_LEADER_ADDRESS', 'LWS_GROUP_SIZE', 'LWS_WORKER_INDEX')
print(json.dumps([os.environ[name] for name in names]))
{}
"""

pytestmark = pytest.mark.usefixtures("groups")


def leader_worker_set(code: str, size: int = 3) -> Json:
    """Of one group, whose pods run *code*."""
    made = pod("", code, grace=1, restartPolicy="Always")
    template = {"metadata": {"labels": {"mine": "yes"}}, "spec": made["spec"]}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "mh"},
        "spec": {"replicas": 1, "leaderWorkerTemplate": {"size": size, "workerTemplate": template}},
    }


def test_a_group_has_its_names_labels_and_variables(namespace: Namespace) -> None:
    sleeping = TOLD.format("time.sleep(600)")
    body = leader_worker_set(sleeping)
    namespace.call("POST", SETS, body, fieldValidation="Strict")
    ready = Watched(namespace, "mh", SETS).when(
        lambda one: one.get("status", {}).get("readyReplicas") == 1
    )
    told = {one["type"]: one["status"] for one in ready["status"]["conditions"]}
    assert told == {"Progressing": "False", "Available": "True"}
    found = namespace.call("GET", "pods", labelSelector=f"{NAME}=mh,mine=yes")["items"]
    place = "leaderworkerset.sigs.k8s.io/worker-index"
    assert {one["metadata"]["name"]: one["metadata"]["labels"][place] for one in found} == {
        "mh-0": "0", "mh-0-1": "1", "mh-0-2": "2",
    }  # fmt: skip
    address = next(one["status"]["podIP"] for one in found if one["metadata"]["name"] == "mh-0")
    for name, index in (("mh-0", "0"), ("mh-0-2", "2")):
        told = json.loads(follow_until(namespace, name, b"]"))
        assert told == [address, "3", index]
    watched = Watched(namespace, "mh-0-2", since=namespace.call("GET", "pods"))
    namespace.call("DELETE", f"{SETS}/mh")
    watched.when(lambda one: "deletionTimestamp" in one["metadata"])


def test_a_group_begins_again_when_a_host_does(namespace: Namespace) -> None:
    code = "import os, time; time.sleep(0.5 if os.environ['LWS_WORKER_INDEX'] == '1' else 600)"
    namespace.call("POST", SETS, leader_worker_set(code, size=2))
    first = Watched(namespace, "mh-0").until("Running")["metadata"]["uid"]
    Watched(namespace, "mh-0").when(lambda one: one["metadata"]["uid"] != first)


def test_hosts_of_a_slice_of_tpus_are_told_of_each_other(namespace: Namespace) -> None:
    body = leader_worker_set("import time; time.sleep(600)", size=2)
    spec = body["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    spec["containers"][0]["resources"] = {"limits": {"google.com/tpu": "4"}}
    spec["containers"][0]["env"] = [{"name": "TPU_PROCESS_PORT", "value": "8471"}]
    namespace.kubelet.add_node("tpu", tpu=4)
    namespace.kubelet.add_node("tpu-2", tpu=4)
    namespace.call("POST", SETS, body)
    found = Watched(namespace, "mh-0-1").until("Running")
    env = {one["name"]: one.get("value") for one in found["spec"]["containers"][0]["env"]}
    assert env["TPU_WORKER_HOSTNAMES"] == "mh-0.mh,mh-0-1.mh"
    assert (env["TPU_WORKER_ID"], env["TPU_NAME"], env["TPU_PROCESS_PORT"]) == ("1", "mh-0", "8471")
    assert env["TPU_PROCESS_ADDRESSES"] == "mh-0.mh:8471,mh-0-1.mh:8471"


def job_set(code: str, **spec: Any) -> Json:
    """Of one replicated job with two hosts that run *code*."""
    template = job("", pod("", code), completions=2, parallelism=2, backoffLimit=0)
    replicated = {"name": "worker", "replicas": 1, "template": {"spec": template["spec"]}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "mh"},
        "spec": {"replicatedJobs": [replicated], **spec},
    }


@pytest.mark.parametrize(("code", "state"), [("", "Completed"), ("1 / 0", "Failed")])
def test_a_job_set_ends_with_its_jobs(namespace: Namespace, code: str, state: str) -> None:
    sets = "jobset.x-k8s.io/v1alpha2/jobsets"
    names = "import os; print(os.environ['HOSTNAME'], os.environ['JOB_COMPLETION_INDEX'])\n"
    body = job_set(names + code, failurePolicy={"maxRestarts": 0})
    label, before = "jobset.sigs.k8s.io/jobset-name=mh", namespace.call("GET", "pods")
    namespace.call("POST", sets, body, fieldValidation="Strict")
    found = Watched(namespace, "mh", sets).when(
        lambda one: one.get("status", {}).get("terminalState")
    )
    assert found["status"]["terminalState"] == state
    hosts: set[str] = set()

    def all_seen(pod: Json) -> bool:
        """Whether both were there; when the first fails the other one is removed."""
        hosts.add(pod["spec"]["hostname"])
        return len(hosts) == 2

    assert "Suspended" not in {one["type"] for one in found["status"]["conditions"]}
    Watched(namespace, label=label, since=before).when(all_seen)
    assert hosts == {"mh-worker-0-0", "mh-worker-0-1"}


def test_a_job_set_says_that_it_is_suspended_and_that_it_was(namespace: Namespace) -> None:
    sets = "jobset.x-k8s.io/v1alpha2/jobsets"
    namespace.call("POST", sets, job_set("", suspend=True))

    def says(status: str) -> None:
        def told(one: Json) -> bool:
            conditions = (one.get("status") or {}).get("conditions") or ()
            return ("Suspended", status) in {(each["type"], each["status"]) for each in conditions}

        Watched(namespace, "mh", sets).when(told)

    says("True")
    namespace.call("PATCH", f"{sets}/mh", {"spec": {"suspend": False}})
    says("False")
    ended = Watched(namespace, "mh", sets).when(lambda one: one["status"].get("terminalState"))
    assert {one["type"] for one in ended["status"]["conditions"]} == {"Suspended", "Completed"}
