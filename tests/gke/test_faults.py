"""Batches while servers and connections fail: nothing is lost, and nothing is done twice."""

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
    """Leaves a mark of its own, each time it runs."""
    Path(folder, f"{x}.{os.environ['KINETIC_ATTEMPT']}.{time.time_ns()}").touch()
    time.sleep(0.1)
    return -x


class Sweep:
    """*number* items, each of which leaves a mark."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder / "marks"
        self.folder.mkdir()
        self.number = number

    async def begin(self, client: aio.Client, go: asyncio.Event | None = None) -> None:
        """Submit the items; those from number 10 on wait for *go*."""

        async def inputs() -> AsyncIterator[tuple[str, int]]:
            for x in range(self.number):
                if go and x >= 10:
                    await go.wait()
                yield str(self.folder), x

        self.batch = await client.run_async_map(marked, inputs(), max_concurrent=12, retries=1)

    async def reach(self, part: float) -> None:
        """Wait until so many have run."""
        await until(lambda: sum(self.runs().values()) >= part * self.number)

    def runs(self) -> Counter[int]:
        """How often each of them has run."""
        return Counter(int(path.name.partition(".")[0]) for path in self.folder.iterdir())

    async def end(self) -> None:
        """All values are there, and each item has run once."""
        assert await self.batch.results() == [-x for x in range(self.number)]
        assert self.runs() == dict.fromkeys(range(self.number), 1)


async def until_told(caplog: pytest.LogCaptureFixture, words: str) -> str:
    """Wait for the one warning with *words*."""
    while not (told := [text for text in caplog.messages if words in text]):
        await asyncio.sleep(0.05)
    (text,) = told
    return text


ROLES = "rbac.authorization.k8s.io/v1"


def granted(namespace: Namespace) -> dict[str, Any]:
    """Let ``dev`` do what kinetic needs there; the binding, which can be made again."""
    right = Right(verb="create", group="batch", resource="jobs", namespace=namespace.name)
    made, binding = yaml.safe_load_all(role(right, "dev"))
    namespace.call("POST", f"{ROLES}/roles", made)
    namespace.call("POST", f"{ROLES}/rolebindings", binding)
    await_granted(namespace, {"rules": made["rules"][:1]}, "dev")
    return binding


async def test_a_right_that_is_gone_for_a_while_fails_no_item(
    configured: Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    binding = await asyncio.to_thread(granted, configured)
    monkeypatch.setenv("KINETIC_KUBE_CONTEXT", "dev")
    sweep = Sweep(tmp_path, 30)
    async with aio.Client() as client:
        await sweep.begin(client)
        await sweep.reach(1 / 4)
        at = f"{ROLES}/rolebindings"
        configured.call("DELETE", f"{at}/{binding['metadata']['name']}")
        told = await until_told(caplog, "is paused")
        assert "kubectl apply" in told and "verb 'create' on resource 'jobs'" in told
        configured.call("POST", at, binding)
        await sweep.end()


POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"


@contextmanager
def denied(namespace: Namespace) -> Iterator[None]:
    """While in the block, a policy denies all Jobs of the namespace, a little later."""
    name = f"no-jobs-{namespace.name}"
    rule = {"apiGroups": ["batch"], "apiVersions": ["*"], "operations": ["CREATE"]}
    where = {"matchLabels": {"kubernetes.io/metadata.name": namespace.name}}
    policy = {
        "matchConstraints": {"resourceRules": [rule | {"resources": ["jobs"]}]},
        "validations": [{"expression": "false", "message": "maintenance until noon"}],
    }
    binding = {
        "policyName": name,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": where},
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
    """Say whether the API server takes a Job; it makes none."""
    pod = {"containers": [{"name": "x", "image": "x"}], "restartPolicy": "Never"}
    job = {"metadata": {"generateName": "probe-"}, "spec": {"template": {"spec": pod}}}
    try:
        namespace.call("POST", "batch/v1/jobs", job, dryRun="All")
    except Refused:
        return False
    return True


async def test_a_policy_that_denies_jobs_for_a_while_fails_no_item(
    client: aio.Client, configured: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep, go = Sweep(tmp_path, 20), asyncio.Event()
    await sweep.begin(client, go)
    await sweep.reach(1 / 20)
    with denied(configured):
        await until(lambda: not accepts_jobs(configured))
        go.set()
        told = await until_told(caplog, "is paused")
        assert "maintenance until noon" in told
    await sweep.end()


async def test_a_login_that_ends_for_a_while_fails_no_item(
    client: aio.Client, configured: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plane, sweep = configured.control_plane, Sweep(tmp_path, 30)
    await sweep.begin(client)
    await sweep.reach(1 / 4)
    await asyncio.to_thread(plane.revoke_token)
    try:
        assert "log in again" in await until_told(caplog, "is paused")
    finally:
        plane.publish_tokens()
    await sweep.end()


@pytest.fixture
def through(configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lead the client to another port than the API server's, and everybody to another GCS."""

    def lead(api: int | None = None, gcs: str | None = None) -> None:
        if api is not None:
            config = json.loads(configured.control_plane.kubeconfig.read_text())
            config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{api}"
            path = tmp_path / "kubeconfig"
            path.write_text(json.dumps(config))
            monkeypatch.setenv("KUBECONFIG", str(path))
        if gcs is not None:
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs)
            configured.kubelet.set_environment(STORAGE_EMULATOR_HOST=gcs)

    return lead


