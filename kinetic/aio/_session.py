"""One opened platform of a client, with one watch over what the client follows."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from absl import logging

from kinetic._runner import seals
from kinetic.aio._patience import PATIENCE_S, is_passing
from kinetic.aio._release import shared
from kinetic.aio._submission import Submission
from kinetic.aio._under_way import AttemptLimit
from kinetic.aio.platforms import Platform
from kinetic.aio.ports import Observation, Phase
from kinetic.configuration import Target
from kinetic.errors import (
    BackendError,
    ConfigurationError,
    KineticError,
    Unavailable,
)

__all__ = [
    "LABEL_ATTEMPT",
    "LABEL_CLIENT",
    "LABEL_INDEX",
    "LABEL_ROUND",
    "LABEL_SUBMISSION",
    "Parting",
    "Session",
]

T = TypeVar("T")

LABEL_SUBMISSION = "kinetic.dev/submission"
LABEL_CLIENT = "kinetic.dev/client"
LABEL_INDEX = "kinetic.dev/index"
LABEL_ATTEMPT = "kinetic.dev/attempt"

LABEL_ROUND = "kinetic.dev/round"
"""How many requests to try items again its batch had, as far as who launched it knew."""

SETTLING = 64
"""Outcomes that are read at once; each is a request or two to the store."""

TURN = 64
"""How many are read in one turn of the loop, by a store that answers at once."""

MANY_WATCHES = 8
"""With so many, further submissions of other processes share one watch over everything."""

OWN, ALL = "", "all jobs"
"""Watches that are about more than one submission."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0


class Parting(Protocol):
    """What has to be left before the session ends: a batch, which stands above it."""

    async def part(self, why: str) -> None:
        """Stop submitting at once."""
        ...


