"""Batches lose nothing and run nothing twice while servers and connections fail."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinetic import aio
from kinetic.aio.kubernetes.rights import Right, role
from tests.cluster.fixtures import Namespace, on_cluster, until
from tests.cluster.rest import Refused
from tests.cluster.rights import await_granted

from .proxy import Front, Relay

slow = (pytest.mark.slow, pytest.mark.timeout(2400))


@on_cluster
def marked(folder: str, x: int) -> int:
    """Leave another marker file each time the function runs."""
    Path(folder, f"{x}.{os.environ['KINETIC_ATTEMPT']}.{time.time_ns()}").touch()
    time.sleep(0.1)
    return -x


class Sweep:
    """A batch of *number* items that leave markers."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder / "marks"
        self.folder.mkdir()
        self.number = number

    async def begin(self, client: aio.Client, go: asyncio.Event | None = None) -> None:
        """Submit the items; the ones from number 10 on wait for *go*."""

        async def inputs() -> AsyncIterator[tuple[str, int]]:
            for x in range(self.number):
                if go and x >= 10:
                    await go.wait()
                yield str(self.folder), x

        self.batch = await client.run_async_map(marked, inputs(), max_concurrent=12, retries=1)

    async def reach(self, part: float) -> None:
        """Wait until this fraction of the items has run."""
        await until(lambda: sum(self.runs().values()) >= part * self.number)

    async def succeed(self, number: int) -> None:
        """Wait until *number* items have their values, so that no end of a pod repeats one."""
        while (await self.batch.status_counts()).get("SUCCEEDED", 0) < number:
            await asyncio.sleep(0.05)

    def runs(self) -> Counter[int]:
        """Count how often each item has run."""
        return Counter(int(path.name.partition(".")[0]) for path in self.folder.iterdir())

    async def end(self) -> None:
        """Check that every value arrives and each item has run once."""
        assert await self.batch.results() == [-x for x in range(self.number)]
        assert self.runs() == dict.fromkeys(range(self.number), 1)


async def until_warned(caplog: pytest.LogCaptureFixture, text: str) -> str:
    """Wait for the one warning that contains *text*."""
    while not (found := [message for message in caplog.messages if text in message]):
        await asyncio.sleep(0.05)
    (message,) = found
    return message


ROLES = "rbac.authorization.k8s.io/v1"


def grant(namespace: Namespace) -> dict[str, Any]:
    """Grant ``dev`` what kinetic needs, and return the binding so that tests can restore it."""
    right = Right(verb="create", group="batch", resource="jobs", namespace=namespace.name)
    document, binding = yaml.safe_load_all(role(right, "dev"))
    namespace.call("POST", f"{ROLES}/roles", document)
    namespace.call("POST", f"{ROLES}/rolebindings", binding)
    await_granted(namespace, {"rules": document["rules"][:1]}, "dev")
    return binding


async def end_jobs(namespace: Namespace) -> None:
    """Delete all Jobs by hand, and wait for their pods, so that kinetic must create another."""
    await asyncio.to_thread(
        namespace.call, "DELETE", "batch/v1/jobs", None, propagationPolicy="Background"
    )
    await until(lambda: not namespace.call("GET", "pods")["items"])


async def test_a_permission_that_is_missing_for_a_while_fails_no_item(
    configured: Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    binding = await asyncio.to_thread(grant, configured)
    monkeypatch.setenv("KINETIC_KUBE_CONTEXT", "dev")
    sweep, go = Sweep(tmp_path, 12), asyncio.Event()
    async with aio.Client() as client:
        await sweep.begin(client, go)
        await sweep.succeed(10)
        bindings = f"{ROLES}/rolebindings"
        configured.call("DELETE", f"{bindings}/{binding['metadata']['name']}")
        await end_jobs(configured)
        go.set()
        # Which request is refused first depends on whether the watch outlives the permission.
        await until(lambda: any("kubectl apply" in message for message in caplog.messages))
        configured.call("POST", bindings, binding)
        await sweep.end()


POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"


@contextmanager
def denied(namespace: Namespace) -> Iterator[None]:
    """Deny all new Jobs of the namespace by a policy; it takes effect a little later."""
    name = f"no-jobs-{namespace.name}"
    rule = {"apiGroups": ["batch"], "apiVersions": ["*"], "operations": ["CREATE"]}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}
    policy = {
        "matchConstraints": {"resourceRules": [rule | {"resources": ["jobs"]}]},
        "validations": [{"expression": "false", "message": "maintenance until noon"}],
    }
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": selector},
    }
    metadata = {"metadata": {"name": name}}
    namespace.admin.call("POST", f"{POLICIES}ies", metadata | {"spec": policy})
    namespace.admin.call("POST", f"{POLICIES}ybindings", metadata | {"spec": binding})
    try:
        yield
    finally:
        namespace.admin.call("DELETE", f"{POLICIES}ybindings/{name}")
        namespace.admin.call("DELETE", f"{POLICIES}ies/{name}")


def accepts_jobs(namespace: Namespace) -> bool:
    """Return whether the API server accepts a Job, without creating one."""
    pod = {"containers": [{"name": "x", "image": "x"}], "restartPolicy": "Never"}
    job = {"metadata": {"generateName": "probe-"}, "spec": {"template": {"spec": pod}}}
    try:
        namespace.call("POST", "batch/v1/jobs", job, dryRun="All")
    except Refused:
        return False
    return True


