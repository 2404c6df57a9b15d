"""Jobs that do not start: why, what to do, and when waiting for them is in vain.

Jobs and pods alone say most of it. Events, nodes and queues are asked for only
when a job waits and a reason is needed, one job after the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from absl import logging

from kinetic.aio.clusters._job_manifest import START_TIMEOUT
from kinetic.aio.clusters._kube_inquiry import Inquiry, Patience
from kinetic.aio.clusters._kube_job import End
from kinetic.aio.clusters._kube_secrets import lacks_own_secret
from kinetic.aio.clusters._kube_table import Entry, Table, thrown_out
from kinetic.aio.clusters._reasons.documents import part, uid
from kinetic.aio.clusters._reasons.verdict import Outlook, Verdict
from kinetic.errors import BackendError
from kinetic.job_status import Reason

__all__ = ["Word", "Worry"]

GROWTH = 4.0

SAMPLE = 3
"""Of many that wait for the same reason, so many are asked about: the others would say the same."""

Word = Callable[[Table], None]


class Worry:
    """Of one watch: looks now and then at what waits, and does something about it.

    ``tell`` takes what was found out, as a change of the table.
    """

    def __init__(
        self, table: Table, inquiry: Inquiry, tell: Callable[[Word], Awaitable[Any]]
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

    def _consider(self, entry: Entry, verdict: Verdict, now: float) -> None:
        patience = self._inquiry.patience
        assert entry.since is not None
        waited = now - entry.since
        if verdict.reason is not None and (entry.asked or waited >= patience.told_s):
            self._inquiry.report(entry.current or entry.name, verdict)
        end = _vain(entry, verdict, now, patience)
        if end is not None and uid(entry.job) not in self._ended:
            self._queue(entry.name, partial(self._end, end=end))
            return
        first = patience.asked_s if verdict.reason is not None else patience.slow_s
        if waited >= first * GROWTH**entry.asked and self._is_worth_asking(entry, verdict):
            self._queue(entry.name, self._ask)

    def _is_worth_asking(self, entry: Entry, verdict: Verdict) -> bool:
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


def _vain(entry: Entry, verdict: Verdict, now: float, patience: Patience) -> End | None:
    """Why the job is to be ended that waits; None while it may go on waiting. Pure."""
    assert entry.since is not None
    waited = now - entry.since
    text = part(part(entry.job, "metadata"), "annotations").get(START_TIMEOUT)
    if text is not None:
        limit = float(text)
        if waited >= max(limit, patience.least_s):
            words = f"waited longer than its start_timeout of {limit:g} s: {verdict.text}"
            return End(reason=verdict.reason or Reason.UNSCHEDULABLE, message=words)
    if waited >= patience.orphaned_s and (secret := lacks_own_secret(entry.job, verdict.message)):
        words = (
            f"the Secret {secret!r} that it reads was never made, or is removed: who submitted it "
            "ended at that very moment, or its batch was over; submit it again"
        )
        return End(reason=Reason.SETUP, message=words)
    if entry.hopeless is not None and now - entry.hopeless >= patience.hopeless_s:
        return End(reason=verdict.reason or Reason.SETUP, message=verdict.text)
    return None
