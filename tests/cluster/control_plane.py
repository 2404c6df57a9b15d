"""etcd, API server, controller manager and scheduler on loopback, for one test run."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from tests.cluster import certificates, children
from tests.cluster.binaries import Binaries
from tests.cluster.rest import Account, Refused

START_S, FREEZE_S = 120.0, 30.0
"""A machine that does much else: there are some two hundred requests before it is ready."""

OLD = "poststarthook/rbac/bootstrap-roles"
"""What it begins with for longest, one request after the other; they are there from before."""

GROUPS = {"harness": "system:masters", "admin": "system:masters", "dev": "developers"}
"""Users by name, and the group of each.

``harness`` is who tests, kubelet and controllers are. ``admin`` is who kinetic is under test: its
requests are recorded. ``dev`` may do nothing at all.
"""

AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": ["admin", "dev"]}, {"level": "None"}],
}

API_FLAGS = (
    "--authorization-mode=RBAC",
    "--service-account-issuer=https://kubernetes.default.svc",
    "--service-cluster-ip-range=10.96.0.0/16",
    "--endpoint-reconciler-type=none",
    "--allow-privileged",
    "--kubelet-preferred-address-types=InternalIP",
    # Pods of a lost node are not kept waiting for it.
    "--default-unreachable-toleration-seconds=1",
    "--default-not-ready-toleration-seconds=20",
)
MANAGER_FLAGS = ("--concurrent-job-syncs=20", "--node-monitor-period=1s", "--node-eviction-rate=10")
CLIENT_FLAGS = ("--leader-elect=false", "--kube-api-qps=500", "--kube-api-burst=1000")


class ControlPlane:
    """``with ControlPlane(find()) as plane:`` runs one; it ends, with all it knew, with the block.

    ``kubeconfig`` has the contexts ``admin`` and ``dev``. Flags in *api* go to the API server.
    """

    def __init__(self, binaries: Binaries, *, api: Sequence[str] = ()) -> None:
        self._binaries = binaries
        self._api_flags = api
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="kn-cluster-"))
        self.certificates = certificates.make(self.folder)
        self._etcd = f"http://127.0.0.1:{children.free_port()}"
        self.port = children.free_port()
        self.server = f"https://127.0.0.1:{self.port}"
        self.kubeconfig = self.folder / "kubeconfig"
        self._tokens = {user: f"{user}-token" for user in GROUPS}
        self._write_accepted()
        self.publish_tokens()
        (self.folder / "controllers").write_text(json.dumps(self._kubeconfig("harness")))
        (self.folder / "audit.yaml").write_text(json.dumps(AUDIT))
        try:
            self._start_etcd()
            self._start_api()
            self._start_controllers()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of it and forget its state."""
        for process in reversed(self._processes.values()):
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def account(self, user: str = "harness") -> Account:
        """The server as *user* sees it."""
        return Account(server=self.server, ca=self.certificates.ca, token=self._tokens[user])

    def call(self, method: str, path: str, body: Any = None, **query: str) -> dict[str, Any]:
        """A request of the tests' own. See `Account.call`."""
        return self.account().call(method, path, body, **query)

    def requests(self, namespace: str, user: str = "admin") -> Counter[str]:
        """What *user* has asked for in a namespace: ``create jobs``, ``get pods/log``, …

        Each request once, when it has been answered; a watch, or a log, once it is under way.
        """
        found: dict[str, str] = {}
        written, _, _ = (self.folder / "audit.log").read_text().rpartition("\n")
        for line in written.splitlines():  # without one that is being written
            event = json.loads(line)
            about = event.get("objectRef") or {}
            if event["user"]["username"] == user and about.get("namespace") == namespace:
                what = "/".join(filter(None, (about["resource"], about.get("subresource"))))
                found[event["auditID"]] = f"{event['verb']} {what}"
        return Counter(found.values())

    # What tests do to it

    def kill_api(self) -> None:
        """The API server is gone, at once; all connections with it. It may be gone already."""
        if "kube-apiserver" in self._processes:
            self._end("kube-apiserver")

    def start_api(self) -> None:
        """Start the API server again, on the same port, and wait until it is ready.

        The controllers are started again, too: left alone they look for it ever more rarely.
        """
        self._start_api(exclude=OLD)
        self._start_controllers_anew()

    def _start_controllers_anew(self) -> None:
        for name in ("kube-controller-manager", "kube-scheduler"):
            if name in self._processes:
                self._end(name)
        self._start_controllers()

    def heal(self) -> None:
        """Start what a test has left dead, or what has died; why is on standard error then."""
        for name, process in [*self._processes.items()]:
            if process.poll() is not None:
                print(f"{name} has died ({process.returncode}):\n{self.log(name)}", file=sys.stderr)
                self._end(name)
        if "etcd" not in self._processes:
            self._start_etcd()
        if "kube-apiserver" not in self._processes:
            self._start_api()
        if not {"kube-controller-manager", "kube-scheduler"} <= self._processes.keys():
            self._start_controllers_anew()

    @contextlib.contextmanager
    def frozen_scheduler(self) -> Iterator[None]:
        """Within, no pod gets a node (for the benchmark of submission)."""
        name = "kube-scheduler"
        process = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        try:
            until = time.monotonic() + FREEZE_S
            while not stopped(process.pid):  # one of its threads may still be about to answer
                assert process.poll() is None and time.monotonic() < until, f"{name} goes on"
                time.sleep(children.POLL_S)
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def compact(self) -> None:
        """Make etcd forget all but what is now.

        An API server that was started before remembers a while.
        """
        # With a change that nobody was told of: who has heard of all before has not heard enough.
        written = {"key": base64.b64encode(b"a").decode(), "value": ""}
        header = self._ask_etcd("put", written)["header"]
        self._ask_etcd("compaction", {"revision": header["revision"], "physical": True})

    def expire_token(self, user: str = "admin") -> None:
        """Another token for *user*, in the kubeconfig as well: the old one gets 401.

        The API server is killed and started for it.
        """
        self.revoke_token(user)
        self.publish_tokens()

    def revoke_token(self, user: str = "admin") -> None:
        """As `expire_token`, but the kubeconfig keeps the old one until `publish_tokens`."""
        self._tokens[user] = secrets.token_hex(8)
        self._write_accepted()
        self.kill_api()
        self.start_api()

    def publish_tokens(self) -> None:
        """Write all tokens that the API server accepts into the kubeconfig."""
        self.kubeconfig.write_text(json.dumps(self._kubeconfig("admin", "dev")))  # JSON is YAML

    def log(self, name: str) -> str:
        """The end of what *name* (``kube-apiserver``, …) has logged."""
        return children.tail(self.folder / f"{name}.log")

    # Its parts

    def _write_accepted(self) -> None:
        known = self._tokens.items()
        rows = (f'{token},{user},{user},"{GROUPS[user]}"\n' for user, token in known)
        (self.folder / "tokens.csv").write_text("".join(rows))

    def _start(self, name: str, program: Path, flags: Sequence[str]) -> None:
        env = {"PATH": os.defpath, "HOME": str(self.folder)}
        log = self.folder / f"{name}.log"
        self._processes[name] = children.start([str(program), *flags], log, env)

    def _start_api(self, **query: str) -> None:
        self._start("kube-apiserver", self._binaries.apiserver, self._api_command())
        self._await("kube-apiserver", lambda: self._there("/readyz", **query))

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def _await(self, name: str, ready: Any) -> None:
        log = self.folder / f"{name}.log"
        children.await_ready(ready, self._processes[name], log, START_S)

    def _start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{children.free_port()}"
        flags = [
            f"--data-dir={self.folder / 'etcd'}", "--unsafe-no-fsync", "--log-level=warn",
            f"--listen-client-urls={self._etcd}", f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]  # fmt: skip
        self._start("etcd", self._binaries.etcd, flags)
        self._await("etcd", lambda: self._ask_etcd("range", {"key": "YQ=="}))

    def _ask_etcd(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._etcd}/v3/kv/{what}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.load(answer)

    def _api_command(self) -> list[str]:
        files = self.certificates
        return [
            f"--etcd-servers={self._etcd}", f"--secure-port={self.port}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
            f"--tls-cert-file={files.certificate}", f"--tls-private-key-file={files.key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            f"--service-account-key-file={files.signing_key}",
            f"--service-account-signing-key-file={files.signing_key}",
            f"--audit-policy-file={self.folder / 'audit.yaml'}",
            f"--audit-log-path={self.folder / 'audit.log'}", "--audit-log-mode=blocking",
            *API_FLAGS, *self._api_flags,
        ]  # fmt: skip

    def _start_controllers(self) -> None:
        config = f"--kubeconfig={self.folder / 'controllers'}"
        files = self.certificates
        tls = [f"--tls-cert-file={files.certificate}", f"--tls-private-key-file={files.key}"]
        common = [config, "--bind-address=127.0.0.1", *tls, *CLIENT_FLAGS]
        ports = children.free_port(), children.free_port()
        manager = [
            f"--service-account-private-key-file={files.signing_key}",
            f"--root-ca-file={files.ca}", f"--secure-port={ports[0]}", *MANAGER_FLAGS,
        ]  # fmt: skip
        self._start("kube-controller-manager", self._binaries.manager, [*common, *manager])
        scheduler = [*common, f"--secure-port={ports[1]}"]
        self._start("kube-scheduler", self._binaries.scheduler, scheduler)
        trial = f"trial-{secrets.token_hex(4)}"
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": trial}})
        account = f"/api/v1/namespaces/{trial}/serviceaccounts/default"
        self._await("kube-controller-manager", lambda: self._there(account))
        self.call("DELETE", f"/api/v1/namespaces/{trial}")
        health = Account(server=f"https://127.0.0.1:{ports[1]}", ca=files.ca, token="")
        self._await("kube-scheduler", lambda: self._there("/healthz", health))

    def _there(self, path: str, account: Account | None = None, **query: str) -> bool:
        try:
            (account or self.account()).call("GET", path, **query)
        except Refused:
            return False
        return True

    def _kubeconfig(self, *users: str) -> dict[str, Any]:
        cluster = {"server": self.server, "certificate-authority": str(self.certificates.ca)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self._tokens[user]}} for user in users],
            "contexts": [
                {"name": user, "context": {"cluster": "local", "user": user}} for user in users
            ],
            "current-context": users[0],
        }


def stopped(pid: int) -> bool:
    """Whether nothing of a process runs any more until it is told to go on."""
    if sys.platform != "linux":
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    try:
        states = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # of a thread that has just ended
        return False
    return all(text.rpartition(")")[2].split()[0] in "Tt" for text in states)
