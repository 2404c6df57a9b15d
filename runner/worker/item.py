"""Run one item in the child of a worker, and decide how its attempt ended.

The child writes the result into memory that it shares with the worker, or into a file if it is
large. Then it writes the size. The worker reads both once the item's process has ended, or has
reported that the result is whole. Without a size, the process has died.
"""

from __future__ import annotations

import contextlib
import marshal
import mmap
import os
import pickle
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..job import metrics, outputs, views
from ..job.attempt import Invocation, without_value
from ..job.processes import Stopping
from ..protocol import frames, stand_ins, wire
from ..protocol.notes import note_of_result
from ..protocol.outcomes import End, death_of, digest, is_plain, outcome_of_death
from ..protocol.spool import Spooled
from . import session
from .imports import Candidate
from .session import Session

if TYPE_CHECKING:
    from ..job.hosts import Hosts
    from ..job.workspace import JobPlace
    from ..stores.objects import Objects

RESULT_BYTES = 1 << 16
"""Maximum bytes of a result in the shared memory."""

_SIZE = struct.Struct("<Q")
_HEAD = struct.Struct("<Q?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What all items of a worker share.

    ``function`` and ``init`` have the bytes of the function and of the mapping ``init``. ``data``
    is the `Data` of all items. The workspace exists already, and is the working directory. The
    items leave their results in ``result_box``. With ``hosts``, other hosts run each item, too.
    """

    objects: Objects
    place: JobPlace
    executor: str
    key: bytes
    result_box: ResultBox
    function: bytes
    init: bytes | None = None
    data: Sequence[wire.DataRef] = ()
    memory_bytes: int | None = None
    hosts: Hosts | None = None

    def session(self, *, stays: bool) -> Session:
        """Return a session for one item, or for all items of an interpreter."""
        return Session(self.function, self.init, self.data, stays=stays)


class ItemInvocation(Invocation):
    """A call whose workspace and function the worker has prepared.

    Args:
        report_call: Called when the function is called.
        on_ready: Called when only the call is left to do.
        has_bare_arguments: *arguments* is what `pickles.bare_pickle` has returned.
        has_outputs: The folder for output files is prepared.
    """

    own_modules = (*Invocation.own_modules, __name__, session.__name__)

    def __init__(
        self,
        order: wire.Order,
        arguments: bytes,
        context: Context,
        items_session: Session,
        stopping: Stopping,
        report_call: Callable[[], None],
        on_ready: Callable[[], None] | None = None,
        *,
        has_bare_arguments: bool = False,
        has_outputs: bool = False,
    ) -> None:
        super().__init__(order, context.objects, context.place, stopping, context.executor)
        self.order = order
        self.arguments = arguments
        self.context = context
        self.plain: tuple[Any, float, float] | None = None
        """A value that the worker's I/O process encodes; when the item started; when it ended."""
        self._session = items_session
        self._call_reporter = report_call
        self._on_ready = on_ready
        self._has_bare_arguments = has_bare_arguments
        self._has_outputs = has_outputs

    def _report_call(self) -> None:
        self._call_reporter()

    def _prepare(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        order, place, own = self._order, self._place, self._session
        self._phase = "data resolve"
        folder = os.fspath(place.work)
        if has_folder(order):
            folder = item_folder(order, place)
            os.makedirs(folder, mode=0o700, exist_ok=True)
        if order.data:
            shared = own.prepare_shared_data(self._objects, place)
            place = replace(place, work=folder)
            views.prepare(order.data[own.shared :], self._objects, place, first=own.shared)
            stand_ins.data_paths[:0] = shared
        if not self._has_outputs:
            self._outputs = outputs.prepare(order, *self._host_position(), folder)
        self._join_hosts()
        self._phase = "payload unpickle"
        function = own.function(self._load)
        load = pickle.loads if self._has_bare_arguments else self._load
        args, kwargs = load(self.arguments)
        self._follow_log_levels()
        self._phase = "init"
        self.context.result_box.in_init = True
        own.begin(self._load)
        self.context.result_box.in_init = False
        if own.values:
            if twice := own.values.keys() & kwargs.keys():
                raise TypeError(f"both the call and init= give the argument {min(twice)!r}")
            kwargs = {**kwargs, **own.values}
        if self._on_ready is not None:
            self._on_ready()
        return function, args, kwargs

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super()._call(function, args, kwargs)
        finally:
            if not self._session.stays:
                self._session.close()

    def _encode_value(self, value: Any) -> tuple[wire.Outcome, Spooled]:
        if is_plain(value) and metrics.end_without_reports():
            self.plain = value, self._started, time.time()
            return _PLAIN
        return super()._encode_value(value)

    def _wait_for(self, value: Any) -> Any:
        return self._session.wait_for(value)


_PLAIN = wire.Outcome(wire.Kind.VALUE), Spooled(b"", "", 0)


def has_folder(order: wire.Order) -> bool:
    """Return whether an item needs a folder of its own, besides the workspace."""
    return bool(order.data) or order.output_dir.startswith("gs:")


def item_folder(order: wire.Order, place: JobPlace) -> str:
    """Return the folder for the `Data` and the output files of one attempt."""
    return f"{place.work}/items/{order.index}.{order.attempt}"


class ResultBox:
    """Where the process of an item leaves the result for the worker, and whether ``init`` runs."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + RESULT_BYTES)
        self._file = _file_without_name()

    @property
    def in_init(self) -> bool:
        """Whether a function of ``init`` runs, or ran when the process died."""
        return bool(self._memory[_SIZE.size])

    @in_init.setter
    def in_init(self, value: bool) -> None:
        self._memory[_SIZE.size] = value

    def put(self, data: bytes) -> None:
        """Leave the result, in the process of the item."""
        size = len(data)
        if size <= RESULT_BYTES:
            self._memory[_HEAD.size : _HEAD.size + size] = data
        else:
            position = 0
            while position < size:
                position += os.pwrite(self._file, memoryview(data)[position:], position)
        _SIZE.pack_into(self._memory, 0, size)

    def take(self) -> bytes:
        """Return the result, which leaves the box empty; empty if the process has died."""
        size: int = _SIZE.unpack_from(self._memory)[0]
        _HEAD.pack_into(self._memory, 0, 0, False)
        if 0 < size <= RESULT_BYTES:
            return self._memory[_HEAD.size : _HEAD.size + size]
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        os.ftruncate(self._file, 0)
        return data if len(data) == size else b""


def _file_without_name() -> int:
    if hasattr(os, "memfd_create"):  # macOS has none
        return os.memfd_create("result")
    import tempfile  # it loads `random`, which each fork would seed

    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def run(invocation: ItemInvocation, list_imports: Callable[[], Sequence[Candidate]]) -> int:
    """Run an item, and write its result; return an exit code."""
    pid, code = os.getpid(), wire.EXIT_SETUP
    order, context = invocation.order, invocation.context

    def commit(outcome: wire.Outcome, body: Spooled) -> int:
        """Write the result of a function that doesn't end; see `metrics.begin`."""
        outcome = outcome._replace(executor=context.executor)
        _put_result(context.result_box, _fields_of(outcome, body), ())
        return wire.EXIT_VALUE

    try:
        metrics.begin(order, context.key, None, commit)
        outcome, body = invocation.run()
        if os.getpid() == pid:
            fields = _fields_of(outcome, body) if invocation.plain is None else invocation.plain
            _put_result(context.result_box, fields, list_imports())
            code = wire.EXIT_VALUE if outcome.kind is wire.Kind.VALUE else wire.EXIT_FINAL
    except BaseException:
        import traceback

        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    finally:
        if os.getpid() != pid:
            os._exit(code)  # the user's code forked, and the fork returned here
    return code


def _fields_of(outcome: wire.Outcome, body: Spooled) -> tuple[Any, ...]:
    """Return the fields of the outcome, the body's path, digest, content, and fields."""
    content = body.content if isinstance(body.content, bytes) else b""
    path = "" if isinstance(body.content, bytes) else os.fspath(body.content)
    note = None if outcome.note is None else dict(outcome.note)
    fields = str(outcome.kind), *outcome._replace(note=note)[1:]
    return fields, path, body.digest, content, body.fields


def _put_result(
    result_box: ResultBox, fields: tuple[Any, ...], imports: Sequence[Candidate]
) -> None:
    # `marshal` writes to fewer memory pages than `pickle`.
    result_box.put(marshal.dumps((fields, [*map(tuple, imports)])))


class Result(NamedTuple):
    """What a process left: its outcome, the outcome's body, and the file of a large value.

    ``imports`` are the modules that the interpreter may import for later items.
    """

    outcome: wire.Outcome
    body: bytes
    value_file: Path | None = None
    imports: Sequence[Candidate] = ()


def take_result(result_box: ResultBox, order: wire.Order) -> Result | None:
    """Return the result, which leaves the box empty; None if the process left none."""
    data = result_box.take()
    if not data:
        return None
    fields, imports = marshal.loads(data)
    imported = [Candidate(*candidate) for candidate in imports]
    if len(fields) == 3:  # a plain value
        value, started, ended = fields
        body = frames.pack([pickle.dumps(value, protocol=5)])
        outcome = wire.Outcome(
            kind=wire.Kind.VALUE,
            phase="result serialization",
            started=started,
            ended=ended,
            body=digest(body),
            note=note_of_result(value),
        )
        return Result(outcome, body, imports=imported)
    header, path, known_digest, body, body_fields = fields
    outcome = wire.Outcome(wire.Kind(header[0]), *header[1:])
    if path:
        body, known_digest = frames.pack([], body_fields), ""
    outcome = outcome._replace(body=known_digest or digest(body))
    return Result(outcome, body, Path(path) if path else None, imported)


def result_of(
    order: wire.Order, executor: str, end: End, found: Result | None, log: str = ""
) -> Result:
    """Decide how the attempt ended; nothing else decides it. *log* has its last lines."""
    if found is not None:
        return found
    open_item = wire.Item(wire.ItemState.OPEN, order.attempt)
    outcome, body = outcome_of_death(death_of(order, end), open_item, executor, log)
    return Result(outcome, body)


def unstorable(result: Result, problem: OSError) -> Result:
    """Return the result of an item whose value can't be stored because of *problem*."""
    outcome, body = without_value(result.outcome, problem)
    content = body.content if isinstance(body.content, bytes) else b""
    return Result(outcome._replace(body=body.digest), content, None, result.imports)
