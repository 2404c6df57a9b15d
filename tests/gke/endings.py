"""A grid of interventions: what is done to a job's objects, when, and to which kind of job.

`Trial.run` carries out one cell of the grid and checks what must always be true: a waiting client
sees the job end, a later client sees the same end, and cleanup leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import kinetic
from kinetic import aio, configuration
from kinetic.aio.platforms import open_platform
from kinetic.errors import KineticError
from kinetic.job_status import JobStatus
from tests.cluster.fixtures import IMAGE, Namespace
from tests.cluster.rest import Refused
from tests.engine.notifications import Fault, Unreliable

HELD = "example.test/held"
POLL_S = 0.05
SETUP_S = 180.0
"""Maximum seconds until a job reaches the moment at which the action follows.

Setup is slow: a machine with two processors starts the programs of up to 32 hosts at once.
"""
END_S = 90.0
"""Maximum seconds until a job's end is reported: Kubernetes' own delays and a margin.

For a minute after a Job vanishes, only its submitter knows whether it will launch the Job again.
"""
LOST_S = 75.0
"""Maximum delay from one lost notification: clients read the state again once a minute."""
REPORT_S = 20.0
"""Seconds to wait for an end before asking for the job's reason."""
FINALIZER = "example.test/stuck"

KINDS = ("job", "item", "jobset", "lws")
MOMENTS = ("pending", "starting", "running", "committing", "ended")
CLIENTS = ("watching", "later")
ACTIONS = (
    "pod deleted",
    "pod force-deleted",
    "pod evicted",
    "pod deleted, finalizer stuck",
    "owner deleted",
    "owner deleted in the foreground",
    "owner deleted, pods orphaned",
    "owner deleted, finalizer stuck",
    "suspended and resumed",
    "deadline patched",
)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One cell of the grid; *second_action* follows the first immediately."""

    action: str
    moment: str
    kind: str
    client: str
    second_action: str = ""

    def __str__(self) -> str:
        return f"{self.action}+{self.second_action}/{self.moment}/{self.kind}/{self.client}"


def every_cell(kind: str) -> list[Cell]:
    """Return the whole grid for one kind of job."""
    return [Cell(action, moment, kind, client) for action, moment, client in _all()]


def random_cells(kind: str, count: int, seed: int) -> list[Cell]:
    """Return *count* random cells, each with a second action that blocks no deletion."""
    chance = random.Random(f"{kind} {seed}")
    plain = [action for action in ACTIONS if "finalizer" not in action and "orphaned" not in action]
    combinations = list(_all())
    return [
        Cell(action, moment, kind, client, chance.choice(plain))
        for action, moment, client in chance.choices(combinations, k=count)
    ]


def sampled(kind: str, count: int, seed: int) -> list[Cell]:
    """Return *count* different cells of the grid."""
    return random.Random(f"{kind} {seed}").sample(every_cell(kind), count)


def pairwise(kind: str) -> list[Cell]:
    """Return cells that, over all kinds, contain each pair of values from different columns."""
    found: list[Cell] = []
    for i, action in enumerate(ACTIONS):
        for j, moment in enumerate(MOMENTS):
            if KINDS[(i + j) % len(KINDS)] == kind:
                client = CLIENTS[((i + j) // len(KINDS) + j) % len(CLIENTS)]
                found.append(Cell(action, moment, kind, client))
    return found


def _all() -> Iterator[tuple[str, str, str]]:
    yield from itertools.product(ACTIONS, MOMENTS, CLIENTS)


class Signals(Protocol):
    """Named signals between a job and its test."""

    def set(self, name: str) -> None:
        """Set the signal *name* permanently."""

    def is_set(self, name: str) -> bool:
        """Return whether the signal *name* is set."""
        ...


@dataclass(frozen=True)
class Files:
    """Signals as files in a shared folder."""

    folder: str

    def set(self, name: str) -> None:
        Path(self.folder, name).touch()

    def is_set(self, name: str) -> bool:
        return Path(self.folder, name).exists()


@dataclass(frozen=True)
class Objects:
    """Signals as objects in a bucket on *server*; their names start with *prefix*."""

    server: str
    bucket: str
    prefix: str

    def set(self, name: str) -> None:
        url = f"{self.server}/upload/storage/v1/b/{self.bucket}/o?uploadType=media"
        with urllib.request.urlopen(f"{url}&name={self.prefix}{name}", data=b"-", timeout=30):
            pass

    def is_set(self, name: str) -> bool:
        url = f"{self.server}/storage/v1/b/{self.bucket}/o/{self.prefix}{name}"
        try:
            with urllib.request.urlopen(url, timeout=30):
                return True
        except urllib.error.HTTPError as refusal:
            if refusal.code == 404:
                return False
            raise


class Slow:
    """A value whose pickling waits for the signal ``commit``: it holds a job while committing."""

    def __init__(self, signals: Signals, value: str) -> None:
        self.signals, self.value = signals, value

    def __reduce__(self) -> Any:
        self.signals.set("committing")
        while not self.signals.is_set("commit"):
            time.sleep(0.01)
        return str, (self.value,)


def work(signals: Signals) -> Any:
    """Signal from the job that it runs, wait for ``go``, and return; later attempts don't wait."""
    first = os.environ["KINETIC_ATTEMPT"] == "1"
    signals.set(f"in.{os.environ.get('KINETIC_HOST', '0')}")
    while first and not signals.is_set("go"):
        time.sleep(0.01)
    return Slow(signals, "value") if first else "value"


