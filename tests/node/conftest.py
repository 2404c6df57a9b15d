"""The node, what a client needs to send jobs to it, and a look at what is left."""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.binaries import MissingBinaries, find
from tests.cluster.control_plane import ControlPlane
from tests.cluster.fixtures import Namespace, absent, until
from tests.cluster.kubelet import NODE, Kubelet
from tests.cluster.rest import Refused
from tests.gcs import processes
from tests.node import images, machine, parts
from tests.node.node import Node

GONE_S = 60.0
FIRST_S = 1800.0
"""Seconds: the first test waits until there are images. Each has a deadline of its own."""


@pytest.hookimpl(tryfirst=True)  # the tiers of the others depend on it
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that is here wants the machine for itself."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.node)
            item.add_marker(pytest.mark.timeout(FIRST_S))


@pytest.fixture(scope="session")
def kitchen() -> Iterator[images.Kitchen]:
    """Where images are made."""
    try:
        found = parts.find()
    except parts.MissingParts as missing:
        absent(str(missing))
    with images.kitchen(found) as kitchen:
        yield kitchen


@pytest.fixture(scope="session")
def control_plane(kitchen: images.Kitchen) -> Iterator[ControlPlane]:
    """One whose only node is the real one; none without what that takes."""
    try:
        with ControlPlane(find()) as plane:
            yield plane
    except MissingBinaries as missing:
        absent(str(missing))


@pytest.fixture(scope="session")
def node(control_plane: ControlPlane, kitchen: images.Kitchen) -> Iterator[Node]:
    """The node, for all tests."""
    archives = images.archives(kitchen)
    with Node(control_plane, kitchen.parts, archives, images.SANDBOX) as node:
        yield node


@pytest.fixture(scope="session")
def controllers(control_plane: ControlPlane, node: Node) -> Iterator[Kubelet]:
    """LeaderWorkerSets and JobSets become pods: by the process kubelet, without its node."""
    with Kubelet(control_plane) as kubelet:
        kubelet.remove_node(NODE)
        kubelet.start_controllers()
        yield kubelet


@pytest.fixture(scope="session")
def gcs_server(node: Node) -> Iterator[str]:
    """A GCS server that this machine and its containers reach by the same URL."""
    if not processes.BINARY:
        absent(processes.MISSING)
    with tempfile.TemporaryDirectory(prefix="kn-gcs-") as folder:
        with processes.running(Path(folder) / "gcs.log", machine.ADDRESS) as url:
            yield url


@contextlib.contextmanager
def fresh_namespace(control_plane: ControlPlane, node: Node) -> Iterator[Namespace]:
    """A namespace; all that is in it ends with the block."""
    name = f"kn-{uuid.uuid4().hex[:10]}"
    path = f"/api/v1/namespaces/{name}"
    control_plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    made = Namespace(
        name=name,
        admin=control_plane.account(),
        kubeconfig=control_plane.kubeconfig,
        kubelet=None,  # type: ignore[arg-type] # the real one takes no orders
        control_plane=control_plane,
    )
    for account in ("kinetic", "default"):
        with contextlib.suppress(Refused):  # the controllers were faster
            made.call("POST", "serviceaccounts", {"metadata": {"name": account}})
    yield made
    node.cordon(closed=False)
    control_plane.call("DELETE", path)  # from now on, no new pods
    until = time.monotonic() + GONE_S
    while pods := made.call("GET", "pods")["items"]:
        for pod in pods:
            with contextlib.suppress(Refused):
                made.call("DELETE", f"pods/{pod['metadata']['name']}", gracePeriodSeconds="1")
        assert time.monotonic() < until, f"pods of {name} do not end\n{node.log('kubelet')}"
        time.sleep(0.3)


@pytest.fixture
def namespace(control_plane: ControlPlane, node: Node) -> Iterator[Namespace]:
    """A fresh one, for a test."""
    with fresh_namespace(control_plane, node) as made:
        yield made


async def gone(namespace: Namespace, *kinds: str) -> None:
    """Wait until there is neither a Job nor a pod nor a submission's Secret."""

    def left() -> list[str]:
        found = [
            one for kind in ("batch/v1/jobs", "pods", *kinds)
            for one in namespace.call("GET", kind)["items"]
        ]  # fmt: skip
        secrets = namespace.call("GET", "secrets")["items"]
        names = [one["metadata"]["name"] for one in [*found, *secrets]]
        return [name for name in names if "root" not in name]

    with contextlib.suppress(Refused):
        await until(lambda: not left())
