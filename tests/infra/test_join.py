"""Join an existing cluster: the control plane of the tests, with a directory as the store."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kinetic
from kinetic import aio, configuration, errors
from kinetic.aio import infra
from kinetic.aio.backends.gke import builds_url, open_storage, store_url
from kinetic.aio.infra.join import decide, target_of
from kinetic.aio.infra.namespace import apply, manifests
from kinetic.aio.infra.resources import Action
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.errors import ConfigurationError
from tests.cluster.fixtures import IMAGE, Namespace
from tests.cluster.rights import await_granted
from tests.gke.proxy import Relay
from tests.infra.console import Console

on_cluster = pytest.mark.timeout(180)
DEADLINE_S = 120.0


@kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1)
def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def fresh(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a namespace that doesn't exist yet, and set this process's kubeconfig."""
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    name = f"{namespace.name}-new"
    yield name
    namespace.admin.call("DELETE", f"/api/v1/namespaces/{name}")
    namespace.kubelet.purge(name)


def actions(joined: infra.Joining) -> set[str]:
    return {change.action.value for change in joined.changes}


async def run_there(context: str, name: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a job and a batch with the settings that `init` saves."""
    for key, value in {
        "KINETIC_KUBE_CONTEXT": context,
        "KINETIC_NAMESPACE": name,
        "KINETIC_STORE": str(store),
        "KINETIC_PACKAGE_ROOT": str(Path(__file__).parent),
    }.items():
        monkeypatch.setenv(key, value)
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        assert await client.run(double, 2) == 4
        batch = await client.run_async_map(double, range(2), progress=False)
        assert await batch.results() == [0, 2]


@on_cluster
async def test_an_administrator_can_apply_the_manifest_that_a_user_gets(
    fresh: str, namespace: Namespace, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the user joins, and jobs run."""
    settings: dict[str, Any] = {"kube_context": "dev", "namespace": fresh, "store": str(store)}
    joined = await infra.init(target_of(**settings))
    assert actions(joined) == {"ask"}
    wanted = manifests(fresh, user="dev")
    printed = [*yaml.safe_load_all(joined.manifest)]
    assert printed == [manifest.document for manifest in wanted]
    admin = target_of(kube_context="admin", store=str(store))
    api = Api(await open_access(admin, os.environ))
    try:
        for manifest in wanted:
            await apply(api, manifest)
    finally:
        await api.aclose()
    roles = [document for document in printed if document["kind"] == "Role"]
    (role,) = [role for role in roles if role["metadata"]["name"] == "kinetic"]
    built_in = [rule for rule in role["rules"] if rule["apiGroups"] in ([""], ["batch"])]
    joined_namespace = Namespace(
        name=fresh,
        admin=namespace.admin,
        kubeconfig=namespace.kubeconfig,
        kubelet=namespace.kubelet,
        control_plane=namespace.control_plane,
    )
    await asyncio.to_thread(await_granted, joined_namespace, {"rules": built_in}, "dev")
    joined = await infra.init(target_of(**settings))
    assert actions(joined) == {"unseen"} and not joined.manifest
    assert "nodes" in " ".join(joined.notes)
    await run_there("dev", fresh, store, monkeypatch)


@on_cluster
async def test_a_user_hands_over_the_roles_that_they_cannot_grant(
    namespace: Namespace, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who manages a namespace may create roles, but only with their own permissions."""
    rights = {"": ["namespaces", "pods", "secrets", "serviceaccounts"], "batch": ["jobs"]}
    rights |= {"rbac.authorization.k8s.io": ["roles", "rolebindings"]}
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    rules = [
        {"apiGroups": [group], "resources": resources, "verbs": verbs}
        for group, resources in rights.items()
    ]
    roles = "rbac.authorization.k8s.io/v1"
    meta: dict[str, Any] = {"apiVersion": roles, "metadata": {"name": "manager"}}
    namespace.call("POST", f"{roles}/roles", meta | {"kind": "Role", "rules": rules})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "name": "manager"}
    binding = {
        "kind": "RoleBinding",
        "subjects": [reference | {"kind": "User"}],
        "roleRef": reference | {"kind": "Role"},
    }
    namespace.call("POST", f"{roles}/rolebindings", meta | binding)
    await asyncio.to_thread(await_granted, namespace, {"rules": rules}, "manager")

    config: dict[str, Any] = yaml.safe_load(namespace.kubeconfig.read_text())
    (admin,) = [entry["user"] for entry in config["users"] if entry["name"] == "admin"]
    (context,) = [entry["context"] for entry in config["contexts"] if entry["name"] == "admin"]
    config["users"].append({"name": "manager", "user": admin | {"as": "manager"}})
    config["contexts"].append({"name": "manager", "context": context | {"user": "manager"}})
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))

    target = target_of(kube_context="manager", namespace=namespace.name, store=str(store))
    planned = await infra.init(target, preview=True)
    assert "create" in actions(planned) and "ask" not in actions(planned)
    joined = await infra.init(target)
    assert "create" not in actions(joined)
    asked = {change.name for change in joined.changes if change.action is Action.ASK}
    assert asked == {"kinetic", "kinetic-runner", "kinetic-manager"}
    assert joined.manifest


@on_cluster
async def test_a_namespace_that_refuses_host_paths_needs_a_claim(
    namespace: Namespace, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    labels = {"pod-security.kubernetes.io/enforce": "baseline"}
    path = f"/api/v1/namespaces/{namespace.name}"
    namespace.admin.call("PATCH", path, {"metadata": {"labels": labels}})
    settings: dict[str, Any] = {"kube_context": "admin", "namespace": namespace.name}
    with pytest.raises(ConfigurationError, match="'baseline'"):
        await infra.init(target_of(**settings, store=str(store)))
    planned = await infra.init(
        target_of(**settings, store=str(store), store_claim="results"), preview=True
    )
    assert planned.target.store_claim == "results"


@on_cluster
async def test_a_wrong_setting_is_one_clear_error(
    namespace: Namespace, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    with pytest.raises(ConfigurationError, match=r"nowhere.*admin"):
        await infra.init(target_of(kube_context="nowhere", store=str(store)))
    for path in (tmp_path / "absent", Path("/dev/null")):
        with pytest.raises(ConfigurationError, match="mount its volume"):
            await infra.init(target_of(kube_context="admin", store=str(path)))
    with pytest.raises(errors.AuthError, match="/sys/kernel"):  # not even root can write to it
        await infra.init(target_of(kube_context="admin", store="/sys/kernel"))
    config = json.loads(namespace.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
        await infra.init(target_of(kube_context="admin", store=str(store)))


@pytest.fixture
def console(namespace: Namespace, tmp_path: Path) -> Console:
    return Console(tmp_path, {"KUBECONFIG": str(namespace.kubeconfig)})


@on_cluster
async def test_the_command_saves_a_profile_and_runs_a_job(
    console: Console, namespace: Namespace, store: Path
) -> None:
    where = ("--namespace", namespace.name, "--store", str(store))
    output, notes = await console.streams(
        "init", "--kube-context", "admin", *where, "--run-job", "--image", IMAGE
    )
    assert "+ create   Role kinetic" in notes and "it ran Python" in output
    assert "saved the profile 'admin'" in notes
    assert not [*store.glob("doctor/*")]
    shown: dict[str, Any] = json.loads((await console.streams("profile", "show", "--json"))[0])
    assert shown["store"] == str(store) and shown["kube_context"] == "admin"
    _, notes = await console.streams("init", "--kube-context", "admin", *where)
    assert "nothing to create" in notes


@on_cluster
async def test_status_works_for_the_cluster_that_init_joined(
    console: Console, namespace: Namespace, store: Path, tmp_path: Path
) -> None:
    where = ("--namespace", namespace.name, "--store", str(store))
    before = json.loads(
        await console.run("status", "--kube-context", "admin", *where[:2], "--json")
    )
    assert {part["name"]: part["exists"] for part in before["parts"]} == {
        namespace.name: True,
        "kinetic": False,
        "kinetic-runner": False,
    }
    await console.run("init", "--kube-context", "admin", *where)
    labels = {"eks.amazonaws.com/nodegroup": "gpus", "node.kubernetes.io/instance-type": "p5"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "bare", "labels": labels}}
    node["status"] = {"allocatable": {"nvidia.com/gpu": "8"}}
    call = namespace.admin.call
    await asyncio.to_thread(call, "POST", "/api/v1/nodes", node | {"spec": {"unschedulable": True}})
    try:
        found = json.loads(await console.run("status", "--json"))
        shown, notes = await console.streams("status")
    finally:
        await asyncio.to_thread(call, "DELETE", "/api/v1/nodes/bare")
    assert (found["context"], found["state"], found["project"]) == ("admin", "RUNNING", "")
    assert found["version"] and found["usd_per_hour"] is None
    assert {part["exists"] for part in found["parts"]} == {True}
    (pool,) = [pool for pool in found["pools"] if pool["name"] == "gpus"]
    assert (pool["machine"], pool["accelerator"]) == ("p5", "nvidia.com/gpu x8")
    assert (pool["nodes"], pool["used"], pool["max_nodes"], pool["spot"]) == (1, 0, None, None)
    assert "bare" in pool["problem"]
    assert any("costs" in line for line in found["unseen"])
    assert "RUNNING" in shown and "Kubernetes doesn't show" in notes
    # A user of one namespace sees its jobs, and is told what is hidden.
    limited = await console.run("status", "--kube-context", "dev", *where[:2], "--json")
    found = json.loads(limited)
    assert found["state"] == "RUNNING" and {part["exists"] for part in found["parts"]} == {None}
    assert any("nodes" in line for line in found["unseen"])
    # A cluster on Google Cloud is another one, whatever the profile says.
    assert "--project" in await console.run("status", "--cluster", "lab", exit_code=2)
    config = namespace.kubeconfig.read_text()
    port = f"127.0.0.1:{namespace.control_plane.port}"
    (tmp_path / "config").write_text(config.replace(port, "127.0.0.1:1"))
    console.environ["KUBECONFIG"] = str(tmp_path / "config")
    assert "127.0.0.1:1" in await console.run("status", exit_code=1)
    assert "'nowhere'" in await console.run("status", "--kube-context", "nowhere", exit_code=2)


@on_cluster
async def test_one_ctrl_c_at_the_prompt_ends_the_command(
    console: Console, namespace: Namespace, store: Path
) -> None:
    where = ("--kube-context", "admin", "--namespace", namespace.name, "--store", str(store))
    printed = await console.interrupted("Create these in", "init", *where)
    assert printed.endswith("kinetic: interrupted\r\n") and "Traceback" not in printed
    assert "no profile" in await console.run("profile", "show", exit_code=2)


@on_cluster
async def test_connections_may_close_while_a_person_thinks(
    console: Console, namespace: Namespace, store: Path, tmp_path: Path
) -> None:
    where = ("--kube-context", "admin", "--namespace", namespace.name, "--store", str(store))
    async with Relay(namespace.control_plane.port) as relay:
        config = namespace.kubeconfig.read_text()
        port = f"127.0.0.1:{namespace.control_plane.port}"
        assert port in config
        (tmp_path / "config").write_text(config.replace(port, f"127.0.0.1:{relay.port}"))
        console.environ["KUBECONFIG"] = str(tmp_path / "config")
        printed = await console.answered(
            "Create these in", b"y\n", "init", *where, meanwhile=relay.cut
        )
        assert relay.cuts
    assert "saved the profile 'admin'" in printed


@on_cluster
async def test_the_command_prints_the_manifest_and_ends_with_a_code(
    console: Console, namespace: Namespace, store: Path
) -> None:
    where = ("--kube-context", "dev", "--namespace", namespace.name, "--store", str(store))
    output, notes = await console.streams("init", *where, exit_code=4)
    assert "'dev'" in notes
    assert "no profile" in (await console.streams("profile", "show", exit_code=2))[1]
    printed, _ = await console.streams("init", *where, "--print")
    everything = [*yaml.safe_load_all(printed)]
    assert everything == [*yaml.safe_load_all(output)]
    wanted = manifests(namespace.name, user="dev")
    assert everything == [manifest.document for manifest in wanted]


@pytest.mark.parametrize("project", ["my-project", "example.com:my-project"])
def test_jobs_use_the_buckets_that_up_makes(project: str) -> None:
    site = infra.Site(project=project, zone="us-central1-a", cluster="lab")
    target = configuration.resolve(backend="gke", project=project, cluster="lab", environ={})
    names = [site.bucket("jobs"), site.bucket("builds")]
    assert [store_url(target), builds_url(target)] == [f"gs://{name}" for name in names]
    open_storage(target, {})  # raises if a bucket can't have this name


@pytest.mark.parametrize(("project", "cluster"), [("My Project", "lab"), ("my-project", "Lab")])
def test_names_that_no_bucket_can_have_are_an_error(project: str, cluster: str) -> None:
    target = configuration.resolve(backend="gke", project=project, cluster=cluster, environ={})
    with pytest.raises(ConfigurationError, match=f"project '{project}' and cluster '{cluster}'"):
        store_url(target)


def test_a_bucket_gets_the_folder_of_its_namespace() -> None:
    def store_of(store: str | None, **settings: Any) -> str | None:
        return target_of(namespace="team", store=store, **settings).store

    assert store_of("gs://b", kube_context="c") == "gs://b/team"
    assert store_of("b", kube_context="c") == "gs://b/team"
    assert store_of("gs://b/mine/", kube_context="c") == "gs://b/mine"
    assert store_of("/srv/k", kube_context="c") == "/srv/k"
    assert store_of(None, project="acme-1", cluster="lab") == "gs://acme-1-kn-lab-jobs/team"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"store": "gs://b"}, "--kube-context"),
        ({"kube_context": "c"}, "KINETIC_STORE"),
        ({"kube_context": "c", "store": "a/b"}, "absolute path"),
        ({"kube_context": "c", "store": "gs://b", "namespace": "A b"}, "namespace"),
        ({"kube_context": "c", "store": "gs://b", "store_claim": "x"}, "claim"),
    ],
)
def test_settings_without_a_target_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        target_of(**given)


def test_an_unreadable_object_counts_as_present_only_if_you_may_submit() -> None:
    (manifest, *_) = manifests("team")
    assert decide(manifest, None, can_write=False, can_submit=True).action is Action.UNSEEN
    assert decide(manifest, None, can_write=False, can_submit=False).action is Action.ASK
    assert decide(manifest, None, can_write=True, can_submit=False).action is Action.CREATE
    assert decide(manifest, manifest.change, can_write=False, can_submit=True).action is Action.ASK
