"""The supervisor's entry, which `kinetic.aio.local.supervisor` runs with the argument HOME.

This process forks and ends, so that its child isn't a child of the client that started this
process. The new process becomes the supervisor of HOME if no other process holds the lock in HOME.
When clients can connect to either supervisor, or after an error, the new process writes a JSON
object to standard output, and closes it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from kinetic._devices import count_cpus, gpu_ids
from kinetic._runner.job import processes
from kinetic._runner.protocol import private
from kinetic._supervisor import jobs, parents, supervisor
from kinetic._supervisor.jobs import KEPT_S, Table
from kinetic._supervisor.protocol import SupervisorPaths
from kinetic._supervisor.supervisor import Supervisor, parse_seconds, write_log

LISTEN_BACKLOG = 512
MAX_LOG_BYTES = 1 << 20
"""Above this size, a new supervisor empties the log of earlier supervisors."""


def become_supervisor(home: Path, environ: Mapping[str, str]) -> Supervisor | None:
    """Return a listening supervisor of *home*; None if another process is its supervisor."""
    paths = SupervisorPaths(home)
    folders = (paths.state, paths.logs, paths.work, paths.trash, paths.spares, paths.cache)
    for folder in folders:
        private.make_folder(folder)
    for folder in (home, paths.state):
        if objection := private.objection(folder):
            raise OSError(errno.EPERM, objection, str(folder))
    os.chdir(paths.state)  # so that `_listen` can use a relative path, which is short
    starting_fd = supervisor.acquire(paths.starting, wait=True)
    assert starting_fd is not None
    with open(starting_fd, "rb"):
        if supervisor.acquire(paths.lock, wait=False) is None:
            return None
        processes.become_subreaper()
        survivors = parents.kill_processes_of(str(paths.state))
        if survivors:
            write_log(f"processes of an earlier supervisor can't be killed: {survivors}")
        slots = jobs.Slots(count_cpus(environ), gpu_ids(environ))
        kept_s = parse_seconds(environ.get("KINETIC_JOB_TTL_S", ""), KEPT_S)
        table = Table(slots, kept_s, str(paths.work))
        with contextlib.suppress(OSError):  # there is no log yet
            if paths.own_log.stat().st_size > MAX_LOG_BYTES:
                os.truncate(paths.own_log, 0)
        parents.discard_folders(paths)
        listener = _listen(paths)
    write_log(f"{slots.cpus} slots, GPUs {', '.join(slots.gpus) or 'none'}")
    return Supervisor(paths, listener, table, environ)


def _listen(paths: SupervisorPaths) -> socket.socket:
    paths.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(paths.socket.name)  # relative to the current folder, which is `paths.state`
    os.chmod(paths.socket, 0o600)
    listener.listen(LISTEN_BACKLOG)
    return listener


def _report(result: Mapping[str, str]) -> None:
    """Send *result* to the client that started this process, and close the pipe to that client."""
    with contextlib.suppress(OSError):  # that client has ended; other clients may connect
        os.write(1, json.dumps(result).encode())
    os.dup2(2, 1)


def main(home: Path) -> NoReturn:
    """Fork; the child is the supervisor of *home*, unless another process already is."""
    if os.fork():
        os._exit(0)  # so that init reaps the supervisor, whose client may have ended
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        new_supervisor = become_supervisor(home, os.environ)
    except OSError as exc:
        _report({"error": exc.strerror or str(exc), "file": str(exc.filename or home)})
        os._exit(1)
    _report({})
    if new_supervisor is not None:
        new_supervisor.run()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
