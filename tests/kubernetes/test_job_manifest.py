"""The Kubernetes objects that carry a job."""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic import accelerators, configuration
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import EXIT_SURPLUS, Crew, Terms
from kinetic.aio.backends import gke
from kinetic.aio.images.container import COMMAND
from kinetic.aio.kubernetes.manifests import (
    CONTAINER,
    JOB_NAME_LENGTH,
    KEY,
    LABEL_LENGTH,
    MAX_SECRET_BYTES,
    NAME,
    Placement,
    job_manifest,
    label_value,
    object_name,
    secret_manifest,
)
from kinetic.aio.ports import Image, Resources
from kinetic.errors import ConfigurationError
from tests.kubernetes.orders import order

AT = Placement(namespace="ml", secret="grp-1")


def pod_of(*, at: Placement = AT, **changes: Any) -> dict[str, Any]:
    pod: dict[str, Any] = job_manifest(order(**changes), at)["spec"]["template"]["spec"]
    return pod


def container_of(**changes: Any) -> dict[str, Any]:
    container: dict[str, Any] = pod_of(**changes)["containers"][0]
    return container


def variables(container: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


def expanded(text: str) -> str:
    """Return a variable's value as a kubelet expands it when no other variable is defined."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda m: "$" if m[1] == "$" else m[0], text)


def test_the_container_starts_the_runner_once() -> None:
    image = Image(uri="ghcr.io/me/mine:1", command=COMMAND)
    assert container_of(image=image)["command"] == ["python3", "-u", "/app/remote_runner.py"]


def test_a_command_arrives_unchanged() -> None:
    words = ("python3", "-c", "print('$(HOME)', '$$')")
    command = container_of(image=Image(uri="ghcr.io/me/mine:1", command=words))["command"]
    assert tuple(map(expanded, command[:3])) == words


# --- the Job ------------------------------------------------------------------------------


def test_the_job_is_indexed_and_replaces_only_a_disrupted_pod() -> None:
    spec = job_manifest(order(), AT)["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 1, 1)
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["backoffLimitPerIndex"] == 3, "for pods that a kubelet refuses"
    assert spec["ttlSecondsAfterFinished"] == 24 * 3600
    final, disruption, failed = spec["podFailurePolicy"]["rules"]
    assert final["action"] == "FailIndex"
    assert final["onExitCodes"]["values"] == [wire.EXIT_FINAL, EXIT_SURPLUS]
    assert final["onExitCodes"]["containerName"] == CONTAINER
    assert disruption["action"] == "Ignore"
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert failed["action"] == "FailIndex"
    assert (failed["onExitCodes"]["operator"], failed["onExitCodes"]["values"]) == ("NotIn", [0])
    assert failed["onExitCodes"]["containerName"] == CONTAINER


def test_the_name_of_a_worker_comes_from_its_pod() -> None:
    crew = Crew(terms=Terms(single=True), outputs="", created=0.0)
    env = variables(container_of(crew=crew))
    assert Crew.decode(env["KINETIC_CREW"].replace("$$", "$")) == crew
    uid = "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert env["KINETIC_JOB_UID"] == {"fieldRef": {"fieldPath": uid}}
    counts = {
        "KINETIC_FAILURES": "batch.kubernetes.io/job-index-failure-count",
        "KINETIC_DISRUPTIONS": "batch.kubernetes.io/job-index-ignored-failure-count",
    }
    for name, annotation in counts.items():
        path = f"metadata.annotations['{annotation}']"
        assert env[name] == {"fieldRef": {"fieldPath": path}}
    assert env["KINETIC_POD_UID"] == {"fieldRef": {"fieldPath": "metadata.uid"}}


@pytest.mark.parametrize(
    ("timeout", "limit"), [(None, None), (10.2, 4241), (0.5, 4231), (1e12, 2**31 - 1)]
)
def test_the_deadline_of_the_pod_leaves_time_to_start(
    timeout: float | None, limit: int | None
) -> None:
    assert pod_of(timeout=timeout).get("activeDeadlineSeconds") == limit


def test_the_pod_has_the_grace_of_the_job() -> None:
    assert pod_of(grace=12.5)["terminationGracePeriodSeconds"] == 13


def test_job_and_pod_have_the_labels_of_the_order_and_the_common_ones() -> None:
    manifest = job_manifest(order(), AT)
    for metadata in (manifest["metadata"], manifest["spec"]["template"]["metadata"]):
        assert metadata["labels"].items() >= order().labels.items()
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "kinetic"
        assert metadata["annotations"][NAME] == order().name


def test_a_queued_job_waits_for_its_queue() -> None:
    manifest = job_manifest(order(), Placement(secret="s", queue="research"))
    assert manifest["spec"]["suspend"] is True
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


def test_environment_variables_set_the_placement_of_jobs() -> None:
    target = configuration.resolve(environ={"KINETIC_PROJECT": "p", "KINETIC_NAMESPACE": "team"})
    environ = {
        "KINETIC_JOB_TTL_S": "60",
        "KINETIC_QUEUE": "research",
        "KINETIC_PRIORITY_CLASS": "high",
        "KINETIC_SERVICE_ACCOUNT": "trainer",
    }
    manifest = job_manifest(order(), gke.placement(target, environ))
    pod = manifest["spec"]["template"]["spec"]
    assert manifest["metadata"]["namespace"] == "team"
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert manifest["spec"]["ttlSecondsAfterFinished"] == 60
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("high", "trainer")
    default = job_manifest(order(), gke.placement(target, {}))
    assert default["spec"]["ttlSecondsAfterFinished"] == 24 * 3600
    with pytest.raises(ConfigurationError, match="KINETIC_JOB_TTL_S must be a whole number"):
        gke.placement(target, {"KINETIC_JOB_TTL_S": "soon"})


# --- the machine --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [str(accelerator) for accelerator in accelerators.catalogue()])
def test_a_pod_requests_its_accelerator_selects_its_nodes_and_tolerates_their_taints(
    name: str,
) -> None:
    accelerator = accelerators.parse(name)
    pod = pod_of(resources=Resources(accelerator=accelerator))
    resources = pod["containers"][0]["resources"]
    assert pod.get("nodeSelector", {}).items() >= accelerator.node_selector.items()
    if accelerator.resource:
        chips = str(accelerator.chips_per_host)
        assert resources["requests"][accelerator.resource] == chips
        assert resources["limits"][accelerator.resource] == chips
        toleration = {"key": accelerator.resource, "operator": "Exists", "effect": "NoSchedule"}
        assert toleration in pod["tolerations"]
        assert "cpu" not in resources["limits"]
    else:
        assert "tolerations" not in pod


def test_a_spot_pod_selects_and_tolerates_spot_machines() -> None:
    pod = pod_of(resources=Resources(accelerator=accelerators.parse("tpu-v5e-8", spot=True)))
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {
        "key": "cloud.google.com/gke-spot",
        "operator": "Equal",
        "value": "true",
        "effect": "NoSchedule",
    } in pod["tolerations"]


def test_cpu_and_memory_are_requested_and_limited() -> None:
    resources = container_of(resources=Resources(cpu=1.5, memory_bytes=3 * 1024**3))["resources"]
    assert resources["requests"] == {"cpu": "1500m", "memory": str(3 * 1024**3)}
    assert resources["limits"] == {"cpu": "1500m", "memory": str(3 * 1024**3)}


def test_the_default_memory_is_requested_but_not_a_limit() -> None:
    resources = container_of(resources=Resources(cpu=2.0))["resources"]
    assert resources["requests"]["memory"] == str(4 * 1024**3)
    assert resources["limits"] == {"cpu": "2000m"}


def test_data_loaders_have_shared_memory() -> None:
    pod = pod_of(resources=Resources(memory_bytes=4 * 1024**3))
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    shm = {"medium": "Memory", "sizeLimit": str(2 * 1024**3)}
    assert {"name": "shm", "emptyDir": shm} in pod["volumes"]


def test_the_container_cannot_gain_privileges() -> None:
    assert container_of()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    pod = pod_of()
    assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}}
    assert pod["automountServiceAccountToken"] is True  # the pod may have to remove itself
    assert pod["serviceAccountName"] == "kinetic"


def test_data_in_a_bucket_is_mounted_read_only() -> None:
    data = [
        {"uri": "gs://b/x/y,z/", "is_dir": True, "fuse": True, "mount": "/data"},
        {"uri": "data/abc", "is_dir": True, "fuse": False, "mount": None},
        {"uri": "gs://b/k/one.h5", "is_dir": False, "fuse": True, "mount": None},
        {"uri": "data/1a2b/manifest", "is_dir": True, "fuse": True, "mount": "/mine"},
    ]
    template = job_manifest(order(data=data), AT)["spec"]["template"]
    pod = template["spec"]
    assert template["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
    options = [volume["csi"]["volumeAttributes"] for volume in pod["volumes"] if "csi" in volume]
    assert options == [
        {"bucketName": "b", "mountOptions": "implicit-dirs,only-dir=x/y\\,z"},
        {"bucketName": "b", "mountOptions": "implicit-dirs,only-dir=k"},
        {
            "bucketName": "p-kn-c-jobs",
            "mountOptions": "implicit-dirs,only-dir=data/1a2b/files",
        },
    ]
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["/data"]["readOnly"] and mounts["/_kinetic/fuse-data/1"]["readOnly"]
    plain = job_manifest(order(), AT)["spec"]["template"]["metadata"]["annotations"]
    assert "gke-gcsfuse/volumes" not in plain


def test_only_pods_have_the_annotations_of_pods_and_kinetic_ones_win() -> None:
    given = {"sidecar.istio.io/inject": "false", "kinetic.dev/name": "other"}
    job = job_manifest(order(), replace(AT, pod_annotations=given))
    found = job["spec"]["template"]["metadata"]["annotations"]
    assert found["sidecar.istio.io/inject"] == "false" and found["kinetic.dev/name"] != "other"
    assert "sidecar.istio.io/inject" not in job["metadata"]["annotations"]


def test_any_user_of_an_image_can_read_the_key() -> None:
    """A volume's files belong to root, and a user's own image may run as another user."""
    for user in (None, 1000):
        pod = pod_of(at=replace(AT, run_as_user=user))
        (key,) = [volume for volume in pod["volumes"] if volume["name"] == "key"]
        assert key["secret"]["defaultMode"] & 0o444 == 0o444


def test_a_pod_runs_as_the_user_of_its_image_unless_another_is_named() -> None:
    built = Image(uri="r.io/base:1", command=COMMAND, user=10001)
    own = Image(uri="r.io/own:1", command=COMMAND)
    cases = [(built, None, 10001), (built, 7, 7), (built, 0, 0), (own, 7, 7), (own, None, None)]
    for image, named, user in cases:
        security = pod_of(at=replace(AT, run_as_user=named), image=image)["securityContext"]
        assert security.get("runAsUser") == user
        assert security.get("runAsNonRoot") == (True if user else None)


@pytest.mark.parametrize(
    ("mount", "ref", "folder"),
    [
        ("/data", {"uri": "data/1/manifest"}, "/data"),
        ("/data/", {"uri": "gs://b/corpus/"}, "/data"),
        ("/models/m.bin", {"uri": "gs://b/m.bin", "is_dir": False}, "/models"),
        ("/models", {"uri": "gs://b/m.bin", "is_dir": False}, "/models"),
        ("/models/m.bin", {"uri": "data/1/manifest", "is_dir": False, "name": "m.bin"}, "/models"),
        ("/m.bin", {"uri": "gs://b/m.bin", "is_dir": False}, None),
        ("/data", {"uri": "gs://b/corpus/", "fuse": True}, None),
    ],
)
def test_a_user_who_is_not_root_gets_a_folder_for_each_volume(
    mount: str, ref: dict[str, Any], folder: str | None
) -> None:
    data = [{"is_dir": True, "fuse": False, **ref, "mount": mount}]
    for user, expected in ((None, None), (0, None), (1000, folder)):
        pod = pod_of(at=replace(AT, run_as_user=user), data=data)
        empty = {volume["name"] for volume in pod["volumes"] if volume.get("emptyDir") == {}}
        mounts = pod["containers"][0]["volumeMounts"]
        paths = [mount["mountPath"] for mount in mounts if mount["name"] in empty]
        assert paths == ([expected] if expected else [])


def test_a_volume_inside_another_needs_no_folder() -> None:
    data = [{"uri": "gs://b/x/", "mount": mount} for mount in ("/data/sub", "/data", "/database")]
    pod = pod_of(at=replace(AT, run_as_user=7), data=data)
    paths = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
    assert paths[-2:] == ["/data", "/database"]


def test_a_shared_directory_is_mounted_at_its_own_path() -> None:
    store = {"store": "shared:///srv/kinetic%20store"}
    source = {"hostPath": {"path": "/srv/kinetic store", "type": "Directory"}}
    claim = {"persistentVolumeClaim": {"claimName": "results"}}
    for at, expected in ((AT, source), (replace(AT, claim="results"), claim)):
        pod = pod_of(at=at, **store)
        assert {"name": "store", **expected} in pod["volumes"]
        mount = {"name": "store", "mountPath": "/srv/kinetic store"}
        assert mount in pod["containers"][0]["volumeMounts"]
    assert "store" not in {volume["name"] for volume in pod_of()["volumes"]}
    with pytest.raises(ConfigurationError, match="mounted at '/app'"):
        job_manifest(order(store="shared:///app"), AT)


def test_pods_with_a_shared_directory_run_as_the_submitting_user(tmp_path: Path) -> None:
    environ = {"KINETIC_KUBE_CONTEXT": "mine", "KINETIC_STORE": str(tmp_path)}
    target = configuration.resolve(environ=environ)
    assert gke.placement(target, environ).run_as_user == os.geteuid()
    named = {**environ, "KINETIC_RUN_AS_USER": "7"}
    assert gke.placement(configuration.resolve(environ=named), named).run_as_user == 7


@pytest.mark.parametrize("path", ["/app", "/var", "/var/run/kinetic", "/var/run/kinetic/key"])
def test_no_volume_hides_what_a_job_needs(path: str) -> None:
    """A job needs the runner and the key that signs its outcome."""
    data = [{"uri": "gs://b/x/", "is_dir": True, "fuse": True, "mount": path}]
    with pytest.raises(ConfigurationError, match=f"mounted at '{path}'"):
        job_manifest(order(data=data), AT)
    for near in ("/app/data", "/apps", "/var/lib/x", "/data"):
        job_manifest(order(data=[{**data[0], "mount": near}]), AT)


def test_data_outside_buckets_cannot_be_mounted() -> None:
    data = [{"uri": "hf://set", "is_dir": True, "fuse": True}]
    with pytest.raises(ConfigurationError, match="hf://set"):
        job_manifest(order(data=data), AT)


# --- environment and Secret ---------------------------------------------------------------


def test_captured_variables_and_the_key_are_in_the_secret_only() -> None:
    spec = order()
    manifest, secret = job_manifest(spec, AT), secret_manifest(spec, "grp-1", "ml")
    content = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    env = variables(container_of())
    for name in ("HF_TOKEN", "WANDB.KEY"):
        reference = env[name]["secretKeyRef"]
        assert reference["name"] == "grp-1"
        assert content[reference["key"]].decode() == spec.environment[name]
    assert content[KEY] == spec.key
    text = json.dumps(manifest)
    assert "geheim" not in text
    assert spec.key.decode() not in text


def test_all_jobs_of_a_submission_share_one_secret() -> None:
    first, second = order(name="grp-1-1-1"), order(name="grp-1-2-1", key=b"k" * 32)
    assert secret_manifest(first, "s", "ml") == secret_manifest(second, "s", "ml")


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_a_dollar_sign_in_a_value_does_not_reference_a_variable(value: str) -> None:
    env = variables(container_of(output_dir=value))
    assert wire.Order.decode(expanded(env["KINETIC_ORDER"])) == order(output_dir=value).order


def test_the_users_variables_replace_kinetics() -> None:
    container = container_of(environment={"JAX_PLATFORMS": "cpu"})
    assert [item["name"] for item in container["env"]].count("JAX_PLATFORMS") == 1


@pytest.mark.parametrize("name", ["", "A=B", "größe", "a\nb"])
def test_an_invalid_variable_name_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(ConfigurationError, match="capture_env_vars"):
        job_manifest(order(environment={name: "x"}), AT)


def test_a_secret_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=str(MAX_SECRET_BYTES)):
        secret_manifest(order(environment={"A": "x" * MAX_SECRET_BYTES}), "s", "ml")


def test_the_secret_of_a_single_job_goes_with_its_job() -> None:
    metadata = {"name": "kinetic-job-1", "uid": "u"}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
    (owner,) = secret_manifest(order(), "s", "ml", owner=job)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "kinetic-job-1", "u")


# --- names --------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text())
def test_any_text_makes_a_legal_name(text: str) -> None:
    name = object_name(text)
    assert len(name) <= JOB_NAME_LENGTH
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name, re.ASCII)
    assert object_name(name) == name


@settings(deadline=None)
@given(st.text())
def test_any_text_makes_a_legal_label(text: str) -> None:
    value = label_value(text)
    assert len(value) <= LABEL_LENGTH
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?", value, re.ASCII)
    assert label_value(value) == value


@settings(deadline=None)
@given(st.lists(st.text(), min_size=2, max_size=2, unique=True))
def test_different_texts_have_different_names(texts: list[str]) -> None:
    assert object_name(texts[0]) != object_name(texts[1])
    assert label_value(texts[0]) != label_value(texts[1])


def test_names_can_still_be_read() -> None:
    assert object_name("kinetic-job-1a2b3c4d") == "kinetic-job-1a2b3c4d"
    assert object_name("Täglich_trainieren").startswith("taglich-trainieren-")
    assert label_value("Täglich trainieren").startswith("Taglich-trainieren-")
    assert object_name("x" * 400).startswith("x" * 40)
    assert object_name("<lambda>").startswith("lambda-")
