"""One attempt, step by step: claim, check, run, commit.

The claim is created before anything else and the checks come after it, so that
of a start and a stop at least one sees the other. The outcome is one create:
that request is the commit, and nothing overrides it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import frames, results, seals, wire
from .directory import DirectoryObjects
from .invoke import Invocation
from .objects import Objects, opened
from .opening import Opening, content
from .stopping import Stopping
from .workspace import Site

__all__ = ["Attempt", "Terms", "exit_code", "main"]

PATIENCE_S = 600.0
FULL_S, FULL_PAUSE_S = 60.0, 1.0
"""How long, and how often, what has ended is written again to a disk that is full."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
SMALL = 64 * 1024
"""A function of more bytes is read by each job's own process."""


def main(order: Mapping[str, Any], key: bytes, executor: str, site: Site) -> int:
    """Carry out an assignment in this process and return its exit code."""
    return Terms(order, key).carry_out({}, executor, site)


class Terms:
    """What the assignments of a batch share: read once, by the parent of their processes."""

    def __init__(self, order: Mapping[str, Any], key: bytes) -> None:
        self._orders = wire.Orders(order)
        self._key = key
        self._prepared = False
        self._function: bytes | None = None
        self._objects: Objects | None = None

    def prepare(self, own: Mapping[str, Any]) -> None:
        """Read what the first of them, *own*, shares with the others, while it is little.

        Raises:
            Exception: The order cannot be read, or the function; each job says so itself.
        """
        if not self._prepared:
            self._prepared = True
            first = self._orders.assignment(own)
            seals.seal_of(self._key, first.scope, first.index, 0, "")  # what all seals begin with
            objects = opened(first.store)
            if first.function.stop - first.function.start <= SMALL:
                self._function = content(objects, first.function)
            if isinstance(
                objects, DirectoryObjects
            ):  # it has no connection that forks must not share
                self._objects = objects

    def carry_out(
        self,
        own: Mapping[str, Any],
        executor: str,
        site: Site,
        arguments: bytes | None = None,
    ) -> int:
        """Carry out the assignment *own* in this process and return its exit code.

        With *arguments*, checked ones, everything before the call was done ahead
        by `opening.make_ready` and `opening.begin`.
        """
        stopping = Stopping()
        stopping.install()
        assignment = self._orders.assignment(own)
        objects = self._objects or opened(assignment.store)
        invocation = Invocation(assignment, objects, site, stopping, executor)
        if arguments is not None:
            invocation.begun(self._function, arguments)
        attempt = Attempt(assignment, self._key, executor, objects, stopping, invocation.run)
        steps = attempt.steps(begun=arguments is not None)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                code: int = end.value
                return code


