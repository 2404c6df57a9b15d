"""The job in its pod: the process that runs the user's code."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from .. import remote_runner
from ..job import metrics, processes
from ..job.attempt import Invocation, take_all
from ..job.opening import Opening
from ..job.processes import Stopped
from ..job.workspace import JobPlace
from ..pauses import pauses
from ..protocol import outcomes, wire
from ..protocol.outcomes import Death
from ..protocol.spool import Spooled
from ..stores.objects import Objects, open_store
from .attempt import PodAttempt, close_attempt, close_earlier, exit_code_for
from .guard import Channel, last_lines

PORT = 8476
"""JAX's port on the first host, unless its address names a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The number of hosts, the index of this host, and the address of the first host."""

    count: int
    index: int
    coordinator: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Hosts | None:
        """Read the environment; None for a single host without a LeaderWorkerSet.

        Raises:
            ValueError: The environment is incomplete.
        """
        count = int(environ.get("KINETIC_HOSTS") or environ.get("LWS_GROUP_SIZE") or 1)
        if count < 2 and not environ.get("KINETIC_LWS"):  # `_Job` handles restarts of such a set
            return None
        names = ("KINETIC_HOST", "LWS_WORKER_INDEX", "JOB_COMPLETION_INDEX")
        index = next((environ[name] for name in names if environ.get(name)), "")
        address = environ.get("KINETIC_COORDINATOR") or environ.get("LWS_LEADER_ADDRESS") or ""
        if not index or not address or not 0 <= int(index) < count:
            raise ValueError(
                f"this is one of {count} hosts, but the environment lacks its index or the "
                "first host's address (KINETIC_HOST, KINETIC_COORDINATOR)"
            )
        coordinator = address if ":" in address else f"{address}:{PORT}"
        return cls(count=count, index=int(index), coordinator=coordinator)

    @property
    def is_first(self) -> bool:
        """Whether this host claims the attempt and returns its value."""
        return self.index == 0

    @property
    def name(self) -> str:
        """The name of this host in messages."""
        return f"host {self.index} of {self.count}"

    def join(self) -> None:
        """Let JAX connect the hosts, if JAX is installed and ``KINETIC_JAX`` isn't ``0``.

        Raises:
            Exception: JAX doesn't find all hosts within ten minutes.
        """
        if (
            self.count < 2
            or importlib.util.find_spec("jax") is None
            or os.environ.get("KINETIC_JAX") == "0"
        ):
            return
        jax: Any = importlib.import_module("jax")
        bind: dict[str, str] = {}
        if self.is_first and set(self.coordinator) <= set("0123456789.:"):
            # Without this, JAX would listen on all addresses.
            bind["coordinator_bind_address"] = self.coordinator
        jax.distributed.initialize(
            coordinator_address=self.coordinator,
            num_processes=self.count,
            process_id=self.index,
            initialization_timeout=600,
            **bind,
        )


class HostCall(Invocation):
    """The call on one of several hosts; only the first host's value is kept."""

    hosts: Hosts
    watch: Watch

    def run_watched(self, arguments: bytes) -> tuple[wire.Outcome, Spooled]:
        """Make the call; during it, watch whether another host ends the attempt.

        The first host waits for the success of all others before it returns its value.
        """
        try:
            outcome, body = self.run(arguments)
            # The other hosts of a pruned attempt run on until they see its outcome.
            is_awaited = self.hosts.is_first and outcome.reason != wire.PRUNED
            if outcome.kind is wire.Kind.VALUE and is_awaited:
                self._phase = "waiting for the other hosts"
                waits = pauses(0.05, 1.0)
                while not self.watch.all_done(self.hosts.count):
                    time.sleep(next(waits))
                    if self._stopping.requested:
                        return self._encode_stop(Stopped())
            return outcome, body
        finally:
            self.watch.stop()

    def _join_hosts(self) -> None:
        self._phase = "joining the hosts"
        self.watch.start()
        self.hosts.join()

    def _encode_value(self, value: Any) -> tuple[wire.Outcome, Spooled]:
        if self.hosts.is_first:
            return super()._encode_value(value)
        return self._outcome(wire.Kind.VALUE, None), Spooled(b"", "", 0)

    def _host_position(self) -> tuple[int, int]:
        return self.hosts.index, self.hosts.count

    def _add_log(self, text: outcomes.ErrorText) -> outcomes.ErrorText:
        text = super()._add_log(text)
        return replace(text, traceback=f"On {self.hosts.name}:\n{text.traceback}")


class Watch:
    """Check regularly whether another host has ended the attempt.

    In that case call *on_end*, and send SIGTERM to this process.
    """

    def __init__(self, order: wire.Order, objects: Objects, on_end: Callable[[], None]) -> None:
        self._order = order
        self._objects = objects
        self._on_end = on_end
        self._finished = threading.Event()

    def start(self) -> None:
        """Start a thread that checks, because the call may wait for a host that has failed."""
        threading.Thread(target=self._check_regularly, name="kinetic-hosts", daemon=True).start()

    def all_done(self, count: int) -> bool:
        """Return whether every host but the first has succeeded."""
        names = [self._order.part_name(host_done(index)) for index in range(1, count)]
        return len(self._objects.look_up(names)) == len(names)

    def stop(self) -> None:
        """End the checks: this host has finished."""
        self._finished.set()

    def _check_regularly(self) -> None:
        for pause in pauses(0.5, longest_s=5.0):
            if self._finished.wait(pause):
                return
            try:
                is_closed = self._objects.exists(self._order.part_name("outcome"))
            except OSError as exc:
                print(f"kinetic: {exc}", file=sys.stderr)
                continue
            if is_closed and not self._finished.is_set():
                print("kinetic: another host has ended this attempt", file=sys.stderr)
                self._on_end()
                os.kill(os.getpid(), signal.SIGTERM)
                return


