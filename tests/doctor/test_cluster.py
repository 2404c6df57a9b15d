"""Examine a real cluster and a bucket: healthy ones, and ones with a single fault."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinetic.aio.gcs.store import GcsStore
from kinetic.credentials import ensure_credentials
from kinetic.doctor.checks import State
from kinetic.doctor.examination import examine
from kinetic.errors import ConfigurationError
from tests.cluster import crds
from tests.cluster.fixtures import Namespace
from tests.cluster.rest import Refused
from tests.cluster.rights import await_granted

ROLES = "rbac.authorization.k8s.io/v1"


async def test_a_healthy_cluster(clustered: dict[str, str], namespace: Namespace) -> None:
    report = await examine(environ=clustered)
    assert report.healthy, report.to_dict()
    assert report["API server"].evidence.startswith("Kubernetes v1.")
    assert report["permissions"].state is State.OK, report["permissions"]
    assert report["namespace"].evidence == f"'{namespace.name}' exists"
    assert report["service account"].evidence == "'kinetic' exists"
    assert report["bucket: use"].evidence == "objects can be written, read, and removed"
    assert "credentials" not in [result.name for result in report.results]  # Google isn't used


async def test_without_a_project_the_job_of_the_doctor_needs_an_image(
    clustered: dict[str, str], namespace: Namespace
) -> None:
    job = (await examine(environ=clustered, run=True))["job"]
    assert job.state is State.FAILED and "can't build an image" in job.evidence
    assert "--image " in job.advice
    jobs = await asyncio.to_thread(namespace.call, "GET", "batch/v1/jobs")
    assert not jobs["items"]


async def test_the_bucket_is_left_as_it_was(clustered: dict[str, str], bucket: str) -> None:
    await examine(environ=clustered)
    url = f"{clustered['STORAGE_EMULATOR_HOST']}/storage/v1/b/{bucket}/o"
    with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
        assert not json.load(answer).get("items")


async def test_objects_of_a_killed_doctor_are_removed_and_those_of_a_running_one_stay(
    clustered: dict[str, str], bucket: str
) -> None:
    store = GcsStore(f"gs://{bucket}", clustered)
    now = int(time.time())
    try:
        for name in (f"doctor/{now - 7200}-old", f"doctor/{now}-young"):
            await store.create(name, b"kinetic doctor")
        await examine(environ=clustered)
        assert [info.name for info in await store.list("doctor/")] == [f"doctor/{now}-young"]
    finally:
        await store.aclose()


async def test_a_user_without_rights_gets_a_role_to_apply_that_fixes_it(
    clustered: dict[str, str], namespace: Namespace
) -> None:
    clustered["KINETIC_KUBE_CONTEXT"] = "dev"
    before = await examine(environ=clustered)
    missing = before["permissions"]
    assert missing.state is State.FAILED
    assert "create, delete, deletecollection, get, list, patch, watch jobs.batch" in (
        missing.evidence
    )
    assert before["namespace"].state is State.SKIPPED  # it may exist, but the user can't see it
    assert before["nodes"].evidence == "you lack permission to read the nodes; jobs run without it"
    documents = list(yaml.safe_load_all(missing.advice.partition("\n")[2]))
    assert [document["kind"] for document in documents] == [
        "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding",
    ]  # fmt: skip
    for document, kind in zip(documents[:2], ("roles", "rolebindings"), strict=True):
        await asyncio.to_thread(namespace.call, "POST", f"{ROLES}/{kind}", document)
    await asyncio.to_thread(await_granted, namespace, documents[0], "dev")
    after = await examine(environ=clustered)
    assert after["permissions"].state is State.WARNING  # reading nodes only improves messages
    assert "list nodes (explaining why a job does not start)" in after["permissions"].evidence
    assert after.healthy


async def test_a_right_that_only_some_jobs_need_is_a_warning(
    clustered: dict[str, str], namespace: Namespace
) -> None:
    clustered["KINETIC_KUBE_CONTEXT"] = "dev"
    report = await examine(environ=clustered)
    role = next(yaml.safe_load_all(report["permissions"].advice.partition("\n")[2]))
    role["rules"] = [rule for rule in role["rules"] if "leaderworkersets" not in rule["resources"]]
    subject = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "dev"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "kinetic"}
    binding: dict[str, Any] = {"apiVersion": ROLES, "kind": "RoleBinding"}
    binding |= {"metadata": {"name": "dev"}, "roleRef": reference, "subjects": [subject]}
    await asyncio.to_thread(namespace.call, "POST", f"{ROLES}/roles", role)
    await asyncio.to_thread(namespace.call, "POST", f"{ROLES}/rolebindings", binding)
    await asyncio.to_thread(await_granted, namespace, role, "dev")
    report = await examine(environ=clustered)
    assert report["permissions"].state is State.WARNING
    assert "(jobs on several hosts)" in report["permissions"].evidence
    several = await examine(environ=clustered, backend="pathways")
    assert several["permissions"].state is State.FAILED


async def test_a_directory_can_replace_the_bucket(
    clustered: dict[str, str], tmp_path: Path
) -> None:
    """Then the doctor needs no Google credentials."""
    clustered["KINETIC_STORE"] = str(tmp_path)
    del clustered["STORAGE_EMULATOR_HOST"]
    report = await examine(environ=clustered)
    assert report["directory: use"].state is State.OK
    assert "credentials" not in {result.name for result in report.results}
    assert not [*tmp_path.glob("doctor/*")]


async def test_a_namespace_that_refuses_root_is_a_warning(
    clustered: dict[str, str], namespace: Namespace
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    path = f"/api/v1/namespaces/{namespace.name}"
    change = {"metadata": {"labels": labels}}
    await asyncio.to_thread(namespace.admin.call, "PATCH", path, change)
    found = (await examine(environ=clustered))["namespace"]
    assert found.state is State.WARNING and "KINETIC_RUN_AS_USER" in found.advice
    for user, state in (("1000", State.OK), ("0", State.FAILED)):
        clustered["KINETIC_RUN_AS_USER"] = user
        assert (await examine(environ=clustered))["namespace"].state is state


@pytest.mark.parametrize(
    ("variable", "value", "name", "message", "skips"),
    [
        ("KINETIC_NAMESPACE", "none", "namespace", "create namespace none", "service account"),
        ("KINETIC_SERVICE_ACCOUNT", "none", "service account", "serviceaccount none -n ", ""),
        ("KINETIC_QUEUE", "none", "queue", "no queue 'none'", ""),
        ("KINETIC_STORE", "gs://kn-none", "bucket", "no bucket gs://kn-none", "bucket: use"),
        ("KINETIC_STORE", "", "bucket", "KINETIC_STORE", ""),
        ("KINETIC_STORE", "/absent", "directory", "mount its volume", ""),
        ("KINETIC_KUBE_CONTEXT", "adnim", "access", "did you mean 'admin'?", "nodes"),
    ],
)
async def test_a_setting_that_names_a_missing_object_fails_and_skips_dependent_checks(
    clustered: dict[str, str], variable: str, value: str, name: str, message: str, skips: str
) -> None:
    clustered[variable] = value
    report = await examine(environ=clustered)
    assert report[name].state is State.FAILED
    assert message in report[name].evidence + report[name].advice
    because = {result.because for result in report.results}
    assert because == ({"", name} if skips else {""})
    assert not skips or report[skips].because == name


def wait_until_served(namespace: Namespace, collection: str, limit_s: float = 30.0) -> None:
    """Wait until the API server serves a new collection."""
    until = time.monotonic() + limit_s
    while True:
        try:
            namespace.call("GET", collection)
        except Refused:
            assert time.monotonic() < until, f"{collection} isn't served"
            time.sleep(0.05)
        else:
            return


async def test_a_queue_of_the_newest_kueue_is_found(
    clustered: dict[str, str], namespace: Namespace
) -> None:
    """Kueue 0.18 and later serve version v1beta2 only."""
    plane = namespace.control_plane
    group, kinds = "kueue.x-k8s.io", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    body = crds.definition("LocalQueue", group, "v1beta2", {"type": "object"})
    await asyncio.to_thread(plane.call, "POST", kinds, body)
    try:
        collection = f"{group}/v1beta2/localqueues"
        await asyncio.to_thread(wait_until_served, namespace, collection)
        queue = {"apiVersion": f"{group}/v1beta2", "kind": "LocalQueue", "metadata": {"name": "q"}}
        await asyncio.to_thread(namespace.call, "POST", collection, queue)
        report = await examine(environ=clustered | {"KINETIC_QUEUE": "q"})
        assert report["queue"].state is State.OK, report["queue"]
    finally:
        await asyncio.to_thread(plane.call, "DELETE", f"{kinds}/localqueues.{group}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server": "https://127.0.0.1:1"}, "https://127.0.0.1:1 does not answer"),
        ({"token": "expired"}, "does not accept the credentials"),
    ],
    ids=["no server", "a wrong token"],
)
async def test_a_server_that_does_not_answer_or_refuses_the_token_fails(
    clustered: dict[str, str], tmp_path: Path, change: dict[str, str], message: str
) -> None:
    config = yaml.safe_load(Path(clustered["KUBECONFIG"]).read_text())
    if "server" in change:
        config["clusters"][0]["cluster"] |= change
    else:
        for user in config["users"]:
            user["user"] |= change
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    clustered["KUBECONFIG"] = str(tmp_path / "kubeconfig")
    result = (await examine(environ=clustered))["API server"]
    assert result.state is State.FAILED
    assert message in result.evidence


async def test_events_that_may_concern_jobs_are_a_warning(
    clustered: dict[str, str], namespace: Namespace
) -> None:
    about = {"kind": "Pod", "namespace": namespace.name, "name": "p"}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "one"}, "type": "Warning"}
    event |= {"reason": "FailedMount", "message": "no such volume", "involvedObject": about}
    await asyncio.to_thread(namespace.call, "POST", "events", event)
    result = (await examine(environ=clustered))["warnings"]
    assert result.state is State.WARNING
    assert result.evidence == "1 FailedMount; the last event says: no such volume"


async def test_a_node_with_gpus_and_without_their_driver_is_a_warning(
    clustered: dict[str, str], namespace: Namespace
) -> None:
    labels = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "bare", "labels": labels}}
    node["spec"] = {"unschedulable": True}
    call = namespace.admin.call
    await asyncio.to_thread(call, "POST", "/api/v1/nodes", node)
    try:
        result = (await examine(environ=clustered))["nodes"]
    finally:
        await asyncio.to_thread(call, "DELETE", "/api/v1/nodes/bare")
    assert result.state is State.WARNING
    assert "no GPU driver runs on bare" in result.evidence
    assert "kubectl get daemonsets" in result.advice


def test_credentials_can_be_checked_alone(
    clustered: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in clustered.items():
        monkeypatch.setenv(name, value)
    before = Path(clustered["KUBECONFIG"]).read_bytes()
    ensure_credentials("acme", "europe-west4-b", "lab")
    monkeypatch.setenv("KINETIC_KUBE_CONTEXT", "nobody")
    with pytest.raises(ConfigurationError, match="nobody"):
        ensure_credentials("acme")
    assert Path(clustered["KUBECONFIG"]).read_bytes() == before


async def test_a_tiny_job_runs_on_a_cluster_and_is_gone_afterwards(
    clustered: dict[str, str],
    namespace: Namespace,
    small_project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in clustered.items():
        monkeypatch.setenv(name, value)
    report = await examine(run=True, container_image="example.test/image:1")
    assert report.healthy, report.to_dict()
    assert "submitted in" in report["job"].evidence and "it ran Python" in report["job"].evidence
    assert await asyncio.to_thread(_jobs, namespace) == []


def _jobs(namespace: Namespace) -> list[str]:
    metadata = [job["metadata"] for job in namespace.call("GET", "batch/v1/jobs")["items"]]
    return [job["name"] for job in metadata if "deletionTimestamp" not in job]
