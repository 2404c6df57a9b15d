"""The servers that all contenders share, and a namespace and bucket for each turn.

They are those of the tests: a real control plane on loopback, and a GCS server that keeps its
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

__all__ = [
    "CLUSTER",
    "CPU",
    "ZONE",
    "Absent",
    "Corner",
    "Place",
    "on_node",
    "opened",
    "standing_in",
]

PROCESS = "example.test/image:1"
"""Any name will do for an image where pods are processes of this machine."""

CPU = 0.4
"""Cores that a pod asks for: four of them fit on two."""

ZONE, CLUSTER = "us-central1-a", "bench"
GONE_S = 180.0
PAUSE_S = 0.05


class Absent(Exception):
    """One of the servers' programs is not here; the message says how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corner:
    """A new namespace and a new bucket.

    Names of all corners are equally long, so that what was sent to one may be sent to another.
    """

    name: str
    kubeconfig: Path
    gcs: str

    @property
    def bucket(self) -> str:
        """Where jobs of the project with the corner's name are kept."""
        return f"{self.name}-kn-{CLUSTER}-jobs"

    def variables(self) -> dict[str, str]:
        """The variables that lead kinetic here."""
        return {
            "KUBECONFIG": str(self.kubeconfig),
            "KINETIC_KUBE_CONTEXT": "admin",
            "KINETIC_NAMESPACE": self.name,
            "KINETIC_STORE": f"gs://{self.bucket}",
            "STORAGE_EMULATOR_HOST": self.gcs,
        }


class Place:
    """Cluster and GCS server.

    *image* is what pods run in; *captured* are variables that they do not have by themselves;
    *purge* ends those of a namespace. *kubelet* runs pods as processes; a real node has none.
    """

    def __init__(
        self,
        plane: ControlPlane,
        gcs: str,
        folder: Path,
        *,
        image: str = PROCESS,
        captured: Sequence[str] = (),
        purge: Callable[[str], object],
        kubelet: Kubelet | None = None,
    ) -> None:
        self.plane = plane
        self.gcs = gcs
        self.image = image
        self.captured = captured
        self.kubelet = kubelet
        self._purge = purge
        self._folder = folder
        self._read = 0
        self._created: dict[str, list[float]] = {}

    @property
    def user(self) -> Account:
        """The account of all contenders: the server's audit log has its requests."""
        return self.plane.account("admin")

    @contextlib.contextmanager
    def corner(self) -> Iterator[Corner]:
        """A fresh one; what is in it goes with the block, and is waited for."""
        name = f"b{secrets.token_hex(5)}"
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        for account in ("kinetic", "default"):
            with contextlib.suppress(Refused):  # the controllers make the second as well
                path = f"/api/v1/namespaces/{name}/serviceaccounts"
                self.plane.call("POST", path, {"metadata": {"name": account}})
        made = self.at(name, self.plane.server, self.gcs)
        request = urllib.request.Request(
            f"{self.gcs}/storage/v1/b?project=p",
            data=json.dumps({"name": made.bucket}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):
            pass
        try:
            yield made
        finally:
            self._remove(name)

    def at(self, name: str, server: str, gcs: str) -> Corner:
        """The corner *name* as it is seen by way of these servers."""
        kubeconfig = self._folder / f"kubeconfig-{name}-{secrets.token_hex(2)}"
        known = json.loads(self.plane.kubeconfig.read_text())
        cluster = f"gke_{name}_{ZONE}_{CLUSTER}"
        (there,) = known["clusters"]
        known["clusters"] = [{"name": cluster, "cluster": {**there["cluster"], "server": server}}]
        known["contexts"] = [{"name": "admin", "context": {"cluster": cluster, "user": "admin"}}]
        kubeconfig.write_text(json.dumps(known))
        return Corner(name=name, kubeconfig=kubeconfig, gcs=gcs)

    def requests(self, corner: Corner) -> Counter[str]:
        """Count the requests to the API server in the corner: ``create jobs``, …"""
        return self.plane.requests(corner.name, "admin")

    def created(self, corner: Corner) -> list[float]:
        """When the Jobs of the corner were there: each moment a request for one was answered."""
        with (self.plane.folder / "audit.log").open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if b'"verb":"create"' in line and b'"resource":"jobs"' in line:
                    self._note(json.loads(line))
        return self._created.get(corner.name, [])

    def until_created(self, corner: Corner, count: int, limit_s: float = 300.0) -> list[float]:
        """The moments of *count* Jobs, once there are as many.

        Raises:
            TimeoutError: There are fewer after *limit_s*.
        """
        until = time.monotonic() + limit_s
        while len(found := self.created(corner)) < count:
            if time.monotonic() > until:
                raise TimeoutError(f"{len(found)} of {count} jobs after {limit_s:g} s")
            time.sleep(PAUSE_S)
        return sorted(found)[:count]

    def _note(self, event: Mapping[str, Any]) -> None:
        if event["stage"] == "ResponseComplete" and event["responseStatus"]["code"] == 201:
            at = datetime.datetime.fromisoformat(event["stageTimestamp"])
            self._created.setdefault(event["objectRef"]["namespace"], []).append(at.timestamp())

    def _remove(self, name: str) -> None:
        """Wait for the pods only: the namespace ends later, and delays no turn."""
        path, options = (
            f"/apis/batch/v1/namespaces/{name}/jobs",
            {"propagationPolicy": "Background"},
        )
        self.plane.account().read("DELETE", path, options, timeout_s=GONE_S)
        self._purge(name)
        until = time.monotonic() + GONE_S
        while self.plane.call("GET", f"/api/v1/namespaces/{name}/pods", limit="1")["items"]:
            assert time.monotonic() < until, f"the pods of {name} are not gone after {GONE_S:g} s"
            time.sleep(4 * PAUSE_S)
        self.plane.call("DELETE", f"/api/v1/namespaces/{name}")


@contextlib.contextmanager
def opened(folder: Path, slots: int) -> Iterator[Place]:
    """Start all of it; pods are processes, *slots* at a time.

    Raises:
        Absent: A program is not here.
    """
    with (
        ControlPlane(_programs()) as plane,
        Kubelet(plane) as kubelet,
        processes.running(folder / "gcs.log") as gcs,
    ):
        kubelet.remove_node(NODE)
        kubelet.add_node(NODE, pods=slots)
        kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs, PYTHONPATH="")
        yield Place(plane, gcs, folder, purge=kubelet.purge, kubelet=kubelet)


