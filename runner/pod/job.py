"""The job in its pod: the process that runs the user's code."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from .. import remote_runner
from ..job import metrics, processes
from ..job.attempt import Invocation, take_all
from ..job.processes import Stopped
from ..job.workspace import JobPlace
from ..protocol import wire
from ..protocol.spool import Spooled
from ..stores.objects import Objects, open_store
from .attempt import PodAttempt, close_earlier
from .guard import Channel, last_lines

KEY_FILE = "/var/run/kinetic/key"
TERMINATION_LOG = "/dev/termination-log"
RUNNER_VARIABLES = (
    "KINETIC_ORDER",
    "KINETIC_FAILURES",
    "KINETIC_DISRUPTIONS",
    "KINETIC_KEY_FILE",
    "KINETIC_POD_NAME",
)
"""Variables of the runner, which the job doesn't get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The environment of a pod: its order, with this attempt's number, and its key.

    ``name`` is the pod's own, and empty in a set of hosts. ``first`` is the number of the attempt
    that the job's first pod made. ``receipt`` is the file for the receipt, and empty if there is
    none.
    """

    order: wire.Order
    key: bytes
    executor: str
    name: str
    first: int
    receipt: str


def read_pod(environ: Mapping[str, str]) -> Pod:
    """Read the environment of a pod.

    Raises:
        ValueError: The environment is incomplete, or this runner can't read its format.
        OSError: The key cannot be read.
    """
    order = wire.Order.decode(environ.get("KINETIC_ORDER", "null"))
    executor = environ.get("KINETIC_POD_UID", "")
    if not executor:
        raise ValueError("KINETIC_POD_UID is not set, so the attempt cannot be claimed")
    receipt = environ.get("KINETIC_TERMINATION_LOG", TERMINATION_LOG)
    failures = int(environ.get("KINETIC_FAILURES") or 0)
    disruptions = int(environ.get("KINETIC_DISRUPTIONS") or 0)
    return Pod(
        order=replace(order, attempt=order.attempt + failures + disruptions),
        key=Path(environ.get("KINETIC_KEY_FILE", KEY_FILE)).read_bytes(),
        executor=executor,
        name=environ.get("KINETIC_POD_NAME", ""),
        first=order.attempt,
        receipt=receipt if os.path.exists(receipt) else "",
    )


def run_job_and_exit(pod: Pod, folder: str, channel: Channel, parent: int) -> NoReturn:
    """Run the job in this fork of *parent*, and exit; the kernel kills it if *parent* dies."""
    job_pid, code = os.getpid(), wire.EXIT_RETRY
    try:
        processes.die_with(parent)
        remote_runner.enable_crash_tracebacks()
        sys.stdout = sys.__stdout__ = open_stream(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = open_stream(2)  # type: ignore[misc]
        sys.argv[:] = [""]
        code = _Job(pod, folder, channel).run()
        channel.report_exit_code(code)
    except BaseException:
        print_error()
    finally:
        if os.getpid() != job_pid:
            os._exit(code)  # this is a fork that the user's code made
        remote_runner.exit_process(code)


class _Job:
    """Carry out the attempt in the folders of its container."""

    def __init__(self, pod: Pod, folder: str, channel: Channel) -> None:
        self._stopping = processes.Stopping()
        self._stopping.install()
        self._pod = pod
        self._order = pod.order
        self._channel = channel
        self._objects: Objects = open_store(pod.order.store)
        work = os.path.join(folder, "work")
        os.mkdir(work, 0o700)
        os.chdir(work)
        self._place = JobPlace(
            work=work,
            cache=os.path.join(folder, "cache"),
            mounts=False,
            exclusive=True,
            log=lambda: last_lines(self._output()),
            on_call=channel.report_call,
        )

    def run(self) -> int:
        """Carry out the attempt, and return the exit code.

        If the platform asks the job to stop before the claim, the job ends. It may have sent the
        request for the claim, so the claim may exist; a later pod then closes the attempt.
        """
        try:
            with self._stopping:
                next_step = self._begin()
        except Stopped:
            print("kinetic: the job was asked to stop before its start", file=sys.stderr)
            return wire.EXIT_RETRY
        return next_step()

    def _begin(self) -> Callable[[], int]:
        """Close earlier attempts and claim this one; return a function for the remaining steps."""
        pod = self._pod
        close_earlier(self._order, pod.key, pod.first, self._objects)
        steps = self._make_attempt().steps()
        for _ in ("claim", "check"):
            next(steps)
        return functools.partial(take_all, steps)

    def _make_attempt(self) -> PodAttempt:
        pod = self._pod
        call = Invocation(self._order, self._objects, self._place, self._stopping, pod.executor)
        attempt = PodAttempt(
            self._order, pod.key, pod.executor, self._objects, self._stopping, call.run
        )
        attempt.receipt, attempt.output = pod.receipt, self._output
        metrics.begin(self._order, pod.key, self._objects, self._committing(attempt))
        return attempt

    def _committing(self, attempt: PodAttempt) -> metrics.Commit:
        """Return a function that commits an outcome of *attempt*, and tells the guard."""

        def commit(outcome: wire.Outcome, body: Spooled) -> int:
            code = attempt.commit(outcome, body)
            self._channel.report_exit_code(code)
            return code

        return commit

    def _output(self) -> bytes:
        _flush()
        return self._channel.output()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's code may have closed the streams
            stream.flush()


def open_stream(fd: int) -> io.TextIOWrapper:
    """Open a stream that writes at once and escapes what can't be encoded."""
    raw = open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it lives as long as the job
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def print_error() -> None:
    """Print why there is no outcome; only a defect of the runner shows a traceback."""
    import traceback

    error = sys.exception()
    with contextlib.suppress(OSError, ValueError):
        if isinstance(error, OSError):  # the store, or the disk
            print(f"kinetic: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