REFUSALS = {
    "OutOfcpu": "Node didn't have enough resource: cpu, requested: 100, used: 15990",
    "UnexpectedAdmissionError": "Allocate failed due to no healthy devices present",
    "NodeShutdown": "Pod was rejected as the node is shutting down.",
}


async def test_a_node_that_refuses_a_pod_fails_neither_a_job_nor_an_item(
    configured: Namespace, client: aio.Client, tmp_path: Path
) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    for reason, message in REFUSALS.items():
        configured.kubelet.refuse(reason, message)
    jobs = [await client.submit(marked, str(folder), x) for x in range(len(REFUSALS))]
    assert [await job for job in jobs] == [0, -1, -2]
    configured.kubelet.refuse("OutOfcpu", REFUSALS["OutOfcpu"])
    batch = await client.run_async_map(marked, [(str(folder), 9)], retries=0)
    assert await batch.results() == [-9]
    assert sorted(path.name.rsplit(".", 1)[0] for path in folder.iterdir()) == [
        *("0.2", "1.2", "2.2", "9.1")
    ]


async def test_a_policy_that_denies_jobs_for_a_while_fails_no_item(
    client: aio.Client, configured: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep, go = Sweep(tmp_path, 12), asyncio.Event()
    await sweep.begin(client, go)
    await sweep.succeed(10)
    with denied(configured):
        await until(lambda: not accepts_jobs(configured))
        await end_jobs(configured)
        go.set()
        assert "maintenance until noon" in await until_warned(caplog, "is paused")
    await sweep.end()


async def test_items_run_to_their_end_while_the_login_of_their_client_has_ended(
    client: aio.Client, configured: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane, sweep = configured.control_plane, Sweep(tmp_path, 30)
    await sweep.begin(client)
    await sweep.reach(1 / 30)
    await asyncio.to_thread(plane.revoke_token)
    try:
        await sweep.reach(1)
        await until(lambda: "log in again" in caplog.text)
    finally:
        plane.publish_tokens()
    await sweep.end()


@pytest.fixture
def redirect(configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Give the client another port for the API server, and client and pods another GCS server."""

    def apply(api: int | None = None, gcs: str | None = None) -> None:
        if api is not None:
            config = json.loads(configured.control_plane.kubeconfig.read_text())
            config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{api}"
            path = tmp_path / "kubeconfig"
            path.write_text(json.dumps(config))
            monkeypatch.setenv("KUBECONFIG", str(path))
        if gcs is not None:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs)
            configured.kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs)

    return apply


def lists(namespace: Namespace) -> int:
    """Count how often kinetic listed pods; a watch that can resume needs no new list."""
    return namespace.control_plane.requests(namespace.name)["list pods"]


async def test_the_api_server_dies_and_comes_back_without_its_history_or_the_old_token(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    plane, sweep, go = configured.control_plane, Sweep(tmp_path, 40), asyncio.Event()
    await sweep.begin(client, go)
    await sweep.reach(1 / 4)
    before = lists(configured)
    await asyncio.to_thread(plane.kill_api)
    await asyncio.to_thread(plane.compact)  # while watches are down: none can resume after this
    await asyncio.to_thread(plane.expire_token)  # this restarts the API server
    await until(lambda: lists(configured) > before)  # the watch got 410 and had to list again
    go.set()
    await sweep.end()


@pytest.mark.parametrize(("number", "seconds"), [(4, 2), pytest.param(60, 30, marks=slow)])
async def test_the_bucket_answers_503(
    gcs_server: str, redirect, tmp_path: Path, number: int, seconds: float
) -> None:
    sweep = Sweep(tmp_path, number)
    async with Front(gcs_server) as front:
        redirect(gcs=front.url)
        async with aio.Client() as client:
            await sweep.begin(client)
            await sweep.reach(1 / 4)
            front.fail(seconds, "create")
            await sweep.end()
    assert "create" in {request.kind for request in front.requests if request.status == 503}


@pytest.mark.parametrize(
    ("number", "break_off"),
    [
        (6, Relay.cut),
        pytest.param(100, Relay.cut, marks=slow),
        pytest.param(40, Relay.fall_silent, marks=slow),
    ],
)
async def test_connections_are_lost(
    configured: Namespace,
    gcs_server: str,
    redirect,
    tmp_path: Path,
    number: int,
    break_off: Callable[[Relay], None],
) -> None:
    """Connections are reset, or stay open and transfer nothing."""
    sweep = Sweep(tmp_path, number)
    bucket = int(gcs_server.rpartition(":")[2])
    async with Relay(configured.control_plane.port) as api, Relay(bucket) as gcs:
        redirect(api.port, f"http://127.0.0.1:{gcs.port}")
        async with aio.Client() as client:
            await sweep.begin(client)
            for part in (1 / 4, 1 / 2, 3 / 4) if break_off is Relay.cut else (1 / 4,):
                await sweep.reach(part)
                break_off(api)
                break_off(gcs)
            await sweep.end()
        assert api.cuts and gcs.cuts
