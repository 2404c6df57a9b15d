"""The manifests of jobs on several hosts, as their controllers and Kubernetes need them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from kinetic import accelerators
from kinetic._runner.protocol import wire
from kinetic.aio.kubernetes.manifests import Placement, job_manifest
from kinetic.aio.kubernetes.sets import KINDS, name_of_set, set_name
from kinetic.aio.ports import Resources
from kinetic.errors import ConfigurationError
from tests.kubernetes.orders import order, set_manifest

AT = Placement(namespace="ns", secret="grp-1")
LABEL = 63
Json = dict[str, Any]


def spec(accelerator: str = "tpu-v5e-16", **more: Any) -> Any:
    return order(resources=Resources(accelerator=accelerators.parse(accelerator)), **more)


def templates(kind: str, manifest: Json) -> list[Json]:
    """Return the templates of the pods, the first host's template first."""
    if kind == "lws":
        group = manifest["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    (job,) = manifest["spec"]["replicatedJobs"]
    return [job["template"]["spec"]["template"]]


def environment(pod: Json) -> Json:
    (container,) = pod["spec"]["containers"]
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


@pytest.mark.parametrize("kind", KINDS)
def test_each_host_has_the_pod_of_a_job_and_knows_the_others(kind: str) -> None:
    manifest = set_manifest(kind, spec(timeout=60.0), AT)
    single = job_manifest(spec(timeout=60.0), AT)
    for pod in templates(kind, manifest):
        hosts_env, single_env = environment(pod), environment(single["spec"]["template"])
        assert hosts_env["KINETIC_HOSTS"] == "4"
        assert hosts_env["KINETIC_COORDINATOR"].endswith(":8476")
        assert hosts_env["KINETIC_FAILURES"] == "1", "the second attempt follows the first"
        first = wire.Order.decode(hosts_env["KINETIC_ORDER"])
        assert replace(first, attempt=2) == wire.Order.decode(single_env["KINETIC_ORDER"])
        added = {"KINETIC_HOST", "KINETIC_HOSTS", "KINETIC_COORDINATOR"}
        added |= {"KINETIC_CREW", "KINETIC_ROUND", "KINETIC_JOB_UID", "KINETIC_RANK"}
        added |= {"KINETIC_LWS", "TPU_PROCESS_PORT"} if kind == "lws" else set()
        removed = {"KINETIC_DISRUPTIONS", "KINETIC_POD_NAME"}
        assert set(hosts_env) ^ set(single_env) == added | removed
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_of_a_batch_is_named_after_its_round_and_rank(kind: str) -> None:
    labels = {"kinetic.dev/submission": "grp-1", "kinetic.dev/round": "3"}
    worker = spec(name="grp-1-r3", labels=labels | {"kinetic.dev/kind": "worker"}, attempt=0)
    manifest = set_manifest(kind, worker, AT, life="b", rank=12)
    observed = manifest["metadata"]["annotations"]["kinetic.dev/name"]
    assert observed == "grp-1-r3.b.12.0"
    assert name_of_set(observed) == manifest["metadata"]["name"] == set_name("grp-1-r3", 12)
    for pod in templates(kind, manifest):
        variables = environment(pod)
        names = ("KINETIC_ROUND", "KINETIC_JOB_UID", "KINETIC_RANK", "KINETIC_FAILURES")
        assert [variables[name] for name in names] == ["3", "b", "12", "0"]
        assert pod["metadata"]["annotations"]["kinetic.dev/name"] == observed


def test_the_pods_of_a_leader_worker_set_suit_stateful_sets() -> None:
    """They can't end by themselves, and only the leader has access to the API server."""
    manifest = set_manifest("lws", spec(timeout=60.0), AT)
    group = manifest["spec"]["leaderWorkerTemplate"]
    leader, worker = templates("lws", manifest)
    assert (manifest["spec"]["replicas"], group["size"]) == (1, 4)
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    for pod in (leader, worker):
        assert not pod["spec"].keys() & {"restartPolicy", "activeDeadlineSeconds"}
        assert environment(pod)["KINETIC_LWS"] == manifest["metadata"]["name"]
        assert environment(pod)["TPU_PROCESS_PORT"] == "8471"  # the default is the coordinator's
    token = "automountServiceAccountToken"
    assert (leader["spec"][token], worker["spec"][token]) == (True, False)


def test_the_users_port_for_libtpu_replaces_the_default() -> None:
    own = set_manifest("lws", spec(environment={"TPU_PROCESS_PORT": "8500"}), AT)
    several = set_manifest("lws", spec("cpu:hosts=3"), AT)
    for pod in templates("lws", own):
        env = pod["spec"]["containers"][0]["env"]
        ports = [item for item in env if "PROCESS_PORT" in item["name"]]
        assert ["valueFrom" in port for port in ports] == [True]  # from the Secret
    for pod in templates("lws", several):
        assert "TPU_PROCESS_PORT" not in environment(pod)


def test_a_job_set_ends_with_the_first_failure_and_is_removed_later() -> None:
    manifest = set_manifest("jobset", spec(timeout=60.0), AT)
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
    manifest = set_manifest(kind, spec(), replace(AT, queue="research"))
    queue = "kueue.x-k8s.io/queue-name"
    assert manifest["metadata"]["labels"][queue] == "research"
    for pod in templates(kind, manifest):
        assert queue not in pod["metadata"]["labels"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accelerator", ["cpu", "cpu:hosts=3", "l4"])
def test_hosts_without_a_tpu_slice_may_be_in_different_node_pools(
    kind: str, accelerator: str
) -> None:
    manifest = set_manifest(kind, spec(accelerator), AT)
    assert "cloud.google.com/gke-nodepool" not in manifest["metadata"]["annotations"].values()
    hosts = str(accelerators.parse(accelerator).hosts)
    assert environment(templates(kind, manifest)[0])["KINETIC_HOSTS"] == hosts


@pytest.mark.parametrize(
    "name", ["job-pathways-0123456789ab", "x" * 300, "größe", "訓練", "<lambda>", "", "9", "a" * 44]
)
def test_names_that_controllers_derive_are_legal(name: str) -> None:
    base = set_name(name)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", base)
    most = 1023
    revision = f"{base}-0-{'f' * 10}"  # a label on the pods of the workers' StatefulSet
    pods = [f"{base}-0-{most}", f"{base}-host-0-{most}-abcde"]
    assert max(map(len, (base, revision, *pods))) <= LABEL


def test_different_names_stay_different() -> None:
    names = ["x" * 45, "x" * 46, "x" * 44, "X" * 44, "größe", "grosse"]
    assert len({set_name(name) for name in names}) == len(names)


def test_an_unknown_accelerator_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no accelerator"):
        set_manifest("lws", spec("tpu-v99-16"), AT)
