"""The loop of the supervisor. It waits for clients, fork servers, signals, and timers.

Each turn of the loop writes its decisions to the journal before it sends them. So a client never
sees an event that the next supervisor can't read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import os
import re
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from kinetic._runner.protocol import wire
from kinetic._runner.protocol.private import make_folder
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._supervisor.jobs import (
    QUEUED_S,
    Action,
    Arm,
    Discard,
    Due,
    Job,
    Record,
    Send,
    Slots,
    Start,
    State,
    Table,
    Tell,
)
from kinetic._supervisor.journal import Journal, supervisor_line
from kinetic._supervisor.parents import Ended, Parent, Parents, Refused, Sweeper
from kinetic._supervisor.protocol import Channel, JobHeader, Places
from kinetic._supervisor.server import Connection, Ending, Owner, Server
from kinetic.job_status import Reason

FRESH_S = 10.0
"""Maximum age, in seconds, of the kernel's count of kills when a job starts."""


class KernelKills:
    """Detects whether the kernel has killed a process for memory since the last job started."""

    def __init__(self, count: Callable[[], int | None]) -> None:
        self._count = count
        self._before = count()
        self._read_at = 0.0

    def note(self, now: float) -> None:
        """Read the count again if it is old when a job starts: earlier kills aren't the job's."""
        if now - self._read_at > FRESH_S:
            self._read_at, self._before = now, self._count()

    def happened(self) -> bool:
        """Return whether the kernel has killed a process since the stored count was read."""
        after = self._count()
        return after is not None and self._before is not None and after > self._before


def count_kills() -> int | None:
    """Return how many processes of this control group, or machine, the kernel has killed."""
    for path in _counters():
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found is not None:
            return int(found[1])
    return None


def _counters() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    paths: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return paths  # macOS keeps no count
    for line in lines:
        _, kinds, group = line.split(":", 2)
        group = group.lstrip("/")
        if not kinds:
            paths.append(root / group / "memory.events")
        elif "memory" in kinds.split(","):
            paths.append(root / "memory" / group / "memory.oom_control")
    return [*paths, Path("/proc/vmstat")]


def acquire(path: Path, *, wait: bool) -> int | None:
    """Return a descriptor that holds the lock; None if another process has it.

    Raises:
        OSError: The file cannot be made or locked.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


IDLE_S = 300.0
FIRST_CLIENT_S = 5.0
"""How long to wait for the client that started this process."""

SHUTDOWN_GRACE_S = 3.0
SWEEP_S = 600.0
FIRST_COLLECTION_S, COLLECTION_S = 60.0, 3600.0
TIMERS = 4096
"""After this many new timers, drop the timers of ended jobs, which may be due only in days."""

START_AGAIN_S = 1.0
"""Pause before the next start, after descriptors, disk space, or memory ran out."""

PASSING = frozenset(
    {
        errno.EAGAIN, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
        errno.ENOSPC,
    }
)  # fmt: skip
"""Errors at a job's start that may be temporary."""


def say(text: str) -> None:
    """Write a line to the supervisor's own log."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{stamp} supervisor {os.getpid()}: {text}\n")
        sys.stderr.flush()


class Timers:
    """The timers of open jobs, by the monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Due, Job]] = []
        self._made = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> float | None:
        """When the next timer is due."""
        return self._heap[0][0] if self._heap else None

    def set(self, at: float, what: Due, job: Job) -> None:
        """Set a timer of *job*."""
        self._made += 1
        heapq.heappush(self._heap, (at, self._made, what, job))
        if self._made % TIMERS == 0:
            over = (State.ENDED, State.GONE)
            self._heap = [one for one in self._heap if one[3].state not in over]
            heapq.heapify(self._heap)

    def due(self, now: float) -> tuple[Due, Job] | None:
        """Remove and return a timer that is due; None if there is none."""
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, what, job = heapq.heappop(self._heap)
        return what, job


