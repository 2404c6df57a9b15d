"""Jobs of one selector, looked at once or watched: one list and watch of jobs, one of pods."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from absl import logging

from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.diagnosis.causes import Diagnosis, Outlook
from kinetic.aio.kubernetes.diagnosis.documents import Document, condition, part, parts, uid
from kinetic.aio.kubernetes.diagnosis.facts import Pod
from kinetic.aio.kubernetes.diagnosis.queues import is_gated
from kinetic.aio.kubernetes.diagnosis.starting import LACKS_DRIVER
from kinetic.aio.kubernetes.manifests import START_TIMEOUT, Paths, by_items, by_labels
from kinetic.aio.kubernetes.secrets import lacks_own_secret
from kinetic.aio.kubernetes.tables import (
    ENDED,
    Changed,
    End,
    Entry,
    Facts,
    Listed,
    Rhythm,
    Table,
    listing,
    reflect,
    thrown_out,
)
from kinetic.aio.ports import Observation
from kinetic.errors import AuthError, BackendError, NotFound
from kinetic.job_status import Reason

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GROUP = "kueue.x-k8s.io/pod-group-name"
"""The label with the name of their Workload, on pods that Kueue holds one by one."""

WORKLOADS = ("v1beta2", "v1beta1")
NODES_S = 60.0
NODES = 500
"""A cluster with more nodes than these is judged by the scheduler's words alone."""

