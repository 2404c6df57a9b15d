"""The I/O process of a worker: it carries out the operations of `pull.Pull`."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..job import main_module, workspace
from ..job.opening import read_input
from ..protocol import wire
from ..protocol.outcomes import encode_error, error_text
from ..protocol.workers import EXIT_REPLACE, Terms, WorkerId
from . import item, pull
from .inputs import Inputs, StoredInput
from .interpreter import CALLED, ENDED, FAILED, STARTED, Interpreter, Report

if TYPE_CHECKING:
    from ..stores.objects import Objects

DISK_FULL_RETRY_S, DISK_FULL_PAUSE_S = 60.0, 1.0
"""How long, and after which pauses, to retry writing an outcome to a full disk, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a worker needs to know: an order without its item, the terms, and names for items.

    ``job_id`` and ``output_dir`` return an item's, from its index.
    """

    order: wire.Order
    key: bytes
    terms: Terms
    job_id: Callable[[int], str]
    output_dir: Callable[[int], str]


class Guard:
    """The running item of a worker: when it must end, and what was done to end it."""

    def __init__(self, order: wire.Order) -> None:
        self.order = order
        self.pid = 0
        self._began = time.monotonic()
        self._called: float | None = None
        self._kill_at: float | None = None
        self.stopped = False
        self.timed_out = False
        self.killed = False

    def call(self) -> None:
        """The function is called now, so its timeout begins."""
        self._called = time.monotonic()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask the process to end, and kill it after its grace period."""
        if self._kill_at is None:
            self.stopped = True
            self._kill_at = time.monotonic() + self.order.grace
            self._signal(number)

    @property
    def next_at(self) -> float:
        """When to call `act`, by the monotonic clock; infinite if never."""
        if self.killed:
            return float("inf")
        if self._kill_at is not None:
            return self._kill_at
        limit = self.order.timeout
        if self._called is not None and limit is not None:
            return self._called + limit
        return self._began + wire.start_allowance(self.order.debug_s) + (limit or 0.0)

    def act(self) -> None:
        """End the process if its time is over."""
        if time.monotonic() < self.next_at:
            return
        if self._kill_at is None:
            self.timed_out = True
            self.stop(signal.SIGXCPU)
        else:
            self.killed = True
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):  # its report is under way
                os.kill(self.pid, number)


class Channel(Protocol):
    """The connection of a worker to its platform.

    ``has_slots`` says whether the worker may run items. ``asked_back`` says that the platform wants
    the slots after the current item, because another submission waits for them.
    """

    has_slots: bool
    asked_back: bool

    def fileno(self) -> int:
        """Return the descriptor to poll."""

    def receive(self) -> bool | None:
        """Read messages. Return whether the store may have changed; None if the platform ended."""

    def give_back(self) -> None:
        """Give the slots back, and ask for others."""

    def report(self, event: str, outcome: str) -> None:
        """Tell that an attempt has started, or ended; *outcome* is the name of its outcome."""


