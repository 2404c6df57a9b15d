"""The loop of the supervisor. It waits for clients, fork servers, signals, and timers.

The end of a supervisor ends its jobs. So the next one doesn't have to know them: that it doesn't
know a job proves that the job's process has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinetic._runner.job import processes
from kinetic._runner.job.kernel_kills import KernelKills, kills_on_machine
from kinetic._runner.protocol.private import make_folder
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._supervisor import rounds
from kinetic._supervisor.jobs import (
    QUEUED_S,
    Action,
    Job,
    RemoveLog,
    Report,
    SendSignal,
    SetTimer,
    State,
    Table,
)
from kinetic._supervisor.parents import Change, Parent, Parents, Sweeper, discard_folders
from kinetic._supervisor.protocol import JobHeader, Stream, SupervisorPaths
from kinetic._supervisor.server import Connection, Server, ShuttingDown
from kinetic.job_status import Reason


def acquire(path: Path, *, wait: bool) -> int | None:
    """Lock the file *path*, and return its descriptor; if not *wait*, None if it was locked."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as exc:
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            return None
        raise
    return fd


IDLE_S = 300.0
"""How long (seconds) to run without clients and jobs."""

FIRST_CLIENT_S = 5.0
"""Seconds between the start and the first idle time: the first client connects in this time."""

SHUTDOWN_GRACE_S = 3.0
FIRST_COLLECTION_S, COLLECTION_S = 60.0, 600.0