class Supervisor:
    """Serves *listener* until it has been idle for a while, or gets SIGTERM."""

    def __init__(
        self,
        places: Places,
        listener: socket.socket,
        table: Table,
        slots: Slots,
        journal: Journal,
        environ: Mapping[str, str],
    ) -> None:
        self._places = places
        self._logs, self._work = str(places.logs), str(places.work)
        self._listener = listener
        self._table = table
        self._gpus = bool(slots.gpus)
        self._journal = journal
        self._server = Server(table, self._launch, self._delete, self._discard)
        self._sweeper = Sweeper(places.trash, places.spares)
        self._parents = Parents(places, environ, self._sweeper)
        self._kills = KernelKills(count_kills)
        self._timers = Timers()
        self._selector = selectors.DefaultSelector()
        self._owners: dict[int, Owner] = {}
        self._orphans: dict[Job, JobHeader] = {}
        self._flushing: set[Parent] = set()
        self._full: set[Channel | Parent] = set()
        self._idle_s = seconds(environ.get("KINETIC_LOCAL_IDLE_S", ""), IDLE_S)
        self._environ = environ
        self._swept_at = time.monotonic()
        self._collection_at = self._swept_at + min(FIRST_COLLECTION_S, self._idle_s)
        self._busy_at = self._swept_at + FIRST_CLIENT_S
        self._reported_at = 0.0
        self._start_again_at = 0.0
        self._ending = False

    def run(self) -> None:
        """Run the loop; when it returns, no process of a job is left."""
        self._listener.setblocking(False)
        self._select(self._listener, self._on_client)
        wake = _wake_on_signals()
        self._select(wake, lambda: self._on_signals(wake))
        while not self._over():
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self._schedule()
            self._handle_due_timers()
            self._schedule()
            self._flush()
        self._shut_down()

    # --- events ------------------------------------------------------------------------

    def _on_client(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as exc:
            say(f"can't accept a client: {exc}")
            time.sleep(0.1)  # too many open files: clients wait, jobs continue
            return
        connection = Connection(sock)
        self._server.connections.add(connection)
        self._select(connection.channel, lambda: self._on_connection(connection))

    def _on_connection(self, connection: Connection) -> None:
        self._server.dirty.add(connection)  # the client may have room for unsent messages
        try:
            messages = connection.channel.receive()
            for message in messages or ():
                self._server.handle(connection, message)
        except Exception as exc:  # one client's bad message must not end the jobs of others
            say(f"disconnecting a client: {exc!r:.500}")
            messages = None
        if messages is None:
            self._drop(connection)

    def _on_parent(self, parent: Parent) -> None:
        self._flushing.add(parent)
        news = parent.hear()
        self._learn(news or ())
        if news is None:
            self._dismiss(parent)
            self._reap()

    def _learn(self, news: Iterable[Ended | Refused]) -> None:
        now = time.time()
        for one in news:
            self._parents.ended(one.job)
            actions: list[Action]
            if isinstance(one, Ended):
                memory = one.status == -signal.SIGKILL and self._kills.happened()
                actions = self._table.ended(
                    one.job,
                    now,
                    status=one.status,
                    out_of_memory=memory,
                    meaning=_meaning(one.job, one.status, self._places),
                )
            else:
                actions = self._not_started(one.job, one.error)
            self._perform(actions)

    def _not_started(self, job: Job, exc: OSError) -> list[Action]:
        """End *job*, or queue it again if the error may pass and other items of its batch ran."""
        words = _cannot(exc)
        if exc.errno not in PASSING or not self._table.may_wait(job):
            return self._table.failed(job, time.time(), Reason.SETUP, words)
        if not job.message:
            say(f"{job.name} waits: {words}")
        self._start_again_at = time.monotonic() + START_AGAIN_S
        return self._table.postpone(job, f"waiting: {words}; kinetic keeps trying")

    def _on_signals(self, wake: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in wake.recv(4096) and not self._ending:
                self._end("its supervisor was asked to stop")
        self._reap()

    def _reap(self) -> None:
        for parent, jobs in self._parents.reap():
            for job in jobs:
                self._parents.ended(job)
                self._perform(self._table.failed(job, time.time(), *self._cause_of_death(parent)))

    def _cause_of_death(self, parent: Parent) -> tuple[Reason, str]:
        if self._ending:
            return Reason.LOST, "its supervisor was asked to stop, and stopped the job"
        if parent.ready or (parent.status or 0) < 0:
            return Reason.LOST, f"its parent process ({parent.pid}) died, and the job with it"
        words = self._parents.last_words(parent)
        command = " ".join(parent.key.command)
        return Reason.SETUP, f"the interpreter {command} can't run jobs: {words}"

    def _handle_due_timers(self) -> None:
        now = time.monotonic()
        while (due := self._timers.due(now)) is not None:
            what, job = due
            left = self._parents.time_left(job, now) if what is Due.DEADLINE else 0.0
            if left > 0:  # the timeout counts from the function's call
                self._timers.set(now + left, what, job)
            else:
                self._perform(self._table.due(what, job, time.time()))
        for parent in self._parents.settling():
            self._learn(parent.settle())
            self._flushing.add(parent)
        for parent in self._parents.spare():
            self._dismiss(parent)
        if now >= self._sweeper.due:
            self._sweeper.drop_spares()
        self._sweeper.sweep()
        if self._parents.dying:
            self._reap()
        held = now < self._start_again_at
        if self._table.queued and not held and now >= self._reported_at + QUEUED_S:
            self._reported_at = now
            self._perform(self._table.held_up(time.time()))
        if now - self._swept_at > SWEEP_S:
            self._swept_at = now
            self._perform(self._table.expired(time.time()))
        if now >= self._collection_at:
            self._collection_at = now + COLLECTION_S
            self._sweeper.aside(self._collect)
        if self._table.busy or self._server.connections or self._parents.dying:
            self._busy_at = now

    def _collect(self) -> None:
        """Collect unused content of the store and the cache, in a helper process."""
        from kinetic import _collector

        home, limits = self._places.home, _collector.Limits.of(self._environ)
        store = _collector.Directory(_collector.local_store(home, self._environ))
        _collector.collect(home, limits, store, limits)

    # --- actions -----------------------------------------------------------------

    def _launch(self, header: JobHeader, body: bytes, client: int) -> None:
        if self._ending:
            raise Ending
        actions = self._table.add(header, body, time.time())
        try:
            self._perform(actions)
        except OSError:
            self._table.forget_unwritten(self._table.jobs[header.name])
            raise
        if header.owned and client:
            self._own(self._table.jobs[header.name], client)

    def _own(self, job: Job, client: int) -> None:
        """End *job* when the process *client* ends."""
        owner = self._owners.get(client)
        if owner is None:
            try:
                owner = self._owners[client] = Owner(client)
            except ProcessLookupError:
                self._orphan(job)
                return
            except OSError as exc:  # the job keeps running, as a job with a handle does
                say(f"{job.name} won't end with process {client}: {exc}")
                return
            self._select(owner, lambda: self._on_owner_gone(client))
        owner.jobs.add(job)

    def _on_owner_gone(self, client: int) -> None:
        owner = self._owners.get(client)  # the owner's last job may have ended in this turn
        for job in [*owner.jobs] if owner is not None else []:
            say(f"{job.name} ends with process {client}, which waited for it")
            self._orphan(job)

    def _orphan(self, job: Job) -> None:
        """End *job*, whose only client has ended, and remove its objects afterwards."""
        if job.header is not None:  # otherwise the job has just ended
            self._orphans[job] = job.header
        self._disown(job)
        self._delete(job)

    def _disown(self, job: Job) -> None:
        for client, owner in [*self._owners.items()]:
            owner.jobs.discard(job)
            if not owner.jobs:
                self._selector.unregister(owner)
                self._owners.pop(client).close()

    def _delete(self, job: Job) -> None:
        self._perform(self._table.delete(job))

    def _discard(self, names: Collection[str], submission: str) -> None:
        """Remove the logs of jobs that aren't in the table."""
        found = {f"{name}.log" for name in names}
        if submission:
            with contextlib.suppress(FileNotFoundError), os.scandir(self._logs) as logs:
                found |= {log.name for log in logs if log.name.startswith(f"{submission}-")}
        for log in found:
            if "/" not in log and log.removesuffix(".log") not in self._table.jobs:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._logs}/{log}")

    def _schedule(self) -> None:
        if time.monotonic() < self._start_again_at:
            return
        while not self._ending and (job := self._table.next()) is not None:
            self._kills.note(time.monotonic())
            try:
                self._make_folders()
                self._perform(self._table.start(job, _new_executor(), time.time()))
            except OSError as exc:
                self._parents.ended(job)
                self._perform(self._not_started(job, exc))
                if job.state is State.QUEUED:
                    return

    def _make_folders(self) -> None:
        """Make the folders again if a user has deleted them."""
        for folder in (self._logs, self._work):
            if not os.path.isdir(folder):
                make_folder(folder)
                say(f"{folder} was deleted while jobs used it; kinetic has made it again")

    def _perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order.

        Raises:
            OSError: The first action failed, and no client has heard of it.
        """
        for action in actions:
            match action:
                case Record(line, vital):
                    if vital:
                        self._journal.append(line)
                    else:
                        self._journal.note(line)
                case Tell(job):
                    if job.state in (State.ENDED, State.GONE):
                        self._disown(job)
                    if job.state is State.GONE and (header := self._orphans.pop(job, None)):
                        _remove_objects(header)
                    self._server.notify(job)
                case Start(job):
                    self._start(job)
                case Send(job, number):
                    if (parent := self._parents.signal(job, number)) is not None:
                        self._flushing.add(parent)
                case Arm(delay, what, job):
                    self._timers.set(time.monotonic() + delay, what, job)
                case Discard(name):
                    with contextlib.suppress(OSError):
                        os.unlink(f"{self._logs}/{name}.log")

    def _start(self, job: Job) -> None:
        assert job.header is not None and job.grant is not None
        job.started = time.monotonic()
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(job.grant.gpus)} if self._gpus else {}
        parent = self._parents.start(job, job.header, gpus)
        if not parent.ready and parent.fileno() not in self._selector.get_map():
            self._select(parent, lambda: self._on_parent(parent))
        self._flushing.add(parent)

    def _flush(self) -> None:
        """Write the kept journal lines, then send this turn's messages to parents and clients."""
        with contextlib.suppress(OSError):
            self._journal.write_kept()
        if self._journal.crowded(len(self._table.jobs)):
            with contextlib.suppress(OSError):
                self._journal.rewrite([supervisor_line(), *self._table.lines()])
        for parent in self._flushing:
            with contextlib.suppress(OSError):  # `hear` notices that the parent has ended
                parent.flush()
            self._wait_for_room(parent)
        self._flushing.clear()
        # Tidy after the parents' flush, so that queued jobs start first, and before clients
        # learn which jobs have ended.
        self._parents.tidy()
        self._tell_clients()

    def _tell_clients(self) -> None:
        now, hurry = time.monotonic(), self._ending or not self._table.busy
        for connection in [*self._server.dirty]:
            try:
                all_sent = connection.pump(now, hurry=hurry)
            except OSError:
                self._drop(connection)
                continue
            self._wait_for_room(connection.channel)
            if all_sent:
                self._server.dirty.discard(connection)

    def _wait_for_room(self, channel: Channel | Parent) -> None:
        if not channel.unsent and channel not in self._full:
            return
        key = self._selector.get_key(channel)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.unsent else 0)
        if key.events != events:
            self._selector.modify(channel, events, key.data)
        if channel.unsent:
            self._full.add(channel)
        else:
            self._full.discard(channel)

    def _select(self, source: Any, handler: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, handler)

    def _dismiss(self, parent: Parent) -> None:
        self._selector.unregister(parent)
        self._flushing.discard(parent)
        self._full.discard(parent)
        self._parents.dismiss(parent)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.channel)
        self._full.discard(connection.channel)
        self._server.close(connection)

    # --- the end ---------------------------------------------------------------------------------

    def _patience(self) -> float | None:
        now = time.monotonic()
        moments = [self._reported_at + QUEUED_S] if self._table.queued else []
        moments += [self._swept_at + SWEEP_S, self._collection_at, self._sweeper.due]
        moments += [self._start_again_at] if now < self._start_again_at else []
        if (first := self._timers.first) is not None:
            moments.append(first)
        if self._parents.dying or self._parents.settling():
            moments.append(now + 0.2)
        if not self._table.busy and not self._server.connections:
            moments.append(self._busy_at + self._idle_s)
        moments += [connection.next_word for connection in self._server.dirty]
        return max(0.0, min(moments) - now)

    def _over(self) -> bool:
        if self._ending:
            return not self._table.busy
        if self._table.busy or self._server.connections or self._parents.dying:
            return False
        return time.monotonic() - self._busy_at >= self._idle_s and self._leave_quietly()

    def _leave_quietly(self) -> bool:
        """Stop listening, unless a client is just connecting; return whether it stopped."""
        starting = acquire(self._places.starting, wait=False)
        before = len(self._server.connections)
        if starting is not None:
            self._on_client()
        if starting is None or len(self._server.connections) > before:
            self._busy_at = time.monotonic()
            if starting is not None:
                os.close(starting)
            return False
        # The lock stays held until this process has ended: the next supervisor waits for it.
        say("idle; shutting down")
        self._stop_listening()
        return True

    def _end(self, why: str) -> None:
        say(f"shutting down: {why}")
        self._ending = True
        acquire(self._places.starting, wait=True)
        self._stop_listening()
        self._perform(self._table.shut_down(time.time(), SHUTDOWN_GRACE_S, why))

    def _stop_listening(self) -> None:
        self._selector.unregister(self._listener)
        with contextlib.suppress(OSError):
            self._places.socket.unlink()
        self._listener.close()

    def _shut_down(self) -> None:
        self._flush()
        self._parents.dismiss_all()
        until = time.monotonic() + SHUTDOWN_GRACE_S
        while self._parents.dying and time.monotonic() < until:
            self._selector.select(0.05)
            self._parents.reap()
        self._parents.kill_all()
        self._sweeper.drop_spares(unused_s=0.0)
        self._sweeper.sweep()
        self._journal.close()