def lists(namespace: Namespace) -> int:
    """How often kinetic had to begin from a list: who can, goes on watching from where he was."""
    return namespace.control_plane.requests(namespace.name)["list pods"]


async def test_the_api_server_dies_forgets_and_knows_the_old_token_no_more(
    client: aio.Client, configured: Namespace, tmp_path: Path
) -> None:
    plane, sweep = configured.control_plane, Sweep(tmp_path, 40)
    await sweep.begin(client)
    await sweep.reach(1 / 4)
    before = lists(configured)
    await asyncio.to_thread(plane.kill_api)
    await asyncio.to_thread(plane.compact)  # while nobody can tell of what comes last
    await asyncio.to_thread(plane.expire_token)  # which starts it again
    await sweep.end()
    assert lists(configured) > before, "410: what there was to go on from is gone"


@pytest.mark.parametrize("number", [pytest.param(500, marks=slow)])
async def test_the_api_server_dies_and_forgets_amid_hundreds_of_jobs(
    client: aio.Client, configured: Namespace, tmp_path: Path, number: int
) -> None:
    plane, sweep = configured.control_plane, Sweep(tmp_path, number)
    await sweep.begin(client)
    for part, fault in ((1 / 5, plane.forget), (2 / 5, plane.expire_token), (3 / 5, plane.forget)):
        await sweep.reach(part)
        await asyncio.to_thread(fault)
    await sweep.reach(4 / 5)
    await asyncio.to_thread(plane.kill_api)
    await asyncio.sleep(20)  # so long it is gone
    await asyncio.to_thread(plane.start_api)
    await sweep.end()
    assert lists(configured) >= 4


@pytest.mark.parametrize(("number", "seconds"), [(4, 2), pytest.param(60, 30, marks=slow)])
async def test_the_bucket_answers_503(
    gcs_server: str, through, tmp_path: Path, number: int, seconds: float
) -> None:
    sweep = Sweep(tmp_path, number)
    async with Front(gcs_server) as front:
        through(gcs=front.url)
        async with aio.Client() as client:
            await sweep.begin(client)
            await sweep.reach(1 / 4)
            front.fail(seconds, "create")
            await sweep.end()
    assert "create" in {one.kind for one in front.asked if one.status == 503}


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (6, Relay.cut),
        pytest.param(100, Relay.cut, marks=slow),
        pytest.param(40, Relay.fall_silent, marks=slow),
    ],
)
async def test_connections_are_lost(
    configured: Namespace,
    gcs_server: str,
    through,
    tmp_path: Path,
    number: int,
    how: Callable[[Relay], None],
) -> None:
    """Reset, or half open: nothing comes through them any more, and nobody says so."""
    sweep = Sweep(tmp_path, number)
    bucket = int(gcs_server.rpartition(":")[2])
    async with Relay(configured.control_plane.port) as api, Relay(bucket) as gcs:
        through(api.port, f"http://127.0.0.1:{gcs.port}")
        async with aio.Client() as client:
            await sweep.begin(client)
            for part in (1 / 4, 1 / 2, 3 / 4) if how is Relay.cut else (1 / 4,):
                await sweep.reach(part)
                how(api)
                how(gcs)
            await sweep.end()
        assert api.cuts and gcs.cuts
