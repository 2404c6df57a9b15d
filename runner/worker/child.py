"""What the child of a worker does with items: prepare, run, restore."""

from __future__ import annotations

import os
import pickle
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .. import remote_runner
from ..fork import child
from ..job import main_module
from ..job.processes import Stopping
from ..protocol import wire
from . import imports, item
from .session import Session


class ItemChild:
    """Run items in this process, or each in a fork of it.

    Args:
        order: The order of the submission, without an item.
        context: What all items share.
        result_fd: The file for results.
        workspace: The working directory of the items.
        stay: Whether items run one after another in this process.
        shares_imports: Whether items fork from a process that has imported what earlier ones did.
    """

    def __init__(
        self,
        order: wire.Order,
        context: item.Context,
        result_fd: int,
        workspace: str,
        *,
        stay: bool,
        shares_imports: bool,
    ) -> None:
        self.stay = stay
        self._recorder: imports.Recorder | None = None
        self._shares_imports = shares_imports and not stay
        self._order = order
        self._context = context
        self._result_fd = result_fd
        self._workspace = workspace
        self._stopping = Stopping()
        self._session: Session | None = None
        self._baseline: Any = None
        self._leftovers: Any = None
        self._seeds_again = False

    def prepare(self) -> None:
        """Prepare the interpreter, once."""
        child.prepare_streams()
        os.chdir(self._workspace)
        function = self._context.function
        main_module.install(lambda: function, os.fspath(self._context.place.work))
        if self.stay:
            self._limit_memory()
            self._stopping.install()
            self._session = self._context.session(stays=True)
        if self._shares_imports:
            self._recorder = imports.Recorder()
            sys.meta_path.insert(0, self._recorder)

    def run(self, message: bytes, report_call: Callable[[], None]) -> int:
        """Run the item in *message*, in this process; return an exit code."""
        job_id, index, attempt, part, data, output_dir, arguments = pickle.loads(message)
        order = replace(
            self._order,
            job_id=job_id,
            index=index,
            attempt=attempt,
            arguments=part,
            data=data,
            output_dir=output_dir,
        )
        session, on_ready = self._session, None
        if session is None:
            self._stopping.install()
            self._limit_memory()
            session = self._context.session(stays=False)
            if self._seeds_again:
                imports.seed_again()
            if self._recorder is not None:
                self._recorder.begin()
        elif self._baseline is None:
            on_ready = self._note_baseline
        invocation = item.ItemInvocation(
            order, self._context, session, self._stopping, report_call, on_ready
        )
        code = item.run(invocation, order, arguments, self._result_fd, self._list_imports)
        if self.stay:
            remote_runner.flush()
            if self._leftovers is not None:
                self._leftovers.look(job_id)
        return code

    def _list_imports(self) -> Sequence[imports.Candidate]:
        return [] if self._recorder is None else self._recorder.candidates()

    def share_imports(self, message: bytes) -> str:
        """Import the modules in *message*; return why this process must not fork any more."""
        problem = imports.import_all(pickle.loads(message))
        self._seeds_again = "numpy.random" in sys.modules
        return problem

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