EVENTS = 100
TOLD = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds that a job may wait before something is done about it.

    ``asked_s``: more is asked about one that has a reason to wait, or no pod, and
    after ``slow_s`` about any; again after four times as long, and so on.
    ``told_s``: it is reported at the latest then. ``hopeless_s``: it is ended
    when it was seen to wait in vain for so long. ``orphaned_s``: so long its
    Secret may take to be made. ``least_s``: no ``start_timeout`` is shorter,
    for Kubernetes takes that long to start anything. ``rights_s``: what may not
    be asked is asked again after that: somebody may have granted it.
    """

    asked_s: float = 4.0
    slow_s: float = 20.0
    told_s: float = 15.0
    hopeless_s: float = 15.0
    orphaned_s: float = 300.0
    least_s: float = 2.0
    pause_s: float = 0.05
    rights_s: float = 60.0


class Diagnostics:
    """Asks the API server about what waits; one for all watches of a cluster's client.

    *stop* is what to change in the spec of a Job, so that its pods are ended and it stays.
    *makers* gives kind and name of what makes its pods, where it does not do that itself.
    """

    def __init__(
        self,
        api: Api,
        paths: Paths,
        patience: Patience,
        *,
        stop: Mapping[str, Any] | None = None,
        makers: Callable[[str], Sequence[tuple[str, str]]] = lambda name: (),
    ) -> None:
        self.patience = patience
        self._makers = makers
        self._stop = {"activeDeadlineSeconds": 1} if stop is None else stop
        self._api = api
        self._paths = paths
        self._nodes: list[Document] | None = None
        self._nodes_until = 0.0
        self._closed_until: dict[str, float] = {}
        self._told: dict[str, None] = {}

    def report(self, name: str, verdict: Diagnosis) -> None:
        """Say once what keeps jobs from starting: others with the same words are not named."""
        if verdict.text in self._told:
            return
        if len(self._told) >= TOLD:
            self._told.clear()
        self._told[verdict.text] = None
        if verdict.outlook is Outlook.OPEN:
            logging.info("%s waits: %s", name, verdict.text)
        else:
            logging.warning("%s cannot start: %s", name, verdict.text)

    async def facts(self, entry: Entry) -> Facts:
        """What jobs and pods alone do not say about this one."""
        alive = [pod for pod in entry.seen.pods if not Pod(pod).ended]
        verdict = entry.verdict
        unplaced = [pod for pod in alive if not part(pod, "spec").get("nodeName")]
        wanted = unplaced and verdict is not None and verdict.reason is Reason.UNSCHEDULABLE
        events = await self._events(entry, alive)
        return Facts(
            events=events,
            absent=await self._absent_drivers(events),
            nodes=await self._all_nodes() if wanted else None,
            workload=await self._workload(entry.job, alive),
        )

    async def scene(self, pod: Document) -> Document | None:
        """The node of a pod that is thrown out: was it closed, or is it lost?"""
        name = part(pod, "spec").get("nodeName")
        found = await self._allowed("nodes", f"{self._paths.nodes}/{name}", {})
        return None if found is None else _slim(found)

    async def end(self, entry: Entry, end: End) -> None:
        """Make Kubernetes end a Job that waits in vain, with a note that says why."""
        job = entry.job
        name = str(part(job, "metadata").get("name"))
        metadata = {"uid": uid(job), "annotations": {ENDED: end.to_text()}}
        change = {"metadata": metadata, "spec": self._stop}
        await self._api.call(
            "PATCH",
            f"{self._paths.jobs}/{name}",
            body=change,
            content_type="application/merge-patch+json",
        )

    async def _events(self, entry: Entry, alive: Sequence[Document]) -> list[Document]:
        """Those of the pod that is there, else of what should have made one."""
        selectors = [f"involvedObject.uid={uid(alive[-1]) if alive else uid(entry.job)}"]
        if not alive and (makers := self._makers(entry.name)):
            names = dict.fromkeys(name for _, name in makers)
            selectors = [f"involvedObject.name={name}" for name in names]
        told: list[Document] = []
        for selector in selectors:
            query = {"fieldSelector": selector, "limit": str(EVENTS)}
            found = await self._allowed("events", self._paths.events, query)
            told += parts(found, "items")
        return told

    async def _absent_drivers(self, events: Sequence[Document]) -> list[str]:
        """Return the storage drivers that a node lacks and that aren't in the cluster at all.

        A node that has just been made lacks a driver until its pod has started there.
        """
        said = (str(one.get("message")) for one in events)
        lacking = dict.fromkeys(name for one in said for name in LACKS_DRIVER.findall(one))
        return [name for name in lacking if await self._is_absent(name)]

    async def _is_absent(self, driver: str) -> bool:
        try:
            await self._api.call("GET", f"/apis/storage.k8s.io/v1/csidrivers/{driver}")
        except NotFound:
            return True
        except BackendError as exc:
            logging.info("whether the cluster has the driver %s is not known: %s", driver, exc)
        return False

    async def _all_nodes(self) -> list[Document] | None:
        now = asyncio.get_running_loop().time()
        if now >= self._nodes_until:
            found = await self._allowed("nodes", self._paths.nodes, {"limit": str(NODES)})
            whole = found is not None and not part(found, "metadata").get("continue")
            self._nodes = [_slim(one) for one in parts(found, "items")] if whole else None
            self._nodes_until = now + NODES_S
        return self._nodes

    async def _workload(self, job: Document | None, alive: Sequence[Document]) -> Document | None:
        """Kueue's object for the Job, if the Job or its pods wait in one of its queues."""
        suspended = part(job, "spec").get("suspend") or condition(job, "Suspended") is not None
        groups = [
            part(part(pod, "metadata"), "labels").get(GROUP) for pod in alive if is_gated(pod)
        ]
        group = next((name for name in groups if name), None)
        if not (suspended or group) or QUEUE_LABEL not in part(part(job, "metadata"), "labels"):
            return None
        query = {"labelSelector": f"kueue.x-k8s.io/job-uid={uid(job)}"}
        if not suspended:
            query = {"fieldSelector": f"metadata.name={group}"}
        for version in WORKLOADS:
            path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{self._paths.namespace}/workloads"
            found = await self._allowed(path, path, query)
            if found is not None:
                return next(iter(parts(found, "items")), None)
        return None

    async def _allowed(self, what: str, path: str, query: dict[str, str]) -> Document | None:
        """An answer, or None where there is none to be had: reasons are only worded worse then."""
        now = asyncio.get_running_loop().time()
        if now < self._closed_until.get(what, 0.0):
            return None
        try:
            return await self._api.call("GET", path, query=query)
        except NotFound:
            if path == what:  # there is no such collection
                self._closed_until[what] = math.inf
        except AuthError as exc:
            if what not in self._closed_until:
                logging.info("jobs that do not start are explained without %s: %s", what, exc)
            self._closed_until[what] = now + self.patience.rights_s
        except BackendError as exc:
            logging.info("jobs that do not start are not explained now: %s", exc)
        return None


def _slim(node: Document) -> Document:
    metadata, spec, status = (part(node, name) for name in ("metadata", "spec", "status"))
    return {
        "metadata": {key: metadata[key] for key in ("name", "labels") if key in metadata},
        "spec": {key: spec[key] for key in ("taints", "unschedulable") if key in spec},
        "status": {
            key: status[key] for key in ("allocatable", "capacity", "conditions") if key in status
        },
    }


GROWTH = 4.0

SAMPLE = 3
"""Of many that wait for the same reason, so many are asked about: the others would say the same."""

Word = Callable[[Table], None]


