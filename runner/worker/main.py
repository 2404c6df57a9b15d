"""The I/O process of a worker: it carries out the operations of `pull.Pull`."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..job import attempt, outputs, processes, temporary, workspace
from ..job.kernel_kills import KernelKills, kills_on_machine
from ..job_log import say
from ..protocol import wire
from ..protocol.outcomes import End, death_of_input, outcome_of_death
from ..protocol.workers import EXIT_REPLACE, Crew, WorkerId
from . import item, pull
from .child import CALLED, DONE, ItemChild, encode_message
from .foresight import first_imports
from .imports import Candidate
from .inputs import Inputs, RefusedInput, StoredInput
from .interpreter import EXIT_CANNOT_IMPORT, FAILED, Interpreter, Report
from .kept_workspace import SPARE_OUTPUT, KeptWorkspace
from .opening import failure_of, open_submission

if TYPE_CHECKING:
    from ..job.hosts import Hosts
    from ..stores.objects import Objects
    from .supervisor import Supervisor

START_CHECK_S = 0.01
"""How often to check whether the process of a stopped item exists, in seconds."""

GPUS = "CUDA_VISIBLE_DEVICES"

EXIT_S = 10.0
"""How long the process of an item may take to exit, in seconds."""


class Guard:
    """The running item of a worker: when it must end, and what was done to end it."""

    def __init__(self, order: wire.Order, output: int, interpreter: Interpreter) -> None:
        self.order = order
        self.output = output  # the size of the worker's output file when the item began
        self._interpreter = interpreter
        self._unsent = 0  # a signal for a process that doesn't exist yet
        self._began = time.monotonic()
        self.called: float | None = None  # when its timeout began
        self._kill_at: float | None = None
        self.stopped = False
        self.timed_out = False
        self.killed = False

    def call(self) -> None:
        """The function is called now, so its timeout begins."""
        self.called = time.monotonic()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask the process to end, and kill it after its grace period."""
        if self._kill_at is None:
            self.stopped = True
            self._kill_at = time.monotonic() + self.order.grace
            self._signal(number)

    def done(self) -> None:
        """The process has left its result, and exits; kill it if it doesn't."""
        self._kill_at = time.monotonic() + EXIT_S

    @property
    def grace_left(self) -> float:
        """How many seconds of its grace period a stopped process has left."""
        return 0.0 if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    @property
    def next_at(self) -> float:
        """When to call `act`, by the monotonic clock; infinite if never."""
        if self._unsent:  # the interpreter hasn't made the process yet
            return time.monotonic() + START_CHECK_S
        if self.killed:
            return float("inf")
        if self._kill_at is not None:
            return self._kill_at
        if (limit := self.order.timeout) is None:
            return float("inf")
        if self.called is not None:
            return self.called + limit
        return self._began + wire.start_allowance(self.order.debug_s) + limit

    def act(self) -> float:
        """End the process if its time is over; return when to call this again."""
        if self._unsent:
            self._signal(self._unsent)
        if time.monotonic() < (next_at := self.next_at):
            return next_at
        if self._kill_at is None:
            self.timed_out = True
            self.stop(signal.SIGXCPU)
        else:
            self.killed = True
            self._signal(signal.SIGKILL)
        return self.next_at

    def _signal(self, number: int) -> None:
        pid = self._interpreter.item_pid
        self._unsent = 0 if pid else number
        if pid:
            with contextlib.suppress(ProcessLookupError):  # the report of its end is under way
                os.kill(pid, number)


