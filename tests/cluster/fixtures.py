"""Fixtures for tests that want a cluster; the control plane and the kubelet are started once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tempfile
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

import kinetic
from kinetic import aio
from tests.cluster.binaries import MissingBinaries, find
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubelet import Kubelet
from tests.cluster.rest import Account, Json, Refused
from tests.gcs import processes


def absent(reason: str) -> NoReturn:
    """No such thing here: skip what needs it, but fail where everything must be run."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """etcd, API server, controllers and scheduler."""
    try:
        found = find()
    except MissingBinaries as missing:
        absent(str(missing))
    with ControlPlane(found) as plane:
        yield plane


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """The URL of a GCS server."""
    if not processes.BINARY:
        absent(processes.MISSING)
    with tempfile.TemporaryDirectory(prefix="kn-gcs-") as folder:
        with processes.running(Path(folder) / "gcs.log") as url:
            yield url


@pytest.fixture(scope="session")
def nodes(control_plane: ControlPlane) -> Iterator[Kubelet]:
    """The kubelet of the whole run; tests ask for `kubelet`."""
    with Kubelet(control_plane) as kubelet:
        yield kubelet


@pytest.fixture
def kubelet(nodes: Kubelet, control_plane: ControlPlane) -> Iterator[Kubelet]:
    """Nodes, and what goes wrong on them; as new after each test."""
    control_plane.heal()
    nodes.heal()
    yield nodes
    control_plane.heal()
    nodes.heal()
    nodes.reset()


@pytest.fixture(scope="session")
def groups(nodes: Kubelet) -> None:
    """LeaderWorkerSets and JobSets, by stand-ins of their controllers."""
    nodes.start_controllers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A namespace of the test's own, with the service account ``kinetic``.

    What is asked through it counts for nobody; see `ControlPlane.requests`.
    """

    name: str
    admin: Account
    kubeconfig: Path
    kubelet: Kubelet
    control_plane: ControlPlane

    def path(self, below: str) -> str:
        """Of ``pods/x`` of the core, of ``batch/v1/jobs/x`` of a group."""
        parts = below.split("/", 2)
        if re.match(r"v\d", parts[1] if len(parts) > 2 else ""):
            group, version, rest = parts
            return f"/apis/{group}/{version}/namespaces/{self.name}/{rest}"
        return f"/api/v1/namespaces/{self.name}/{below}"

    def call(self, method: str, below: str, body: Json | None = None, **query: str) -> Json:
        """A request below the namespace. See `Account.call`."""
        return self.admin.call(method, self.path(below), body, **query)


@pytest.fixture
def namespace(control_plane: ControlPlane, kubelet: Kubelet) -> Iterator[Namespace]:
    """A fresh namespace; whatever runs in it is ended with the test."""
    with fresh_namespace(control_plane, kubelet) as yours:
        yield yours


def new_namespace(control_plane: ControlPlane, kubelet: Kubelet) -> Namespace:
    """A namespace and its service accounts."""
    name = f"kn-{uuid.uuid4().hex[:10]}"
    made: dict[str, Any] = {"apiVersion": "v1", "metadata": {"name": name}}
    control_plane.call("POST", "/api/v1/namespaces", made | {"kind": "Namespace"})
    yours = Namespace(
        name=name,
        admin=control_plane.account(),
        kubeconfig=control_plane.kubeconfig,
        kubelet=kubelet,
        control_plane=control_plane,
    )
    for account in ("kinetic", "default"):  # the controllers make the second, a little later
        body = {"kind": "ServiceAccount", "apiVersion": "v1", "metadata": {"name": account}}
        try:
            yours.call("POST", "serviceaccounts", body)
        except Refused as refusal:
            if refusal.code != 409:
                raise
    return yours


@contextmanager
def fresh_namespace(control_plane: ControlPlane, kubelet: Kubelet) -> Iterator[Namespace]:
    """See `new_namespace`; whatever runs in it is ended on leaving."""
    yours = new_namespace(control_plane, kubelet)
    try:
        yield yours
    finally:
        control_plane.heal()
        with contextlib.suppress(Refused):
            control_plane.call("DELETE", f"/api/v1/namespaces/{yours.name}")  # no new pods
        kubelet.purge(yours.name)


@pytest.fixture
def bucket(gcs_server: str) -> str:
    """The name of a bucket of the test's own, empty."""
    return fresh_bucket(gcs_server)


def fresh_bucket(gcs_server: str) -> str:
    """Make an empty bucket; its name."""
    name = f"kn-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(
        f"{gcs_server}/storage/v1/b?project=p",
        data=json.dumps({"name": name}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60):
        return name


IMAGE = "example.test/image:1"
"""Any name will do: the processes run in the interpreter of the tests."""

on_cluster = kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1)
"""Decorate a function for one pod."""


def settings(namespace: Namespace, bucket: str, gcs_server: str) -> dict[str, str]:
    """Return the variables by which users name cluster and bucket."""
    return {
        "KUBECONFIG": str(namespace.kubeconfig),
        "KINETIC_KUBE_CONTEXT": "admin",
        "KINETIC_NAMESPACE": namespace.name,
        "KINETIC_STORE": f"gs://{bucket}",
        "STORAGE_EMULATOR_HOST": gcs_server,
    }


@pytest.fixture
def configured(
    namespace: Namespace,
    bucket: str,
    gcs_server: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Namespace:
    """The namespace; this process is configured for it, and packs the folder of the test alone."""
    for name, value in settings(namespace, bucket, gcs_server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KINETIC_PACKAGE_ROOT", str(request.path.parent))
    if isinstance(namespace.kubelet, Kubelet):
        namespace.kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs_server)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return namespace


@pytest.fixture
async def client(configured: Namespace) -> AsyncIterator[aio.Client]:
    async with aio.Client() as client:
        yield client


async def until(what: Callable[[], Any]) -> None:
    """Wait until *what*, asked in a thread, is true."""
    while not await asyncio.to_thread(what):
        await asyncio.sleep(0.05)