class Worker:
    """Carry out what `Pull` decides.

    Args:
        me: This worker.
        executor: The platform's name of this process.
        objects: The store.
        submission: What the worker runs.
        place: Its directories. ``work`` must be empty.
        channel: The connection to the platform; None without one.
        memory_bytes: The limit of an item's memory.
    """

    def __init__(
        self,
        me: WorkerId,
        executor: str,
        objects: Objects,
        submission: Submission,
        place: workspace.JobPlace,
        *,
        channel: Channel | None = None,
        memory_bytes: int | None = None,
        pull_type: type[pull.Pull] = pull.Pull,
    ) -> None:
        order = submission.order
        self._objects = objects
        self._submission = submission
        self._place = place
        self._executor = executor
        self._channel = channel
        self._memory_bytes = memory_bytes
        self._pull = pull_type(
            me, executor, submission.key, order.scope, submission.terms, time.monotonic
        )
        self._inputs = Inputs(objects, order.scope)
        self._input: StoredInput | None = None
        self._guard: Guard | None = None
        self._terminating = False
        self._context: item.Context | None = None
        self._interpreter = Interpreter(self._enter, self._run_item)
        self._result = _result_file()
        self._wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_terminate)
        self._operations: Mapping[type, Callable[[Any], Any]] = {
            pull.Create: self._create,
            pull.Read: self._read,
            pull.List: self._list,
            pull.Delete: lambda operation: objects.delete([operation.name]),
            pull.Open: self._open,
            pull.Fetch: self._fetch,
            pull.Ready: self._ready,
            pull.Start: self._start,
            pull.Stop: self._stop,
            pull.Wait: self._wait,
        }

    def run(self) -> int:
        """Work until nothing is left for this worker; return the exit code."""
        steps = self._pull.steps()
        answer: Any = None
        try:
            while True:
                operation = steps.send(answer)
                try:
                    answer = self._operations[type(operation)](operation)
                except OSError as exc:
                    item.say(f"the worker ends, because the store doesn't answer: {exc}")
                    return EXIT_REPLACE
        except StopIteration as end:
            code: int = end.value
            return code
        finally:
            self._interpreter.end()

    def _on_terminate(self, number: int, frame: object) -> None:
        self._terminating = True

    # --- the store ---

    def _create(self, operation: pull.Create) -> bool:
        deadline = time.monotonic() + DISK_FULL_RETRY_S
        while True:
            try:
                created = self._objects.create(operation.name, operation.body, operation.metadata)
                if created and operation.name.endswith(".outcome"):
                    self._report("ended", operation.name)
                return created
            except OSError as exc:
                is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
                if not is_full or time.monotonic() >= deadline:
                    raise
                time.sleep(DISK_FULL_PAUSE_S)

    def _read(self, operation: pull.Read) -> tuple[bytes, Mapping[str, str]] | None:
        try:
            content, metadata = self._objects.get(operation.name)
            if not metadata:
                metadata = self._objects.stat(operation.name).metadata
        except KeyError:
            return None
        return content, metadata

    def _list(self, operation: pull.List) -> list[tuple[str, Mapping[str, str]]]:
        return [(entry.name, entry.metadata) for entry in self._objects.list(operation.prefix)]

    def _open(self, operation: pull.Open) -> pull.OpeningFailure | None:
        """Read the function, and make the workspace."""
        order = self._submission.order
        try:
            function = read_input(self._objects, order.function)
            folder = os.getcwd()
            workspace.prepare(order.code, self._objects, self._place)
            self._workspace = os.getcwd()
            os.chdir(folder)
        except Exception as exc:
            text = error_text(exc, phase="setup")
            text = replace(text, message=f"kinetic setup failed: {text.qualname}: {text.message}")
            outcome = wire.Outcome(wire.Kind.ERROR, "setup", phase="setup", note=text.note)
            body = encode_error(text, None)
            content = body.content if isinstance(body.content, bytes) else b""
            outcome = outcome._replace(body=body.digest)
            passing = isinstance(exc, OSError)
            return pull.OpeningFailure(outcome, content, text.message, passing)
        self._context = item.Context(
            objects=self._objects,
            place=self._place,
            executor=self._executor,
            key=self._submission.key,
            function=function,
            memory_bytes=self._memory_bytes,
        )
        return None

    def _fetch(self, operation: pull.Fetch) -> bool:
        slot = self._pull.items.slots[operation.slot]
        self._input = self._inputs.read(operation.item, operation.slot, slot)
        return self._input is not None

    # --- the item ---

    def _start(self, operation: pull.Start) -> None:
        assert self._input is not None
        submission = self._submission
        order = replace(
            submission.order,
            job_id=submission.job_id(operation.item),
            index=operation.item,
            attempt=operation.attempt,
            arguments=self._input.part,
            data=(*submission.order.data, *self._input.data),
            output_dir=submission.output_dir(operation.item),
        )
        self._guard = Guard(order)
        name = wire.attempt_key(order.scope, operation.item, operation.attempt, "outcome")
        self._report("started", name)
        fields = (
            *(order.job_id, order.index, order.attempt),
            *(order.arguments, order.data, order.output_dir),
        )
        self._interpreter.start(pickle.dumps((*fields, self._input.content)))

    def _stop(self, operation: pull.Stop) -> None:
        if self._guard is not None:
            self._guard.stop()

    def _ended(self, status: int) -> pull.Ended:
        guard, self._guard = self._guard, None
        assert guard is not None
        end = item.End(status, guard.stopped, guard.timed_out, guard.killed)
        found = item.result_of(guard.order, self._executor, end, item.read_result(self._result))
        if found.value_file is not None and found.outcome.value is not None:
            self._objects.create(found.outcome.value[0], found.value_file, {}, consume=True)
        return pull.Ended(found.outcome, found.body)

    # --- waiting ---

    def _report(self, event: str, outcome: str) -> None:
        if self._channel is not None:
            self._channel.report(event, outcome)

    def _ready(self, operation: pull.Ready) -> None:
        """Let other submissions have the slots for a while, if the platform asks for them."""
        channel = self._channel
        if channel is None:
            return
        if channel.asked_back:
            channel.give_back()
        while not channel.has_slots and not self._terminating:
            self._poll(None)

    def _wait(self, operation: pull.Wait) -> pull.News | pull.Ended:
        deadline = time.monotonic() + operation.seconds
        while True:
            if self._terminating:
                self._terminating = False
                return pull.News.TERMINATE
            guard, channel = self._guard, self._channel
            if guard is not None:
                guard.act()
            elif channel is not None and channel.asked_back:
                channel.give_back()
            until = deadline if guard is None else min(deadline, guard.next_at)
            changed, reports = self._poll(until - time.monotonic())
            for report in reports if guard is not None else ():
                assert guard is not None
                if report.kind == STARTED:
                    guard.pid = report.pid
                elif report.kind == CALLED:
                    guard.call()
                elif report.kind in (ENDED, FAILED):
                    return self._ended(report.status)
            if changed:
                return pull.News.CHANGE
            if time.monotonic() >= deadline:
                return pull.News.TIME

    def _poll(self, seconds: float | None) -> tuple[bool, list[Report]]:
        """Wait for messages. Return whether the store may have changed, and what items report."""
        sources = [self._wake_read]
        if self._channel is not None:
            sources.append(self._channel.fileno())
        if self._interpreter.running:
            sources.append(self._interpreter.reports)
        timeout = None if seconds is None else max(0.0, seconds)
        readable, _, _ = select.select(sources, [], [], timeout)
        if self._wake_read in readable:
            os.read(self._wake_read, 4096)
        changed: bool | None = False
        if self._channel is not None and self._channel.fileno() in readable:
            changed = self._channel.receive()
            self._terminating = self._terminating or changed is None
        reports: list[Report] = []
        if self._interpreter.running and self._interpreter.reports in readable:
            reports = self._interpreter.receive()
        return bool(changed), reports

    # --- in the interpreter ---

    def _enter(self) -> None:
        assert self._context is not None
        function = self._context.function
        os.chdir(self._workspace)
        main_module.install(lambda: function, os.fspath(self._place.work))

    def _run_item(self, message: bytes, report_call: Callable[[], None]) -> Any:
        assert self._context is not None
        job_id, index, attempt, part, data, output_dir, arguments = pickle.loads(message)
        order = replace(
            self._submission.order,
            job_id=job_id,
            index=index,
            attempt=attempt,
            arguments=part,
            data=data,
            output_dir=output_dir,
        )
        invocation = item.ItemInvocation(order, arguments, self._context)
        item.run_and_exit(invocation, report_call, self._result)


def _result_file() -> int:
    """Open a file without a name, for the results of items."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("result")
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd
