"""Attach a debugger to a job on a cluster through the API server alone."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kinetic import aio, errors
from kinetic.debug import cleanup_port_forward
from tests.cluster.fixtures import Namespace
from tests.cluster.rights import await_granted
from tests.face.editor import attached, stopped_at

DEADLINE_S = 180.0
PROGRAM = """
import os
import kinetic

on_cluster = kinetic.run(container_image="example.test/image:1", cpu=0.1, debug=True)

@on_cluster
def doubled(x):
    y = x * 2
    return y

def which():
    host = os.environ["KINETIC_HOST"]
    return host
"""
ROLES = "rbac.authorization.k8s.io/v1"
RULES_WITHOUT_PORT_FORWARD = [
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["*"]},
    {"apiGroups": [""], "resources": ["pods", "pods/log", "secrets", "events"], "verbs": ["*"]},
]


@pytest.fixture
def project(
    configured: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """Import the user's module ``experiment``."""
    (tmp_path / "experiment.py").write_text(PROGRAM)
    monkeypatch.delenv("KINETIC_PACKAGE_ROOT")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("experiment")
    del sys.modules["experiment"]


def bind(namespace: Namespace, role: dict[str, Any], user: str) -> None:
    """Create *role*, grant it to *user*, and wait until the grant takes effect."""
    namespace.call("POST", f"{ROLES}/roles", role)
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    ref = {"kind": "Role", "name": role["metadata"]["name"], "apiGroup": subject["apiGroup"]}
    binding = {"apiVersion": ROLES, "kind": "RoleBinding", "metadata": {"name": ref["name"]}}
    namespace.call(
        "POST", f"{ROLES}/rolebindings", binding | {"subjects": [subject], "roleRef": ref}
    )
    await_granted(namespace, role, user)


async def test_the_function_stops_at_a_breakpoint_once_the_user_may_forward_ports(
    configured: Namespace, project: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, the error prints the Role to apply. The forwarder ends with the job."""
    monkeypatch.setenv("KINETIC_KUBE_CONTEXT", "dev")
    base = {"apiVersion": ROLES, "kind": "Role", "metadata": {"name": "base"}}
    base_role = base | {"rules": RULES_WITHOUT_PORT_FORWARD}
    await asyncio.to_thread(bind, configured, base_role, "dev")
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        job = await client.submit(project.doubled.options(accelerator="cpu"), 21)
        with pytest.raises(errors.AuthError, match="pods/portforward") as refused:
            await job.debug_attach(local_port=0)
        _, _, printed = str(refused.value).partition("this:\n")
        role, _ = yaml.safe_load_all(printed)
        await asyncio.to_thread(bind, configured, role, "dev")
        forwarder, port = await attached(job)
        frame, seen = await asyncio.to_thread(stopped_at, port, project.__file__, 10)
        assert (frame["name"], frame["source"]["path"]) == ("doubled", project.__file__)
        assert seen == {"x": "21", "y": "42"}
        assert await job.result() == 42
        assert await asyncio.to_thread(forwarder.wait, 60) == 0
        await job.cleanup()
    cleanup_port_forward(forwarder)


@pytest.mark.full
async def test_an_item_of_a_batch_stops_at_a_breakpoint(
    configured: Namespace, project: ModuleType
) -> None:
    """The forwarder ends with the item, while the worker waits for the debugger of the next."""
    async with asyncio.timeout(DEADLINE_S), aio.Client() as client:
        doubled = project.doubled.options(accelerator="cpu")
        batch = await client.run_async_map(doubled, [1, 2], max_concurrent=1, progress=False)
        forwarder, port = await attached(batch.jobs[0])
        frame, seen = await asyncio.to_thread(stopped_at, port, project.__file__, 10)
        assert (frame["name"], frame["source"]["path"]) == ("doubled", project.__file__)
        assert seen == {"x": "1", "y": "2"}
        assert await batch.jobs[0].result() == 2
        assert await asyncio.to_thread(forwarder.wait, 60) == 0
        await batch.cancel()
    cleanup_port_forward(forwarder)


@pytest.mark.usefixtures("groups")
async def test_attaching_to_a_chosen_host_starts_all_hosts(
    client: aio.Client, project: ModuleType
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        which = project.on_cluster(project.which).options(accelerator="cpu:hosts=2")
        job = await client.submit(which)
        with pytest.raises(errors.ConfigurationError, match="workers 0 to 1, not 2"):
            await job.debug_attach(worker=2)
        forwarder, port = await attached(job, worker=1)
        frame, seen = await asyncio.to_thread(stopped_at, port, project.__file__, 14)
        assert (frame["name"], seen) == ("which", {"host": "'1'"})
        assert await job.result() == "0"
        await job.cleanup()
        await asyncio.to_thread(cleanup_port_forward, forwarder)
