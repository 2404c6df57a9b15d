"""Fixtures for the node and its clients, and a check for what tests leave behind."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.binaries import MissingBinaries, find
from tests.cluster.control_plane import ControlPlane
from tests.cluster.fixtures import Namespace, absent, new_namespace, until
from tests.cluster.kubelet import NODE, Kubelet
from tests.cluster.rest import Refused
from tests.gcs import processes
from tests.node import images, machine, parts
from tests.node.node import Node

GONE_S = 60.0
FIRST_S = 1800.0
"""Timeout of a test in seconds: the first one builds images. Tests set shorter deadlines."""


@pytest.hookimpl(tryfirst=True)  # the hook that assigns tiers reads this marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder: they need the machine for themselves."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.node)
            item.add_marker(pytest.mark.timeout(FIRST_S))


@pytest.fixture(scope="session")
def builder() -> Iterator[images.Builder]:
    """Provide the builder of images."""
    try:
        found = parts.find()
    except parts.MissingParts as missing:
        absent(str(missing))
    with images.builder(found) as builder:
        yield builder


@pytest.fixture(scope="session")
def control_plane(builder: images.Builder) -> Iterator[ControlPlane]:
    """Start a control plane whose only node is the real one, if the machine has the programs."""
    try:
        with ControlPlane(find()) as plane:
            yield plane
    except MissingBinaries as missing:
        absent(str(missing))


@pytest.fixture(scope="session")
def node(control_plane: ControlPlane, builder: images.Builder) -> Iterator[Node]:
    """Start the node that all tests share."""
    archives = images.archives(builder)
    with Node(control_plane, builder.parts, archives, images.SANDBOX) as node:
        yield node


@pytest.fixture(scope="session")
def controllers(control_plane: ControlPlane, node: Node) -> Iterator[Kubelet]:
    """Turn LeaderWorkerSets and JobSets into pods with the process kubelet's controllers."""
    with Kubelet(control_plane) as kubelet:
        kubelet.remove_node(NODE)
        kubelet.start_controllers()
        yield kubelet


@pytest.fixture(scope="session")
def gcs_server(node: Node) -> Iterator[str]:
    """Start a GCS server that this machine and its containers reach by the same URL."""
    if not processes.BINARY:
        absent(processes.MISSING)
    with tempfile.TemporaryDirectory(prefix="kn-gcs-") as folder:
        with processes.running(Path(folder) / "gcs.log", machine.ADDRESS) as url:
            yield url


@contextlib.contextmanager
def fresh_namespace(control_plane: ControlPlane, node: Node) -> Iterator[Namespace]:
    """Create a namespace; at the end of the block, delete it and wait for its pods to end."""
    kubelet: Any = None  # tests can't control the real kubelet
    namespace = new_namespace(control_plane, kubelet)
    yield namespace
    node.cordon(closed=False)
    path = f"/api/v1/namespaces/{namespace.name}"
    control_plane.call("DELETE", path)  # from now on, no new pods
    deadline = time.monotonic() + GONE_S
    while pods := namespace.call("GET", "pods")["items"]:
        for pod in pods:
            with contextlib.suppress(Refused):
                namespace.call("DELETE", f"pods/{pod['metadata']['name']}", gracePeriodSeconds="1")
        assert time.monotonic() < deadline, (
            f"pods of {namespace.name} do not end\n{node.log('kubelet')}"
        )
        time.sleep(0.3)


@pytest.fixture
def namespace(control_plane: ControlPlane, node: Node) -> Iterator[Namespace]:
    """Create a fresh namespace for a test."""
    with fresh_namespace(control_plane, node) as namespace:
        yield namespace


async def gone(namespace: Namespace, *kinds: str) -> None:
    """Wait until no Job, pod, object of *kinds*, or Secret except the root key is left."""

    def left() -> list[str]:
        names = [
            str(item["metadata"]["name"])
            for kind in ("batch/v1/jobs", "pods", *kinds, "secrets")
            for item in namespace.call("GET", kind)["items"]
        ]
        return [name for name in names if "root" not in name]

    with contextlib.suppress(Refused):
        await until(lambda: not left())
