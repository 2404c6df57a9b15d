"""The servers that all contenders share, and a namespace and bucket for each turn.

The tests use the same servers: a real control plane on loopback, and a GCS server that keeps its
objects in memory. The kubelet runs pods as processes, or is a real one with containers.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.binaries import Binaries, MissingBinaries, find
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubelet import NODE, Kubelet
from tests.cluster.rest import Account, Refused
from tests.gcs import processes
from tests.node import images, machine, parts
from tests.node.node import Node

PROCESS_IMAGE = "example.test/image:1"
"""The image of pods that are processes of this machine; its name doesn't matter."""

CPU = 0.4
"""Cores that a pod requests: four pods fit on two cores."""

ZONE, CLUSTER = "us-central1-a", "bench"
REMOVAL_S = 180.0
PAUSE_S = 0.05


class MissingProgram(Exception):
    """A program of the servers isn't installed; the message says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A new namespace and a new bucket.

    All names have the same length, so a recorded request fits another workspace after a renaming.
    """

    name: str
    kubeconfig: Path
    gcs: str

    @property
    def bucket(self) -> str:
        """The bucket for jobs of the project with the workspace's name."""
        return f"{self.name}-kn-{CLUSTER}-jobs"

    def variables(self) -> dict[str, str]:
        """Return the variables by which kinetic uses this workspace."""
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "KINETIC_KUBE_CONTEXT": "admin",
            "KINETIC_NAMESPACE": self.name,
            "KINETIC_STORE": f"gs://{self.bucket}",
            "STORAGE_EMULATOR_HOST": self.gcs,
        }


class Cluster:
    """A Kubernetes cluster and a GCS server.

    *image* is the image of pods. *captured_variables* names the variables that pods get only from
    the client. *purge* ends the pods of a namespace. *kubelet* runs pods as processes; it is None
    if there is a real node.
    """

    def __init__(
        self,
        plane: ControlPlane,
        gcs: str,
        folder: Path,
        *,
        image: str = PROCESS_IMAGE,
        captured_variables: Sequence[str] = (),
        purge: Callable[[str], object],
        kubelet: Kubelet | None = None,
    ) -> None:
        self.plane = plane
        self.gcs = gcs
        self.image = image
        self.captured_variables = captured_variables
        self.kubelet = kubelet
        self._purge = purge
        self._folder = folder
        self._log_position = 0
        self._created: dict[str, list[float]] = {}

    @property
    def user(self) -> Account:
        """The account of all contenders, by which the audit log's requests are counted."""
        return self.plane.account("admin")

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Workspace]:
        """Make a workspace, and remove its content after the block; see `_remove`."""
        name = f"b{secrets.token_hex(5)}"
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        for account in ("kinetic", "default"):
            with contextlib.suppress(Refused):  # a controller may have created ``default``
                path = f"/api/v1/namespaces/{name}/serviceaccounts"
                self.plane.call("POST", path, {"metadata": {"name": account}})
        workspace = self.workspace_at(name, self.plane.server, self.gcs)
        request = urllib.request.Request(
            f"{self.gcs}/storage/v1/b?project=p",
            data=json.dumps({"name": workspace.bucket}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):
            pass
        try:
            yield workspace
        finally:
            self._remove(name)

    def workspace_at(self, name: str, server: str, gcs: str) -> Workspace:
        """Return the workspace *name*, with the addresses of these servers."""
        kubeconfig = self._folder / f"kubeconfig-{name}-{secrets.token_hex(2)}"
        config = json.loads(self.plane.kubeconfig.read_text())
        cluster = f"gke_{name}_{ZONE}_{CLUSTER}"
        (entry,) = config["clusters"]
        config["clusters"] = [{"name": cluster, "cluster": {**entry["cluster"], "server": server}}]
        config["contexts"] = [{"name": "admin", "context": {"cluster": cluster, "user": "admin"}}]
        kubeconfig.write_text(json.dumps(config))
        return Workspace(name=name, kubeconfig=kubeconfig, gcs=gcs)

    def count_requests(self, workspace: Workspace) -> Counter[str]:
        """Count the requests to the API server in the workspace: ``create jobs``, …"""
        return self.plane.requests(workspace.name, "admin")

    def creation_times(self, workspace: Workspace) -> list[float]:
        """Return when the API server answered each creation of a Job in the workspace."""
        with (self.plane.folder / "audit.log").open("rb") as log:
            log.seek(self._log_position)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._log_position += len(line)
                if b'"verb":"create"' in line and b'"resource":"jobs"' in line:
                    self._record_creation(json.loads(line))
        return self._created.get(workspace.name, [])

    def wait_for_jobs(
        self, workspace: Workspace, count: int, limit_s: float = 300.0
    ) -> list[float]:
        """Wait until *count* Jobs exist; return their creation times in order.

        Raises:
            TimeoutError: There are fewer after *limit_s* seconds.
        """
        deadline = time.monotonic() + limit_s
        while len(found := self.creation_times(workspace)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} of {count} jobs after {limit_s:g} s")
            time.sleep(PAUSE_S)
        return sorted(found)[:count]

    def _record_creation(self, event: Mapping[str, Any]) -> None:
        if event["stage"] == "ResponseComplete" and event["responseStatus"]["code"] == 201:
            answered = datetime.datetime.fromisoformat(event["stageTimestamp"])
            times = self._created.setdefault(event["objectRef"]["namespace"], [])
            times.append(answered.timestamp())

    def _remove(self, name: str) -> None:
        """Remove Jobs and pods, and wait for that; the namespace ends later, without a wait."""
        path, options = (
            f"/apis/batch/v1/namespaces/{name}/jobs",
            {"propagationPolicy": "Background"},
        )
        self.plane.account().read("DELETE", path, options, timeout_s=REMOVAL_S)
        self._purge(name)
        deadline = time.monotonic() + REMOVAL_S
        while self.plane.call("GET", f"/api/v1/namespaces/{name}/pods", limit="1")["items"]:
            assert time.monotonic() < deadline, f"{name} still has pods after {REMOVAL_S:g} s"
            time.sleep(4 * PAUSE_S)
        self.plane.call("DELETE", f"/api/v1/namespaces/{name}")


@contextlib.contextmanager
def start_with_processes(folder: Path, slots: int) -> Iterator[Cluster]:
    """Start the servers; pods are processes of this machine, *slots* at a time.

    Raises:
        MissingProgram: A program isn't installed.
    """
    with (
        ControlPlane(_programs()) as plane,
        Kubelet(plane) as kubelet,
        processes.running(folder / "gcs.log") as gcs,
    ):
        kubelet.remove_node(NODE)
        kubelet.add_node(NODE, pods=slots)
        kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs, PYTHONPATH="")
        yield Cluster(plane, gcs, folder, purge=kubelet.purge, kubelet=kubelet)