class Worker:
    """Carry out what `Pull` decides.

    Args:
        me: This worker.
        executor: The platform's name of this process.
        objects: The store.
        order: The order of the submission, without an item.
        key: The key of the submission.
        crew: How to run its items.
        place: Its directories. ``work`` must be empty.
        channel: The connection to the supervisor; None on a cluster.
        memory_bytes: The limit of an item's memory.
        hosts: The hosts that run each item, of which this is the first; None without others.
    """

    def __init__(
        self,
        me: WorkerId,
        executor: str,
        objects: Objects,
        order: wire.Order,
        key: bytes,
        crew: Crew,
        place: workspace.JobPlace,
        *,
        channel: Supervisor | None = None,
        memory_bytes: int | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._objects = objects
        self._submission = order
        self._key = key
        self._crew = crew
        self._hosts = hosts
        self._place = place
        self._executor = executor
        self._channel = channel
        self._memory_bytes = memory_bytes
        self._pull = pull.Pull(
            *(me, executor, key, order.scope, crew.terms, time.monotonic),
            age_s=max(0.0, time.time() - crew.created),
            once=hosts is not None,
        )
        self._order = replace(order)  # that of the item that runs, or has run last
        self._inputs = Inputs(objects, order.scope)
        self._input: StoredInput | None = None
        self._workspace: KeptWorkspace | None = None
        self._not_started: pull.Ended | None = None  # an item that couldn't be prepared
        self._guard: Guard | None = None
        self._output_end: int | None = None  # where the output of an item without outcome ends
        self._leaving: Guard | None = None  # its item is done, and its process exits
        self._terminating = self._changed = False
        self._is_opening = False  # whether a signal ends this process at once
        self._interpreter: Interpreter | None = None
        self._temporary = temporary.find(os.fspath(place.work))
        self._temporary_in_use = False
        self._retire_by: float | None = None
        self._kills = KernelKills(kills_on_machine)
        self._message = self._function = b""
        self._folder = ""
        # Modules that items import, in this order; None if each item imports its own.
        shares_imports = _can_share_imports() and not crew.terms.single
        shares_imports = shares_imports and crew.isolation == "process"
        self._shared_imports: list[Candidate] | None = [] if shares_imports else None
        # The code of ``init`` runs before the function. Of several hosts, each runs one item.
        self._foresees = crew.init is None and hosts is None
        self._imported = 0  # how many of them the interpreter has
        self._spare_output = outputs.SpareFolder(f"{os.fspath(place.work)}/{SPARE_OUTPUT}")
        self._result_box = item.ResultBox()
        self._poller: select.poll | None = None
        self._polled = -1  # the descriptor of the reports in it
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGCHLD, processes.ignore_signal)  # it wakes `_poll`
        processes.become_subreaper()
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
        try:
            self._is_opening = True
            if self._terminating:  # the signal came before `_is_opening` was set
                raise processes.Stopped
            operation = next(steps)
            while True:
                try:
                    answer = self._operations[type(operation)](operation)
                except OSError as exc:
                    operation = steps.throw(exc)
                else:
                    operation = steps.send(answer)
        except StopIteration as end:
            code: int = end.value
            return code
        except OSError as exc:
            say(f"the worker ends, because it can't use the store: {exc}")
            return EXIT_REPLACE
        except processes.Stopped:
            say("this process was asked to stop before its first job")
            return EXIT_REPLACE
        finally:
            if self._channel is not None:
                self._channel.flush()
            if not self._terminating:
                self._await_end()
            self._clean_up()
            if self._interpreter is not None:
                self._interpreter.end(self._submission.grace)

    def _on_terminate(self, number: int, frame: object) -> None:
        self._terminating = True
        if self._is_opening:  # an installation or a silent store may take minutes
            self._is_opening = False
            raise processes.Stopped

    # --- the store ---

    def _create(self, operation: pull.Create) -> bool:
        is_outcome = operation.name.endswith(".outcome")
        # A signal must not end this process now, because the outcome would be lost.
        self._is_opening = self._is_opening and not is_outcome
        metadata = operation.metadata
        if self._channel is not None and operation.name.endswith(".claim"):
            # If this worker dies, what follows in its output file is the item's.
            metadata = {**metadata, wire.OUTPUT: str(_output_size())}
        outage_s = attempt.OUTAGE_RETRY_S if is_outcome else 0.0
        created = self._put(operation.name, operation.body, metadata, outage_s)
        if is_outcome and self._channel is not None:
            self._channel.ended(*wire.parse_attempt_key(operation.name), self._output_end)
            self._output_end = None
        return created

    def _put(
        self, name: str, content: bytes | Path, metadata: Mapping[str, str], outage_s: float
    ) -> bool:
        """Create an object; see `attempt.create_patiently`. Consume a file."""
        created = attempt.create_patiently(
            *(self._objects, name, content, metadata),
            gives_up=self._gives_up,
            consume=True,
            outage_s=outage_s,
        )
        if self._channel is not None:
            self._channel.waits("")
        return created

    def _gives_up(self, problem: OSError) -> bool:
        """Return whether to wait no longer for space on the disk, or for the store."""
        if self._channel is not None:
            self._channel.flush()
            self._channel.waits(f"waiting for space on the disk of {problem.filename}")
        return self._terminating

    def _read(self, operation: pull.Read) -> tuple[bytes, Mapping[str, str]] | None:
        try:
            content, metadata = self._objects.get(operation.name)
            if not metadata:
                metadata = self._objects.stat(operation.name).metadata
        except KeyError:
            return None
        return content, metadata

    def _list(self, operation: pull.List) -> list[tuple[str, Mapping[str, str]]]:
        if self._channel is not None:
            # This worker knows no item to take. The next may depend on the end of the last one.
            self._channel.flush(urgent=True)
        return [(entry.name, entry.metadata) for entry in self._objects.list(operation.prefix)]

    def _open(self, operation: pull.Open) -> pull.OpeningFailure | None:
        """Prepare what all items share; see `opening`."""
        order, crew = self._submission, self._crew
        stay = crew.isolation == "worker"
        opened = open_submission(
            *(order, crew.init, self._objects, self._place),
            restores=not (stay or crew.terms.single),
        )
        if isinstance(opened, pull.OpeningFailure):
            return opened
        context = item.Context(
            objects=self._objects,
            place=self._place,
            executor=self._executor,
            key=self._key,
            result_box=self._result_box,
            function=opened.function,
            init=opened.init,
            data=order.data,
            memory_bytes=self._memory_bytes,
            hosts=self._hosts,
        )
        items = ItemChild(
            order,
            context,
            opened.folder,
            stay=stay,
            shares_imports=self._shared_imports is not None,
            temporary_folder=self._temporary,
        )
        self._workspace = opened.kept
        self._function, self._folder = opened.function, opened.folder
        self._interpreter = Interpreter(items, self._own_files)
        gc.freeze()  # what exists now stays
        return None

    def _own_files(self) -> Sequence[int]:
        """Return the descriptors that no process of an item may have."""
        files = [self._wake_read, self._wake_write]
        if self._channel is not None:
            files.append(self._channel.fileno())
        return files if self._workspace is None else [*files, *self._workspace.descriptors()]

    def _fetch(self, operation: pull.Fetch) -> bool | pull.Ended:
        found: StoredInput | RefusedInput | None
        try:
            if self._crew.terms.single:
                found = self._inputs.read_part(self._submission.arguments, ())
            else:
                slot = self._pull.items.slots[operation.slot]
                found = self._inputs.read(operation.item, operation.slot, slot)
        except ValueError as exc:  # it isn't what was submitted
            failure = failure_of(exc, "artifact verification", self._place)
            return pull.Ended(failure.outcome, failure.body)
        if isinstance(found, RefusedInput):
            death, unread = death_of_input(found.message), wire.Item(wire.ItemState.OPEN, 1)
            return pull.Ended(*outcome_of_death(death, unread, ""))
        self._input = found
        return found is not None

    # --- the item ---

    def _start(self, operation: pull.Start) -> None:
        interpreter = self._interpreter
        assert self._input is not None and interpreter is not None
        self._is_opening = False
        self._await_end()
        self._clean_up()
        self._temporary_in_use = bool(self._temporary)
        if self._workspace is not None:
            try:
                self._workspace.restore()
            except Exception as exc:
                failure = failure_of(exc, "context extract", self._place)
                self._not_started = pull.Ended(failure.outcome, failure.body)
                return
        order, outputs_base = self._order, self._crew.outputs
        order.turn_to(
            self._job_id(operation.item),
            operation.item,
            operation.attempt,
            outputs_base if order.group_id is None else f"{outputs_base}/{operation.item}",
            (*self._submission.data, *self._input.data),
        )
        self._kills.refresh_if_stale(time.monotonic())
        self._guard = Guard(order, _output_size(), interpreter)
        has_outputs = self._spare_output.give(order.output_dir)
        self._message = encode_message(order, self._input.content, has_outputs=has_outputs)
        if self._foresees and self._shared_imports is not None:
            self._foresees = False
            with contextlib.chdir(self._folder):
                self._shared_imports += first_imports(self._function, self._input.content)
        interpreter.start(self._message, self._imports_to_share())
        if self._channel is not None:
            self._channel.started(operation.item, operation.attempt, self._guard.output)

    def _job_id(self, index: int) -> str:
        group = self._submission.group_id
        return self._submission.job_id if group is None else f"{group}-{index}"

    def _imports_to_share(self) -> bytes:
        """Return the modules that the interpreter has to import before its next fork."""
        assert self._interpreter is not None
        if not self._interpreter.running:  # the next one has imported nothing
            self._imported = 0
        new = (self._shared_imports or [])[self._imported :]
        self._imported += len(new)
        return pickle.dumps(new) if new else b""

    def _stop(self, operation: pull.Stop) -> None:
        if self._guard is not None:
            self._guard.stop()

    def _ended(self, report: Report) -> pull.Ended:
        guard, self._guard = self._guard, None
        assert guard is not None
        in_init = self._result_box.in_init
        left = item.take_result(self._result_box, guard.order)
        self._judge_interpreter(guard, left)
        if left is not None and self._shared_imports is not None:
            known = {it.name for it in self._shared_imports}
            self._shared_imports += [it for it in left.imports if it.name not in known]
        # A user may send SIGKILL, too.
        by_kernel = report.status == -signal.SIGKILL and self._kills.has_increased()
        how = guard.stopped, guard.timed_out, guard.killed, by_kernel, guard.called is not None
        end = End(report.status, *how, in_init)
        log = "" if left is not None else self._last_lines()
        found = item.result_of(guard.order, self._executor, end, left, log)
        if found.value_file is not None and found.outcome.value is not None:
            try:
                name = found.outcome.value[0]
                self._put(name, found.value_file, {}, attempt.OUTAGE_RETRY_S)
            except OSError as exc:
                found = item.unstorable(found, exc)
        if item.has_folder(guard.order):
            import shutil  # it maps compression libraries, which every fork would inherit

            shutil.rmtree(item.item_folder(guard.order, self._place), ignore_errors=True)
        self._spare_output.take(guard.order.output_dir)
        self._output_end = _output_size()
        return pull.Ended(found.outcome, found.body, (guard.output, self._output_end))

    def _last_lines(self) -> str:
        """Return the last lines that the item has written; empty if the platform keeps its log."""
        return ""

    def _judge_interpreter(self, guard: Guard, left: item.Result | None) -> None:
        """Decide whether the interpreter has to end, if the item ran in it."""
        interpreter, crew = self._interpreter, self._crew
        assert interpreter is not None
        if crew.isolation == "process":  # each item has a process of its own
            return
        if guard.stopped:
            self._retire_by = time.monotonic() + guard.grace_left
        elif (
            left is None
            or left.outcome.phase == "init"
            or left.outcome.reason == "out of memory"
            or interpreter.started == crew.recycle
        ):
            self._retire_by = time.monotonic() + self._submission.grace

    def _clean_up(self) -> None:
        """End the interpreter if it has to end, and remove temporary files that nothing uses.

        Call this once the outcome is stored. An interpreter that stays keeps its temporary files.
        """
        interpreter = self._interpreter
        if self._retire_by is not None and interpreter is not None:
            interpreter.end(max(0.0, self._retire_by - time.monotonic()))
        self._retire_by = None
        stays = self._crew.isolation == "worker" and interpreter and interpreter.running
        if self._temporary_in_use and self._leaving is None and not stays:
            temporary.clear(self._temporary)
            self._temporary_in_use = False

    # --- waiting ---

    def _ready(self, operation: pull.Ready) -> pull.News | None:
        """Let other submissions have the slots for a while, if the platform asks for them.

        Return None if this worker may run an item; otherwise the news to look at before.
        """
        channel = self._channel
        if self._retire_by is not None:
            self._clean_up()  # before a claim, because the item would seem to run meanwhile
        # An interpreter keeps what it has loaded, and so its slots and GPUs, while it has items.
        is_kept = self._crew.isolation == "worker"
        if channel is not None and channel.asked_back and not is_kept:
            self._await_end()
            self._clean_up()
            channel.give_back()
        while not (self._terminating or self._changed or channel is None or channel.has_slots):
            self._poll(None)
        if self._terminating:
            self._terminating = False
            return pull.News.TERMINATE
        if self._changed:
            self._changed = False
            return pull.News.CHANGE
        gpus = None if channel is None else channel.gpus
        if gpus is not None and gpus != os.environ.get(GPUS):
            self._await_end()
            if self._interpreter is not None:
                self._interpreter.end(self._submission.grace)  # it uses the other GPUs
            os.environ[GPUS] = gpus
        return None

    def _wait(self, operation: pull.Wait) -> pull.News | pull.Ended:
        if (not_started := self._not_started) is not None:
            self._not_started = None
            return not_started
        if self._guard is None:
            self._clean_up()
        deadline = time.monotonic() + operation.seconds
        while True:
            if self._terminating:
                self._terminating = False
                return pull.News.TERMINATE
            guard, channel = self._guard or self._leaving, self._channel
            until = deadline
            if guard is not None:
                until = min(deadline, guard.act())
            elif channel is not None and channel.asked_back:  # no item runs here
                channel.give_back()
            seconds = 0.0 if self._changed else until - time.monotonic()
            if (end := self._poll(seconds)) is not None:
                return self._ended(end)
            if self._changed:
                self._changed = False
                return pull.News.CHANGE
            if time.monotonic() >= deadline:
                return pull.News.TIME

    def _read_reports(self, readable: AbstractSet[int]) -> Report | None:
        """Note what the interpreter reports; return the report of the item's end."""
        interpreter, end = self._interpreter, None
        if interpreter is None or not interpreter.running:
            return None
        if readable.isdisjoint((interpreter.reports, self._wake_read)):
            return None
        for report in interpreter.receive(reap=self._wake_read in readable):
            guard = self._guard if self._leaving is None else self._leaving
            if guard is None:
                continue
            if report.kind == CALLED:
                guard.call()
            elif self._leaving is not None:  # the process that was exiting has ended
                self._leaving = None
            elif report.kind == DONE:
                end, self._leaving = report, guard
                guard.done()
            elif report.kind == FAILED and self._imported and not interpreter.item_began:
                self._share_less(report.status)
            else:
                end = report
        return end

    def _await_end(self) -> None:
        """Wait until no process of the last item is left, or this worker must end."""
        while self._leaving is not None and not self._terminating:
            self._poll(min(EXIT_S, self._leaving.act() - time.monotonic()))

    def _share_less(self, status: int) -> None:
        """Run the item again, in an interpreter without imports: it ended before it began."""
        assert self._interpreter is not None and self._shared_imports is not None
        if any(it.state is None for it in self._shared_imports):
            self._shared_imports = []  # first let an item show what it imports
        else:
            if status != EXIT_CANNOT_IMPORT:
                say(
                    "each job imports its packages itself, because the process that imports them "
                    f"for all jobs has ended with status {status}"
                )
            self._shared_imports = None
        self._interpreter.start(self._message, self._imports_to_share())

    def _poll(self, seconds: float | None) -> Report | None:
        """Wait for messages, and take them; return the report of the item's end."""
        channel, interpreter = self._channel, self._interpreter
        reports = -1 if interpreter is None or not interpreter.running else interpreter.reports
        if self._poller is None or self._polled != reports:
            self._poller, self._polled = select.poll(), reports
            self._poller.register(self._wake_read, select.POLLIN)
            if channel is not None:
                self._poller.register(channel.fileno(), select.POLLIN)
            if reports >= 0:
                self._poller.register(reports, select.POLLIN)
        timeout = None if seconds is None else max(0.0, seconds) * 1000
        flush_at = float("inf") if channel is None else channel.flush_at
        if channel is not None and flush_at < float("inf"):
            until_flush = max(0.0, flush_at - time.monotonic()) * 1000
            timeout = until_flush if timeout is None else min(timeout, until_flush)
        readable = {fd for fd, _ in self._poller.poll(timeout)}
        if channel is not None:
            if time.monotonic() >= flush_at:
                channel.flush()
            if channel.fileno() in readable:
                changed = channel.receive()
                self._terminating = self._terminating or changed is None
                self._changed = self._changed or bool(changed)
        if self._wake_read in readable:
            os.read(self._wake_read, 4096)
        return self._read_reports(readable)


def _can_share_imports() -> bool:
    """Return whether items may fork from a process that has imported packages."""
    value = os.environ.get("KINETIC_LOCAL_FRESH", "").strip().lower()
    return processes.LINUX and value in ("", "0", "false", "no", "off")


def _output_size() -> int:
    """Return the size of the worker's output file; 0 if its output isn't a file."""
    try:
        return os.fstat(1).st_size
    except OSError:
        return 0