@contextlib.contextmanager
def on_node(folder: Path) -> Iterator[Place]:
    """The same with a real node, which this machine becomes: as many pods as have `CPU`.

    Raises:
        Absent: A program is not here, or somebody is not root.
    """
    programs = _programs()
    try:
        found = parts.find()
    except parts.MissingParts as missing:
        raise Absent(str(missing)) from None
    with (
        images.kitchen(found) as kitchen,
        ControlPlane(programs) as plane,
        Node(plane, found, images.archives(kitchen), images.SANDBOX),
        processes.running(folder / "gcs.log", machine.ADDRESS) as gcs,
    ):
        yield Place(
            plane,
            gcs,
            folder,
            image=images.JOBS,
            captured=["STORAGE_EMULATOR_HOST"],
            purge=lambda name: _end_pods(plane, name),
        )


def _programs() -> Binaries:
    try:
        programs = find()
    except MissingBinaries as missing:
        raise Absent(str(missing)) from None
    if not processes.BINARY:
        raise Absent(processes.MISSING)
    return programs


def _end_pods(plane: ControlPlane, namespace: str) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"
    for pod in plane.call("GET", pods)["items"]:
        with contextlib.suppress(Refused):  # it has gone meanwhile
            name = pod["metadata"]["name"]
            plane.call("DELETE", f"{pods}/{name}", gracePeriodSeconds="1")


@contextlib.contextmanager
def standing_in(corner: Corner) -> Iterator[None]:
    """Set the variables that lead kinetic to *corner*, and unset its others."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("KINETIC_")]:
        del os.environ[name]
    os.environ.update(corner.variables())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
