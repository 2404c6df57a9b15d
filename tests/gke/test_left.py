"""List everything in the cluster and the bucket to see what is left after cleanup."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic import aio, errors
from tests.cluster.fixtures import IMAGE, Namespace
from tests.cluster.rest import Refused

DEADLINE_S = 120.0
on_cluster = kinetic.run(
    accelerator="cpu", container_image=IMAGE, cpu=0.1, capture_env_vars=["MINE"]
)
on_hosts = kinetic.run(accelerator="cpu:hosts=2", container_image=IMAGE, cpu=0.1)
SHARED = ("code/", "data/", "functions/", "requirements/")
ROOT_KEY = "secrets/kinetic-root-key"
CA = "configmaps/kube-root-ca.crt"
"""The controllers eventually put it into each namespace."""


@on_cluster
def files_of(folder: str) -> list[str]:
    assert os.environ["MINE"] == "geheim"
    return sorted(os.listdir(folder))


@on_cluster
def odd_fails(x: int) -> bytes:
    if x % 2:
        raise ValueError(x)
    return bytes(2_000_000)


@on_cluster
def wait_long() -> None:
    print("waiting", flush=True)
    asyncio.run(asyncio.sleep(600))


@on_hosts
def host() -> str:
    return os.environ["KINETIC_HOST"]


def everything(namespace: Namespace) -> set[str]:
    """Return all objects of the namespace, of every kind except events."""
    found: set[str] = set()
    groups = namespace.admin.call("GET", "/apis")["groups"]
    versions = ["/api/v1", *(f"/apis/{x['preferredVersion']['groupVersion']}" for x in groups)]
    for version in versions:
        try:
            kinds = namespace.admin.call("GET", version)["resources"]
        except Refused:
            continue  # another test has just deleted the definition of these objects
        for kind in kinds:
            name = str(kind["name"])
            if not kind["namespaced"] or "list" not in kind["verbs"] or name == "events":
                continue
            path = f"{version}/namespaces/{namespace.name}/{name}"
            try:
                items: list[Any] = namespace.admin.call("GET", path).get("items") or []
            except Refused:
                continue  # an aggregated API whose server is gone
            found |= {f"{name}/{item['metadata']['name']}" for item in items}
    return found


def objects(server: str, bucket: str) -> set[str]:
    """Return the names of all objects in the bucket."""
    found: set[str] = set()
    token = ""
    while True:
        query = urllib.parse.urlencode({"maxResults": "1000", "pageToken": token})
        with urllib.request.urlopen(f"{server}/storage/v1/b/{bucket}/o?{query}") as answer:
            page = json.load(answer)
        found |= {str(item["name"]) for item in page.get("items") or ()}
        if not (token := page.get("nextPageToken") or ""):
            return found


async def nothing_left(namespace: Namespace, before: set[str]) -> None:
    """Wait until the namespace has no objects except those in *before* and its root key."""
    while new := await asyncio.to_thread(everything, namespace) - before - {ROOT_KEY, CA}:
        print("still there:", sorted(new), file=sys.stderr)
        await asyncio.sleep(0.3)


@pytest.mark.usefixtures("groups")
async def test_nothing_is_left_but_shared_content(
    client: aio.Client,
    configured: Namespace,
    bucket: str,
    gcs_server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = await asyncio.to_thread(everything, configured)
    monkeypatch.setenv("MINE", "geheim")
    monkeypatch.setenv("KINETIC_MULTIHOST", "jobset")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("content")
    async with asyncio.timeout(DEADLINE_S):
        succeeding = await client.submit(files_of, kinetic.Data(str(folder)))
        failing = await client.submit(odd_fails, 1)
        stopped = await client.submit(wait_long)
        several = await client.submit(host)
        assert await succeeding == ["a.txt"]  # this also cleans up the job
        with pytest.raises(ValueError, match="1"):
            await failing
        assert await several.result(cleanup=False) == "0"
        await stopped.cancel()

        batch = await client.run_async_map(odd_fails, range(3), max_concurrent=3)
        with pytest.raises(errors.BatchError):
            await batch.results(cleanup=False)
        assert await asyncio.to_thread(objects, gcs_server, bucket)
        for handle in (failing, stopped, several, batch):
            await handle.cleanup()
        await nothing_left(configured, before)
    names = await asyncio.to_thread(objects, gcs_server, bucket)
    assert {name for name in names if not name.startswith(SHARED)} == set()
    assert {name.split("/")[0] for name in names} >= {"data", "functions"}


async def test_the_secrets_of_a_batch_go_when_it_completes(
    client: aio.Client, configured: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with failed items keeps its environment, because they can be retried."""
    monkeypatch.setenv("MINE", "geheim")

    def secrets() -> set[str]:
        items = configured.call("GET", "secrets")["items"]
        names = {str(item["metadata"]["name"]) for item in items}
        return names - {"kinetic-root-key"}

    async with asyncio.timeout(DEADLINE_S):
        batch = await client.run_async_map(odd_fails, [0, 1], max_concurrent=2)
        await batch.wait()
        while len(await asyncio.to_thread(secrets)) > 1:
            await asyncio.sleep(0.1)
        assert await asyncio.to_thread(secrets) == {f"kept-{batch.group_id}"}
        assert await batch.retry_failed() == 1  # its pod finds its environment
        with pytest.raises(errors.BatchError, match="ValueError: 1"):
            await batch.results(cleanup=False)
        succeeding = await client.run_async_map(odd_fails, [0, 2], max_concurrent=2)
        await succeeding.wait()
        while await asyncio.to_thread(secrets) != {f"kept-{batch.group_id}"}:
            await asyncio.sleep(0.1)
        async with aio.Client() as other:
            found = await other.attach_batch(succeeding.group_id)
            await found.resume()  # succeeds without secrets: no item is left to run
            assert [len(value) for value in await found.results()] == [2_000_000] * 2
        await batch.cleanup()
        await succeeding.cleanup()


@on_hosts
def wait_for(gate: str) -> str:
    while not Path(gate).exists():
        time.sleep(0.05)
    return os.environ["KINETIC_HOST"]


@pytest.mark.usefixtures("groups")
async def test_one_list_has_the_jobs_on_one_host_and_those_on_several(
    client: aio.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configured backend doesn't matter: all three jobs share a store and a namespace."""
    gate = tmp_path / "gate"
    async with asyncio.timeout(DEADLINE_S):
        jobs = [await client.submit(wait_long)]
        for kind in ("lws", "jobset"):
            monkeypatch.setenv("KINETIC_MULTIHOST", kind)
            async with aio.Client() as other:
                jobs.append(await other.submit(wait_for, str(gate)))
        wanted = {job.job_id for job in jobs}
        for backend in ("gke", "pathways"):
            async with aio.Client(backend=backend) as other:
                assert {job.job_id for job in await other.list_jobs()} == wanted
        gate.touch()
        async with aio.Client(backend="pathways") as other:
            found = [await other.attach(job.job_id) for job in jobs]
            for handle in found[1:]:
                assert await handle.result(cleanup=False) == "0"
            for handle in found:
                await handle.cleanup()
            assert await other.list_jobs() == []
