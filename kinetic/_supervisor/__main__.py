"""The supervisor's entry: ``python -P -m kinetic._supervisor HOME READY_FD``.

This process forks and ends, so that its child doesn't belong to the client that started it. The
child becomes the supervisor of HOME if no other process holds the lock in HOME. It writes one line
of JSON to the descriptor READY_FD: its PID, null if another supervisor runs, or an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from kinetic._devices import cpus_here, gpus_here
from kinetic._runner.job import processes
from kinetic._runner.protocol import private
from kinetic._supervisor import jobs, parents, supervisor
from kinetic._supervisor.jobs import KEPT_S, Table
from kinetic._supervisor.journal import Journal, read, supervisor_line
from kinetic._supervisor.protocol import SupervisorPaths
from kinetic._supervisor.supervisor import Supervisor, seconds, write_log

LISTEN_BACKLOG = 512
MAX_LOG_BYTES = 1 << 20
"""Above this size, a new supervisor empties the log of earlier ones."""


def become_supervisor(
    home: Path, environ: Mapping[str, str], report: Callable[[Mapping[str, object]], None]
) -> Supervisor | None:
    """Return a listening supervisor of *home*; None if another process is its supervisor.

    Call *report* when clients can connect to the returned or the other supervisor.

    Raises:
        OSError: A folder can't be made, or isn't safe to use (`private.objection`).
    """
    paths = SupervisorPaths(home)
    for folder in (
        paths.state,
        paths.logs,
        paths.work,
        paths.trash,
        paths.spares,
        paths.cache,
    ):
        private.make_folder(folder)
    for folder in (home, paths.state):
        if objection := private.objection(folder):
            raise OSError(errno.EPERM, objection, str(folder))
    os.chdir(paths.state)  # so that `_listen` can use a relative path, which is short
    starting_fd = supervisor.acquire(paths.starting, wait=True)
    assert starting_fd is not None
    with open(starting_fd, "rb"):
        if supervisor.acquire(paths.lock, wait=False) is None:
            report({"pid": None})
            return None
        processes.become_subreaper()
        survivors = parents.kill_processes_of(str(paths.state))
        if survivors:
            write_log(f"processes of an earlier supervisor can't be killed: {survivors}")
        slots = jobs.Slots(cpus_here(environ), gpus_here(environ))
        table = Table(slots, seconds(environ.get("KINETIC_JOB_TTL_S", ""), KEPT_S))
        journal = _restore_jobs(table, paths)
        _clear_leftovers(paths)
        listener = _listen(paths)
        report({"pid": os.getpid()})
    write_log(f"{slots.cpus} slots, GPUs {', '.join(slots.gpus) or 'none'}")
    return Supervisor(paths, listener, table, slots, journal, environ)


def _restore_jobs(table: Table, paths: SupervisorPaths) -> Journal:
    """Fill *table* from an earlier supervisor's journal; return the journal, open for appending."""
    deleted = table.restore(read(paths.journal), time.time())
    journal = Journal(paths.journal)
    for name in deleted:
        paths.log(name).unlink(missing_ok=True)
    journal.rewrite([supervisor_line(), *table.lines()])
    return journal


def _clear_leftovers(paths: SupervisorPaths) -> None:
    """Move the folders of earlier jobs to the trash, and empty a log above `MAX_LOG_BYTES`."""
    with contextlib.suppress(OSError):
        if paths.own_log.stat().st_size > MAX_LOG_BYTES:
            os.truncate(paths.own_log, 0)
    for folder in (paths.work, paths.spares):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                os.rename(entry.path, paths.trash / os.urandom(8).hex())


def _listen(paths: SupervisorPaths) -> socket.socket:
    paths.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(paths.socket.name)  # relative to the current folder, which is `paths.state`
    os.chmod(paths.socket, 0o600)
    listener.listen(LISTEN_BACKLOG)
    return listener


def main(home: Path, ready_fd: int) -> None:
    """Fork; the child is the supervisor of *home*, unless another process already is."""
    if os.fork():
        os._exit(0)  # so that init reaps the supervisor, whose client may have ended
    reported: list[Mapping[str, object]] = []

    def report(result: Mapping[str, object]) -> None:
        reported.append(result)
        try:
            os.write(ready_fd, json.dumps(result).encode() + b"\n")
            os.close(ready_fd)
        except OSError:
            return  # the client that started this process has ended; other clients may connect

    try:
        _begin(home, report)
    except OSError as exc:
        if reported:
            raise
        report({"error": exc.strerror or str(exc), "file": str(exc.filename or home)})
        raise SystemExit(1) from exc


def _begin(home: Path, report: Callable[[Mapping[str, object]], None]) -> None:
    """Serve *home* until the supervisor ends; return at once if another one runs."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    new_supervisor = become_supervisor(home, os.environ, report)
    if new_supervisor is not None:
        new_supervisor.run()


def _main() -> NoReturn:
    main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
