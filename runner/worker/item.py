"""Run one item in a process of its own, and decide how its attempt ended.

The process writes its result to a file that the worker has opened. The worker reads the file once
the process and all that it started have ended. So a result is whole, or the process has died.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .. import remote_runner
from ..job import metrics, opening, outputs, views
from ..job.attempt import Invocation
from ..job.environment import add_to_environment
from ..job.processes import Stopping
from ..protocol import frames, wire
from ..protocol.outcomes import Death, digest, outcome_of_death
from ..protocol.spool import Spooled

if TYPE_CHECKING:
    from ..job.workspace import JobPlace
    from ..stores.objects import Objects

_MAGIC = b"kinetic result\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the processes of all items of a worker share.

    ``function`` has the bytes of the function. The workspace exists already, and is the working
    directory.
    """

    objects: Objects
    place: JobPlace
    executor: str
    key: bytes
    function: bytes
    memory_bytes: int | None = None


class ItemInvocation(Invocation):
    """A call whose workspace and function the worker has prepared."""

    def __init__(self, order: wire.Order, arguments: bytes, context: Context) -> None:
        self.stopping = Stopping()
        super().__init__(order, context.objects, context.place, self.stopping, context.executor)
        self.order = order
        self.arguments = arguments
        self.context = context
        self.report_call: Callable[[], None] = lambda: None

    def _report_call(self) -> None:
        self.report_call()

    def _prepare(self, arguments: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        order, place = self._order, self._place
        if order.data:
            self._phase = "data resolve"
            views.prepare(order.data, self._objects, place)
        self._outputs = outputs.prepare(order, 0, 1, place.work)
        self._phase = "payload unpickle"
        function = self._load(self.context.function)
        args, kwargs = self._load(arguments)
        return function, args, kwargs


def run_and_exit(
    invocation: ItemInvocation, report_call: Callable[[], None], result_fd: int
) -> NoReturn:
    """Run an item in this process, write its result, and exit. Never returns."""
    pid, code = os.getpid(), wire.EXIT_SETUP
    context = invocation.context

    def commit(outcome: wire.Outcome, body: Spooled) -> int:
        """Write the result of a function that doesn't end; see `metrics.begin`."""
        outcome = outcome._replace(executor=context.executor, fence=invocation.order.fence)
        _write_result(result_fd, outcome, body)
        return wire.EXIT_VALUE

    try:
        add_to_environment(invocation.order.variables())
        metrics.begin(invocation.order, context.key, None, commit)
        invocation.stopping.install()
        invocation.report_call = report_call
        if (memory := context.memory_bytes) is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        outcome, body = invocation.run(invocation.arguments)
        if os.getpid() == pid:  # otherwise the user's code forked, and the fork returned here
            _write_result(result_fd, outcome, body)
            code = wire.EXIT_VALUE if outcome.kind is wire.Kind.VALUE else wire.EXIT_FINAL
    except BaseException:
        import traceback

        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    finally:
        if os.getpid() != pid:
            os._exit(code)
        remote_runner.exit_process(code)


def _write_result(fd: int, outcome: wire.Outcome, body: Spooled) -> None:
    """Write the length of the header, the header, the body's path or content, and a mark."""
    content = body.content if isinstance(body.content, bytes) else b""
    path = "" if isinstance(body.content, bytes) else os.fspath(body.content)
    header = json.dumps([outcome._asdict(), path, body.digest, body.fields]).encode()
    data = b"%d\n%b%b%b" % (len(header), header, content, _MAGIC)
    while data:
        data = data[os.write(fd, data) :]


class Result(NamedTuple):
    """What a process left: its outcome, the outcome's body, and the file of a large value."""

    outcome: wire.Outcome
    body: bytes
    value_file: Path | None = None


def read_result(fd: int) -> Result | None:
    """Return the result in the file, and empty the file; None if the process wrote none."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, size, 0)
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    if not data.endswith(_MAGIC):
        return None
    length, _, rest = data.partition(b"\n")
    header = rest[: int(length)]
    fields, path, known_digest, body_fields = json.loads(header)
    outcome = wire.Outcome.parse(json.dumps(fields))
    body = rest[int(length) : -len(_MAGIC)]
    if path:
        body, known_digest = frames.pack([], body_fields), ""
    outcome = outcome._replace(body=known_digest or digest(body))
    return Result(outcome, body, Path(path) if path else None)


class End(NamedTuple):
    """How an item's process ended: its status, and what the worker did to it before."""

    status: int  # an exit code, or a negative signal
    stopped: bool = False
    timed_out: bool = False
    killed: bool = False
    out_of_memory: bool = False


def result_of(order: wire.Order, executor: str, end: End, found: Result | None) -> Result:
    """Decide how the attempt ended; nothing else decides it."""
    if found is not None:
        return found
    open_item = wire.Item(wire.ItemState.OPEN, order.attempt)
    outcome, body = outcome_of_death(_death(order, end), open_item, executor, order.fence)
    return Result(outcome, body)


def _death(order: wire.Order, end: End) -> Death:
    status = end.status
    if end.timed_out:
        message = f"the job {opening.timeout_message(order, True)}, and did not end when asked to"
        return Death(message=message, reason="deadline", kind=wire.Kind.ERROR, exit_code=status)
    if end.stopped and (end.killed or status in (-signal.SIGTERM, -signal.SIGKILL)):
        message = "the job was asked to stop" + (" and did not end in time" if end.killed else "")
        return Death(message=message, reason="preempted", kind=wire.Kind.ERROR, exit_code=status)
    if end.out_of_memory:
        message = "the job's process was killed: it exceeded its memory limit"
        return Death(message=message, reason="out of memory", exit_code=status)
    if status < 0:
        number = -status
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        message = f"the job's process was killed by {name}"
    else:
        message = f"the job's process exited with code {status} and left no outcome"
    return Death(message=message, reason="lost", exit_code=status)


def say(message: str) -> None:
    """Write a line to the worker's log."""
    with contextlib.suppress(OSError):  # the log may be on the disk that failed
        print(f"kinetic: {message}", file=sys.stderr, flush=True)


def now() -> float:
    """Return the time in seconds since the epoch."""
    return time.time()