def _meaning(job: Job, status: int, places: Places) -> str:
    """Explain the exit code *status* of a runner; empty if it isn't one of the runner's codes."""
    if job.header is None or status not in (
        wire.EXIT_FINAL,
        wire.EXIT_SETUP,
        wire.EXIT_UNCOMMITTED,
    ):
        return ""
    if status == wire.EXIT_SETUP:
        return (
            f"kinetic couldn't prepare the job in {places.work}; see its log and the free disk "
            "space"
        )
    store = job.header.store
    if status == wire.EXIT_UNCOMMITTED:
        return f"kinetic couldn't write to the store {store}; see its log and the free disk space"
    return f"the store {store} has nothing to run for it; it was removed, or cleaned up"


def _remove_objects(header: JobHeader) -> None:
    """Remove the objects of a single job from its store; after an error, `cleanup` can do it."""
    try:
        objects = DirectoryObjects.from_url(header.store)
        objects.delete([one.name for one in objects.list(header.scope)])
    except (OSError, ValueError) as exc:
        say(f"the objects of {header.name} could not be removed: {exc}")


def _wake_on_signals() -> socket.socket:
    """Return a socket that receives a byte for each signal."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _noted)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return ours


def _noted(signum: int, frame: object) -> None:
    """Do nothing: the wake-up socket reports the signal."""


def _new_executor() -> str:
    """Return a new random ID of a process."""
    return os.urandom(16).hex()


def _cannot(exc: OSError) -> str:
    what = f": {exc.filename}" if exc.filename else ""
    return f"the job couldn't be started: {exc.strerror or exc}{what}"


def seconds(text: str, default: float) -> float:
    """Parse a setting in seconds; return *default* if it isn't a number."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return default