class PendingMonitor:
    """Of one watch: looks now and then at what waits, and does something about it.

    ``tell`` takes what was found out, as a change of the table.
    """

    def __init__(
        self, table: Table, inquiry: Diagnostics, tell: Callable[[Word], Awaitable[Any]]
    ) -> None:
        self._table = table
        self._inquiry = inquiry
        self._tell = tell
        self._work: deque[tuple[str, Callable[[Entry], Awaitable[None]]]] = deque()
        self._queued: set[str] = set()
        self._ended: set[str] = set()
        self._asked: Counter[str] = Counter()
        self._telling: set[str] = set()
        self._awake = asyncio.Event()

    def look(self, now: float) -> None:
        """Go through what waits, or is thrown out; *now* is the loop's time."""
        while self._table.curious:
            name, _ = self._table.curious.popitem()
            self._queue(name, self._look_at_scene)
        for entry in [*self._table.waiting.values()]:
            verdict = entry.verdict
            if verdict is None or entry.job is None or End.of(entry.job) is not None:
                continue
            if entry.name in self._queued:
                continue
            if entry.since is None:
                entry.since = now
            if verdict.outlook is not Outlook.FINAL:
                entry.hopeless = None
            elif entry.hopeless is None:
                entry.hopeless = now
                self._telling.add(entry.asked_as)  # to ask about its like is worth it
            self._consider(entry, verdict, now)

    def _consider(self, entry: Entry, verdict: Diagnosis, now: float) -> None:
        patience = self._inquiry.patience
        assert entry.since is not None
        waited = now - entry.since
        if verdict.reason is not None and (entry.asked or waited >= patience.told_s):
            self._inquiry.report(entry.current or entry.name, verdict)
        end = _vain(entry, verdict, now, patience)
        if end is not None and uid(entry.job) not in self._ended:
            self._queue(entry.name, partial(self._end, end=end))
            return
        suspicious = verdict.reason is not None or not entry.pods  # something keeps them from it
        first = patience.asked_s if suspicious else patience.slow_s
        if waited >= first * GROWTH**entry.asked and self._is_worth_asking(entry, verdict):
            self._queue(entry.name, self._ask)

    def _is_worth_asking(self, entry: Entry, verdict: Diagnosis) -> bool:
        if entry.asked == 0:
            entry.asked_as = verdict.text
            if self._asked[entry.asked_as] >= SAMPLE and entry.asked_as not in self._telling:
                return False
            self._asked[entry.asked_as] += 1
        return True

    def _queue(self, name: str, do: Callable[[Entry], Awaitable[None]]) -> None:
        self._queued.add(name)
        self._work.append((name, do))
        self._awake.set()

    async def work(self) -> None:
        """Do what was queued, one after the other, until cancelled."""
        while True:
            while self._work:
                name, do = self._work.popleft()
                entry = self._table.entries.get(name)
                try:
                    if entry is not None and entry.job is not None and not entry.over:
                        await do(entry)
                finally:
                    self._queued.discard(name)
                await asyncio.sleep(self._inquiry.patience.pause_s)
            self._awake.clear()
            await self._awake.wait()

    async def _ask(self, entry: Entry) -> None:
        entry.asked += 1
        facts = await self._inquiry.facts(entry)
        await self._tell(lambda table: table.learn(entry.name, facts))

    async def _look_at_scene(self, entry: Entry) -> None:
        for pod in (one for one in entry.seen.pods if thrown_out(one)):
            if (node := await self._inquiry.scene(pod)) is not None:
                learn = Table.learn_scene
                await self._tell(partial(learn, name=entry.name, pod=uid(pod), node=node))

    async def _end(self, entry: Entry, *, end: End) -> None:
        self._ended.add(uid(entry.job))  # once: what it does is told later, and may look otherwise
        logging.warning("%s is ended, for it cannot start: %s", entry.current, end.message)
        try:
            await self._inquiry.end(entry, end)
        except BackendError as exc:
            logging.warning("%s waits in vain, and cannot be ended: %s", entry.current, exc)


def _vain(entry: Entry, verdict: Diagnosis, now: float, patience: Patience) -> End | None:
    """Why the job is to be ended that waits; None while it may go on waiting. Pure."""
    assert entry.since is not None
    waited = now - entry.since
    text = part(part(entry.job, "metadata"), "annotations").get(START_TIMEOUT)
    if text is not None:
        limit = float(text)
        if waited >= max(limit, patience.least_s):
            words = f"waited longer than its start_timeout of {limit:g} s: {verdict.text}"
            return End(reason=verdict.reason or Reason.UNSCHEDULABLE, message=words)
    if waited >= patience.orphaned_s and (secret := lacks_own_secret(entry.job, verdict.secret)):
        words = (
            f"the Secret {secret!r} that it reads was never made, or is removed: who submitted it "
            "ended at that very moment, or its batch was over; submit it again"
        )
        return End(reason=Reason.SETUP, message=words)
    if entry.hopeless is not None and now - entry.hopeless >= patience.hopeless_s:
        return End(reason=verdict.reason or Reason.SETUP, message=verdict.text)
    return None


MANY_NAMES = 500
"""To look for more than these by name would take more requests than to look at all there is."""

