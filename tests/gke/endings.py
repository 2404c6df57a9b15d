"""What can be done to the objects of a job, when, and to what kind of job: a grid of cells.

A cell is carried out by `Deed.done`, and what came of it is held against the few things that must
always be true: whoever waits hears of the end, whoever comes later hears the same, and nothing of
it is left.
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
HERE_S = 180.0
"""Maximum seconds until a job reaches the state in which something is done to it.

That is only the setup: a machine of two processors starts the programs of up to 32 hosts at once.
"""
END_S = 90.0
"""Seconds in which its end has to be told: Kubernetes' own delays (a grace, a back-off) and some.

Of a Job that is nowhere nobody but its submitter knows for a minute whether it still comes.
"""
LOST_S = 75.0
"""Seconds that one lost notification may cost: a reading is a minute after the one before."""
REPORT_S = 20.0
"""Seconds after which it is asked what holds it."""
FINALIZER = "example.test/stuck"

KINDS = ("job", "item", "jobset", "lws")
MOMENTS = ("pending", "starting", "running", "committing", "ended")
CLIENTS = ("watching", "later")
DEEDS = (
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
    """One place of the grid; what is done *besides* follows at once."""

    deed: str
    moment: str
    kind: str
    client: str
    besides: str = ""

    def __str__(self) -> str:
        return f"{self.deed}+{self.besides}/{self.moment}/{self.kind}/{self.client}"


def every_cell(kind: str) -> list[Cell]:
    """The whole grid, for one kind of job."""
    return [Cell(deed, moment, kind, who) for deed, moment, who in _all()]


def random_cells(kind: str, count: int, seed: int) -> list[Cell]:
    """So many places of the grid, with two deeds each: any, and one that holds nothing fast."""
    chance = random.Random(f"{kind} {seed}")
    plain = [one for one in DEEDS if "finalizer" not in one and "orphaned" not in one]
    places = list(_all())
    return [
        Cell(deed, moment, kind, who, chance.choice(plain))
        for deed, moment, who in chance.choices(places, k=count)
    ]


def sampled(kind: str, count: int, seed: int) -> list[Cell]:
    """So many different places of the grid."""
    return random.Random(f"{kind} {seed}").sample(every_cell(kind), count)


def pairwise(kind: str) -> list[Cell]:
    """So many cells that any two values of different columns meet in one."""
    found: list[Cell] = []
    for i, deed in enumerate(DEEDS):
        for j, moment in enumerate(MOMENTS):
            if KINDS[(i + j) % len(KINDS)] == kind:
                who = CLIENTS[((i + j) // len(KINDS) + j) % len(CLIENTS)]
                found.append(Cell(deed, moment, kind, who))
    return found


def _all() -> Iterator[tuple[str, str, str]]:
    yield from itertools.product(DEEDS, MOMENTS, CLIENTS)


class Signals(Protocol):
    """What a job and its test say to each other, a word at a time."""

    def give(self, word: str) -> None:
        """Say it, for good."""

    def given(self, word: str) -> bool:
        """Whether it was said."""
        ...


@dataclass(frozen=True)
class Files:
    """Signals of who shares a folder."""

    folder: str

    def give(self, word: str) -> None:
        Path(self.folder, word).touch()

    def given(self, word: str) -> bool:
        return Path(self.folder, word).exists()


@dataclass(frozen=True)
class Objects:
    """Signals of who shares a bucket of a *server*, but no disk; *prefix* begins their names."""

    server: str
    bucket: str
    prefix: str

    def give(self, word: str) -> None:
        url = f"{self.server}/upload/storage/v1/b/{self.bucket}/o?uploadType=media"
        with urllib.request.urlopen(f"{url}&name={self.prefix}{word}", data=b"-", timeout=30):
            pass

    def given(self, word: str) -> bool:
        url = f"{self.server}/storage/v1/b/{self.bucket}/o/{self.prefix}{word}"
        try:
            with urllib.request.urlopen(url, timeout=30):
                return True
        except urllib.error.HTTPError as refusal:
            if refusal.code == 404:
                return False
            raise


class Slow:
    """A value that takes until it may be committed to be pickled: what returns it is committing."""

    def __init__(self, signals: Signals, word: str) -> None:
        self.signals, self.word = signals, word

    def __reduce__(self) -> Any:
        self.signals.give("committing")
        while not self.signals.given("commit"):
            time.sleep(0.01)
        return str, (self.word,)


def work(signals: Signals) -> Any:
    """In the job: tell that it runs, wait for the word, and return; later attempts do not wait."""
    first = os.environ["KINETIC_ATTEMPT"] == "1"
    signals.give(f"in.{os.environ.get('KINETIC_HOST', '0')}")
    while first and not signals.given("go"):
        time.sleep(0.01)
    return Slow(signals, "value") if first else "value"


@dataclass(slots=True)
class Deed:
    """One cell, on a namespace; no node ever gets the image *held*."""

    cell: Cell
    namespace: Namespace
    signals: Signals
    image: str = IMAGE
    held: str = HELD
    options: dict[str, Any] = field(default_factory=lambda: {"cpu": 0.05})
    fault: Fault | None = None
    """Of the watch of whoever waits; whoever comes afterwards has none."""

    # --- the job ---

    def _options(self) -> dict[str, Any]:
        hosts = self.cell.kind in ("jobset", "lws")
        options: dict[str, Any] = {"accelerator": "cpu:hosts=2" if hosts else "cpu", **self.options}
        if self.cell.moment == "pending":
            options["cpu"] = 900
        image = self.held if self.cell.moment == "starting" else self.image
        return {**options, "container_image": image}

    async def _submitted(self, client: aio.Client) -> str:
        """Its id, once it is where the cell says."""
        function = kinetic.run(**self._options())(work)
        if self.cell.kind == "item":
            batch = await client.run_async_map(function, [self.signals], progress=False)
            await batch.submitted()
            job = await batch.job(0)
        else:
            job = await client.submit(function, self.signals)
        if self.cell.moment in ("committing", "ended"):
            await self._give("go")
        if self.cell.moment == "ended":
            await self._give("commit")
        try:
            async with asyncio.timeout(HERE_S):
                while not await self._is_there(job):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            said = f"{await job.status()}, {await job.reason()!r}"
            raise AssertionError(f"not {self.cell.moment} after {HERE_S:g} s: {said}") from None
        return job.job_id

    async def _is_there(self, job: aio.JobHandle[Any]) -> bool:
        pods = await self.pods()
        match self.cell.moment:
            case "pending":
                return bool(pods)
            case "starting":
                statuses = [one["status"].get("containerStatuses") or [{}] for one in pods]
                return bool(pods) and all(
                    one[0].get("state", {}).get("waiting") for one in statuses
                )
            case "running":
                wanted = 2 if self.cell.kind in ("jobset", "lws") else 1
                return all([await self._given(f"in.{host}") for host in range(wanted)])
            case "committing":
                return await self._given("committing")
            case _:
                return await job.status() is JobStatus.SUCCEEDED

    # --- what is done ---

    async def done(self) -> None:
        """Do it, and hold what is told against what is true."""
        async with self._client(self.fault) as first:
            identity = await self._submitted(first)
            if self.cell.client == "later":
                await first.aclose()
                await self._do()
                async with self._client(self.fault) as second:
                    told = await self._told(second, identity)
            else:
                waiting = asyncio.create_task(self._told(first, identity))
                await asyncio.sleep(0)
                await self._do()
                told = await waiting
        async with self._client() as third:
            again = await self._end(await third.attach(identity), END_S)
            assert again == told or told[0] == "SubmitterLost", (
                f"who came later heard {again!r}, before that it was {told!r}"
            )
            await self._unstick([*await self._owners(), *await self.pods()])
            if self.cell.deed == "owner deleted, pods orphaned":  # somebody wants to keep them
                await self._call("DELETE", "pods")
            await self._leave(third, identity)
        self._judge(*told)

    def _judge(self, kind: str, words: str) -> None:
        moment = self.cell.moment
        if kind == "value":
            assert moment not in ("pending", "starting"), "it cannot have run"
            return
        assert moment != "ended", f"its value was there, and is lost: {words}"
        if moment in ("running", "committing"):
            assert "never started" not in words, words

    async def _told(self, client: aio.Client, identity: str) -> tuple[str, str]:
        """What `result` says; what holds it up is said, too, if a finalizer or a lack of room does.

        Kubernetes, or who submits it, makes another pod for one that was taken away. What cannot
        start then waits, or is ended when it is certain that it waits in vain.
        """
        held, waits = "finalizer" in self.cell.deed, self.cell.moment in ("pending", "starting")
        handle = await client.attach(identity)
        if held or waits:
            with contextlib.suppress(TimeoutError):
                return await self._end(handle, REPORT_S)
            reason = await handle.reason()
            assert reason or handle.group_id, "it waits, and nothing is said"
            # Others may have their grace first, or a submitter its minute to send it again.
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
            said = f"{await handle.status()}, {await handle.reason()!r}"
            raise AssertionError(f"no end within {END_S:g} s: {said}") from None

    async def _end(self, handle: aio.JobHandle[Any], within: float) -> tuple[str, str]:
        try:
            async with asyncio.timeout(within):
                return "value", str(await handle.result(cleanup=False))
        except KineticError as exc:
            return type(exc).__name__, str(exc)

    async def _leave(self, client: aio.Client, identity: str) -> None:
        """Clean up; nothing is left then but what somebody else holds fast."""
        handle = await client.attach(identity)
        if handle.group_id is not None:
            await client.cleanup(handle.group_id)
        else:
            await handle.cleanup()
        assert await handle.status() is JobStatus.NOT_FOUND
        try:
            async with asyncio.timeout(END_S):
                while left := [*await self._owners(), *await self.pods()]:
                    await self._unstick(left)  # again: others change the list at the same time
                    await asyncio.sleep(10 * POLL_S)
        except TimeoutError:
            raise AssertionError(f"left: {[self._path(one) for one in left]}") from None

    async def _do(self) -> None:
        await self._act(self.cell.deed)
        if self.cell.besides:
            await self._act(self.cell.besides)
        if self.cell.moment == "committing":
            await self._give("commit")

    async def _act(self, deed: str) -> None:
        what, _, how = deed.partition(" ")
        match what, how:
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
            with contextlib.suppress(Refused):  # it has just gone
                await self._call("DELETE", f"pods/{pod['metadata']['name']}", options or None)

    async def _evict(self) -> None:
        for pod in (await self.pods())[-1:]:
            name = pod["metadata"]["name"]
            about = {"name": name, "namespace": self.namespace.name}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": about}
            with contextlib.suppress(Refused):
                await self._call("POST", f"pods/{name}/eviction", body)

    async def _delete_owner(self, policy: str) -> None:
        for owner in await self._owners():
            path = self._path(owner)
            with contextlib.suppress(Refused):
                await self._call("DELETE", path, None, propagationPolicy=policy)

    async def _end_orphans(self) -> None:
        """Whoever orphans pods looks after them; those that wait would do so for ever."""
        if self.cell.moment in ("pending", "starting"):
            await self._delete_pod()
        else:
            await self._let_go()

    async def _let_go(self) -> None:
        await self._give("go")
        await self._give("commit")

    async def _give(self, word: str) -> None:
        await asyncio.to_thread(self.signals.give, word)

    async def _given(self, word: str) -> bool:
        return await asyncio.to_thread(self.signals.given, word)

    async def _suspend(self) -> None:
        lws = self.cell.kind == "lws"
        for stopped in (True, False):
            change = {"replicas": 0 if stopped else 1} if lws else {"suspend": stopped}
            for owner in await self._owners():
                with contextlib.suppress(Refused):  # it has ended
                    await self._call("PATCH", self._path(owner), {"spec": change})
            if "finalizer" in self.cell.deed:  # what it holds, or what belongs to that, may stay
                continue
            async with asyncio.timeout(END_S):
                while stopped and any(map(_runs, await self.pods())):
                    await asyncio.sleep(POLL_S)
        await self._let_go()
        if self.cell.moment in ("pending", "starting"):
            await self._delete_owner("Background")

    async def _pass_the_deadline(self) -> None:
        """As somebody does who wants it to end: Jobs have a field for that, pods, too."""
        if self.cell.kind in ("job", "item"):
            for owner in await self._owners():
                body = {"spec": {"activeDeadlineSeconds": 1}}
                with contextlib.suppress(Refused):
                    await self._call("PATCH", self._path(owner), body)
        else:
            await self._suspend()

    # --- finalizers ---

    async def _stick(self, objects: list[dict[str, Any]]) -> None:
        for one in objects:
            kept = [*one["metadata"].get("finalizers", ()), FINALIZER]
            with contextlib.suppress(Refused):  # it goes already
                await self._call("PATCH", self._path(one), {"metadata": {"finalizers": kept}})

    async def _unstick(self, objects: list[dict[str, Any]]) -> None:
        for one in objects:
            if FINALIZER not in (there := one["metadata"].get("finalizers", ())):
                continue
            kept = [name for name in there if name != FINALIZER]
            with contextlib.suppress(Refused):
                await self._call("PATCH", self._path(one), {"metadata": {"finalizers": kept}})

    # --- what there is ---

    @asynccontextmanager
    async def _client(self, fault: Fault | None = None) -> AsyncGenerator[aio.Client]:
        platform, name = None, self.namespace.name
        if fault is not None:
            sound = await open_platform(configuration.resolve(namespace=name))
            unreliable: Any = Unreliable(sound.cluster, fault)
            platform = replace(sound, cluster=unreliable)
        async with aio.Client(namespace=name, platform=platform) as client:
            yield client

    async def pods(self) -> list[dict[str, Any]]:
        """Those of the cell's job, by name."""
        found = await self._items("pods")
        return sorted(found, key=lambda one: str(one["metadata"]["name"]))

    async def _owners(self) -> list[dict[str, Any]]:
        return await self._items(COLLECTIONS[self.cell.kind])

    async def _items(self, collection: str) -> list[dict[str, Any]]:
        answer = await self._call("GET", collection)
        return [{"collection": collection, **one} for one in answer["items"]]

    def _path(self, found: dict[str, Any]) -> str:
        return f"{found['collection']}/{found['metadata']['name']}"

    async def _call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        return await asyncio.to_thread(self.namespace.call, method, path, body, **query)


async def wrongs(deeds: Iterable[Deed], at_once: int) -> str:
    """Carry them out, so many side by side; what was wrong, a line for each."""
    turns, wrong = asyncio.Semaphore(at_once), list[str]()

    async def play(deed: Deed) -> None:
        async with turns:
            try:
                await deed.done()
            except Exception as exc:
                wrong.append(f"{deed.cell} {deed.fault or ''}: {type(exc).__name__}: {exc}")

    await asyncio.gather(*map(play, deeds))
    return "\n".join(wrong)


COLLECTIONS = {
    "job": "batch/v1/jobs",
    "item": "batch/v1/jobs",
    "lws": "leaderworkerset.x-k8s.io/v1/leaderworkersets",
    "jobset": "jobset.x-k8s.io/v1alpha2/jobsets",
}


def _runs(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") not in ("Succeeded", "Failed")
