"""What carries a job on several hosts is what its controllers, and Kubernetes, take."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from kinetic import accelerators
from kinetic.aio.kubernetes.manifests import Placement, job_manifest
from kinetic.aio.kubernetes.sets import KINDS, group_name
from kinetic.aio.ports import Resources
from kinetic.errors import ConfigurationError
from tests.kubernetes.orders import order

AT = Placement(namespace="ns", secret="grp-1")
LABEL = 63
Json = dict[str, Any]


def spec(accelerator: str = "tpu-v5e-16", **more: Any) -> Any:
    return order(resources=Resources(accelerator=accelerators.parse(accelerator)), **more)


def templates(kind: str, manifest: Json) -> list[Json]:
    """The pods' templates, that of the first host at the beginning."""
    if kind == "lws":
        group = manifest["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    (job,) = manifest["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]]


def environment(pod: Json) -> Json:
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@pytest.mark.parametrize("kind", KINDS)
def test_each_host_has_the_pod_of_a_job_and_knows_the_others(kind: str) -> None:
    manifest = KINDS[kind].manifest(spec(timeout=60.0), AT)
    single = job_manifest(spec(timeout=60.0), AT)
    for pod in templates(kind, manifest):
        several, usual = environment(pod), environment(single["spec"]["template"])
        assert several["KINETIC_HOSTS"] == "4"
        assert several["KINETIC_COORDINATOR"].endswith(":8476")
        assert several["KINETIC_ORDER"] == usual["KINETIC_ORDER"]
        added = {"KINETIC_HOST", "KINETIC_HOSTS", "KINETIC_COORDINATOR"}
        added |= {"KINETIC_LWS", "TPU_PROCESS_PORT"} if kind == "lws" else set()
        assert set(several) ^ set(usual) == added | {"KINETIC_FAILURES", "KINETIC_DISRUPTIONS"}
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["google.com/tpu"] == "4"
        assert pod["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    labels, annotations = manifest["metadata"]["labels"], manifest["metadata"]["annotations"]
    assert labels == {
        **single["metadata"]["labels"],
        "kinetic.dev/job": manifest["metadata"]["name"],
    }
    assert annotations["kinetic.dev/hosts"] == "4"
    assert "cloud.google.com/gke-nodepool" in annotations.values()


def test_the_pods_of_a_leader_worker_set_are_those_of_stateful_sets() -> None:
    """They may not end by themselves, and the leader alone may speak to the API server."""
    manifest = KINDS["lws"].manifest(spec(timeout=60.0), AT)
    group = manifest["spec"]["leaderWorkerTemplate"]
    leader, worker = templates("lws", manifest)
    assert (manifest["spec"]["replicas"], group["size"]) == (1, 4)
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    for pod in (leader, worker):
        assert not pod["spec"].keys() & {"restartPolicy", "activeDeadlineSeconds"}
        assert environment(pod)["KINETIC_LWS"] == manifest["metadata"]["name"]
        assert environment(pod)["TPU_PROCESS_PORT"] == "8471"  # else it is the coordinator's
    token = "automountServiceAccountToken"
    assert (leader["spec"][token], worker["spec"][token]) == (True, False)


def test_where_libtpu_listens_is_what_the_user_says_if_he_does() -> None:
    own = KINDS["lws"].manifest(spec(environment={"TPU_PROCESS_PORT": "8500"}), AT)
    several = KINDS["lws"].manifest(spec("cpu:hosts=3"), AT)
    for pod in templates("lws", own):
        ports = [
            one for one in pod["spec"]["containers"][0]["env"] if "PROCESS_PORT" in one["name"]
        ]
        assert ["valueFrom" in one for one in ports] == [True]  # from the Secret
    for pod in templates("lws", several):
        assert "TPU_PROCESS_PORT" not in environment(pod)


def test_a_job_set_ends_with_the_first_failure_and_is_removed_later() -> None:
    manifest = KINDS["jobset"].manifest(spec(timeout=60.0), AT)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 24 * 3600
    (pod,) = templates("jobset", manifest)
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["activeDeadlineSeconds"] > 60
    assert pod["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_holds_the_set_and_not_its_parts(kind: str) -> None:
    manifest = KINDS[kind].manifest(spec(), replace(AT, queue="research"))
    queue = "kueue.x-k8s.io/queue-name"
    assert manifest["metadata"]["labels"][queue] == "research"
    for pod in templates(kind, manifest):
        assert queue not in pod["metadata"]["labels"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accelerator", ["cpu", "cpu:hosts=3", "l4"])
def test_what_is_no_slice_of_tpus_may_be_on_any_nodes(kind: str, accelerator: str) -> None:
    manifest = KINDS[kind].manifest(spec(accelerator), AT)
    assert "cloud.google.com/gke-nodepool" not in manifest["metadata"]["annotations"].values()
    hosts = str(accelerators.parse(accelerator).hosts)
    assert environment(templates(kind, manifest)[0])["KINETIC_HOSTS"] == hosts


@pytest.mark.parametrize(
    "name", ["job-pathways-0123456789ab", "x" * 300, "größe", "訓練", "<lambda>", "", "9", "a" * 44]
)
def test_what_controllers_make_of_a_name_is_legal(name: str) -> None:
    made = group_name(name)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", made)
    most = 1023
    revision = f"{made}-0-{'f' * 10}"  # of the StatefulSet of the workers, as a label
    pods = [f"{made}-0-{most}", f"{made}-host-0-{most}-abcde"]
    assert max(map(len, (made, revision, *pods))) <= LABEL


def test_different_names_stay_different() -> None:
    names = ["x" * 45, "x" * 46, "x" * 44, "X" * 44, "größe", "grosse"]
    assert len({group_name(name) for name in names}) == len(names)


def test_an_accelerator_that_is_none_is_told() -> None:
    with pytest.raises(ConfigurationError, match="no accelerator"):
        KINDS["lws"].manifest(spec("tpu-v99-16"), AT)