WORDS_AHEAD = 1000
"""Changes that wait for whoever reads; the rest waits in the connection."""

TICK_S = 1.0
"""How often what waits is looked at, while something does."""

TURN = 100
"""Jobs that are judged in one turn of the loop."""

Words: TypeAlias = "asyncio.Queue[Word | Exception]"


async def found(
    api: Api,
    paths: Paths,
    selectors: Iterable[str],
    empty: Callable[[], Table] = Table,
    inquiry: Diagnostics | None = None,
) -> list[Observation]:
    """All that any of *selectors* finds: a consistent read, by means of an *empty* table.

    Jobs are read before pods: what a Job leaves behind that is deleted in
    between is seen among the pods. *inquiry* is asked about some that wait.
    """
    seen: dict[str, Observation] = {}
    for selector in selectors:
        table = empty()
        table.feed(await listing(api, paths.jobs, selector), pods=False)
        table.feed(await listing(api, paths.pods, selector), pods=True)
        if table.strays:  # of a Job that was made in between, or is gone
            table.feed(await listing(api, paths.jobs, selector), pods=False)
            table.orphans = True
        seen |= await _news(table)
        if inquiry is not None:
            for entry in [*table.waiting.values()][:SAMPLE]:
                table.learn(entry.name, await inquiry.facts(entry))
            seen |= await _news(table)
    return [seen[name] for name in sorted(seen)]


async def _news(table: Table) -> dict[str, Observation]:
    seen: dict[str, Observation] = {}
    while table.dirty:
        seen |= {one.name: one for one in table.news(TURN)}
        await asyncio.sleep(0)
    return seen


async def sought(
    api: Api,
    paths: Paths,
    names: Collection[str],
    labels: Mapping[str, str] | None,
    empty: Callable[[], Table] = Table,
    inquiry: Diagnostics | None = None,
) -> list[Observation]:
    """All of these *names*, and all that carry *labels*; everything, if neither is given."""
    wanted = set(names)
    some = by_items(wanted) if len(wanted) <= MANY_NAMES else (by_labels({}),)
    there = await found(api, paths, some, empty, inquiry)
    seen = {one.name: one for one in there if one.name in wanted}
    if labels is not None or not names:
        more = await found(api, paths, (by_labels(labels or {}),), empty, inquiry)
        seen |= {one.name: one for one in more}
    return [*seen.values()]


async def observed(
    api: Api,
    paths: Paths,
    selector: str,
    inquiry: Diagnostics,
    rhythm: Rhythm,
    empty: Callable[[], Table] = Table,
) -> AsyncGenerator[Observation]:
    """What is there now, then every change, for ever; whoever reads slowly gets the latest.

    Raises:
        BackendError: The server will not let it be read, however often it is asked.
    """
    loop = asyncio.get_running_loop()
    table = empty()
    words: Words = asyncio.Queue(WORDS_AHEAD)
    worry = PendingMonitor(table, inquiry, words.put)
    listed = asyncio.Event()
    tasks = [
        loop.create_task(_told(work, words), name=f"kinetic watch of {name}")
        for name, work in (
            ("jobs", _pump(reflect(api, paths.jobs, selector, rhythm), words, listed, pods=False)),
            ("pods", _pump(reflect(api, paths.pods, selector, rhythm), words, listed, pods=True)),
            ("reasons", worry.work()),
        )
    ]
    due = 0.0
    try:
        while True:
            for word in await _next(words, TICK_S if table.waiting else None):
                if isinstance(word, Exception):
                    raise word
                word(table)
            while table.dirty:
                for seen in [*table.news(TURN)]:
                    yield seen
                if table.dirty:
                    await asyncio.sleep(0)
            if table.curious or loop.time() >= due:
                worry.look(loop.time())
                due = loop.time() + TICK_S
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _told(work: Coroutine[Any, Any, None], words: Words) -> None:
    """Do *work*; its failure ends the watch."""
    try:
        await work
    except Exception as exc:
        await words.put(exc)


async def _pump(
    told: AsyncGenerator[Listed | Changed], words: Words, listed: asyncio.Event, *, pods: bool
) -> None:
    """Pods come once jobs were *listed*: an older list would not have how those ended."""
    async with aclosing(told):
        if pods:
            await listed.wait()
        async for word in told:
            listed.set()
            await words.put(_feed(word, pods=pods))


def _feed(word: Listed | Changed, *, pods: bool) -> Word:
    return lambda table: table.feed(word, pods=pods)


async def _next(words: Words, timeout: float | None) -> list[Word | Exception]:
    """The next word and what else is there already; nothing after *timeout* seconds."""
    try:
        async with asyncio.timeout(timeout):
            found = [await words.get()]
    except TimeoutError:
        return []
    while not words.empty():
        found.append(words.get_nowait())
    return found