@dataclass(slots=True)
class Trial:
    """Run one cell in a namespace; no node can pull the image *held*."""

    cell: Cell
    namespace: Namespace
    signals: Signals
    image: str = IMAGE
    held: str = HELD
    options: dict[str, Any] = field(default_factory=lambda: {"cpu": 0.05})
    fault: Fault | None = None
    """A fault in the watch of the waiting client; the client that attaches afterwards has none."""

    # --- the job ---

    def _options(self) -> dict[str, Any]:
        hosts = self.cell.kind in ("jobset", "lws")
        options: dict[str, Any] = {"accelerator": "cpu:hosts=2" if hosts else "cpu", **self.options}
        if self.cell.moment == "pending":
            options["cpu"] = 900
        image = self.held if self.cell.moment == "starting" else self.image
        return {**options, "container_image": image}

    async def _submitted(self, client: aio.Client) -> str:
        """Submit the job, wait until it reaches the cell's moment, and return its ID."""
        function = kinetic.run(**self._options())(work)
        if self.cell.kind == "item":
            batch = await client.run_async_map(function, [self.signals], progress=False)
            await batch.submitted()
            job = await batch.job(0)
        else:
            job = await client.submit(function, self.signals)
        if self.cell.moment in ("committing", "ended"):
            await self._set("go")
        if self.cell.moment == "ended":
            await self._set("commit")
        try:
            async with asyncio.timeout(SETUP_S):
                while not await self._is_at_moment(job):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            state = f"{await job.status()}, {await job.reason()!r}"
            raise AssertionError(f"not {self.cell.moment} after {SETUP_S:g} s: {state}") from None
        return job.job_id

    async def _is_at_moment(self, job: aio.JobHandle[Any]) -> bool:
        pods = await self.pods()
        match self.cell.moment:
            case "pending":
                return bool(pods)
            case "starting":
                statuses = [pod["status"].get("containerStatuses") or [{}] for pod in pods]
                return bool(pods) and all(
                    containers[0].get("state", {}).get("waiting") for containers in statuses
                )
            case "running":
                hosts = 2 if self.cell.kind in ("jobset", "lws") else 1
                return all([await self._is_set(f"in.{host}") for host in range(hosts)])
            case "committing":
                return await self._is_set("committing")
            case _:
                return await job.status() is JobStatus.SUCCEEDED

    # --- the action and its checks ---

    async def run(self) -> None:
        """Carry out the cell and check the job's end."""
        async with self._client(self.fault) as first:
            job_id = await self._submitted(first)
            if self.cell.client == "later":
                await first.aclose()
                await self._do()
                async with self._client(self.fault) as second:
                    end = await self._wait_for_end(second, job_id)
            else:
                waiting = asyncio.create_task(self._wait_for_end(first, job_id))
                await asyncio.sleep(0)
                await self._do()
                end = await waiting
        async with self._client() as third:
            later_end = await self._end(await third.attach(job_id), END_S)
            assert later_end == end or end[0] == "SubmitterLost", (
                f"a later client saw {later_end!r}, the first one {end!r}"
            )
            await self._unstick([*await self._owners(), *await self.pods()])
            if self.cell.action == "owner deleted, pods orphaned":  # kinetic doesn't delete orphans
                await self._call("DELETE", "pods")
            await self._clean_up(third, job_id)
        self._check(*end)

    def _check(self, kind: str, message: str) -> None:
        moment = self.cell.moment
        if kind == "value":
            assert moment not in ("pending", "starting"), "it cannot have run"
            return
        assert moment != "ended", f"its value existed and is lost: {message}"
        if moment in ("running", "committing"):
            assert "never started" not in message, message

    async def _wait_for_end(self, client: aio.Client, job_id: str) -> tuple[str, str]:
        """Return what `result` returns or raises, and check the reason of a job that is held up.

        Kubernetes or the submitter replaces a deleted pod. A pod that can't start keeps the job
        waiting, or ends it once waiting is certain to be useless.
        """
        held = "finalizer" in self.cell.action
        waits = self.cell.moment in ("pending", "starting")
        handle = await client.attach(job_id)
        if held or waits:
            with contextlib.suppress(TimeoutError):
                return await self._end(handle, REPORT_S)
            reason = await handle.reason()
            assert reason or handle.group_id, "it waits and has no reason"
            # First a pod's grace may pass, or the minute in which a submitter may launch again.
            until = time.monotonic() + END_S
            while held and not waits and FINALIZER not in reason:
                assert time.monotonic() < until, reason
                with contextlib.suppress(TimeoutError):
                    return await self._end(handle, 1.0)
                reason = await handle.reason()
            await self._unstick([*await self._owners(), *await self.pods()])
        if waits:
            await handle.cancel()
        try:
            return await self._end(handle, END_S if self.fault is None else END_S + LOST_S)
        except TimeoutError:
            state = f"{await handle.status()}, {await handle.reason()!r}"
            raise AssertionError(f"no end within {END_S:g} s: {state}") from None

    async def _end(self, handle: aio.JobHandle[Any], within: float) -> tuple[str, str]:
        try:
            async with asyncio.timeout(within):
                return "value", str(await handle.result(cleanup=False))
        except KineticError as exc:
            return type(exc).__name__, str(exc)

    async def _clean_up(self, client: aio.Client, job_id: str) -> None:
        """Clean up and check that, once finalizers are removed, nothing is left."""
        handle = await client.attach(job_id)
        if handle.group_id is not None:
            await client.cleanup(handle.group_id)
        else:
            await handle.cleanup()
        assert await handle.status() is JobStatus.NOT_FOUND
        try:
            async with asyncio.timeout(END_S):
                while left := [*await self._owners(), *await self.pods()]:
                    await self._unstick(left)  # again: controllers also write the finalizers
                    await asyncio.sleep(10 * POLL_S)
        except TimeoutError:
            raise AssertionError(f"left: {[self._path(found) for found in left]}") from None

    async def _do(self) -> None:
        await self._act(self.cell.action)
        if self.cell.second_action:
            await self._act(self.cell.second_action)
        if self.cell.moment == "committing":
            await self._set("commit")

    async def _act(self, action: str) -> None:
        target, _, verb = action.partition(" ")
        match target, verb:
            case "pod", "deleted":
                await self._delete_pod()
            case "pod", "force-deleted":
                await self._delete_pod(gracePeriodSeconds=0)
            case "pod", "evicted":
                await self._evict()
            case "pod", _:
                await self._stick((await self.pods())[-1:])
                await self._delete_pod()
            case "owner", "deleted":
                await self._delete_owner("Background")
            case "owner", "deleted in the foreground":
                await self._delete_owner("Foreground")
            case "owner", "deleted, pods orphaned":
                await self._delete_owner("Orphan")
                await self._end_orphans()
            case "owner", _:
                await self._stick(await self._owners())
                await self._delete_owner("Background")
                await self._let_go()
            case "suspended", _:
                await self._suspend()
            case "nothing", _:
                await self._let_go()
            case _:
                await self._pass_the_deadline()

    async def _delete_pod(self, **options: Any) -> None:
        for pod in (await self.pods())[-1:]:
            with contextlib.suppress(Refused):  # the pod is already deleted
                await self._call("DELETE", f"pods/{pod['metadata']['name']}", options or None)

    async def _evict(self) -> None:
        for pod in (await self.pods())[-1:]:
            name = pod["metadata"]["name"]
            metadata = {"name": name, "namespace": self.namespace.name}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
            with contextlib.suppress(Refused):
                await self._call("POST", f"pods/{name}/eviction", body)

    async def _delete_owner(self, policy: str) -> None:
        for owner in await self._owners():
            path = self._path(owner)
            with contextlib.suppress(Refused):
                await self._call("DELETE", path, None, propagationPolicy=policy)

    async def _end_orphans(self) -> None:
        """End the orphaned pods: delete those that would wait forever, let the others finish."""
        if self.cell.moment in ("pending", "starting"):
            await self._delete_pod()
        else:
            await self._let_go()

    async def _let_go(self) -> None:
        await self._set("go")
        await self._set("commit")

    async def _set(self, name: str) -> None:
        await asyncio.to_thread(self.signals.set, name)

    async def _is_set(self, name: str) -> bool:
        return await asyncio.to_thread(self.signals.is_set, name)

    async def _suspend(self) -> None:
        lws = self.cell.kind == "lws"
        for stopped in (True, False):
            change = {"replicas": 0 if stopped else 1} if lws else {"suspend": stopped}
            for owner in await self._owners():
                with contextlib.suppress(Refused):  # the owner has ended
                    await self._call("PATCH", self._path(owner), {"spec": change})
            if "finalizer" in self.cell.action:  # the finalizer may keep pods alive
                continue
            async with asyncio.timeout(END_S):
                while stopped and any(map(_runs, await self.pods())):
                    await asyncio.sleep(POLL_S)
        await self._let_go()
        if self.cell.moment in ("pending", "starting"):
            await self._delete_owner("Background")

    async def _pass_the_deadline(self) -> None:
        """End the job through a deadline; sets have no such field and are suspended instead."""
        if self.cell.kind in ("job", "item"):
            for owner in await self._owners():
                body = {"spec": {"activeDeadlineSeconds": 1}}
                with contextlib.suppress(Refused):
                    await self._call("PATCH", self._path(owner), body)
        else:
            await self._suspend()

    # --- finalizers ---

    async def _stick(self, objects: list[dict[str, Any]]) -> None:
        for found in objects:
            finalizers = [*found["metadata"].get("finalizers", ()), FINALIZER]
            with contextlib.suppress(Refused):  # its deletion has begun
                change = {"metadata": {"finalizers": finalizers}}
                await self._call("PATCH", self._path(found), change)

    async def _unstick(self, objects: list[dict[str, Any]]) -> None:
        for found in objects:
            if FINALIZER in found["metadata"].get("finalizers", ()):
                await self._remove_finalizer(self._path(found), found["metadata"]["uid"])

    async def _remove_finalizer(self, path: str, uid: str) -> None:
        """Remove our finalizer; read again if a controller changes the finalizers meanwhile."""
        while True:
            try:
                metadata = (await self._call("GET", path))["metadata"]
                finalizers = metadata.get("finalizers", ())
                if metadata["uid"] != uid or FINALIZER not in finalizers:
                    return
                kept = {"finalizers": [x for x in finalizers if x != FINALIZER]}
                change = kept | {"resourceVersion": metadata["resourceVersion"]}
                await self._call("PATCH", path, {"metadata": change})
                return
            except Refused as refusal:
                if refusal.code == 404:
                    return
                if refusal.code != 409:
                    raise

    # --- clients and objects ---

    @asynccontextmanager
    async def _client(self, fault: Fault | None = None) -> AsyncGenerator[aio.Client]:
        platform, name = None, self.namespace.name
        if fault is not None:
            reliable = await open_platform(configuration.resolve(namespace=name))
            unreliable: Any = Unreliable(reliable.cluster, fault)
            platform = replace(reliable, cluster=unreliable)
        async with aio.Client(namespace=name, platform=platform) as client:
            yield client

    async def pods(self) -> list[dict[str, Any]]:
        """Return the pods of the cell's job, sorted by name."""
        found = await self._items("pods")
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    async def _owners(self) -> list[dict[str, Any]]:
        return await self._items(COLLECTIONS[self.cell.kind])

    async def _items(self, collection: str) -> list[dict[str, Any]]:
        answer = await self._call("GET", collection)
        return [{"collection": collection, **item} for item in answer["items"]]

    def _path(self, found: dict[str, Any]) -> str:
        return f"{found['collection']}/{found['metadata']['name']}"

    async def _call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        return await asyncio.to_thread(self.namespace.call, method, path, body, **query)


async def run_all(trials: Iterable[Trial], at_once: int) -> str:
    """Run the trials, *at_once* at a time, and return a line for each that failed."""
    turns, failures = asyncio.Semaphore(at_once), list[str]()

    async def run_one(trial: Trial) -> None:
        async with turns:
            try:
                await trial.run()
            except Exception as exc:
                failures.append(f"{trial.cell} {trial.fault or ''}: {type(exc).__name__}: {exc}")

    await asyncio.gather(*map(run_one, trials))
    return "\n".join(failures)


COLLECTIONS = {
    "job": "batch/v1/jobs",
    "item": "batch/v1/jobs",
    "lws": "leaderworkerset.x-k8s.io/v1/leaderworkersets",
    "jobset": "jobset.x-k8s.io/v1alpha2/jobsets",
}


def _runs(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")
