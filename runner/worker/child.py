"""What the child of a worker does with items: prepare, run, restore."""

from __future__ import annotations

import _thread
import contextlib
import gc
import marshal
import os
import pickle
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from .. import remote_runner
from ..job import main_module, metrics, outputs
from ..job.processes import Stopping
from ..protocol import pickles, wire
from . import imports, item
from .session import Session

CALLED, DONE = b"c", b"d"
"""Reports of an item's process: the function is called; the result is whole, and it exits now."""

JOB_ID = "JOB_ID"
"""A variable that the pod of a worker has for its batch, unless the user has captured another."""


def encode_message(order: wire.Order, arguments: bytes, *, has_outputs: bool = False) -> bytes:
    """Return what the child has to know about an item.

    *has_outputs* says that its output directory exists, on this machine.

    `marshal` makes the child write to fewer memory pages than `pickle`.
    """
    data = pickle.dumps(order.data) if order.data else b""
    bare = pickles.bare_pickle(arguments)
    content = arguments if bare is None else bare
    fields = order.job_id, order.index, order.attempt, order.output_dir
    head = marshal.dumps((*fields, data, len(content), bare is not None, has_outputs))
    return head + content  # `marshal` takes at most 2 GiB


def _decode_message(message: bytes, order: wire.Order) -> tuple[bytes, bool, bool]:
    """Write the fields of an item into *order*; return its arguments, and if they're a bare pickle.

    The third value says whether the output directory exists.
    """
    job_id, index, attempt, output_dir, data, size, is_bare, has_outputs = marshal.loads(message)
    order.turn_to(job_id, index, attempt, output_dir, pickle.loads(data) if data else ())
    return message[len(message) - size :], is_bare, has_outputs


class ItemChild:
    """Run items in this process, or each in a fork of it.

    Args:
        order: The order of the submission, without an item.
        context: What all items share.
        workspace: The working directory of the items.
        stay: Whether items run one after another in this process.
        shares_imports: Whether items fork from a process that has imported what they would.
        temporary_folder: The folder that is emptied between items; empty if there is none.
    """

    def __init__(
        self,
        order: wire.Order,
        context: item.Context,
        workspace: str,
        *,
        stay: bool,
        shares_imports: bool,
        temporary_folder: str,
    ) -> None:
        self.stay = stay
        self._recorder: imports.Recorder | None = None
        self._shares_imports = shares_imports
        self._temporary_folder = temporary_folder
        self._order = replace(order)
        self._context = context
        self._workspace = workspace
        self._stopping = Stopping()
        self._session: Session | None = None
        self._baseline: Any = None
        self._leftovers: Any = None
        self._seeds_again = False
        self._has_job_id = False

    def prepare(self) -> None:
        """Prepare the interpreter, once."""
        remote_runner.prepare_streams()
        os.chdir(self._workspace)
        group = self._order.group_id
        self._has_job_id = group is not None and os.environ.get(JOB_ID) == group
        function = self._context.function
        main_module.install(lambda: function, os.fspath(self._context.place.work))
        self._session = self._context.session(stays=self.stay)
        if self.stay:
            self._stopping.install()
            self._limit_memory()
        else:
            self._session.load_plain_function()
        if self._shares_imports:
            self._recorder = imports.Recorder()
            sys.meta_path.insert(0, self._recorder)

    def take(self, message: bytes, report: Callable[[bytes], None]) -> None:
        """Prepare for the item in *message*: what a fork need not do takes less time here."""
        if self.stay and metrics.is_begun():  # a thread may still read the order of the last item
            self._order = replace(self._order)
        order = self._order
        arguments, is_bare, has_outputs = _decode_message(message, order)
        variables = order.variables()
        if self._has_job_id:
            variables[JOB_ID] = order.job_id
        hosts = self._context.hosts
        if hosts is None and not has_outputs:  # each of several hosts has a folder of its own
            with contextlib.suppress(OSError):  # the item's process tries again, with the error
                has_outputs = outputs.prepare_local(order.output_dir)
        if has_outputs:
            variables[outputs.VARIABLE] = order.output_dir
        os.environ.update(variables)
        if not self.stay:
            os.chdir(self._workspace)  # an item may have removed this folder
        if self._baseline is not None:
            self._baseline.expect(variables)
        assert self._session is not None
        kind = item.ItemInvocation
        if hosts is not None:
            from .host_item import HostItem  # most workers need no threads

            kind = HostItem
        self._item = kind(
            order,
            arguments,
            self._context,
            self._session,
            self._stopping,
            lambda: report(CALLED),
            self._note_baseline if self.stay and self._baseline is None else None,
            has_bare_arguments=is_bare,
            has_outputs=has_outputs,
        )
        self._report = report

    def run(self) -> int:
        """Run the item that was taken, in this process; return an exit code."""
        code = item.run(self._item, self._list_imports)
        remote_runner.flush()
        self._stopping.reset()
        if self._leftovers is not None:
            self._leftovers.look(self._item.order.job_id)
        return code

    def run_and_exit(self) -> NoReturn:
        """Run the item that was taken, in this fork of the interpreter."""
        self._stopping.install()
        gc.enable()  # the interpreter has turned it off
        threads: Any = sys.modules.get("threading")
        if threads is not None:
            threads._main_thread._native_id = _thread.get_native_id()  # a fork inherits the ID
        self._limit_memory()
        if self._seeds_again:
            imports.seed_again()
        if self._recorder is not None:
            self._recorder.begin()
        code = item.run(self._item, self._list_imports)
        has_result = code != wire.EXIT_SETUP and not item.has_folder(self._item.order)
        if has_result and remote_runner.exits_at_once():
            remote_runner.flush()
            self._report(DONE)  # the I/O process continues while the kernel ends this process
        report = (lambda: self._report(DONE)) if has_result else _report_nothing
        remote_runner.exit_process(code, report)

    def _list_imports(self) -> Sequence[imports.Candidate]:
        return [] if self._recorder is None else self._recorder.candidates()

    def share_imports(self, message: bytes) -> bool:
        """Import the modules in *message*; return whether this process may fork any more.

        If not, write why, unless the items haven't shown yet whether they import these modules.
        """
        for name in (*self._order.variables(), outputs.VARIABLE):
            os.environ.pop(name, None)
        candidates: Sequence[imports.Candidate] = pickle.loads(message)
        problem = imports.import_all(candidates)
        if not problem and self._temporary_folder and os.listdir(self._temporary_folder):
            problem = "they write temporary files"  # which don't outlive the item
        if problem and all(it.state is not None for it in candidates):
            text = f"kinetic: each job imports its packages itself, because {problem}\n"
            os.write(2, text.encode(errors="replace"))
        self._seeds_again = "numpy.random" in sys.modules
        if self._session is not None and not problem:
            self._session.load_plain_function()
        return not problem

    def _limit_memory(self) -> None:
        if (memory := self._context.memory_bytes) is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    def _note_baseline(self) -> None:
        """Note the state that later items begin with: ``init`` has made it."""
        from . import restore  # an item in a process of its own doesn't need it

        assert self._session is not None
        self._baseline, self._leftovers = restore.Baseline(), restore.Leftovers()
        self._session.on_loop = self._leftovers.ignore

    def restore(self) -> None:
        """Take back what the item that ran here has changed."""
        if self._baseline is not None:
            self._baseline.restore()

    def close(self) -> None:
        """Clean up what ``init`` has made, and end the event loop."""
        if self._session is not None:
            self._session.close()


def _report_nothing() -> None:
    """Report no slow exit: the worker reads the result when the process has ended."""
