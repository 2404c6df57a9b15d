"""Manage a supervisor's warm parents (fork servers), and the folders in which its jobs run."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinetic._runner.fork import fork_server
from kinetic._runner.job import outputs, processes, spares, temporary
from kinetic._runner.job.processes import LINUX, MARK, NOBODY, children, mark_of
from kinetic._supervisor.jobs import Job
from kinetic._supervisor.protocol import Stream, SupervisorPaths, inherited_variables

KILL_TIMEOUT_S = 5.0
"""Maximum seconds to wait for killed processes of a job, which may hang in the kernel."""

_dumps = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class ParentKey:
    """The properties of jobs that share a warm parent."""

    command: tuple[str, ...]
    runner: str
    edition: str


Change = tuple[Job, int | OSError]
"""A job that has ended, and its exit code or negated signal; or the error that prevented the fork.
"""


@dataclass(slots=True)
class _Process:
    """The main process of a job.

    ``pid`` is 0 until the parent has reported the fork. ``status`` is the exit code, or None while
    the process runs. The job then waits, at most until ``give_up_at``, for its other processes.
    """

    job: Job
    pid: int = 0
    status: int | None = None
    give_up_at: float = 0.0


class Parent(Stream):
    """A warm parent. In its processes, the environment variable `MARK` starts with *directory*.

    Until it is dismissed, *environment*, if given, is a locked descriptor of its interpreter's
    folder, so that no collection removes the folder.
    """

    def __init__(
        self,
        key: ParentKey,
        pid: int,
        sock: socket.socket,
        directory: str,
        environment: int | None = None,
    ) -> None:
        super().__init__(sock)
        self._environment = environment
        self.key = key
        self.pid = pid
        self.ready = False
        self.status: int | None = None
        self.last_used_at = time.monotonic()
        self.dismissed_at = 0.0
        self.log_offset = 0
        self._directory = directory
        self._in = bytearray()
        self._last_serial = 0
        self._processes: dict[int, _Process] = {}  # by serial
        self._orphan_owners: dict[int, frozenset[str]] = {}

    @property
    def jobs(self) -> list[Job]:
        """The jobs that neither `receive` nor `finish_ended_jobs` has returned yet."""
        return [process.job for process in self._processes.values()]

    @property
    def has_ending_jobs(self) -> bool:
        """Whether processes of an ended job still run."""
        return any(process.status is not None for process in self._processes.values())

    def _running(self) -> dict[int, _Process]:
        return {
            serial: process for serial, process in self._processes.items() if process.status is None
        }

    def start(self, job: Job, fields: Mapping[str, Any]) -> None:
        """Queue the command to fork a process for *job*; it has *fields*, then the job's body."""
        self._last_serial += 1
        self.last_used_at = time.monotonic()
        self._processes[self._last_serial] = _Process(job)
        message = _dumps(fields).encode() + b"\n" + job.body
        self._out += (
            fork_server.COMMAND.pack(fork_server.FORK, self._last_serial, len(message)) + message
        )

    def signal(self, job: Job, signal_number: int) -> None:
        """Queue a signal for the main process of *job*, if that process hasn't ended."""
        running = self._running()
        for serial, process in running.items():
            if process.job is job:
                self._out += fork_server.COMMAND.pack(fork_server.SIGNAL, serial, signal_number)
        all_stopping = all(process.job.stopping is not None for process in running.values())
        if signal_number == signal.SIGKILL and not self.ready and all_stopping:
            self.kill()  # a parent that isn't ready reads no commands, and may hang

    def receive(self) -> list[Change] | None:
        """Return the jobs that ended or weren't forked; None if the parent has ended."""
        data = self.read()
        if data is None:
            return None
        self._in += data
        complete = len(self._in) - len(self._in) % fork_server.REPLY.size
        changes: list[Change] = []
        for kind, serial, pid, code in fork_server.REPLY.iter_unpack(bytes(self._in[:complete])):
            if kind == fork_server.EXITED:
                self._orphan_owners.pop(pid, None)
                if (process := self._processes.get(serial)) is not None:  # not an orphan
                    process.status = code
                    process.give_up_at = time.monotonic() + KILL_TIMEOUT_S
            elif kind == fork_server.FORKED:
                self._processes[serial].pid = pid
            elif kind == fork_server.REFUSED:
                changes.append((self._processes.pop(serial).job, OSError(code, os.strerror(code))))
            else:
                self.ready = True
        del self._in[:complete]
        return changes + self.finish_ended_jobs()

    def finish_ended_jobs(self) -> list[Change]:
        """Kill the remaining processes of ended jobs, and return the jobs that have none.

        `KILL_TIMEOUT_S` after its end, also return a job of which processes remain.
        """
        if not self.has_ending_jobs:
            return []
        unfinished, now = self._kill_orphans(), time.monotonic()
        finished: list[Change] = []
        for serial, process in [*self._processes.items()]:
            is_waiting = process.job.executor in unfinished and now <= process.give_up_at
            if process.status is not None and not is_waiting:
                del self._processes[serial]
                finished.append((process.job, process.status))
        return finished

    def close(self) -> None:
        """Close the connection, upon which the parent ends its jobs and itself."""
        super().close()
        if self._environment is not None:
            os.close(self._environment)
            self._environment = None

    def kill(self) -> None:
        """Kill the parent, unless it has ended."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)

    def kill_jobs(self) -> None:
        """Kill the jobs of this parent, which has died; on Linux, the kernel does so itself."""
        for process in self._running().values():
            if process.pid:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _kill_orphans(self) -> set[str]:
        """Queue kills of remaining processes of ended jobs; return executors that may own them."""
        unfinished: set[str] = set()
        try:
            pids = children(self.pid)
        except OSError:  # no descriptor is free to list processes; the next call retries
            return {job.executor for job in self.jobs}
        running = self._running().values()
        main_pids = {process.pid for process in running}
        executors = {process.job.executor for process in running}
        for pid in pids:
            if pid in main_pids or (owners := self._owners(pid)) is None:
                continue
            if owners.isdisjoint(executors):
                unfinished |= owners
                # The killed process's children become the parent's; the next call kills them.
                self._out += fork_server.COMMAND.pack(fork_server.KILL_ORPHAN, pid, 0)
        return unfinished

    def _owners(self, pid: int) -> frozenset[str] | None:
        """Return the executors that a process may belong to.

        A mark or a session of a job names one executor. Otherwise, the process may belong to any
        job that runs now. None means that the process is a new fork, which soon becomes a job.
        """
        directory, executor = mark_of(pid)
        if directory == self._directory:
            if executor == NOBODY:
                return None
            owners = self._orphan_owners[pid] = frozenset({executor})
            return owners
        if pid in self._orphan_owners:  # the process has removed its mark, or is ending
            return self._orphan_owners[pid]
        with contextlib.suppress(OSError):
            session = os.getsid(pid)
            for process in self._processes.values():
                if process.pid == session:
                    return frozenset({process.job.executor})
        # Any job that runs now may own the process, so kill it when the last of these jobs ends.
        owners = self._orphan_owners[pid] = frozenset(job.executor for job in self.jobs)
        return owners


def processes_of(directory: str) -> list[int]:
    """Find the processes with the mark of *directory*, except this one; none on macOS."""
    if not LINUX:
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and mark_of(pid)[0] == directory]


def kill_processes_of(directory: str) -> list[int]:
    """Kill the processes with the mark of *directory*; return those that outlive 10 s."""
    deadline = time.monotonic() + 10.0
    while (pids := processes_of(directory)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):  # the process has ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return pids


SPARE_LIFETIME_S = 10.0
"""How long (seconds) to keep a spare, the folder of an ended job, that no later job takes."""

REMOVED_AT_ONCE = 64
"""Maximum files and folders in a folder that the supervisor removes without a helper."""


@dataclass(frozen=True, slots=True)
class _Spare:
    """A spare of a project; ``since`` is when the folder became a spare, by the monotonic clock."""

    path: str
    project: str
    since: float


class Sweeper:
    """Make the folders of jobs, keep some for later jobs (spares), and remove the others.

    A helper process removes large folders, which were renamed into *trash*.
    """

    def __init__(self, trash: Path, spares_folder: Path) -> None:
        self.helper_pids: set[int] = set()
        self.keeps_spares = spares.can_keep(str(spares_folder))
        """Whether jobs write the record without which no folder is kept."""
        self._sweeping_pid = 0
        self._trash = str(trash)
        self._spares_folder = str(spares_folder)
        self._spares: list[_Spare] = []  # the oldest first
        self._trashed_folders = _entries(self._trash)

    @property
    def next_drop_at(self) -> float:
        """When to call `drop_spares`, by the monotonic clock; infinite without spares."""
        return self._spares[0].since + SPARE_LIFETIME_S if self._spares else math.inf

    def make_folder(self, folder: str, project: str) -> None:
        """Make the *folder* of a job, by renaming a spare of *project* if there is one."""
        for spare in reversed([spare for spare in self._spares if spare.project == project]):
            self._spares.remove(spare)
            with contextlib.suppress(FileNotFoundError):  # a user has removed the spare
                os.rename(spare.path, folder)
                return
        os.mkdir(folder, 0o700)

    def release_folder(self, folder: str, executor: str, project: str) -> None:
        """Keep the *folder* of an ended job of *project* as a spare, or remove it."""
        parts = {spares.WORKSPACE, project + spares.RECORD}
        with contextlib.suppress(OSError):  # the folder was never made, or is unreadable
            if not temporary.remove_if_small(folder, REMOVED_AT_ONCE):
                self._move_to_trash(f"{folder}/{temporary.LINK}")
            entries = {*os.listdir(folder)}
            if parts <= entries:
                spare = f"{self._spares_folder}/{executor}"
                os.rename(folder, spare)
                for entry in entries - parts:
                    self._move_to_trash(f"{spare}/{entry}")
                self._spares.append(_Spare(spare, project, time.monotonic()))
                return
            if processes.remove_if_small(folder, REMOVED_AT_ONCE):
                return
        self._move_to_trash(folder)

    def drop_spares(self) -> None:
        """Move the spares that no job has taken for `SPARE_LIFETIME_S` to the trash."""
        cutoff = time.monotonic() - SPARE_LIFETIME_S
        while self._spares and self._spares[0].since <= cutoff:
            self._move_to_trash(self._spares.pop(0).path)

    def _move_to_trash(self, folder: str) -> None:
        trashed = f"{self._trash}/{os.urandom(8).hex()}"
        with contextlib.suppress(OSError):
            os.rename(folder, trashed)
            self._trashed_folders.append(trashed)

    def sweep_all(self) -> None:
        """Start a helper that removes all of the trash, also what a helper that died has left."""
        self._trashed_folders, self._sweeping_pid = _entries(self._trash), 0
        self.sweep()

    def sweep(self) -> None:
        """Start a helper that removes the folders in the trash, unless such a helper runs."""
        if self._trashed_folders and self._sweeping_pid not in self.helper_pids:
            with contextlib.suppress(OSError):  # no process can be started: the next call retries
                remove = functools.partial(temporary.remove_all, self._trashed_folders)
                self._sweeping_pid = processes.run_in_background(remove)
                self.helper_pids.add(self._sweeping_pid)
                self._trashed_folders = []


def discard_folders(paths: SupervisorPaths) -> None:
    """Move the folders of all jobs, none of which runs, and all spares to the trash."""
    for folder in (paths.work, paths.spares):
        with contextlib.suppress(OSError):  # a user has deleted the folder
            for entry in _entries(str(folder)):
                with contextlib.suppress(OSError):
                    os.rename(entry, paths.trash / os.urandom(8).hex())


def _entries(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.path for entry in entries]


SPARE_PARENTS = 4
"""How many warm parents without a job to keep."""

MAX_STDERR_BYTES = 2000
_SOCKET_FD = 3


class Parents:
    """The warm parents of a supervisor, and the folders of their jobs."""

    def __init__(
        self, paths: SupervisorPaths, environ: Mapping[str, str], sweeper: Sweeper
    ) -> None:
        self._paths = paths
        self._sweeper = sweeper
        self._directory = str(paths.state)
        self._environment = inherited_variables(environ, "KINETIC_HOME")
        self._environment[MARK] = f"{self._directory}:{NOBODY}"
        self._parents: dict[ParentKey, Parent] = {}
        self._parent_by_job: dict[Job, Parent] = {}
        self._dismissed: list[Parent] = []

    def start(self, job: Job, variables: Mapping[str, str]) -> Parent:
        """Have a warm parent fork a process for *job*; return that parent, which may be new."""
        header, work = job.header, self.work_folder(job)
        self._sweeper.make_folder(work, header.project)
        key = ParentKey(header.command, header.runner, header.edition)
        parent = self._parents.get(key)
        if parent is None:
            parent = self._parents[key] = self._spawn(key)
        self._parent_by_job[job] = parent
        local = {
            "executor": job.executor,
            "variables": variables,
            "log": f"{self._paths.logs}/{job.name}.log",
            "work": work,
            "cache": str(self._paths.cache),
            "memory_bytes": header.memory_bytes,
            "worker": header.worker,
            "spares": self._sweeper.keeps_spares,
            "command": [*header.command, "-u", _entry(header.runner)] if header.fresh else [],
        }
        parent.start(job, local)
        return parent

    def work_folder(self, job: Job) -> str:
        """Return the folder that *job* runs in."""
        return f"{self._paths.work}/{job.name}"

    def signal(self, job: Job, number: int) -> None:
        """Signal *job*'s main process, unless its parent was dismissed, which ends the process."""
        parent = self._parent_by_job.get(job)
        if parent is not None and parent not in self._dismissed:
            parent.signal(job, number)

    def release(self, job: Job) -> None:
        """Release the folder of *job*, which ends now, for reuse; remove an empty output folder."""
        self._parent_by_job.pop(job, None)
        header, work = job.header, self.work_folder(job)
        self._sweeper.release_folder(work, job.executor, header.project)
        outputs.drop_if_empty(header.output_dir)

    @property
    def connected_parents(self) -> list[Parent]:
        """The parents that weren't dismissed."""
        return [*self._parents.values()]

    def parents_with_ending_jobs(self) -> list[Parent]:
        """Return the parents in which processes of ended jobs may still run."""
        return [parent for parent in self._parents.values() if parent.has_ending_jobs]

    def surplus_parents(self) -> list[Parent]:
        """Return the parents without a job, except the `SPARE_PARENTS` that were used last."""
        if len(self._parents) <= SPARE_PARENTS:
            return []
        free = [parent for parent in self._parents.values() if not parent.jobs]
        return sorted(free, key=lambda parent: parent.last_used_at)[:-SPARE_PARENTS]

    def dismiss(self, parent: Parent) -> None:
        """Disconnect *parent*."""
        if self._parents.get(parent.key) is parent:
            del self._parents[parent.key]
        parent.dismissed_at = time.monotonic()
        parent.close()
        self._dismissed.append(parent)

    @property
    def has_dismissed(self) -> bool:
        """Whether processes of dismissed parents may still run."""
        return bool(self._dismissed)

    def kill_all(self) -> None:
        """Kill the dismissed parents that still run."""
        for parent in self._dismissed:
            parent.kill()

    def reap(self) -> list[tuple[Parent, list[Job]]]:
        """Collect dead processes; return the dismissed parents that have ended, and their jobs.

        When a parent dies, this process inherits the processes of its jobs. So this method kills
        each child that is neither a parent nor a helper. While it finds such a child, it returns
        only parents that were dismissed more than `KILL_TIMEOUT_S` ago.
        """
        self._reap_children()
        own_pids = {parent.pid for parent in self._running_parents()} | self._sweeper.helper_pids
        try:
            orphans = [pid for pid in children() if pid not in own_pids]
        except OSError:  # no descriptor is free to list processes; the next call retries
            return []
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # this user may not kill a set-user-ID program
        finished: list[tuple[Parent, list[Job]]] = []
        for parent in [*self._dismissed]:
            is_late = time.monotonic() > parent.dismissed_at + KILL_TIMEOUT_S
            if is_late:
                parent.kill()
            if parent.status is not None and (not orphans or is_late):
                if not LINUX:  # Linux has killed the jobs by their parent-death signal
                    parent.kill_jobs()
                self._dismissed.remove(parent)
                finished.append((parent, parent.jobs))
        return finished

    def read_stderr_tail(self, parent: Parent) -> str:
        """Return the end of *parent*'s standard error; empty if the log can't be read."""
        try:
            with open(self._paths.own_log, "rb") as file:
                end = os.fstat(file.fileno()).st_size
                file.seek(max(parent.log_offset, end - MAX_STDERR_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def _running_parents(self) -> list[Parent]:
        return [
            parent
            for parent in [*self._parents.values(), *self._dismissed]
            if parent.status is None
        ]

    def _reap_children(self) -> None:
        """Collect the children that have ended, and note the exit codes of parents."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._sweeper.helper_pids.discard(pid)
            for parent in self._running_parents():
                if parent.pid == pid:
                    parent.status = os.waitstatus_to_exitcode(status)

    def _spawn(self, key: ParentKey) -> Parent:
        """Start the fork server of *key*; its output goes to the supervisor's own log."""
        own_end, child_end = socket.socketpair()
        argv = [*key.command, "-P", _entry(key.runner), str(_SOCKET_FD)]
        log = str(self._paths.own_log)
        open_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            log_offset = os.stat(log).st_size if os.path.exists(log) else 0
            pid = os.posix_spawnp(
                argv[0],
                argv,
                self._environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, log, open_flags, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                    (os.POSIX_SPAWN_DUP2, child_end.fileno(), _SOCKET_FD),
                ],
                setsigmask=[],
                setsigdef=[signal.SIGINT, signal.SIGHUP],  # this process ignores them
            )
        except OSError:
            own_end.close()
            raise
        finally:
            child_end.close()
        environment = self._lock_environment(key.command[0])
        parent = Parent(key, pid, own_end, self._directory, environment)
        parent.log_offset = log_offset
        return parent

    def _lock_environment(self, python: str) -> int | None:
        """Lock the folder of *python* if it is in the cache, and return the descriptor."""
        folder = Path(python).parent.parent.parent
        try:
            if not os.path.samefile(folder.parent, self._paths.cache / "environments"):
                return None
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # there is no such folder
            return None
        with contextlib.suppress(OSError):  # a user has removed the mark, so it is made again
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return lock


def _entry(runner: str) -> str:
    return f"{runner}/remote_runner.py"