class Attempt:
    """The steps of one attempt, over any objects and any way to make the call."""

    def __init__(
        self,
        order: wire.Assignment,
        key: bytes,
        executor: str,
        objects: Objects,
        stopping: Stopping,
        invoke: Callable[[], tuple[wire.Outcome, results.Stored]],
    ) -> None:
        self._order = order
        self._key = key
        self._executor = executor
        self._objects = objects
        self._stopping = stopping
        self._invoke = invoke
        self._opening = Opening(order, key, executor, objects)

    def steps(self, *, begun: bool = False) -> Generator[str, None, int]:
        """Go one step on with each ``next``, which names the step to come.

        Whatever others do may fall between two steps. Returns the exit code.
        What was *begun* needs no step before the call.
        """
        if not begun:
            yield "claim"
            if not self._opening.claim():
                yield "wait"
                return self._wait_for_the_other()
            yield "check"
            may_run = self._opening.may_run()
            yield "inputs"
            if not self._opening.inputs_there():
                self._opening.withdraw()  # the batch was cleaned up meanwhile
                return wire.EXIT_FINAL
            if not may_run:
                yield "commit"
                return self._commit(self._cancelled("not started"), results.Stored(b"", "", 0))
        yield "run"
        mine = os.getpid()
        outcome, body = self._invoke()
        if os.getpid() != mine:
            os._exit(0)  # a fork of the user's code came out here; it has nothing to say
        yield "commit"
        if self._stopping.requested and outcome.kind is not wire.Kind.VALUE and self._was_stopped():
            outcome = self._cancelled("cancelled")
        return self._commit(outcome, body)

    def _was_stopped(self) -> bool:
        return self._opening.item().state is wire.ItemState.CANCELLING

    def _cancelled(self, phase: str) -> wire.Outcome:
        return wire.Outcome(
            kind=wire.Kind.CANCELLED,
            reason="cancelled",
            executor=self._executor,
            fence=self._order.fence,
            phase=phase,
            ended=time.time(),
        )

    def _commit(self, outcome: wire.Outcome, body: results.Stored) -> int:
        try:
            if outcome.value is not None and not isinstance(body.content, bytes):
                self._create(outcome.value[0], body.content, consume=True)
                content = frames.pack([])
            else:
                content = body.content if isinstance(body.content, bytes) else b""
            known = body.digest if content is body.content else ""
            outcome = outcome._replace(body=known or results.digest(content))
            place = (self._order.scope, self._order.index, self._order.attempt)
            metadata = outcome.signed(self._key, *place)
            created = self._create(self._name("outcome"), content, metadata)
        except OSError as exc:
            return self._uncommitted(outcome, exc)
        if not created:
            print("kinetic: this attempt was closed by somebody else", file=sys.stderr)
        return self._code(outcome, metadata if created else None, content)

    def _create(
        self,
        name: str,
        content: bytes | Path,
        metadata: Mapping[str, str] | None = None,
        *,
        consume: bool = False,
    ) -> bool:
        """Create an object; on a full disk again and again for a minute, if it can ever hold it.

        The work is done: a minute is little beside it, and enough to free some space.
        """
        until, told = time.monotonic() + FULL_S, False
        while True:
            try:
                return self._objects.create(name, content, metadata, consume=consume)
            except OSError as exc:
                late = time.monotonic() > until or self._stopping.requested
                if exc.errno not in FULL or late or not _can_hold(exc.filename or "/", content):
                    raise
                if not told:
                    _tell_full(exc)
                told = True
                time.sleep(FULL_PAUSE_S)

    def _code(
        self, outcome: wire.Outcome, metadata: Mapping[str, str] | None, content: bytes
    ) -> int:
        """What to leave with; *metadata* and *content* are those of what was committed here."""
        return exit_code(outcome, self._order)

    def _uncommitted(self, outcome: wire.Outcome, exc: OSError) -> int:
        print(f"kinetic: the outcome could not be written: {exc}", file=sys.stderr)
        if outcome.kind is not wire.Kind.VALUE:
            return wire.EXIT_UNCOMMITTED
        text = results.error_text(exc, phase="commit")
        words = f"the job ended well, but its result could not be stored: {text.message}"
        failed = outcome._replace(kind=wire.Kind.ERROR, reason="setup", phase="commit", value=None)
        return self._commit(failed, results.encode_error(replace(text, message=words), None))

    def _wait_for_the_other(self) -> int:
        """Another process has this attempt: leave only when it has ended.

        Leaving earlier would complete a Kubernetes Job, whose controller then
        deletes the process that does the work. An attempt that was voided has
        none, and whoever hears of our end closes it.
        """
        if self._opening.is_void():
            return wire.EXIT_FINAL
        waited, pause = 0.0, 10.0
        while waited < PATIENCE_S and not self._stopping.requested:
            try:
                metadata = self._objects.stat(self._name("outcome")).metadata
            except KeyError:
                time.sleep(pause)
                waited, pause = waited + pause, min(60.0, pause * 1.5)
                continue
            place = (self._order.scope, self._order.index, self._order.attempt)
            try:
                outcome = wire.Outcome.verified(metadata, self._key, *place)
            except ValueError as exc:
                print(f"kinetic: {exc}", file=sys.stderr)
                break
            return self._code(outcome, None, b"")
        return wire.EXIT_FINAL

    def _name(self, what: str) -> str:
        order = self._order
        return wire.attempt_key(order.scope, order.index, order.attempt, what)


def _can_hold(place: str, content: bytes | Path) -> bool:
    """Whether the disk of *place* could, if it were empty."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    disk = os.statvfs(place)
    return size < disk.f_blocks * disk.f_frsize


def _tell_full(exc: OSError) -> None:
    with contextlib.suppress(OSError):  # the log may lie on the same disk
        print(
            f"kinetic: the job has ended, and what came of it cannot be written: {exc}; it is "
            f"tried again for {FULL_S:.0f} s: free some space",
            file=sys.stderr,
            flush=True,
        )


def exit_code(outcome: wire.Outcome, order: wire.Assignment) -> int:
    """What the platform is told: done, may be tried again, or final."""
    if outcome.kind is wire.Kind.VALUE:
        return wire.EXIT_VALUE
    if outcome.kind is wire.Kind.CANCELLED:
        return wire.EXIT_FINAL
    infrastructure = outcome.reason in wire.INFRASTRUCTURE
    budget = order.budgets.infrastructure if infrastructure else order.budgets.user
    return wire.EXIT_RETRY if budget > 0 else wire.EXIT_FINAL
