"""Read and verify files of controllers, and apply them on the control plane of the tests."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinetic.aio import infra
from kinetic.aio.infra import read_controller, target_of
from kinetic.aio.infra.controllers import Controller, install, plan_install
from kinetic.aio.infra.resources import Action
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.errors import AuthError, ConfigurationError
from tests.cluster.control_plane import ControlPlane
from tests.cluster.crds import definition
from tests.cluster.fixtures import Namespace, until
from tests.cluster.rest import Refused
from tests.infra.google import Google

KIND = definition("Widget", "widgets.example.test", "v1", {"type": "object", "properties": {}})
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OWN = f"{DEFINITIONS}/{KIND['metadata']['name']}"


def manifests(name: str) -> list[dict[str, Any]]:
    """Return a controller's manifests; an object of its kind comes before the definition."""
    labels = {"app": "widget"}
    pod = {"containers": [{"name": "c", "image": "example.test/c:1"}]}
    template = {"metadata": {"labels": labels}, "spec": pod}
    return [
        {
            "apiVersion": "widgets.example.test/v1",
            "kind": "Widget",
            "metadata": {"name": "first", "namespace": name},
            "spec": {},
        },
        KIND | {"status": {"conditions": []}},
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "widgets", "namespace": name},
            "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template},
        },
    ]


@pytest.fixture
def file(control_plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(manifests(namespace.name)))
    yield path
    with contextlib.suppress(Refused):
        control_plane.call("DELETE", OWN)


def test_a_file_with_another_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lws.yaml"
    path.write_text(yaml.safe_dump_all(manifests("n")))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    controller = read_controller(f"{path}@sha256:{digest.upper()}")
    assert (controller.name, controller.digest) == ("lws.yaml", digest)
    assert len(controller.documents) == 4
    assert digest in controller.change.reason
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ConfigurationError, match=digest):
        read_controller(f"{path}@sha256:{digest}")


@pytest.mark.parametrize(
    ("configuration", "limits"),
    [
        (
            "apiVersion: config.kueue.x-k8s.io/v1beta2\n#waitForPodsReady:\n#  timeout: 5m\n",
            {"timeout": "2h", "recoveryTimeout": "0s"},
        ),
        (
            "apiVersion: config.kueue.x-k8s.io/v1beta2\nwaitForPodsReady: {timeout: 9h}",
            {"timeout": "9h"},
        ),
        ("apiVersion: config.kueue.x-k8s.io/v1beta1\nkind: Configuration\n", None),
    ],
)
def test_kueue_waits_for_slow_nodes_and_not_for_workers_that_have_left(
    tmp_path: Path, configuration: str, limits: dict[str, str] | None
) -> None:
    path = tmp_path / "kueue.yaml"
    metadata = {"name": "kueue-manager-config", "namespace": "kueue-system"}
    data = {"controller_manager_config.yaml": configuration}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    path.write_text(yaml.safe_dump_all([*manifests("n"), config_map]))
    controller = read_controller(str(path))
    assert controller.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    installed = controller.documents[-1]["data"]["controller_manager_config.yaml"]
    assert installed.startswith(configuration)
    found: dict[str, Any] = yaml.safe_load(installed)
    assert found.get("waitForPodsReady") == limits


@pytest.mark.parametrize("content", ["", "a: [", "- 1", "kind: Pod", "apiVersion: v1\nkind: Pod"])
def test_a_file_without_manifests_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"x\.yaml"):
        read_controller(str(path))
    with pytest.raises(ConfigurationError, match="No such file"):
        read_controller(str(tmp_path / "absent.yaml"))


async def test_a_new_kind_comes_before_its_objects_and_a_second_run_changes_nothing(
    file: Path, namespace: Namespace, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    (file.parent / "store").mkdir()
    settings: dict[str, Any] = {"namespace": namespace.name, "store": str(file.parent / "store")}
    target = target_of(kube_context="admin", **settings)
    wanted = read_controller(str(file))
    joined = await infra.init(target, controllers=(wanted,))
    assert [change.action for change in joined.controllers] == [Action.CREATE]
    widget = f"/apis/widgets.example.test/v1/namespaces/{namespace.name}/widgets/first"
    assert control_plane.call("GET", widget)
    assert namespace.call("GET", "apps/v1/deployments/widgets")["spec"]["replicas"] == 0
    again = await infra.init(target, controllers=(wanted,))
    assert not again.steps
    control_plane.call("DELETE", widget)
    drifted = await infra.init(target, controllers=(wanted,), preview=True)
    assert "1 of 4 objects" in drifted.controllers[0].reason
    with pytest.raises(AuthError):
        await infra.init(target_of(kube_context="dev", **settings), controllers=(wanted,))


async def test_an_undefined_kind_is_named(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    path = tmp_path / "odd.yaml"
    path.write_text("apiVersion: odd.test/v1\nkind: Odd\nmetadata: {name: a}\n")
    api = Api(await open_access(target_of(kube_context="admin", store="/s"), os.environ))
    try:
        with pytest.raises(ConfigurationError, match="no kind Odd"):
            await install(api, read_controller(str(path)))
    finally:
        await api.aclose()


CRDS = Path(os.environ.get("KINETIC_CRDS", "/nowhere"))


@pytest.mark.skipif(not CRDS.is_dir(), reason="KINETIC_CRDS names no folder with published CRDs")
async def test_large_published_definitions_are_applied(
    namespace: Namespace, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server-side apply has no limit of 256 KiB, unlike the annotation of client-side apply."""
    monkeypatch.setenv("KUBECONFIG", str(namespace.kubeconfig))
    api = Api(await open_access(target_of(kube_context="admin", store="/s"), os.environ))
    installed: list[Controller] = []
    try:
        for path in sorted(CRDS.glob("*.yaml")):
            controller = read_controller(str(path))
            if await plan_install(api, controller) == controller.change:
                installed.append(controller)
                await install(api, controller)
            assert (await plan_install(api, controller)).action is Action.KEEP
    finally:
        await api.aclose()
        for controller in installed:
            for document in controller.documents:
                name = f"{DEFINITIONS}/{document['metadata']['name']}"
                control_plane.call("DELETE", name)
                await until(lambda name=name: _is_gone(control_plane, name))


def _is_gone(plane: ControlPlane, path: str) -> bool:
    try:
        plane.call("GET", path)
    except Refused:
        return True
    return False


async def test_up_installs_a_controller_in_its_new_cluster(
    infra: infra.Infrastructure, google: Google, tmp_path: Path
) -> None:
    path = tmp_path / "lws.yaml"
    crd = definition("LeaderWorkerSet", "leaderworkerset.x-k8s.io", "v1", {"type": "object"})
    path.write_text(yaml.safe_dump(crd))
    served = {"resources": [{"name": "leaderworkersets", "kind": "LeaderWorkerSet"}]}
    google.objects["/lab/apis/leaderworkerset.x-k8s.io/v1"] = served
    names = {"name": "customresourcedefinitions", "kind": "CustomResourceDefinition"}
    types = {"resources": [{**names, "namespaced": False}]}
    google.objects["/lab/apis/apiextensions.k8s.io/v1"] = types
    files = (read_controller(str(path)),)
    planned = await infra.plan_up(controllers=files)
    assert planned.notes == ()
    assert planned.plan.changes[-1].kind == "controller"
    await infra.apply(planned)
    assert any("leaderworkersets." in key for key in google.objects)
    assert not (await infra.plan_up(controllers=files)).plan.steps
