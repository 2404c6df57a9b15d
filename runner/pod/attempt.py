"""The extra work of an attempt in a pod: earlier pods' ends, the receipt, a silent death."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..job import opening, processes
from ..job.attempt import Attempt
from ..job.opening import Opening, out_of_time
from ..protocol import signing, wire
from ..protocol.outcomes import Death, Stored, closed
from ..protocol.retry_budgets import INFRASTRUCTURE
from ..stores.objects import Objects

KEPT_BYTES = 8192
KEPT_LINES = 20
READ_BYTES = 65536
WRITE_BYTES = 4096
"""Bytes that a ready pipe takes at once, without blocking."""

HELD_BYTES = 1 << 20
"""Maximum bytes of unread output; beyond it the job waits."""

ASKING_S = 10.0
LEAVING_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds: the job's time from the call of its function on, that until then, and its grace.

    The grace ends for the job some seconds before it ends for its pod.
    """

    timeout: float | None
    start: float
    grace: float

    @property
    def patience(self) -> float:
        """How long the job has after it was asked to end."""
        return max(self.grace - 5.0, self.grace * 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How the job's process ended: the code it told us to leave with, or what became of it.

    ``status`` is its exit code, or a negative signal.
    """

    told: int | None
    status: int
    called: bool
    out_of_time: bool
    stopped: bool
    killed: bool
    log: str
    output: bytes


class Line:
    """The messages between a job and its guard; made before the fork, used on both sides.

    ``sheet`` is a file without a name that the guard writes a long answer into.
    """

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sheet = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the line

    def tell(self, code: int) -> None:
        """In the job: its outcome is there, and this is what to leave with."""
        with contextlib.suppress(OSError):  # then the guard looks for itself
            self.far.send(b"code %d" % code)

    def tell_called(self) -> None:
        """In the job: its function is called now, and its time begins."""
        with contextlib.suppress(OSError):  # then its time is longer
            self.far.send(b"called")

    def last_lines(self) -> str:
        """In the job: the last lines of its output so far."""
        return self._asked(b"log").decode(errors="replace")

    def output(self) -> bytes:
        """In the job: the last MiB of its output so far, in whole lines."""
        answer = self._asked(b"output")
        return os.pread(self.sheet.fileno(), int(answer), 0) if answer else b""

    def _asked(self, word: bytes) -> bytes:
        try:
            self.far.settimeout(ASKING_S)
            self.far.send(word)
            return self.far.recv(KEPT_BYTES * 2)
        except OSError:
            return b""


class Guard:
    """Looks after the process *pid*; *streams* says where what comes from where goes to."""

    def __init__(self, pid: int, streams: Mapping[int, int], line: Line, limits: Limits) -> None:
        self._pid = pid
        self._targets = dict(streams)
        self._waiting: dict[int, bytearray] = {out: bytearray() for out in streams.values()}
        self._line, self._sheet = line.near, line.sheet
        self._limits = limits
        self._kept = bytearray()
        self._told: int | None = None
        self._called = self._stopped = self._out_of_time = self._killed = False
        self._deadline: float | None = None
        if limits.timeout is not None:
            self._deadline = time.monotonic() + limits.start + limits.timeout
        self._end: float | None = None
        self._wake, self._woken = os.pipe()

    def watch(self) -> Ended:
        """Return when it has ended, and its output is passed on.

        Takes the signals over, and leaves those that are to stop us held back.
        """
        for fd in (*self._targets, self._wake, self._woken):
            os.set_blocking(fd, False)
        self._line.setblocking(False)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (*processes.STOPS, signal.SIGCHLD):
            signal.signal(number, _noted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, processes.STOPS)
        status: int | None = None
        while status is None:
            self._wait()
            status = self._reaped()
            if status is None:  # once it is reaped, another process may get its number
                self._watch_the_time()
        self._read_all()
        self._flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, processes.STOPS)
        with contextlib.suppress(BlockingIOError):  # one that came since then counts, too
            self._stopped = self._stopped or signal.SIGTERM in os.read(self._wake, 4096)
        return Ended(
            told=self._told,
            status=status,
            called=self._called,
            out_of_time=self._out_of_time,
            stopped=self._stopped,
            killed=self._killed,
            log=self.last_lines().decode(errors="replace"),
            output=self.output(),
        )

    def last_lines(self) -> bytes:
        """The last lines of the output, in at most 8 KiB."""
        kept = bytes(self._kept[-KEPT_BYTES:])
        lines = kept.splitlines(keepends=True)
        if len(self._kept) > KEPT_BYTES and len(lines) > 1:
            lines = lines[1:]  # of the first there is only a part
        return b"".join(lines[-KEPT_LINES:])

    def output(self) -> bytes:
        """The end of the output, in whole lines."""
        kept = bytes(self._kept[-wire.LOG_BYTES :])
        return kept if len(kept) == len(self._kept) else kept.partition(b"\n")[2] or kept

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._line, select.POLLIN)
        for source, out in self._targets.items():
            if len(self._waiting[out]) < HELD_BYTES:
                poll.register(source, select.POLLIN)
        for out, waiting in self._waiting.items():
            if waiting:
                poll.register(out, select.POLLOUT)
        for fd, _ in poll.poll(self._pause()):
            if fd == self._wake:
                self._on_signals(os.read(fd, 4096))
            elif fd == self._line.fileno():
                self._on_word()
            elif fd in self._targets:
                self._read(fd)
            else:
                self._write(fd)

    def _pause(self) -> float | None:
        """Milliseconds until the time is over that ends next."""
        ends = [end for end in (self._deadline, self._end) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) * 1000 + 1 if ends else None

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers and not self._stopped:
            self._stopped = True
            self._ask(signal.SIGTERM)

    def _watch_the_time(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if self._told is None:
                self._out_of_time = True
                self._ask(signal.SIGXCPU)
        if self._end is not None and now >= self._end:
            self._end = None
            self._killed = True
            os.kill(self._pid, signal.SIGKILL)

    def _ask(self, number: int) -> None:
        """Ask it to end; it is not reaped yet, so that the number is its own."""
        os.kill(self._pid, number)
        end = time.monotonic() + self._limits.patience
        self._end = end if self._end is None else min(end, self._end)

    def _on_word(self) -> None:
        word = self._line.recv(64)
        if word == b"log":
            self._read_all()
            with contextlib.suppress(OSError):  # it has gone meanwhile
                self._line.send(self.last_lines())
        elif word == b"output":
            self._read_all()
            output = self.output()
            with contextlib.suppress(OSError):
                os.pwrite(self._sheet.fileno(), output, 0)
                self._line.send(b"%d" % len(output))
        elif word == b"called":
            self._called = True
            if self._deadline is not None and self._limits.timeout is not None:
                self._deadline = time.monotonic() + self._limits.timeout
        elif word.startswith(b"code "):
            self._told = int(word[5:])
            end = time.monotonic() + LEAVING_S  # threads and libraries may never let it go
            self._end = end if self._end is None else min(end, self._end)

    def _reaped(self) -> int | None:
        """The job's status once it has ended; orphans are collected by the way."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return -signal.SIGKILL  # another process has collected it
            if pid == 0:
                return None
            if pid == self._pid:
                while self._has_word():
                    self._on_word()
                return os.waitstatus_to_exitcode(status)

    def _has_word(self) -> bool:
        return bool(select.select([self._line], [], [], 0)[0])

    def _read_all(self) -> None:
        for source in list(self._targets):
            while source in self._targets and self._read(source):
                pass

    def _read(self, source: int) -> bool:
        """Whether there was something to read."""
        try:
            data = os.read(source, READ_BYTES)
        except BlockingIOError:
            return False
        out = self._targets[source]
        if not data:
            del self._targets[source]
            return False
        self._kept += data
        if len(self._kept) > 2 * wire.LOG_BYTES:
            del self._kept[: -wire.LOG_BYTES - 1]  # one more tells that there was more
        self._waiting[out] += data
        return True

    def _write(self, out: int) -> None:
        waiting = self._waiting[out]
        try:
            del waiting[: os.write(out, waiting[:WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            waiting.clear()  # no process reads it any more; the job goes on

    def _flush(self) -> None:
        for out, waiting in self._waiting.items():
            while waiting:
                if not select.select([], [out], [], LEAVING_S)[1]:
                    return
                self._write(out)


def _noted(number: int, frame: object) -> None:
    """Nothing: the signal is read from the wake-up pipe."""


OOM_EVENTS = (
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
)
"""Where the kernel counts them: control groups of version 2, and of version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often Kubernetes has started the job anew, and where a receipt goes."""

    failures: int = 0
    disruptions: int = 0
    receipt: str = ""

    @property
    def total(self) -> int:
        """The number of pods before this one."""
        return self.failures + self.disruptions


READ_AHEAD = 1024 * 1024
"""Maximum bytes of arguments that are read to check that the submission still exists."""


class _PodOpening(Opening):
    """With as few requests as can be: each takes its time in a bucket."""

    arguments = b""

    def _is_closed(self) -> bool:
        """What was claimed just now is not: an attempt is closed after its claim was seen."""
        return not self._made_claim and super()._is_closed()

    def inputs_there(self) -> bool:
        """To read small arguments takes one request, as to look whether they are there does."""
        part = self._order.arguments
        if part.stop - part.start > READ_AHEAD:
            return super().inputs_there()
        try:
            self.arguments = opening.content(self._objects, part)
        except KeyError:
            return False
        except ValueError:
            pass  # they are damaged: the next reader reports it
        return True


class PodAttempt(Attempt):
    """An attempt whose exit code says what becomes of its item, by all attempts there were.

    What is kept of its *output* is there before its outcome: who removes its objects after that
    finds all of them.
    """

    opening_kind = _PodOpening

    receipt = ""
    host = 0
    output: Callable[[], bytes]

    def read_ahead(self) -> bytes:
        """The arguments, if they were small."""
        return self._opening.arguments if isinstance(self._opening, _PodOpening) else b""

    def beside(self, done: str) -> int:
        """The part of a host that does not lead: it creates *done*, or commits what went wrong."""
        outcome, body = self._invoke()
        if outcome.kind is wire.Kind.VALUE:
            keep_log(self._order, self._key, self.host, self.output(), self._objects)
            self._objects.create(done, b"")
            return wire.EXIT_VALUE
        if self._stopping.requested and self._was_stopped():
            outcome = self._cancelled("cancelled")
        return self._commit(outcome, body)

    def _commit(self, outcome: wire.Outcome, body: Stored) -> int:
        keep_log(self._order, self._key, self.host, self.output(), self._objects)
        return super()._commit(outcome, body)

    def _code(
        self, outcome: wire.Outcome, metadata: Mapping[str, str] | None, content: bytes
    ) -> int:
        return _leave_with(self._opening, self._order, outcome, metadata, content, self.receipt)


def keep_log(order: wire.Order, key: bytes, host: int, output: bytes, objects: Objects) -> None:
    """Store the output of the job on *host*, which outlives its pod, if there is any."""
    if not output:
        return
    name = wire.log_key(order.scope, order.index, order.attempt, host)
    try:
        objects.create(name, output, {"mac": signing.sign(key, order.scope, name, output)})
    except OSError as exc:
        print(f"kinetic: the end of this log could not be kept: {exc}", file=sys.stderr)


def _leave_with(
    opening: Opening,
    order: wire.Order,
    outcome: wire.Outcome,
    metadata: Mapping[str, str] | None,
    content: bytes,
    receipt: str,
) -> int:
    """Write the receipt of what was committed, and say what to leave with."""
    if metadata is not None:
        _write_receipt(order, metadata, content, receipt)
        if outcome.kind is wire.Kind.VALUE:
            return wire.EXIT_VALUE
        if outcome.kind is wire.Kind.CANCELLED:
            return wire.EXIT_FINAL
    return code_of(opening)


def code_of(opening: Opening) -> int:
    """Return the exit code for the state of the item's objects."""
    try:
        item = opening.item()
    except (OSError, ValueError) as exc:
        print(f"kinetic: what is left of the item's tries cannot be read: {exc}", file=sys.stderr)
        return wire.EXIT_RETRY
    if item.state is wire.ItemState.SUCCEEDED:
        return wire.EXIT_VALUE
    return wire.EXIT_RETRY if item.state is wire.ItemState.OPEN else wire.EXIT_FINAL


def _write_receipt(
    order: wire.Order, metadata: Mapping[str, str], content: bytes, path: str
) -> None:
    if not path:
        return
    receipt = wire.Receipt(
        index=order.index, attempt=order.attempt, metadata=metadata, body=content
    )
    with contextlib.suppress(OSError):  # it is a copy that only saves time
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
        with open(fd, "wb") as file:
            file.write(receipt.to_text().encode())


# --- earlier pods -------------------------------------------------------------------------


def close_earlier(
    order: wire.Order, key: bytes, first: int, restarts: Restarts, objects: Objects
) -> None:
    """Close the attempts from *first* to the one before that of *order* that are still open.

    That their successor runs is the evidence that their pods have ended: a
    controller replaces a pod when it has. Of a disruption no pod can tell
    afterwards, but the controller's count does.

    Raises:
        OSError: The store does not do it.
    """
    if first >= order.attempt:
        return
    names = wire.attempt_keys(order.scope, order.index, order.attempt)
    entries = [(one.name, one.metadata) for one in objects.look_up(names)]
    known = wire.attempts_of(entries, key, order.scope).get(order.index, {})
    told = [known[n].outcome for n in range(first, order.attempt) if n in known]
    disrupted = sum(1 for one in told if one is not None and one.reason in INFRASTRUCTURE)
    for number in range(first, order.attempt):
        there = known.get(number, wire.Attempt())
        if there.outcome is not None:
            continue
        preempted = disrupted < restarts.disruptions
        disrupted += preempted
        how = "its node was taken away, or it had to make way" if preempted else "its pod ended"
        words = f"the job ended without an outcome: {how}; Kubernetes started it again"
        death = Death(message=words, reason="preempted" if preempted else "lost")
        _close(order, key, number, there.executor, death, objects)


def _close(
    order: wire.Order,
    key: bytes,
    number: int,
    executor: str | None,
    death: Death,
    objects: Objects,
    log: str = "",
) -> tuple[wire.Outcome, Mapping[str, str] | None, bytes]:
    """Close attempt *number*; without metadata when it had its outcome already."""
    place = (order.scope, order.index, number)
    if executor is None:
        claim = wire.claim_metadata(wire.VOID, order.fence)
        name = wire.attempt_key(*place, "claim")
        if objects.create(name, b"", claim):
            executor = wire.VOID
        else:
            executor = objects.stat(name).metadata.get("executor", "")
    # After the claim was seen: a stop counts from here on.
    item = Opening(order, key, executor, objects).item()
    outcome, content = closed(death, item, executor, order.fence, log)
    metadata = outcome.signed(key, *place)
    created = objects.create(wire.attempt_key(*place, "outcome"), content, metadata)
    return outcome, metadata if created else None, content


def close_restarted(
    order: wire.Order, key: bytes, executor: str, who: str, objects: Objects
) -> int:
    """Close the own attempt, which *executor* had begun before *who* was started again."""
    words = f"{who} ended without an outcome, and was started again; nothing runs twice"
    death = Death(message=words, reason="lost")
    _close(order, key, order.attempt, executor, death, objects)
    return code_of(Opening(order, key, executor, objects))


# --- a death without a word ---------------------------------------------------------------


def death_of(ended: Ended, order: wire.Order, *, memory: bool) -> Death:
    """Describe how a process *ended*; *memory* says that it ran out of memory."""
    status = ended.status
    if ended.killed and ended.out_of_time:
        words = f"{out_of_time(order, ended.called)}, and did not end when asked to"
        return Death(
            message=f"the job {words}", reason="deadline", kind=wire.Kind.ERROR, exit_code=status
        )
    if ended.stopped and (ended.killed or status in (-signal.SIGTERM, -signal.SIGKILL)):
        words = "the job was asked to stop" + (", and did not end in time" if ended.killed else "")
        return Death(message=words, reason="preempted", kind=wire.Kind.ERROR, exit_code=status)
    if memory:
        words = "the job's process was killed: it took more memory than its pod may have"
        return Death(message=words, reason="out of memory", exit_code=status)
    if status < 0:
        number = -status
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        words = f"the job's process was killed by {name}"
    else:
        words = f"the job's process ended by itself with exit code {status}, without an outcome"
    return Death(message=words, reason="lost", exit_code=status)


def oom_kills(places: Sequence[str] = OOM_EVENTS) -> int:
    """How many processes of this container were killed for memory so far; 0 where unknown."""
    for place in places:
        with contextlib.suppress(OSError, ValueError), open(place) as file:
            for line in file:
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def close_dead(
    order: wire.Order,
    key: bytes,
    executor: str,
    death: Death,
    ended: Ended,
    host: int,
    receipt: str,
    objects: Objects,
) -> int:
    """Commit that the own attempt came to *death*, and say what to leave with."""
    opening = Opening(order, key, executor, objects)
    try:
        if not opening.claim():
            return wire.EXIT_RETRY  # it is another's, who may be at work: nothing here is over
        if not opening.inputs_there():
            opening.withdraw()  # the batch was cleaned up meanwhile
            return wire.EXIT_FINAL
        keep_log(order, key, host, ended.output, objects)
        outcome, metadata, content = _close(
            order, key, order.attempt, executor, death, objects, ended.log
        )
    except OSError as exc:
        print(f"kinetic: the outcome could not be written: {exc}", file=sys.stderr)
        return wire.EXIT_UNCOMMITTED
    return _leave_with(opening, order, outcome, metadata, content, receipt)