def write_log(text: str) -> None:
    """Write a line to the supervisor's own log."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{stamp} supervisor {os.getpid()}: {text}\n")
        sys.stderr.flush()


class Supervisor:
    """Serve clients of *listener*, until this process was idle for a while or gets SIGTERM."""

    def __init__(
        self,
        paths: SupervisorPaths,
        listener: socket.socket,
        table: Table,
        environ: Mapping[str, str],
    ) -> None:
        self._paths = paths
        self._logs, self._work = str(paths.logs), str(paths.work)
        self._listener = listener
        self._table = table
        self._has_gpus = bool(table.slots.gpus)
        self._rounds = rounds.Rounds(os.urandom(4).hex())
        self._server = Server(
            *(table, self._launch, self._delete, self._remove_logs),
            *(self._scale, self._grow, self._end_rounds, self._perform),
        )
        self._sweeper = Sweeper(paths.trash, paths.spares)
        self._parents = Parents(paths, environ, self._sweeper)
        self._kills = KernelKills(kills_on_machine)
        self._timers: dict[Job, float] = {}  # when the timer of a job is due
        self._selector = selectors.DefaultSelector()
        self._orphans: set[Job] = set()  # their objects are removed at their end
        self._idle_s = parse_seconds(environ.get("KINETIC_LOCAL_IDLE_S", ""), IDLE_S)
        self._environ = environ
        now = time.monotonic()
        self._collection_at = now + min(FIRST_COLLECTION_S, self._idle_s)
        self._busy_at = now + FIRST_CLIENT_S
        self._waits_reported_at = 0.0
        self._stop_requested = False
        self._ending = False

    def run(self) -> None:
        """Run the loop; when it returns, no process of a job is left."""
        self._listener.setblocking(False)
        self._register(self._listener, self._on_client)
        wakeup = _wake_on_signals(self._request_stop)
        self._register(wakeup, lambda: self._on_signals(wakeup))
        while not self._try_to_finish():
            for key, _ in self._selector.select(self._select_timeout()):
                key.data()
            if self._stop_requested and not self._ending:
                cause = "its supervisor was asked to stop"
                write_log(f"shutting down: {cause}")
                self._ending = True
                acquire(self._paths.starting, wait=True)  # a client may be starting another one
                self._stop_listening()
                self._perform(self._table.shut_down(time.time(), SHUTDOWN_GRACE_S, cause))
            self._schedule()
            self._do_due_work()
            self._schedule()
            self._flush()
        self._shut_down()

    # --- events ------------------------------------------------------------------------

    def _on_client(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # the client has left already
            return
        except OSError as exc:
            write_log(f"can't accept a client: {exc}")
            time.sleep(0.1)  # probably too many open files: clients wait, jobs continue
            return
        connection = Connection(sock)
        self._server.connections.add(connection)
        self._register(connection.channel, lambda: self._on_connection(connection))

    def _on_connection(self, connection: Connection) -> None:
        try:
            messages = connection.channel.receive()
            for message in messages or ():
                self._server.handle(connection, message)
        except Exception as exc:  # one client's bad message must not end the jobs of others
            write_log(f"disconnecting a client: {exc!r:.500}")
            messages = None
        if messages is None:
            self._disconnect(connection)

    def _on_parent(self, parent: Parent) -> None:
        changes = parent.receive()
        self._handle_changes(changes or ())
        if changes is None:
            self._dismiss(parent)
            self._reap()

    def _handle_changes(self, changes: Iterable[Change]) -> None:
        """Record the jobs that have ended, or couldn't be forked."""
        for job, result in changes:
            if isinstance(result, OSError):
                self._fail_start(job, result)
                continue
            self._parents.release(job)
            by_kernel = result == -signal.SIGKILL and self._kills.has_increased()
            now = time.time()
            self._perform(self._table.record_exit(job, now, status=result, out_of_memory=by_kernel))
            self._follow_worker(job, result)

    def _fail(self, job: Job, reason: Reason, message: str) -> None:
        """End a job that has no process and no exit code; if it is a worker, replace it."""
        self._parents.release(job)
        self._perform(self._table.fail(job, time.time(), reason, message))
        self._follow_worker(job, 1)

    def _fail_start(self, job: Job, exc: OSError) -> None:
        file = f": {exc.filename}" if exc.filename else ""
        message = f"the job couldn't be started: {exc.strerror or exc}{file}"
        write_log(f"{job.name}: {message}")
        is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        self._fail(job, Reason.STORE_FULL if is_full else Reason.SETUP, message)

    def _follow_worker(self, job: Job, status: int) -> None:
        """If *job* is a worker, replace it, or end the others of its round."""
        result = self._rounds.ended(job.name, status, time.monotonic() - job.started)
        if isinstance(result, rounds.Start) and not self._ending:
            failed = job.reason in (Reason.SETUP, Reason.STORE_FULL)
            waits = f"waiting to start again: {job.message}" if failed else ""
            self._launch(result.header, result.body, waits, result.pause_s)
        elif isinstance(result, list):
            for name in result:
                if (worker := self._table.jobs.get(name)) is not None:
                    self._perform(self._table.dismiss(worker, time.time()))

    def _scale(self, header: JobHeader, body: bytes, number: int, workers: int) -> int:
        """Begin a round of workers, or add workers to it; return how many it has."""
        return self._start_workers(header.name, self._rounds.scale(header, body, number, workers))

    def _grow(self, name: str, workers: int) -> int:
        """Add workers to a round that was begun; return how many it has."""
        return self._start_workers(name, self._rounds.grow(name, workers))

    def _start_workers(self, name: str, starts: Iterable[rounds.Start]) -> int:
        if self._ending:
            raise ShuttingDown
        for start in starts:
            self._launch(start.header, start.body)
        return self._rounds.count(name)

    def _end_rounds(
        self, names: Collection[str], labels: Mapping[str, str] | None, keep_logs: bool
    ) -> None:
        for name in self._rounds.delete(names, labels):
            if (worker := self._table.jobs.get(name)) is not None:
                self._delete(worker, keep_logs)

    def _on_signals(self, wakeup: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            wakeup.recv(4096)
        self._reap()

    def _request_stop(self, signum: int, frame: object) -> None:
        self._stop_requested = True

    def _reap(self) -> None:
        for parent, jobs in self._parents.reap():
            for job in jobs:
                self._fail(job, *self._cause_of_death(parent))

    def _cause_of_death(self, parent: Parent) -> tuple[Reason, str]:
        """Return a reason and a message for the jobs of *parent*, which has ended."""
        if self._ending:
            return Reason.LOST, "its supervisor was asked to stop, and stopped the job"
        if parent.ready or (parent.status or 0) < 0:
            return Reason.LOST, f"its parent process ({parent.pid}) died, and the job with it"
        error_output = self._parents.read_stderr_tail(parent)
        command = " ".join(parent.key.command)
        return Reason.SETUP, f"the interpreter {command} can't run jobs: {error_output}"

    def _do_due_work(self) -> None:
        """Handle due timers, and do the periodic work, such as cleaning up and forgetting jobs."""
        now = time.monotonic()
        for job in [job for job, due_at in self._timers.items() if due_at <= now]:
            del self._timers[job]
            self._perform(self._table.handle_timer(job, time.time()))
        for parent in self._parents.parents_with_ending_jobs():
            self._handle_changes(parent.finish_ended_jobs())
        for parent in self._parents.surplus_parents():
            self._dismiss(parent)
        self._sweeper.drop_spares()
        self._sweeper.sweep()
        if self._parents.has_dismissed:
            self._reap()
        if self._table.has_queued_jobs and now >= self._waits_reported_at + QUEUED_S:
            self._waits_reported_at = now
            self._perform(self._table.report_waiting(time.time()))
        self._perform(self._table.forget_expired(time.time()))
        if now >= self._collection_at:
            self._collection_at = now + COLLECTION_S
            # If no process can be started, the next collection retries.
            with contextlib.suppress(OSError):
                self._sweeper.helper_pids.add(processes.run_in_background(self._collect))
        if self._busy:
            self._busy_at = now

    def _collect(self) -> None:
        """Remove unused content of the store and the cache; this runs in a helper process."""
        from kinetic import _collector

        home, limits = self._paths.home, _collector.Limits.of(self._environ)
        store = _collector.Directory(_collector.local_store(home, self._environ))
        _collector.collect(home, limits, store)

    # --- actions -----------------------------------------------------------------

    def _launch(
        self, header: JobHeader, body: bytes, message: str = "", pause_s: float = 0.0
    ) -> Job:
        """Queue a job, after a pause that *message* explains."""
        if self._ending:
            raise ShuttingDown
        if header.single:
            header = replace(header, worker=self._rounds.single_worker)
        job = Job(
            name=header.name,
            labels=header.labels,
            created=time.time(),
            header=header,
            body=body,
            message=message,
        )
        self._perform(self._table.add(job, pause_s))
        self._server.notify(job)
        return job

    def _delete(self, job: Job, keep_log: bool = False) -> None:
        if job.worker is not None:  # the worker finds the request that stops its item
            self._server.tell_worker(job.worker, {"news": True})
        else:
            self._perform(self._table.delete(job, keep_log=keep_log))

    def _remove_logs(self, names: Collection[str], submission: str) -> None:
        """Remove the logs of the jobs *names* and of *submission*, but keep those of known jobs."""
        log_names = {f"{name}.log" for name in names}
        if submission:
            with contextlib.suppress(FileNotFoundError), os.scandir(self._logs) as logs:
                log_names |= {
                    entry.name for entry in logs if entry.name.startswith(f"{submission}-")
                }
        for log_name in log_names:
            if "/" not in log_name and log_name.removesuffix(".log") not in self._table.jobs:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._logs}/{log_name}")

    def _schedule(self) -> None:
        """Start queued jobs while slots are free."""
        while not self._ending and (job := self._table.take_next()) is not None:
            if job.state is State.RUNNING:  # a worker that had given its slots back
                self._server.tell_worker(job, {"slots": True, "gpus": self._visible_gpus(job)})
                continue
            self._kills.refresh_if_stale(time.monotonic())
            try:
                self._make_folders()
                self._perform(self._table.start(job, os.urandom(16).hex()))
                self._start(job)
            except OSError as exc:
                self._fail_start(job, exc)
        for worker in self._table.ask_back():
            if worker.grant is not None:
                self._server.tell_worker(worker, {"slots": not worker.asked_back})

    def _make_folders(self) -> None:
        """Make the folders again if a user has deleted them."""
        for folder in (self._logs, self._work):
            if not os.path.isdir(folder):
                make_folder(folder)
                write_log(f"{folder} was deleted while jobs used it; kinetic has made it again")

    def _perform(self, actions: Iterable[Action]) -> None:
        """Carry out *actions* in order."""
        for action in actions:
            match action:
                case Report(job):
                    self._report(job)
                case SendSignal(job, signal_number):
                    self._parents.signal(job, signal_number)
                case SetTimer(job, delay):
                    self._timers.pop(job, None)
                    if delay is not None:
                        self._timers[job] = time.monotonic() + delay
                case RemoveLog(name):
                    with contextlib.suppress(OSError):
                        os.unlink(f"{self._logs}/{name}.log")

    def _report(self, job: Job) -> None:
        """Tell the clients that *job* has changed."""
        if job.state in (State.ENDED, State.GONE):
            self._timers.pop(job, None)
            for connection in self._server.connections:
                connection.owned.discard(job)
        if job.state is State.GONE and job in self._orphans:
            self._orphans.remove(job)
            try:
                objects = DirectoryObjects.from_url(job.header.store)
                objects.delete([stored.name for stored in objects.list(job.header.scope)])
            except (OSError, ValueError) as exc:
                write_log(f"the objects of {job.name} could not be removed: {exc}")
        self._server.notify(job)

    def _start(self, job: Job) -> None:
        job.started = time.monotonic()
        gpus = self._visible_gpus(job)
        variables = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        parent = self._parents.start(job, variables)
        if not parent.ready and parent.fileno() not in self._selector.get_map():
            self._register(parent, lambda: self._on_parent(parent))

    def _visible_gpus(self, job: Job) -> str | None:
        """Return the GPUs that *job* has, as ``CUDA_VISIBLE_DEVICES``; None if there are none."""
        return ",".join(job.grant.gpus) if self._has_gpus and job.grant is not None else None

    def _flush(self) -> None:
        """Send this turn's messages to parents and clients."""
        for parent in self._parents.connected_parents:
            with contextlib.suppress(OSError):  # `receive` notices that the parent has ended
                parent.flush()
            self._update_write_interest(parent)
        now, immediately = time.monotonic(), self._ending or not self._table.busy
        for connection in [*self._server.connections]:
            try:
                connection.pump(now, immediately=immediately)
            except OSError:
                self._disconnect(connection)
                continue
            self._update_write_interest(connection.channel)

    def _update_write_interest(self, stream: Stream) -> None:
        """Have the selector wait for room in *stream* only while it has unsent bytes."""
        key = self._selector.get_key(stream)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.unsent else 0)
        if key.events != events:
            self._selector.modify(stream, events, key.data)

    def _register(self, source: Any, handler: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, handler)

    def _dismiss(self, parent: Parent) -> None:
        self._selector.unregister(parent)
        self._parents.dismiss(parent)

    def _disconnect(self, connection: Connection) -> None:
        self._selector.unregister(connection.channel)
        self._server.close(connection)
        for job in tuple(connection.owned):
            write_log(f"{job.name} ends with the program that waited for it")
            self._orphans.add(job)
            self._delete(job)

    # --- the end ---------------------------------------------------------------------------------

    def _select_timeout(self) -> float | None:
        """Return the seconds until the next work that no event announces."""
        now = time.monotonic()
        moments = [self._waits_reported_at + QUEUED_S] if self._table.has_queued_jobs else []
        moments += [self._collection_at, self._sweeper.next_drop_at, *self._timers.values()]
        if self._parents.has_dismissed or self._parents.parents_with_ending_jobs():
            moments.append(now + 0.2)
        if not (self._table.busy or self._server.connections or self._table.knows_unheard_end):
            moments.append(self._busy_at + self._idle_s)
        moments += [
            connection.next_send_at
            for connection in self._server.connections
            if connection.has_news and not connection.channel.unsent
        ]
        return max(0.0, min(moments) - now)

    @property
    def _busy(self) -> bool:
        has_work = self._table.busy or self._parents.has_dismissed
        return has_work or bool(self._server.connections)

    def _try_to_finish(self) -> bool:
        """Return whether the loop ends: no job is left after a stop, or the idle time is over."""
        if self._ending:
            return not self._table.busy
        if self._busy or self._table.knows_unheard_end:
            return False
        return time.monotonic() - self._busy_at >= self._idle_s and self._stop_if_no_client()

    def _stop_if_no_client(self) -> bool:
        """Stop listening, unless a client is just connecting; return whether it stopped."""
        starting_fd = acquire(self._paths.starting, wait=False)
        if starting_fd is None:
            self._busy_at = time.monotonic()
            return False
        self._on_client()
        if self._server.connections:
            os.close(starting_fd)
            return False
        # The lock stays held until this process has ended; the next supervisor waits for the lock.
        write_log("idle; shutting down")
        self._stop_listening()
        return True

    def _stop_listening(self) -> None:
        self._selector.unregister(self._listener)
        with contextlib.suppress(OSError):
            self._paths.socket.unlink()
        self._listener.close()

    def _shut_down(self) -> None:
        """End the parents, and kill those that take too long; then clean up."""
        self._flush()
        for parent in self._parents.connected_parents:
            self._parents.dismiss(parent)
        deadline = time.monotonic() + SHUTDOWN_GRACE_S
        while self._parents.has_dismissed and time.monotonic() < deadline:
            self._selector.select(0.05)
            self._parents.reap()
        self._parents.kill_all()
        discard_folders(self._paths)
        with contextlib.suppress(OSError):  # a user has deleted the folder
            self._sweeper.sweep_all()


def _wake_on_signals(request_stop: Callable[[int, object], None]) -> socket.socket:
    """Call *request_stop* on SIGTERM; return a socket that receives a byte for each signal."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGCHLD, processes.ignore_signal)  # it wakes the loop
    for signal_number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    return reader


def parse_seconds(text: str, default: float) -> float:
    """Return a setting in seconds, at least 0; *default* if *text* isn't a number."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return default
