"""The warm parents of a supervisor: started when a job needs one, mourned when one dies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinetic._local.ahead import Ahead
from kinetic._local.jobs import Job
from kinetic._local.parent import PATIENCE_S, Key, Parent
from kinetic._local.places import Places
from kinetic._local.protocol import Order
from kinetic._local.strays import end_strays
from kinetic._local.sweeping import Sweeper
from kinetic._runner import private
from kinetic._runner.processes import LINUX, MARK, NOBODY, children

__all__ = ["Parents"]

SPARE = 4
"""How many parents without a job are kept warm."""

LAST_WORDS = 2000
_BASE = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "TZ", "KINETIC_HOME")
_SOCKET_FD = 3

_OUTPUTS = re.compile(r"(/.*/outputs/(?:job|grp)-(?:local-)?[0-9a-f]{12})(/[0-9]+)?")
"""The output directories that kinetic has named; one that the user has is the user's."""


class Parents:
    """All parents, and which of them has which job."""

    def __init__(self, places: Places, environ: Mapping[str, str], sweeper: Sweeper) -> None:
        self._places = places
        self._sweeper = sweeper
        self._environment = {
            name: value
            for name, value in environ.items()
            if name in _BASE or name.startswith("LC_")
        }
        self._directory = str(places.state)
        self._environment[MARK] = f"{self._directory}:{NOBODY}"
        self._logs, self._work = str(places.logs), str(places.work)
        self._cache = str(places.cache)
        self._ahead = Ahead(self._cache)
        self._parents: dict[Key, Parent] = {}
        self._homes: dict[Job, Parent] = {}
        self._dead: list[Parent] = []
        self._left: dict[str, Job] = {}
        self._outputs: dict[Job, str] = {}
        self._writers: Counter[str] = Counter()

    def make_ready(self, job: Job, order: Order) -> None:
        """Do beforehand what *job*, which still waits, can have done before its turn."""
        self._ahead.make_ready(job, order, self.work(job))

    def start(self, job: Job, order: Order, environment: Mapping[str, str]) -> Parent:
        """Give *job* to its parent; a new one if need be, for the caller to listen to.

        Raises:
            OSError: Its interpreter cannot be started.
        """
        if job.name in self._left:  # one of its name has ended this very moment: its folder goes
            self.tidy()
        key = Key.of(order, sys.executable)
        parent = self._parents.get(key)
        if parent is None:
            parent = self._parents[key] = self._spawn(key)
        self._homes[job] = parent
        self._make_outputs(job)
        own = {
            "overrides": environment,
            "executor": job.executor,
            "log": f"{self._logs}/{job.name}.log",
            "work": self.work(job),
        }
        arguments = None if order.fresh else self._ahead.take(job, order, self.work(job))
        parent.start(job, lambda: self._shared(order), own, arguments)
        return parent

    def _shared(self, order: Order) -> dict[str, Any]:
        """What the jobs of a batch have from us in common."""
        runner = f"{order.runner}/remote_runner.py"
        return {
            "cache": self._cache,
            "memory_bytes": order.memory_bytes,
            "mounts": LINUX,
            "command": [*order.command, "-u", runner] if order.fresh else [],
        }

    def work(self, job: Job) -> str:
        """The folder *job* runs in."""
        return f"{self._work}/{job.name}"

    def signal(self, job: Job, number: int) -> Parent | None:
        """Have *job*'s main process signalled; the parent to flush, if there is one to hear it."""
        parent = self._homes.get(job)
        if parent is None or parent in self._dead:  # then the job ends without being asked
            return None
        parent.signal(job, number)
        return parent

    def never_began(self, job: Job) -> None:
        """There was no process for *job*."""
        self._ahead.withdraw(job)

    def ended(self, job: Job) -> None:
        """Nothing of *job* runs any more; its folder goes with the next `tidy`."""
        self._homes.pop(job, None)
        self._left[job.name] = job

    def tidy(self) -> None:
        """Clear the folders of those that have ended."""
        for job in self._left.values():
            if not self._ahead.clear(job):
                self._sweeper.put_aside(self.work(job), job.executor)
            self._drop_outputs(job)
        self._left.clear()

    def _make_outputs(self, job: Job) -> None:
        """Make the output directory of *job*, in which its function may open a file at once.

        All are made and removed here, where nothing comes between the two.
        """
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):  # the job will say so
            folder: str = json.loads(job.body)["assignment"]["output_dir"]
            if _OUTPUTS.fullmatch(folder):
                self._outputs[job] = folder
                self._writers[folder] += 1
                private.make_folder(folder)

    def _drop_outputs(self, job: Job) -> None:
        """Remove the output directory of *job* if nothing is in it, and that of its batch so."""
        folder = self._outputs.pop(job, None)
        if folder is None:
            return
        self._writers[folder] -= 1
        if self._writers[folder]:  # the next attempt has it
            return
        del self._writers[folder]
        named = _OUTPUTS.fullmatch(folder)
        with contextlib.suppress(OSError):  # there is something in it
            os.rmdir(folder)
            if named is not None and named[2]:
                os.rmdir(named[1])

    def forget(self, job: Job) -> None:
        """*job* never had its turn, and will not."""
        if not self._ahead.forget(job):
            self._sweeper.put_aside(self.work(job), os.urandom(8).hex())

    def settling(self) -> list[Parent]:
        """Parents with jobs that have ended and left something behind."""
        return [one for one in self._parents.values() if one.settling]

    def spare(self) -> list[Parent]:
        """Parents that nobody has needed for the longest time."""
        if len(self._parents) <= SPARE:
            return []
        free = [one for one in self._parents.values() if not one.jobs]
        return sorted(free, key=lambda one: one.used)[:-SPARE]

    def dismiss(self, parent: Parent) -> None:
        """It is gone, or has to go: it ends its jobs and itself."""
        if self._parents.get(parent.key) is parent:
            del self._parents[parent.key]
        parent.let_go()
        self._dead.append(parent)

    def dismiss_all(self) -> None:
        """Let all of them go."""
        for parent in [*self._parents.values()]:
            self.dismiss(parent)

    @property
    def dying(self) -> bool:
        """Whether processes of parents that are gone may still be there."""
        return bool(self._dead)

    def kill_all(self) -> None:
        """End those that do not end by themselves."""
        for parent in self._dead:
            parent.kill()

    def reap(self) -> list[tuple[Parent, list[Job]]]:
        """Collect what has died; the parents that are gone with all they had, and their jobs.

        Jobs' processes become ours when their parent dies. What is neither a
        parent nor a helper is therefore to be ended.
        """
        self._collect()
        ours = {one.pid for one in self._living()} | self._sweeper.helpers
        orphans = [pid for pid in children() if pid not in ours]
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue  # a set-user-id program is not ours to end
        finished: list[tuple[Parent, list[Job]]] = []
        for parent in [*self._dead]:
            late = time.monotonic() > parent.gone_at + PATIENCE_S
            if late:
                parent.kill()
            if parent.status is not None and (not orphans or late):
                if not LINUX and parent.jobs:
                    end_strays(self._directory)
                self._dead.remove(parent)
                finished.append((parent, parent.jobs))
        return finished

    def last_words(self, parent: Parent) -> str:
        """The end of what *parent* has written to its standard error."""
        try:
            with open(self._places.diary, "rb") as file:
                end = os.fstat(file.fileno()).st_size
                file.seek(max(parent.diary_at, end - LAST_WORDS))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def _living(self) -> list[Parent]:
        return [one for one in [*self._parents.values(), *self._dead] if one.status is None]

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._sweeper.helped(pid)
            for parent in self._living():
                if parent.pid == pid:
                    parent.status = os.waitstatus_to_exitcode(status)

    def _spawn(self, key: Key) -> Parent:
        mine, theirs = socket.socketpair()
        warm = str(Path(key.runner) / "warm.py")
        argv = [*key.command, "-P", warm, str(_SOCKET_FD), *(["fresh"] if key.fresh else [])]
        diary = str(self._places.diary)
        opening = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            diary_at = os.stat(diary).st_size if os.path.exists(diary) else 0
            pid = os.posix_spawnp(
                argv[0],
                argv,
                self._environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, diary, opening, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), _SOCKET_FD),
                ],
                setsigmask=[],
            )
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        parent = Parent(key, pid, mine, self._directory)
        parent.diary_at = diary_at
        return parent
