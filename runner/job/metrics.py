"""Send the metrics that a job reports to the store, and find out whether the job was pruned.

`kinetic.report` only appends to a buffer. A thread, which begins with the first report, stores what
the buffer has as one object, once a second and later less often. What isn't stored when the
function ends goes into the body of the outcome. The same thread looks for the object by which a
client prunes the attempt, while reports come.

Nothing here may fail the job: if the store refuses or doesn't answer, the reports wait, and the
oldest are dropped.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..job_log import say
from ..protocol import frames, metrics, outcomes, signing, wire
from ..protocol.metrics import Reports, Value
from ..protocol.spool import Spooled
from ..stores.objects import Objects, open_store

MAX_WAITING = 4096
"""Maximum number of reports that wait in memory."""

QUICK_PAUSE_S, PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0, 30.0
"""Pauses between two objects with reports, in seconds: at first here, on a cluster, and later."""

PAUSE_SHARE = 0.02
"""The pause as a share of the time since the first report, so that a long job makes few objects."""

TICKS_S, QUICK_TICKS_S = (0.25, 0.25), (0.02, 0.1)
"""First and longest pause of the thread, in seconds.

Without further reports, the pauses grow. The thread isn't woken by a report: that takes 30 µs.
"""

LOOKS_S, QUICK_LOOKS_S = (2.0, 30.0), (0.0, 0.0)
"""Likewise, pauses between two looks for the object that prunes the attempt; 0: in each tick."""

GROWTH = 1.25

CLOSE_S = 10.0
"""How long the end of the function waits for the request that is under way, in seconds."""

Commit = Callable[[wire.Outcome, Spooled], int]

_begun: tuple[int, wire.Order, bytes, Objects | None, Commit] | None = None
_reporter: Reporter | None = None
_has_forked = _is_hooked = False
_starting = _thread.allocate_lock()


def begin(order: wire.Order, key: bytes, objects: Objects | None, commit: Commit) -> None:
    """Take the reports of this process from now on.

    If *objects* is None, the first report opens the store: the connections belong to a parent.
    If the user's code ignores that it was pruned, the thread calls *commit* with the outcome, and
    ends this process with the exit code that *commit* returns.
    """
    global _begun, _reporter, _has_forked, _is_hooked
    _begun, _reporter, _has_forked = (os.getpid(), order, key, objects, commit), None, False
    metrics.sink = _BeforeFirst
    if not _is_hooked:  # a process may begin another job
        _is_hooked = True
        os.register_at_fork(after_in_parent=_note_fork, after_in_child=_continue_in_child)


def _note_fork() -> None:
    global _has_forked
    _has_forked = True


def _continue_in_child() -> None:
    """In a fork of the user's code, take reports like another process of the job."""
    global _starting
    _starting = _thread.allocate_lock()
    if _reporter is not None:
        _reporter.continue_in_child()


def ignore() -> None:
    """Take no reports of this process: the first host of the job sends them."""
    metrics.sink = _Ignored


def is_begun() -> bool:
    """Return whether this process has reported since `begin`, so that a thread may send that."""
    return _reporter is not None


def end_without_reports() -> bool:
    """End the reports if this process and its forks have none; return whether they have none."""
    global _begun
    with _starting:
        if _reporter is None and not _has_forked:
            metrics.sink, _begun = _Ignored, None
        return _begun is None


def finish(outcome: wire.Outcome, body: Spooled) -> tuple[wire.Outcome, Spooled]:
    """End the reports; return the outcome and its body with the reports that aren't stored yet.

    If the function learned that it was pruned, a pruned outcome replaces this one.
    """
    global _reporter
    metrics.sink = _Ignored
    if _reporter is None and _has_forked and _begun is not None:
        _reporter = Reporter(*_begun)  # a fork may have reported
    return (outcome, body) if _reporter is None else _reporter.finish(outcome, body)


class _Ignored:
    """The sink of a process that sends no reports."""

    @staticmethod
    def add(step: int, value: Value) -> None:
        """Implement `metrics.Sink`."""

    @staticmethod
    def should_stop() -> bool:
        """Implement `metrics.Sink`."""
        return False


class _BeforeFirst(_Ignored):
    """The sink until the first report: most jobs never report."""

    @staticmethod
    def add(step: int, value: Value) -> None:
        """Implement `metrics.Sink`."""
        global _reporter
        with _starting:  # threads of the user's code may report at once
            if _begun is None:
                return  # the function has ended
            if _reporter is None:
                _reporter = metrics.sink = Reporter(*_begun)
        _reporter.add(step, value)


