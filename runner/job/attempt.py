"""One attempt, step by step: claim, check, run, commit.

The runner first creates the claim, an object that reserves the attempt for one process. Then it
looks for a stop request in the control log. To stop an attempt, a client first writes a stop
request, and then looks for the claim. So the runner sees the request, or the client sees the claim.
The commit is the one write that creates the outcome; nothing can change the outcome afterwards.
"""

from __future__ import annotations

import errno
import importlib
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..job_log import say
from ..protocol import frames, outcomes, pickles, wire
from ..protocol.notes import Note, note_of_result
from ..protocol.spool import Spooled
from ..protocol.wire import Input, Kind, Order, Outcome, value_key
from ..stores.objects import Objects, open_store
from . import main_module, metrics, opening, outputs, views, workspace
from .processes import Stopped, Stopping, tell_supervisor
from .workspace import JobPlace

RESERVE_BYTES = 4 << 20
"""Bytes that a call reserves, and frees when it fails: reporting the failure needs memory."""

RESERVE_FILES = 64
"""How many more files a job may open when its call has failed, which may have opened too many."""


class Invocation:
    """One call of the user's function, and the phase that it is in."""

    own_modules: tuple[str, ...] = (__name__, pickles.__name__)
    """The modules that call the user's code; tracebacks begin after their frames."""

    def __init__(
        self,
        order: Order,
        objects: Objects,
        place: workspace.JobPlace,
        stopping: Stopping,
        executor: str,
    ) -> None:
        self._order = order
        self._objects = objects
        self._place = place
        self._stopping = stopping
        self._executor = executor
        self._phase = "startup"
        self._started = time.time()
        self._called: float | None = None
        self._outputs: outputs.Mirror | None = None
        global _memory_reserve
        if _memory_reserve is None:
            # The mapping takes no memory. Large bytes would, once the process has freed such bytes.
            _memory_reserve = mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE)

    def run(self) -> tuple[Outcome, Spooled]:
        """Call the function; return the outcome, which may be an error, and its body.

        This method uploads the job's output files before it returns.
        """
        result = metrics.finish(*self._call_and_encode())
        if self._outputs is not None:
            self._outputs.finish(self._stopping, self._order.grace)
        return result

    def _call_and_encode(self) -> tuple[Outcome, Spooled]:
        """Prepare and make the call; return how it ended as an outcome and its body."""
        try:
            with self._stopping:
                function, args, kwargs = self._prepare()
                if self._order.debug_s is not None:
                    self._debug()
                value = self._call(function, args, kwargs)
            return self._encode_value(value)
        except BaseException as error:
            _free_memory()
            # The call may have opened too many files to report that.
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != resource.RLIM_INFINITY:
                with suppress(OSError, ValueError):  # *hard* may be lower
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + RESERVE_FILES, hard))
            if isinstance(error, Stopped):
                return self._encode_stop(error)
            if metrics.is_pruned(error) and self._phase == "execute":
                made: Any = error  # of a class that only the client has
                return metrics.pruned(self._outcome(Kind.VALUE, None), made.step, made.value)
            return self._encode_failure(error)

    def _prepare(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Prepare the process for the call; return the function and its arguments."""
        order = self._order
        self._phase = "environment setup"
        check_python(order.client.get("python", ""))
        if order.requirements is not None:
            self._phase = "requirements"
            requirements: Any = importlib.import_module(".requirements", __package__)
            requirements.install(order.requirements, self._objects, os.fspath(self._place.work))
        self._phase = "data resolve"
        if order.data:
            views.prepare(order.data, self._objects, self._place)
        self._outputs = outputs.prepare(order, *self._host_position(), self._place.work)
        self._phase = "context extract"
        workspace.prepare(order.code, self._objects, self._place)
        self._join_hosts()
        function_bytes = self._read_input(order.function)
        arguments = self._read_input(order.arguments)
        self._phase = "payload unpickle"
        main_module.install(
            lambda: opening.read_input(self._objects, order.function), os.fspath(self._place.work)
        )
        function = self._load(function_bytes)
        args, kwargs = self._load(arguments)
        self._follow_log_levels()
        return function, args, kwargs

    def _follow_log_levels(self) -> None:
        """Show the log records that the submitting program shows; add a handler if none exists."""
        if not (levels := self._order.client.get("log_levels")):
            return
        import logging  # few jobs need it

        # The function's modules are imported, so a program that sets up logging has its handlers.
        logging.basicConfig()
        for name, level in json.loads(levels).items():
            if name == "absl":
                # absl must create its logger itself, because the logger has a class of its own.
                with suppress(ImportError):
                    importlib.import_module("absl.logging")
            logging.getLogger(name).setLevel(level)

    def _join_hosts(self) -> None:
        """Connect to the other hosts of the call; a job on one host has none."""

    def _load(self, content: bytes) -> Any:
        if self._order.debug_s is None:
            return pickles.load(content)
        return _load_debugger().load(content, self._order, self._place)

    def _debug(self) -> None:
        """Start the debugger and wait until a user attaches to it."""
        self._phase = "debugger setup"
        host, hosts = self._host_position()
        debugger_wait = _load_debugger().DebuggerWait(
            self._order, self._objects, self._place, host, hosts
        )
        debugger_wait.listen()
        self._phase = "waiting for a debugger"
        debugger_wait.wait()

    def _host_position(self) -> tuple[int, int]:
        """Return the number of this host, and how many hosts there are."""
        return 0, 1

    def _read_input(self, part: Input) -> bytes:
        self._phase = "artifact download"
        try:
            return opening.read_input(self._objects, part)
        except ValueError:
            self._phase = "artifact verification"
            raise

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the function's value, awaited if needed; after ``sys.exit(0)``, return None."""
        self._phase = "execute"
        if self._order.timeout is not None:
            self._called = time.monotonic()
            with suppress(OSError):  # without the report, the limit includes the start
                self._report_call()
        try:
            value: object = function(*args, **kwargs)
            if hasattr(type(value), "__await__"):
                value = self._wait_for(value)
        except SystemExit as exit_request:
            if isinstance(exit_request, Stopped) or exit_request.code not in (None, 0):
                raise  # a `Stopped` isn't the user's exit
            return None
        return value

    def _wait_for(self, value: Any) -> Any:
        """Return the value of an awaitable."""
        import asyncio  # forks of a warm parent without asyncio are cheaper

        return asyncio.run(await_value(value))

    def _report_call(self) -> None:
        """Report that the function is called, which starts its timeout."""
        tell_supervisor("called")

    def _encode_value(self, value: Any) -> tuple[Outcome, Spooled]:
        """Return the outcome of *value* and its body, or those of an error if pickling fails."""
        self._phase = "result serialization"
        try:
            stored = outcomes.encode_value(value, f"{self._place.work}/result")
        except BaseException as error:
            _free_memory()
            text = outcomes.error_text(error, phase=self._phase, own_frames=1)  # of this method
            is_full = _is_disk_full(error)
            verb = "written" if is_full else "pickled"
            message = f"the result cannot be {verb}: {text.qualname}: {text.message}"
            message += self._hint(error, ". ")
            shown = "" if is_full else outcomes.result_repr(value)
            text = replace(text, message=message, result_repr=shown)
            return self._encode_error(text, self._failure_reason(error))
        outcome = self._outcome(Kind.VALUE, note_of_result(value))
        if not isinstance(stored.content, bytes):
            order = self._order
            name = value_key(order.scope, order.index, order.attempt, self._executor)
            outcome = outcome._replace(value=(name, stored.digest))
        return outcome, stored

    def _encode_failure(self, error: BaseException) -> tuple[Outcome, Spooled]:
        """Return the outcome of a call or a preparation that raised *error*, and its body."""
        # If an error doesn't come from the user's code, its traceback shows the runner's frames.
        in_user_code = self._phase in ("execute", "payload unpickle", "init")
        own_frames = self._own_frames(error) if in_user_code else 0
        text = outcomes.error_text(error, phase=self._phase, own_frames=own_frames)
        text = self._localize_paths(text)
        rebuilt = None
        if self._phase == "execute":
            text = replace(text, traceback=text.traceback + self._hint(error, "", "\n"))
        # The caller of an owned job sees the traceback when its call raises the error.
        if in_user_code and not self._order.owned:
            with suppress(Exception):  # the user's code may have closed the stream
                sys.stderr.write(text.traceback)
        if self._phase == "execute":
            # In the client, these exceptions would end the caller's process or generator.
            if not isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
                rebuilt = error
        else:
            step = "init=" if self._phase == "init" else f"kinetic {self._phase}"
            message = f"{step} failed: {text.qualname}: {text.message}"
            text = replace(text, message=message + self._hint(error, ". "))
        text = self._add_log(text)
        return self._encode_error(text, self._failure_reason(error), rebuilt)

    def _encode_stop(self, stopped: Stopped) -> tuple[Outcome, Spooled]:
        """Return the outcome of a call that a signal ended (timeout, preemption), and its body."""
        limit = self._order.timeout
        called, is_late = self._called, limit is not None and self._stopping.out_of_time
        if limit is not None and called is not None:
            is_late = is_late or time.monotonic() - called >= limit
        reason = "deadline" if is_late else "preempted"
        problem = "was asked to stop"
        if is_late:
            problem = outcomes.timeout_message(self._order, called is not None)
        message, own_frames = f"the job {problem}", self._own_frames(stopped)
        text = outcomes.stop_text(stopped, message, phase=self._phase, own_frames=own_frames)
        return self._encode_error(self._localize_paths(text), reason)

    def _encode_error(
        self, text: outcomes.ErrorText, reason: str, error: BaseException | None = None
    ) -> tuple[Outcome, Spooled]:
        outcome = self._outcome(Kind.ERROR, text.note, reason=reason)
        return outcome, outcomes.encode_error(text, error)

    def _failure_reason(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            return "out of memory"
        if _is_disk_full(error) and self._phase != "execute":
            return wire.OUT_OF_DISK if self._order.store.startswith("gs:") else wire.STORE_FULL
        is_of_user = self._phase in ("execute", "result serialization")
        return "user error" if is_of_user else "setup"

    def _hint(self, error: BaseException, prefix: str, suffix: str = "") -> str:
        """Return advice about *error* between *prefix* and *suffix*; empty without advice."""
        hint = advice(error, self._phase, self._place)
        return hint and f"{prefix}{hint}{suffix}"

    def _own_frames(self, error: BaseException) -> int:
        """Count the outermost frames up to the runner's last one; asyncio's may lie in between."""
        count = own = 0
        trace = error.__traceback__
        while trace is not None:
            count += 1
            if trace.tb_frame.f_globals.get("__name__") in self.own_modules:
                own = count
            trace = trace.tb_next
        return own

    def _localize_paths(self, text: outcomes.ErrorText) -> outcomes.ErrorText:
        """Show files of the workspace by their paths on the caller's machine."""
        root = self._order.root
        if not root:
            return text
        job_prefix, caller_prefix = f'File "{self._place.work}/workspace/', f'File "{root}/'
        return replace(text, traceback=text.traceback.replace(job_prefix, caller_prefix))

    def _add_log(self, text: outcomes.ErrorText) -> outcomes.ErrorText:
        """Add the last lines of the log if the platform doesn't keep the log."""
        log = self._place.log
        return text if log is None else replace(text, log=log())

    def _outcome(self, kind: Kind, note: Note | None, *, reason: str = "") -> Outcome:
        return Outcome(
            kind=kind,
            reason=reason,
            executor=self._executor,
            phase=self._phase,
            started=self._started,
            ended=time.time(),
            note=note,
        )


async def await_value(value: Any) -> Any:
    return await value


_memory_reserve: mmap.mmap | None = None


def _free_memory() -> None:
    global _memory_reserve
    _memory_reserve = None


def check_python(submitted: str) -> None:
    """Raise RuntimeError if this Python can't run the bytecode of the caller's (*submitted*)."""
    running = ".".join(map(str, sys.version_info[:3]))
    if submitted and submitted.split(".")[:2] != running.split(".")[:2]:
        raise RuntimeError(
            f"the job was submitted from Python {submitted} and runs on Python {running}; "
            "use an image (or interpreter) with the same minor version"
        )


def _load_debugger() -> Any:
    return importlib.import_module(".debugger", __package__)


def advice(error: BaseException, phase: str, place: workspace.JobPlace) -> str:
    """Return advice that the message of *error* lacks; empty if there is none."""
    if _is_disk_full(error) and phase != "execute":
        return f"The disk of {place.cache} is full: free some space there"
    module = _failed_module(error, place) if phase == "payload unpickle" else ""
    if module:
        module = (
            f"The job imports {module}, as your program does. If it can't be imported where the "
            "job runs, set KINETIC_BY_VALUE to the module's name: its definitions then travel by "
            "value"
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        advice = place.install_advice(error.name.partition(".")[0])
        return (
            f"The module {error.name!r} is not installed where the job runs: {advice}. If the "
            "module is your own, move it into the project's directory, or set KINETIC_PACKAGE_ROOT "
            f"to a directory that contains the module and the project{module and '. '}{module}"
        )
    if module:
        return module
    if isinstance(error, KeyError) and _is_of_environ(error):
        variable = f"The environment variable {error.args[0]!r}"
        return f"{variable} is not set in the job: add it to capture_env_vars="
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if isinstance(error, MemoryError) and limit != resource.RLIM_INFINITY:
        memory = f"{limit / (1 << 20):,.0f} MiB"
        return f"memory= limits the job to {memory}: raise memory= if the job needs more"
    return ""


def _failed_module(error: BaseException, place: workspace.JobPlace) -> str:
    """Return the file and line of the project at which an import failed; empty without one."""
    found, trace, root = "", error.__traceback__, f"{place.work}/workspace/"
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(root):
            name = trace.tb_frame.f_globals.get("__name__")
            file = code.co_filename.removeprefix(root)
            found = f"the module {name} ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _is_of_environ(error: KeyError) -> bool:
    """Return whether a look-up in ``os.environ`` raised *error*."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_locals.get("self") is os.environ


DISK_FULL_RETRY_S, DISK_FULL_PAUSE_S = 60.0, 1.0
"""How long, and after which pauses, to retry writing an outcome to a full disk, in seconds."""

OUTAGE_RETRY_S, OUTAGE_PAUSE_S = 3600.0, 10.0
"""Likewise, to a store that doesn't answer."""


def main(order: Order, key: bytes, executor: str, place: JobPlace) -> int:
    """Carry out *order* in this process and return its exit code."""
    stopping = Stopping()
    stopping.install()
    objects = open_store(order.store)
    invocation = Invocation(order, objects, place, stopping, executor)
    attempt = Attempt(order, key, executor, objects, stopping, invocation.run)
    metrics.begin(order, key, objects, attempt.commit)
    return attempt.run()


class Attempt:
    """Run the steps of one attempt; *invoke* makes the call, like `Invocation.run`."""

    def __init__(
        self,
        order: Order,
        key: bytes,
        executor: str,
        objects: Objects,
        stopping: Stopping,
        invoke: Callable[[], tuple[wire.Outcome, Spooled]],
    ) -> None:
        self._order = order
        self._key = key
        self._executor = executor
        self._objects = objects
        self._stopping = stopping
        self._invoke = invoke

    def run(self) -> int:
        """Take all steps and return the exit code."""
        order, objects, claim = self._order, self._objects, self._order.part_name("claim")
        created = objects.create(claim, b"", wire.claim_metadata(self._executor))
        if not created and objects.stat(claim).metadata.get("executor") != self._executor:
            return wire.EXIT_FINAL  # the claimant has ended with its supervisor
        item = self._read_item()  # after the claim
        if not objects.exists(order.arguments.name):
            objects.delete([claim])  # a cleanup has removed the inputs
            return wire.EXIT_FINAL
        if (item.state, item.attempt) != (wire.ItemState.OPEN, order.attempt):
            return self._commit(self._cancelled_outcome("not started"), Spooled(b"", "", 0))
        own_pid = os.getpid()
        outcome, body = self._invoke()
        if os.getpid() != own_pid:
            os._exit(0)  # the user's code forked, and the fork returned here: don't commit
        return self._commit(self._outcome_under_stop(outcome), body)

    def _read_item(self) -> wire.Item:
        return opening.read_item(self._order, self._key, self._objects)

    def commit(self, outcome: wire.Outcome, body: Spooled) -> int:
        """Commit the outcome of a function that doesn't end; return the exit code."""
        return self._commit(outcome._replace(executor=self._executor), body)

    def _outcome_under_stop(self, outcome: wire.Outcome) -> wire.Outcome:
        """Replace a failure by `CANCELLED` if a request to stop the item ended this attempt."""
        if not self._stopping.requested or outcome.kind is wire.Kind.VALUE:
            return outcome
        if self._read_item().state is not wire.ItemState.CANCELLING:
            return outcome
        return self._cancelled_outcome("cancelled")._replace(metrics=outcome.metrics)

    def _cancelled_outcome(self, phase: str) -> wire.Outcome:
        return wire.Outcome(
            kind=wire.Kind.CANCELLED,
            reason="cancelled",
            executor=self._executor,
            phase=phase,
            ended=time.time(),
        )

    def _commit(self, outcome: wire.Outcome, body: Spooled) -> int:
        """Create the object of a large value, then the outcome; return the exit code."""
        order, name = self._order, self._order.part_name("outcome")
        was_called = outcome.reason not in ("setup", wire.STORE_FULL) or outcome.phase in (
            "result serialization",
            "commit",
        )
        create = partial(
            create_patiently,
            self._objects,
            # Before the call, no work can be lost.
            gives_up=lambda _: self._stopping.requested or not was_called,
            outage_s=OUTAGE_RETRY_S,
        )
        try:
            if outcome.value is not None and not isinstance(body.content, bytes):
                create(outcome.value[0], body.content, {}, consume=True)
                packed = frames.pack([], body.fields)
            else:
                packed = body.content if isinstance(body.content, bytes) else b""
            known_digest = body.digest if packed is body.content else ""
            outcome = outcome._replace(body=known_digest or outcomes.digest(packed))
            attempt_id = order.scope, order.index, order.attempt
            content, metadata = outcome.stored(self._key, *attempt_id, packed)
            created = create(name, content, metadata)
        except OSError as exc:
            say(f"can't write the outcome: {exc}")
            if outcome.kind is not wire.Kind.VALUE:
                return wire.EXIT_STORE_FULL if _is_disk_full(exc) else wire.EXIT_UNCOMMITTED
            return self._commit(*without_value(outcome, exc))
        if not created:
            say("another process closed this attempt")
        return self._exit_code(outcome, metadata if created else None)

    def _exit_code(self, outcome: wire.Outcome, metadata: Mapping[str, str] | None) -> int:
        """Return the exit code; *metadata* is None if another process committed the outcome."""
        return wire.EXIT_VALUE if outcome.kind is wire.Kind.VALUE else wire.EXIT_FINAL


def create_patiently(
    objects: Objects,
    name: str,
    content: bytes | Path,
    metadata: Mapping[str, str],
    *,
    gives_up: Callable[[OSError], bool],
    consume: bool = False,
    outage_s: float = 0.0,
) -> bool:
    """Create an object; return False if it exists.

    If the disk is full, retry for `DISK_FULL_RETRY_S`, so that the user can free space, unless
    *gives_up* returns True for the error. Don't retry if the object is larger than the disk. If the
    store doesn't answer, retry for *outage_s*; then an earlier try may have created the object.
    """
    began, warned = time.monotonic(), False
    while True:
        try:
            return objects.create(name, content, metadata, consume=consume)
        except OSError as exc:
            limit, pause, advice = 0.0, 0.0, ""
            if isinstance(exc, TimeoutError):
                limit, pause = outage_s, OUTAGE_PAUSE_S
            elif _is_disk_full(exc) and _can_hold(exc.filename or "/", content):
                limit, pause, advice = DISK_FULL_RETRY_S, DISK_FULL_PAUSE_S, "free some space: "
            if time.monotonic() - began >= limit or gives_up(exc):
                raise
            if not warned:
                say(
                    f"the job has ended, but its result can't be written ({exc}); {advice}kinetic "
                    f"retries for {limit:.0f} s"
                )
            warned = True
            time.sleep(pause)


def without_value(outcome: wire.Outcome, problem: OSError) -> tuple[wire.Outcome, Spooled]:
    """Return the outcome and the body of a call whose value can't be stored."""
    text = outcomes.error_text(problem, phase="commit")
    message = f"the job succeeded, but its result can't be stored: {text.message}"
    reason = "setup"
    if _is_disk_full(problem):
        message += "; free some space there, and run the job again"
        reason = wire.STORE_FULL
    text = replace(text, message=message)
    failed = outcome._replace(kind=wire.Kind.ERROR, reason=reason, phase="commit", value=None)
    return failed._replace(note=text.note), outcomes.encode_error(text, None)


def _can_hold(path: str, content: bytes | Path) -> bool:
    """Return whether *content* would fit on the disk of *path* if the disk were empty."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    disk = os.statvfs(path)
    return size < disk.f_blocks * disk.f_frsize