def host_done(index: int) -> str:
    """Return the name of the object that marks a host's success; see `wire.attempt_key`."""
    return f"host-{index}.done"


def wait_for_claimant(name: str, objects: Objects, timeout_s: float = 600.0) -> str:
    """Wait for the claim *name*, and return its executor; empty after *timeout_s*."""
    for pause in pauses(0.1, 2.0, timeout_s):
        with contextlib.suppress(KeyError):
            return objects.stat(name).metadata.get("executor", "")
        time.sleep(pause)
    return ""


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
    that the job's first pod made. ``receipt`` is the file for the receipt, and ``group`` the name
    of the LeaderWorkerSet that the pod belongs to; each may be empty.
    """

    order: wire.Order
    key: bytes
    executor: str
    name: str
    first: int
    receipt: str
    hosts: Hosts | None = None
    group: str = ""

    @property
    def host(self) -> int:
        """The index of this host; 0 for a job on one host."""
        return 0 if self.hosts is None else self.hosts.index


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
        hosts=Hosts.of(environ),
        group=environ.get("KINETIC_LWS", ""),
    )


RESTARTED_MARK = "again"
"""A restarted host creates this folder when it closes the attempt that its earlier pod began."""


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
        _print_error()
    finally:
        if os.getpid() != job_pid:
            os._exit(code)  # this is a fork that the user's code made
        remote_runner.exit_process(code)


class _Job:
    """Carry out the attempt in the folders of its container."""

    def __init__(self, pod: Pod, folder: str, channel: Channel) -> None:
        self._restarted_mark = os.path.join(folder, RESTARTED_MARK)
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
        """Claim the attempt, or wait until the first host has claimed it; return the next step."""
        hosts, executor = self._pod.hosts, self._pod.executor
        if hosts is None:
            return self._claim(Invocation)
        claim = self._order.part_name("claim")
        if not hosts.is_first:
            return functools.partial(
                self._run_on_other_host, hosts, wait_for_claimant(claim, self._objects)
            )
        if self._pod.group and self._objects.exists(claim):
            return functools.partial(self._close_restarted, hosts, executor)
        return self._claim(HostCall)

    def _claim(self, kind: type[Invocation]) -> Callable[[], int]:
        """Close earlier attempts and claim this one; return a function for the remaining steps."""
        pod = self._pod
        close_earlier(self._order, pod.key, pod.first, self._objects)
        steps = self._make_attempt(kind, pod.executor).steps()
        for _ in ("claim", "check"):
            next(steps)
        return functools.partial(take_all, steps)

    def _run_on_other_host(self, hosts: Hosts, executor: str) -> int:
        """Run the job on a host other than the first; return the exit code.

        *executor* has claimed the attempt, for all hosts; it is empty if no claim came in time.
        """
        if not executor:
            print("kinetic: the first host did not claim the attempt in time", file=sys.stderr)
            return wire.EXIT_RETRY
        if executor == wire.VOID or self._objects.exists(self._order.part_name("outcome")):
            return self._exit_code(executor)
        metadata = {"executor": self._pod.executor}
        if not self._objects.create(self._order.part_name(f"host-{hosts.index}"), b"", metadata):
            return self._close_restarted(hosts, executor)
        done_name = self._order.part_name(host_done(hosts.index))
        return self._make_attempt(HostCall, executor).run_on_other_host(done_name)

    def _close_restarted(self, hosts: Hosts, executor: str) -> int:
        """Close the attempt: this host restarted, and the function must not run twice."""
        os.mkdir(self._restarted_mark)
        problem = f"{hosts.name} ended without an outcome and restarted"
        death = Death(message=f"{problem}; kinetic doesn't run the function twice", reason="lost")
        order = self._order
        close_attempt(order, self._pod.key, order.attempt, executor, death, self._objects)
        return self._exit_code(executor)

    def _make_attempt(self, kind: type[Invocation], executor: str) -> PodAttempt:
        """Return the attempt, whose call is of the class *kind*."""
        pod = self._pod
        call = kind(self._order, self._objects, self._place, self._stopping, executor)
        invoke = call.run
        if isinstance(call, HostCall) and pod.hosts is not None:
            call.hosts = pod.hosts
            call.watch = Watch(
                self._order,
                self._objects,
                lambda: self._channel.report_exit_code(self._exit_code(executor)),
            )
            invoke = call.run_watched
        attempt = PodAttempt(self._order, pod.key, executor, self._objects, self._stopping, invoke)
        attempt.receipt, attempt.host = pod.receipt, pod.host
        attempt.output = self._output
        if pod.host:
            metrics.ignore()
        else:
            metrics.begin(self._order, pod.key, self._objects, self._committing(attempt))
        return attempt

    def _committing(self, attempt: PodAttempt) -> metrics.Commit:
        """Return a function that commits an outcome of *attempt*, and tells the guard."""

        def commit(outcome: wire.Outcome, body: Spooled) -> int:
            code = attempt.commit(outcome, body)
            self._channel.report_exit_code(code)
            return code

        return commit

    def _exit_code(self, executor: str) -> int:
        return exit_code_for(Opening(self._order, self._pod.key, executor, self._objects))

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


def _print_error() -> None:
    """Print why there is no outcome; only a defect of the runner shows a traceback."""
    import traceback

    error = sys.exception()
    with contextlib.suppress(OSError, ValueError):
        if isinstance(error, OSError):  # the store, or the disk
            print(f"kinetic: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