def is_pruned(error: BaseException) -> bool:
    """Return whether *error* is a ``kinetic.Pruned``; the job's image may lack kinetic."""
    names = ((cls.__module__, cls.__name__) for cls in type(error).__mro__)
    return ("kinetic.errors", "Pruned") in names


def pruned(outcome: wire.Outcome, step: Any, value: Any) -> tuple[wire.Outcome, Spooled]:
    """Return *outcome* as that of an attempt that was pruned at *step*, and its body."""
    step, value = metrics.plain(step, value)
    content = metrics.pruned_body(step, value)
    outcome = outcome._replace(
        kind=wire.Kind.VALUE,
        reason=wire.PRUNED,
        value=None,
        note=metrics.pruned_note(step, value),
        phase="execute",
    )
    return outcome, Spooled(content, outcomes.digest(content), len(content))


class Reporter:
    """The reports of one process of a job.

    ``told`` says that the user's code has learned that the attempt was pruned.
    """

    def __init__(
        self, job_pid: int, order: wire.Order, key: bytes, objects: Objects | None, commit: Commit
    ) -> None:
        self.told = False
        self._order = order
        self._key = key
        self._commit = commit
        self._is_job = os.getpid() == job_pid
        self._objects = objects if self._is_job else None  # the connections belong to the parent
        self._started = time.time()
        is_quick = metrics.is_quick(order.store)
        self._pause_s = QUICK_PAUSE_S if is_quick else PAUSE_S
        self._ticks_s = QUICK_TICKS_S if is_quick else TICKS_S
        self._looks_s = QUICK_LOOKS_S if is_quick else LOOKS_S
        self._pruned = self._asked = False
        self._last: tuple[int, Value | None] = (0, None)
        self._warned_of: set[str] = set()
        self._slot = 0
        self._began = self._closed = False

    def add(self, step: int, value: Value) -> None:
        """Implement `metrics.Sink`; this runs for every report, so it does very little."""
        if not self._began:
            self._start()
        if step >= self._last[0]:
            self._last = step, value
            self._waiting.append((step, value))
        else:
            self._warn(
                "back",
                f"kinetic.report: step {step} comes after step {self._last[0]}; a report of an "
                "earlier step is dropped",
            )
        if self._pruned:
            self.told = True
            raise metrics.pruned_class()(*self._last)

    def should_stop(self) -> bool:
        """Implement `metrics.Sink`."""
        self.told = self.told or self._pruned
        return self._pruned

    def _start(self) -> None:
        """Prepare this process for its first report, and start the thread."""
        with _starting:  # threads of the user's code may report at once
            if self._began:
                return
            self._waiting: deque[tuple[int, Value]] = deque(maxlen=MAX_WAITING)
            self._sending: list[tuple[int, Value]] = []  # no longer waiting, and not stored yet
            self._sent = 0
            self._writer, self._began_at = os.urandom(6).hex(), time.monotonic()
            self._storing, self._wake = _thread.allocate_lock(), _thread.allocate_lock()
            self._wake.acquire()
            self._began = True
            # A child of multiprocessing ends without the functions of `atexit`.
            if not self._is_job and "multiprocessing.util" in sys.modules:
                util: Any = sys.modules["multiprocessing.util"]
                util.Finalize(None, self._flush_at_exit, exitpriority=0)
            # Without a thread, the outcome has the last reports.
            with suppress(RuntimeError, MemoryError):
                _thread.start_new_thread(self._run, ())

    def continue_in_child(self) -> None:
        """Begin again in a fork."""
        self._is_job, self._objects = False, None
        self._began = self._closed = False

    # --- the thread ---

    def _run(self) -> None:
        """Store reports, and look for the object that prunes the attempt, until the end."""
        next_flush = next_look = self._began_at
        (tick, longest_tick), (look_pause, longest_look) = self._ticks_s, self._looks_s
        end_at: float | None = None
        while not self._closed:
            now = time.monotonic()
            try:
                is_due = now >= next_flush or len(self._waiting) > MAX_WAITING // 2
                if (self._waiting or self._sending) and is_due:
                    pause = max(self._pause_s, (now - self._began_at) * PAUSE_SHARE)
                    next_flush = now + min(LONGEST_PAUSE_S, pause)
                    tick, look_pause = self._ticks_s[0], self._looks_s[0]
                    next_look = min(next_look, now + look_pause)
                    self._flush()
                if self._order.prunable and not self._pruned and now >= next_look:
                    next_look = now + look_pause
                    look_pause = min(look_pause * GROWTH, longest_look)
                    self._pruned = self._look()
                if self._pruned and self._is_job:
                    end_at = self._end_if_ignored(now, end_at)
            except Exception as exc:  # nothing here may end the job, or this thread
                self._warn(
                    "store", f"can't store metrics: {exc}; the job goes on, and kinetic retries"
                )
            self._wake.acquire(timeout=tick)
            tick = min(tick * GROWTH, longest_tick)

    def _flush(self, *, last: bool = False) -> None:
        """Store the waiting reports as one object; if that fails, the next call tries again."""
        with self._storing:
            if self._closed and not last:
                return  # the outcome has them
            while self._waiting:
                self._sending.append(self._waiting.popleft())
            if not self._sending:
                return
            excess = max(0, len(self._sending) - MAX_WAITING)
            del self._sending[:excess]
            self._sent += excess
            order = self._order
            reports = Reports(self._writer, self._sent, self._sending)
            while True:
                name = metrics.metrics_key(order.scope, order.index, order.attempt, self._slot)
                content, metadata = reports.signed(self._key, order.scope, name)
                created = self._store().create(name, content, metadata)
                # If the slot is taken, a fork has taken it, or this process, and the reply was
                # lost. A reader recognizes reports that come twice.
                self._slot += 1
                if created:
                    break
            self._sent += len(self._sending)
            self._sending = []

    def _store(self) -> Objects:
        if self._objects is None:
            self._objects = open_store(self._order.store)
        return self._objects

    def _look(self) -> bool:
        """Return whether a client has pruned the attempt."""
        order, objects = self._order, self._store()
        name = metrics.prune_key(order.scope, order.index, order.attempt)
        if not objects.exists(name):
            return False
        if signing.is_signed(objects.stat(name).metadata, self._key, order.scope, name, b""):
            return True
        self._warn("forged", f"{name} is forged or damaged; it has no effect")
        return False

    def _end_if_ignored(self, now: float, end_at: float | None) -> float:
        """End the function if it runs on after the grace period; return when to call this again."""
        if end_at is None or now < end_at:
            return now + self._order.grace if end_at is None else end_at
        with self._storing:  # so `finish` returns before this, or waits for it
            if self._closed:
                return end_at
            self.told = True
            if self._asked:  # it caught the exception of the signal, or doesn't return to Python
                outcome = wire.Outcome(
                    wire.Kind.VALUE, started=self._started, ended=time.time(), phase="execute"
                )
                os._exit(self._commit(*self._finished(outcome, Spooled(b"", "", 0))))
            self._asked = True
            self._warn("grace", f"the job was pruned, and runs on after {self._order.grace:g} s")
            os.kill(os.getpid(), signal.SIGTERM)  # raises `Stopped` in the user's code
        return now + self._order.grace

    # --- the end ---

    def finish(self, outcome: wire.Outcome, body: Spooled) -> tuple[wire.Outcome, Spooled]:
        """Implement `finish`."""
        if self._began:
            self._closed = True
            with suppress(RuntimeError):  # the thread has already been woken
                self._wake.release()
            # A request that is under way ends before the commit, so that a cleanup finds its
            # object. The thread sends no other one.
            if self._storing.acquire(timeout=CLOSE_S):
                self._storing.release()
        if self._order.prunable and outcome.kind is not wire.Kind.VALUE and not self.told:
            # A fork may have learned it, or the platform ends the job in these seconds.
            with suppress(Exception):
                self.told = self._look()
        self._objects = None  # it may have connections, and this process may run another job
        return self._finished(outcome, body)

    def _finished(self, outcome: wire.Outcome, body: Spooled) -> tuple[wire.Outcome, Spooled]:
        if self.told and outcome.reason != wire.PRUNED:
            outcome, body = pruned(outcome, *self._last)
        outcome = outcome._replace(metrics=True)
        if not self._began:
            return outcome, body
        entries = [*self._sending, *self._waiting][-MAX_WAITING:]
        sent = self._sent + len(self._sending) + len(self._waiting) - len(entries)
        fields = {metrics.METRICS: Reports(self._writer, sent, entries).to_fields()}
        if not isinstance(body.content, bytes):
            return outcome, replace(body, fields=fields)
        content = frames.with_fields(body.content, fields)
        return outcome, Spooled(content, outcomes.digest(content), len(content))

    def _flush_at_exit(self) -> None:
        """At the end of a child of `multiprocessing`, store the last reports."""
        if self._began:
            self._closed = True
            with suppress(Exception):
                self._flush(last=True)

    def _warn(self, subject: str, message: str) -> None:
        if subject not in self._warned_of:
            self._warned_of.add(subject)
            say(message)
