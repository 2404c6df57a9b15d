"""The tests' hand on the process kubelet: nodes, and what goes wrong on them on order."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self, cast

import psutil

from tests.cluster import children, crds
from tests.cluster.control_plane import ControlPlane
from tests.cluster.rest import Refused

ROOT = Path(__file__).parents[2]
ANSWER_S = 60.0
END_S = 60.0
NODE = "cpu-1"
"""The node that is always there: 16 CPUs, no accelerator."""


def now() -> str:
    """The time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Kubelet:
    """``with Kubelet(plane) as kubelet:`` has the node `NODE`; pods are processes of this machine.

    ``python3`` in a command is the interpreter of the tests and ``/app/…`` the tree's runner; the
    Secret volume at ``/var/run/kinetic`` is where ``KINETIC_KEY_FILE`` says, the service account's
    where ``KINETIC_POD_ACCOUNT_FOLDER`` does. Memory limits are kept, those of CPU are not. What a
    process writes to ``KINETIC_TERMINATION_LOG`` is its termination message.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._lock = threading.Lock()
        self._has_controllers = False

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="kn-kubelet-"))
        self._log = self.folder / "kubelet.log"
        self._nodes: list[str] = []
        self.port = children.free_port()
        account = self._plane.account()
        settings = {
            "server": account.server,
            "ca": str(account.ca),
            "token": account.token,
            "certificate": str(self._plane.certificates.certificate),
            "key": str(self._plane.certificates.key),
            "port": self.port,
            "folder": str(self.folder),
        }
        kept = ("PATH", "HOME", "LANG", "TMPDIR")
        env = {name: os.environ[name] for name in kept if name in os.environ}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=env | {"PYTHONPATH": str(ROOT)},
            )
        try:
            self._send(settings)
            self.add_node(NODE)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and all processes of its pods.

        Raises:
            AssertionError: It had a fault of its own, or processes that did not end.
        """
        process = self._process
        with process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        until = time.monotonic() + (END_S if process.returncode == 0 else 0.0)
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(children.POLL_S)  # it has killed them: they go in a moment
        for one in left:
            one.kill()
        output = children.tail(self._log)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert "Traceback" not in output and process.returncode == 0, output
        assert not left, f"processes of pods outlived them: {left}"

    def heal(self) -> None:
        """Start another one if it has died; why is on standard error then."""
        code = self._process.poll()
        if code is None:
            return
        print(f"the kubelet has died ({code}):\n{children.tail(self._log)}", file=sys.stderr)
        with contextlib.suppress(AssertionError, OSError):
            self.close()
        self.__enter__()
        if self._has_controllers:
            self._start_controllers()

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("CLUSTER_TESTS") == str(self.folder):
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # gone, or somebody else's
        return found

    # Nodes

    def add_node(
        self,
        name: str,
        *,
        cpu: int = 16,
        memory: str = "64Gi",
        pods: int = 500,
        tpu: int = 0,
        gpu: int = 0,
        labels: dict[str, str] | None = None,
        taints: list[dict[str, str]] | None = None,
    ) -> None:
        """A node more, until the end of the test, with *tpu* or *gpu* chips and room for *pods*."""
        given = {"cpu": cpu, "memory": memory, "pods": pods, "tpu": tpu, "gpu": gpu}
        self._order("add_node", name=name, labels=labels or {}, taints=taints or [], **given)
        self._nodes.append(name)

    def remove_node(self, name: str) -> None:
        """Take it away, its object as well: what an autoscaler does."""
        self._order("remove_node", name=name)
        self._nodes.remove(name)

    # Pods, as "namespace/name", or "namespace/" for all in it

    def preempt(self, pod: str) -> None:
        """The scheduler wants its place for another: it is deleted, with its own grace."""
        namespace, _, name = pod.partition("/")
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        target = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "default-scheduler: preempting to accommodate a higher priority pod",
            "lastTransitionTime": now(),
        }
        conditions = self._plane.call("GET", path)["status"].get("conditions", [])
        body = {"status": {"conditions": [*conditions, target]}}
        self._plane.call("PATCH", f"{path}/status", body)
        self._plane.call("DELETE", path)

    def purge(self, namespace: str) -> None:
        """Kill all that runs in a namespace."""
        self._order("purge", namespace=namespace)

    # Images and variables

    def fail_pull(self, part: str, why: str = "not found") -> None:
        """Images with *part* in their name cannot be pulled, until mended or the test's end."""
        self._order("fail_pull", part=part, why=why)

    def refuse(self, reason: str, message: str) -> None:
        """Refuse the next pod, as a node does that can't run a pod which is bound to it."""
        self._order("refuse", reason=reason, message=message)

    def set_image(self, part: str, *, python: Path, runner: Path) -> None:
        """Give images with *part* in their name another interpreter and another runner."""
        self._order("set_image", part=part, python=str(python), runner=str(runner))

    def set_environment(self, **variables: str) -> None:
        """These, beside their own, for all containers that start from now on."""
        self._order("set_environment", **variables)

    def reset(self) -> None:
        """As at the beginning: only `NODE`, and nothing goes wrong."""
        self._order("reset")
        for name in [*self._nodes]:
            if name != NODE:
                self.remove_node(name)
        if NODE not in self._nodes:
            self.add_node(NODE)

    def start_controllers(self) -> None:
        """LeaderWorkerSets and JobSets become pods from now on (once for each kubelet)."""
        for body in crds.DEFINITIONS:
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            self._plane.call("POST", path, body)
        self._has_controllers = True
        self._start_controllers()

    def _start_controllers(self) -> None:
        ca = base64.b64encode(self._plane.certificates.ca.read_bytes()).decode()
        hook = crds.webhook(self.port, ca)
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        for one in crds.collections():
            self._eventually(one, lambda path: self._plane.call("GET", path))
        with contextlib.suppress(Refused):  # there is none yet
            self._plane.call("DELETE", f"{path}/{hook['metadata']['name']}")
        self._plane.call("POST", path, hook)
        self._order("start_controllers")
        self._eventually("the completion of pods", lambda _: self._completed())

    def _completed(self) -> None:
        """Have a pod made, as a trial: what is not completed yet would never be."""
        path = "/api/v1/namespaces/default/pods"
        made = self._plane.call("POST", path, crds.TRIAL, dryRun="All")
        if crds.COMPLETED not in made["metadata"]["labels"]:
            raise Refused(404, {"message": "no webhook is asked yet"})

    def _eventually(self, what: str, step: Callable[[str], object]) -> None:
        """Do it, as soon as the API server knows of it: it hears of what is new a little later."""
        until = time.monotonic() + ANSWER_S
        while True:
            try:
                step(what)
            except Refused as refusal:
                failure = f"{what}: {refusal} after {ANSWER_S:g} s"
            else:
                return
            assert time.monotonic() < until, failure
            time.sleep(children.POLL_S)

    # How it is told

    def _send(self, message: dict[str, Any]) -> None:
        stdin = cast(IO[bytes], self._process.stdin)
        stdin.write(json.dumps(message).encode() + b"\n")
        stdin.flush()

    def _order(self, what: str, **given: Any) -> None:
        with self._lock:
            self._send({"do": what, "with": given})
            stdout = cast(IO[bytes], self._process.stdout)
            ready, _, _ = select.select([stdout], [], [], ANSWER_S)
            line = stdout.readline() if ready else b""
            if not line:
                self._process.kill()  # its late answer would be taken for that to the next order
        assert line, f"{what}: no answer in {ANSWER_S:g} s\n{children.tail(self._log)}"
        error = json.loads(line)["error"]
        assert error is None, f"{what}: {error}"
