"""The real Job controller and scheduler with the process kubelet: policies, lost nodes."""

from __future__ import annotations

from tests.cluster.fixtures import Namespace
from tests.cluster.orders import FOREVER, Json, Watched, condition, ended, follow_until, job, pod

JOBS = "batch/v1/jobs"
LABEL = "batch.kubernetes.io/job-name=j"
ANNOTATION = "metadata.annotations['batch.kubernetes.io/{}']"
DISRUPTED = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}
FINAL = {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": [42]}}
POLICY = {"podFailurePolicy": {"rules": [FINAL, DISRUPTED]}, "backoffLimitPerIndex": 0}


def started(namespace: Namespace, code: str, **spec: object) -> str:
    """Order the job ``j`` and return the name of its first pod, once that is up."""
    namespace.call("POST", JOBS, job("j", pod("j", code, grace=2), **(POLICY | spec)))
    name: str = up(namespace)["metadata"]["name"]
    follow_until(namespace, name, b"up")
    return name


def up(namespace: Namespace, *but: str) -> Json:
    """The job's pod that runs, and is none of *but*."""
    return Watched(namespace, label=LABEL).when(
        lambda one: one["status"]["phase"] == "Running" and one["metadata"]["name"] not in but
    )


def finished(namespace: Namespace) -> Json:
    """The condition that the job has ended with."""

    def end(found: Json) -> list[Json]:
        conditions = found["status"].get("conditions", ())
        return [one for one in conditions if one["type"] in ("Complete", "Failed")]

    return end(Watched(namespace, "j", JOBS).when(end))[0]


def disruptions(found: Json) -> str:
    """How often a pod of this index was disrupted before."""
    key = "batch.kubernetes.io/job-index-ignored-failure-count"
    return str(found["metadata"]["annotations"].get(key, "0"))


def unscheduled(found: Json) -> bool:
    """Whether the scheduler has said that there is no place."""
    return condition(found, "PodScheduled").get("status") == "False"


def test_a_job_of_one_completes(namespace: Namespace) -> None:
    namespace.call("POST", JOBS, job("j", pod("j", "print('done')"), **POLICY))
    assert finished(namespace)["type"] == "Complete"


def test_an_exit_code_that_is_final_is_not_tried_again(namespace: Namespace) -> None:
    template = pod("j", "raise SystemExit(42)")
    namespace.call("POST", JOBS, job("j", template, **(POLICY | {"backoffLimitPerIndex": 3})))
    assert finished(namespace)["type"] == "Failed"
    (only,) = namespace.call("GET", "pods", labelSelector=LABEL)["items"]
    assert ended(only)["exitCode"] == 42


def test_a_disrupted_pod_is_replaced_and_counts_for_nothing(namespace: Namespace) -> None:
    first = started(namespace, FOREVER)
    namespace.kubelet.evict(f"{namespace.name}/{first}")
    assert disruptions(up(namespace, first)) == "1"


def test_a_spot_node_that_is_taken_back_fails_its_pods_and_takes_no_more(
    namespace: Namespace,
) -> None:
    spot = {"cloud.google.com/gke-spot": "true"}
    namespace.kubelet.add_node("spot-1", labels=spot)
    namespace.call("POST", "pods", pod("p", FOREVER, nodeSelector=spot))
    follow_until(namespace, "p", b"up")
    namespace.kubelet.shut_down("spot-1", grace=1)
    found = Watched(namespace, "p").until("Failed")
    assert found["status"]["reason"] == "Terminated"
    assert condition(found, "DisruptionTarget")["reason"] == "TerminationByKubelet"
    namespace.call("POST", "pods", pod("q", FOREVER, nodeSelector=spot))
    Watched(namespace, "q").when(
        lambda one: condition(one, "PodScheduled").get("status") == "False"
    )


def test_a_lost_node_s_pod_is_told_to_go_and_is_gone_once_that_is_sure(
    namespace: Namespace,
) -> None:
    here = {"here": "yes"}
    namespace.kubelet.add_node("lost-1", labels=here)
    namespace.call("POST", "pods", pod("p", FOREVER, nodeSelector=here))
    follow_until(namespace, "p", b"up")
    namespace.kubelet.lose_node("lost-1")
    told = Watched(namespace, "p").when(lambda one: "deletionTimestamp" in one["metadata"])
    assert told["status"]["phase"] == "Running"
    assert condition(told, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    watched = Watched(namespace, "p", since=told)
    namespace.kubelet.collect("lost-1")
    watched.gone()


def test_accelerators_are_counted_by_the_real_scheduler(namespace: Namespace) -> None:
    topology = {"cloud.google.com/gke-tpu-topology": "2x2"}
    namespace.kubelet.add_node("tpu-1", tpu=4, labels=topology)
    chips = {"google.com/tpu": "4"}
    for name in ("one", "two"):
        order = pod(
            name, FOREVER, resources={"limits": chips, "requests": chips}, nodeSelector=topology
        )
        namespace.call("POST", "pods", order)
        if name == "one":  # the scheduler takes them in any order
            Watched(namespace, "one").until("Running")
    waits = Watched(namespace, "two").when(unscheduled)
    assert "Insufficient google.com/tpu" in condition(waits, "PodScheduled")["message"]
    namespace.call("DELETE", "pods/one", gracePeriodSeconds="1")
    Watched(namespace, "two").until("Running")