@contextlib.contextmanager
def start_on_node(folder: Path) -> Iterator[Cluster]:
    """Start the servers with this machine as a real node, for as many pods as get their `CPU`.

    Raises:
        MissingProgram: A program isn't installed, or this user isn't root.
    """
    programs = _programs()
    try:
        node_programs = parts.find()
    except parts.MissingParts as missing:
        raise MissingProgram(str(missing)) from None
    with (
        images.builder(node_programs) as builder,
        ControlPlane(programs) as plane,
        Node(plane, node_programs, images.archives(builder), images.SANDBOX),
        processes.running(folder / "gcs.log", machine.ADDRESS) as gcs,
    ):
        yield Cluster(
            plane,
            gcs,
            folder,
            image=images.JOBS,
            captured_variables=["STORAGE_EMULATOR_HOST"],
            purge=lambda name: _end_pods(plane, name),
        )


def _programs() -> Binaries:
    try:
        programs = find()
    except MissingBinaries as missing:
        raise MissingProgram(str(missing)) from None
    if not processes.BINARY:
        raise MissingProgram(processes.MISSING)
    return programs


def _end_pods(plane: ControlPlane, namespace: str) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    for pod in plane.call("GET", pods)["items"]:
        with contextlib.suppress(Refused):  # the pod has ended meanwhile
            name = pod["metadata"]["name"]
            plane.call("DELETE", f"{pods}/{name}", gracePeriodSeconds="1")


@contextlib.contextmanager
def environment_for(workspace: Workspace) -> Iterator[None]:
    """Set the variables of *workspace* during the block, and no other ``KINETIC_`` variable."""
    previous = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("KINETIC_")]:
        del os.environ[name]
    os.environ.update(workspace.variables())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)