class Session:
    """Routes the platform's words to the submissions they are about.

    What this client starts carries its label and needs one watch; a submission
    of another process gets a watch of its own. Batches and submissions are
    known here for as long as somebody holds a handle, waits, or submits.
    """

    def __init__(
        self, target: Target, platform: Platform, client_id: str, limit: AttemptLimit
    ) -> None:
        self.target = target
        self.platform = platform
        self.client_id = client_id
        self.limit = limit
        self.batches: weakref.WeakValueDictionary[str, Parting] = weakref.WeakValueDictionary()
        self._submissions: weakref.WeakValueDictionary[str, Submission]
        self._submissions = weakref.WeakValueDictionary()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unsettled: deque[_Ended] = deque()
        self._settlers = 0
        self._settler_comes = False
        self._root_key: asyncio.Task[bytes] | None = None
        self._closed = False

    async def key(self, scope: str) -> bytes:
        """What the outcomes under *scope* are signed with."""
        asked = self._root_key
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception())):
            asked = self._root_key = self.spawn(self.platform.cluster.root_key(), name="root key")
        return seals.submission_key(await shared(asked, "the client"), scope)

    def follow(self, submission: Submission, *, ours: bool) -> Submission:
        """Keep *submission* current from now on; the one already followed wins."""
        known = self._submissions.setdefault(submission.identity.id, submission)
        if ours:
            known.ours = True
            self._ensure_watch(OWN, {LABEL_CLIENT: self.client_id})
        elif known is submission:
            if len(self._watches) >= MANY_WATCHES:
                self._ensure_watch(ALL, {"app": "kinetic"})
            else:
                self.watch(submission)
        return known

    def watch(self, submission: Submission) -> None:
        """Hear of all its attempts, also of those that other clients have started."""
        label = {LABEL_SUBMISSION: submission.identity.id}
        self._ensure_watch(submission.identity.id, label)

    def followed(self, submission_id: str) -> Submission | None:
        """The submission of this id, if it is followed."""
        return self._submissions.get(submission_id)

    def forget(self, submission: Submission) -> None:
        """Its objects are gone: nothing more will be asked about it."""
        submission.abandon(submission.identity.gone)
        self._submissions.pop(submission.identity.id, None)
        self.batches.pop(submission.identity.id, None)
        if (watch := self._watches.pop(submission.identity.id, None)) is not None:
            watch.cancel()

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """A task that lives no longer than the session.

        Raises:
            ConfigurationError: The session is closed.
        """
        if self._closed:
            work.close()
            raise ConfigurationError("this client is closed; open another one")
        task = asyncio.get_running_loop().create_task(work, name=f"kinetic {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Stop submitting, end the watches and close the platform; jobs go on."""
        batches = tuple(self.batches.values())
        try:
            await asyncio.gather(*(batch.part("the client is closed") for batch in batches))
        finally:
            await self._end()

    async def _end(self) -> None:
        self._closed = True
        for submission in tuple(self._submissions.values()):
            submission.abandon(
                KineticError(
                    f"the client was closed while {submission.identity.id} went on; "
                    "attach to it to find its outcome"
                )
            )
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.platform.aclose()

    def _ensure_watch(self, name: str, labels: Mapping[str, str]) -> None:
        if name not in self._watches:
            for known in tuple(self._watches):
                if known not in (OWN, ALL) and known not in self._submissions:
                    self._watches.pop(known).cancel()  # nobody asks about it any more
            watching = self._watch(dict(labels))
            self._watches[name] = self.spawn(watching, name=f"watch {name or 'own jobs'}")

    async def _watch(self, labels: Mapping[str, str]) -> None:
        pause = FIRST_PAUSE_S
        while True:
            try:
                async with aclosing(self.platform.cluster.watch(labels)) as news:
                    async for seen in news:
                        pause = FIRST_PAUSE_S
                        self._route(seen)
            except KineticError as exc:
                logging.warning("watching jobs was interrupted: %s; trying again", exc)
            except Exception:  # the only source of news must not end
                logging.exception("watching jobs was interrupted; trying again")
            for submission in tuple(self._submissions.values()):
                submission.doubt_all()
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_S, pause * 2)

    def _route(self, seen: Observation) -> None:
        submission = self._submissions.get(seen.labels.get(LABEL_SUBMISSION, ""))
        if submission is None:
            return
        index, number = int(seen.labels[LABEL_INDEX]), int(seen.labels[LABEL_ATTEMPT])
        if not submission.concerns(index, number):
            return
        if seen.phase in (Phase.ENDED, Phase.GONE):
            self.settle(submission, index, number, seen)
        else:
            submission.note(index, number, seen)

    def settle(
        self,
        submission: Submission,
        index: int,
        number: int,
        seen: Observation | None,
        claimant: str | None = None,
    ) -> None:
        """Find out how an attempt has ended; None: it is gone from the platform.

        *claimant* is who was known to have claimed it before the platform was asked.
        """
        self._unsettled.append(_Ended(submission, index, number, seen, claimant))
        self._call_settler()

    def _call_settler(self) -> None:
        """See in the next turn of the loop whether one more has to work on what has ended."""
        if not self._settler_comes:
            self._settler_comes = True
            asyncio.get_running_loop().call_soon(self._send_settler)

    def _send_settler(self) -> None:
        self._settler_comes = False
        if self._unsettled and self._settlers < SETTLING and not self._closed:
            self._settlers += 1
            self.spawn(self._settle_some(), name="settler")

    async def _settle_some(self) -> None:
        """Settle until nothing is left; a task for each would cost more than the settling."""
        count = 0
        try:
            while self._unsettled:
                ended = self._unsettled.popleft()
                self._call_settler()  # should this one have to wait for the store
                if not await self._settle(ended):
                    name = f"settle {ended.name}"
                    self.spawn(self._settle_later(ended), name=name)
                count += 1
                if count % TURN == 0:
                    await asyncio.sleep(0)
        finally:
            self._settlers -= 1

    async def _settle_later(self, ended: _Ended) -> None:
        while True:
            await asyncio.sleep(ended.pause)  # whoever holds the batch is about to close it
            ended.waited += 0.0 if ended.answered else ended.pause
            ended.pause = min(LONGEST_PAUSE_S, ended.pause * 2)
            if await self._settle(ended):
                return

    async def _settle(self, ended: _Ended) -> bool:
        """Ask once how an attempt has ended; False when it has to be asked again."""
        submission, index = ended.submission, ended.index
        try:
            item = await submission.settle(index, ended.number, ended.seen, ended.claimant)
        except BackendError as exc:
            if not is_passing(exc):
                submission.fail(index, exc)
                return True
            logging.warning("%s ended, but not how: %s; trying again", ended.name, exc)
            ended.answered = False
            if ended.waited >= PATIENCE_S:
                submission.fail(index, _unanswered(ended.name, exc))
            return False
        except KineticError as exc:
            logging.error("cannot find out how %s ended: %s", ended.name, exc)
            submission.fail(index, exc)
            return True
        except Exception as exc:  # a defect of ours: whoever waits must hear of it, too
            logging.exception("cannot find out how %s ended", ended.name)
            submission.fail(index, exc)
            return True
        ended.answered = True
        submission.hope(index)
        return item.state.final or item.attempt != ended.number or submission.closes


@dataclass(slots=True)
class _Ended:
    """An attempt that has ended for the platform, and what came of asking how.

    ``waited`` counts the seconds in which nobody answered.
    """

    submission: Submission
    index: int
    number: int
    seen: Observation | None
    claimant: str | None = None
    pause: float = FIRST_PAUSE_S
    waited: float = 0.0
    answered: bool = True

    @property
    def name(self) -> str:
        """The platform's name of the attempt."""
        return self.submission.identity.attempt_name(self.index, self.number)


def _unanswered(name: str, error: BackendError) -> Unavailable:
    return Unavailable(
        f"{name} has ended, and for {PATIENCE_S:g} s nobody could say how: {error}; it is asked "
        "for further on: wait again when the store answers",
        retryable=True,
    )
