"""A kubelet with containerd and runc, registered with the control plane of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from tests.cluster import children
from tests.cluster.control_plane import ControlPlane
from tests.cluster.rest import Refused
from tests.node import machine
from tests.node.parts import PLUGINS, Parts

NAME = "machine"
START_S = 90.0
ROOT = Path(__file__).parents[2]
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "kinetic",
    "plugins": [
        {
            "type": "bridge",
            "bridge": machine.BRIDGE,
            "isGateway": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": machine.SUBNET, "gateway": machine.GATEWAY}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}
RUNTIME = """\
version = 2
root = "{folder}/containerd"
state = "{folder}/state"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{folder}/cni"
"""


class Node:
    """``with Node(plane, parts, archives, sandbox) as node:`` runs a node with these images.

    *archives* are files of images (docker-archive), and *sandbox* is the name of the pause image.
    Containers reach this machine at `machine.ADDRESS`.
    """

    def __init__(
        self, plane: ControlPlane, parts: Parts, archives: Iterable[Path], sandbox: str
    ) -> None:
        self._plane = plane
        self._parts = parts
        self._archives = archives
        self._sandbox = sandbox

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="kn-node-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder)
            stack.enter_context(machine.borrowed(self.folder, self._parts.ip))
            stack.callback(self._end)
            self._start_containerd()
            for archive in self._archives:
                self.load(archive)
            self._start_forward()
            self._start_kubelet()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def load(self, archive: Path) -> None:
        """Import the images of a file, as if the node had pulled them."""
        self._ctr("images", "import", str(archive))

    def log(self, name: str) -> str:
        """Return the end of the log of ``kubelet`` or ``containerd``."""
        return children.tail(self.folder / f"{name}.log")

    def cordon(self, *, closed: bool = True) -> None:
        """Stop the node from taking pods, or let it take them again."""
        self._plane.call("PATCH", f"/api/v1/nodes/{NAME}", {"spec": {"unschedulable": closed}})

    def drain(self, namespace: str) -> list[str]:
        """Cordon the node and evict a namespace's pods, like ``kubectl drain``.

        Returns:
            The names of the pods.
        """
        self.cordon()
        pods = f"/api/v1/namespaces/{namespace}/pods"
        names = [pod["metadata"]["name"] for pod in self._plane.call("GET", pods)["items"]]
        for name in names:
            eviction = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": name, "namespace": namespace},
            }
            self._plane.call("POST", f"{pods}/{name}/eviction", eviction)
        return names

    # Processes of the node

    def _start(self, name: str, *command: str | Path) -> None:
        env = {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
        env |= {"HOME": str(self.folder), "PYTHONPATH": str(ROOT)}
        log = self.folder / f"{name}.log"
        self._processes[name] = children.start([str(part) for part in command], log, env)

    def _await(self, name: str, ready: Any) -> None:
        log = self.folder / f"{name}.log"
        children.await_ready(ready, self._processes[name], log, START_S)

    def _ctr(self, *arguments: str) -> str:
        options = ["-a", self.folder / "containerd.sock", "-n", "k8s.io"]
        command = [self._parts.ctr, *options, *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise OSError(f"ctr {arguments}: {done.stderr.decode(errors='replace')}")
        return done.stdout.decode()

    def _start_containerd(self) -> None:
        (self.folder / "cni").mkdir()
        (self.folder / "cni" / "10.conflist").write_text(json.dumps(NETWORK))
        config = self.folder / "containerd.toml"
        config.write_text(
            RUNTIME.format(folder=self.folder, sandbox=self._sandbox, plugins=PLUGINS)
        )
        self._start("containerd", self._parts.containerd, "--config", config)
        self._await("containerd", lambda: self._ctr("version"))

    def _start_forward(self) -> None:
        addresses = (machine.ADDRESS, "443", "127.0.0.1", str(self._plane.port))
        self._start("forward", sys.executable, "-m", "tests.node.forward", *addresses)

    def _start_kubelet(self) -> None:
        config = self.folder / "kubelet.yaml"
        config.write_text(json.dumps(self._kubelet_config()))
        self._start(
            "kubelet",
            self._parts.kubelet,
            f"--config={config}",
            f"--kubeconfig={self._plane.folder / 'controllers'}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'pki'}",
            f"--hostname-override={NAME}",
            f"--node-ip={machine.ADDRESS}",
        )
        self._await("kubelet", self._is_ready)

    def _is_ready(self) -> bool:
        try:
            found = self._plane.call("GET", f"/api/v1/nodes/{NAME}")
        except Refused:
            return False
        return not found["spec"].get("taints") and any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in found["status"].get("conditions") or ()
        )

    def _kubelet_config(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": machine.ADDRESS,
            "port": children.free_port(),
            "readOnlyPort": 0,
            "healthzPort": 0,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.folder / 'containerd.sock'}",
            "podLogsDir": str(self.folder / "logs"),
            "volumePluginDir": str(self.folder / "plugins"),
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{machine.CGROUP}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "oomScoreAdj": 0,
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "resolvConf": "/etc/resolv.conf",
            "nodeStatusUpdateFrequency": "1s",
            "serializeImagePulls": False,
            "maxPods": 100,
        }

    def _end(self) -> None:
        """Stop the kubelet first, because it would restart containers that end."""
        for name in ("kubelet", "forward"):
            self._stop(name)
        if "containerd" in self._processes:
            with contextlib.suppress(OSError):
                for task in self._ctr("tasks", "list", "-q").split():
                    with contextlib.suppress(OSError):
                        self._ctr("tasks", "kill", "--signal", "SIGKILL", task)
        self._stop("containerd")
        with contextlib.suppress(Refused, OSError):
            self._plane.call("DELETE", f"/api/v1/nodes/{NAME}")

    def _stop(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.terminate()
            try:
                process.wait(machine.END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
