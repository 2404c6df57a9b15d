"""Checks of the local platform: its home, the machine's room, its kernel and the supervisor."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from kinetic import configuration
from kinetic._devices import cpus_here, gpus_here, memory_here
from kinetic._runner.protocol import private
from kinetic._supervisor.protocol import VERSION, Places
from kinetic.aio.local.supervisor import running
from kinetic.doctor.checks import Check, Finding, State

GROUP = "this machine"
MIB = 1024 * 1024
FULL, TIGHT = 100 * MIB, 2048 * MIB
"""With less room than this nothing can run, and something may not."""

MEMORY_TIGHT = 512 * MIB


class Machine:
    """What jobs of ``backend="local"`` need of this machine."""

    def __init__(self, target: configuration.Target, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._home = configuration.home(environ)
        store = target.store or environ.get("KINETIC_STORE")
        self._store = Path(store).expanduser() if store else self._home / "store"

    def checks(self) -> list[Check]:
        """Those of the local platform."""
        return [
            Check(
                name="home",
                group=GROUP,
                look=self._rights,
                advice=f"see that {self._home} can be written to and its disk has room, or set "
                "KINETIC_HOME to a folder of your own",
            ),
            Check(
                name="disk",
                group=GROUP,
                look=self._disk,
                needs=("home",),
                advice="free some room there (`kinetic gc` removes what nobody uses), or set "
                "KINETIC_HOME and KINETIC_STORE to another disk",
            ),
            Check(
                name="memory",
                group=GROUP,
                look=self._memory,
                advice="end other programs, or run fewer jobs at once: KINETIC_LOCAL_SLOTS",
            ),
            Check(name="processors", group=GROUP, look=self._processors),
            Check(name="kernel", group=GROUP, look=self._kernel),
            Check(name="supervisor", group=GROUP, look=self._supervisor, needs=("home",)),
        ]

    async def _rights(self) -> Finding:
        return await anyio.to_thread.run_sync(self._home_of_ones_own)

    def _home_of_ones_own(self) -> Finding:
        places = Places(self._home)
        mine = {self._home: False, self._store: False, places.state: False}
        for path, secret in {**mine, self._home / "key": True}.items():
            if words := private.objection(path, secret=secret):
                return Finding(State.FAILED, *_halves(words))
        for folder in (self._home, self._store):
            with tempfile.TemporaryFile(dir=_existing(folder)) as probe:
                probe.write(b"\0" * 4096)
                probe.flush()
        return Finding(State.OK, f"{self._home} and the store {self._store} can be written to")

    async def _disk(self) -> Finding:
        rooms = {
            folder: shutil.disk_usage(_existing(folder)).free
            for folder in (self._home, self._store, Path(tempfile.gettempdir()))
        }
        words = ", ".join(f"{folder}: {free // MIB} MiB free" for folder, free in rooms.items())
        least = min(rooms.values())
        state = State.FAILED if least < FULL else State.WARNING if least < TIGHT else State.OK
        return Finding(state, words)

    async def _memory(self) -> Finding:
        whole, free = memory_here(), _free_memory()
        words = f"{whole // MIB} MiB" + ("" if free is None else f", {free // MIB} MiB of it free")
        tight = free is not None and free < MEMORY_TIGHT
        return Finding(State.WARNING if tight else State.OK, words)

    async def _processors(self) -> Finding:
        gpus = len(gpus_here(self._environ))
        words = f"jobs may take {cpus_here(self._environ)} CPUs and {gpus} GPUs together"
        return Finding(State.OK, words)

    async def _kernel(self) -> Finding:
        if not hasattr(os, "fork"):
            return Finding(
                State.FAILED,
                f"{sys.platform} cannot fork",
                "use Linux, macOS or WSL, or a cluster (KINETIC_PROJECT)",
            )
        # It is tried in a fork, and this process may have threads: another interpreter asks.
        command = "from kinetic._runner.job.namespace import available; print(available())"
        package = Path(configuration.__file__).parents[1]
        environ = {"PATH": os.defpath, "PYTHONPATH": str(package)}
        probe = await anyio.run_process(
            [sys.executable, "-S", "-c", command], check=False, env=environ
        )
        namespaces = probe.stdout.decode().strip()
        lacking: list[str] = []
        if not namespaces:
            lacking.append("no mount namespaces: volumes= at absolute paths will not work")
        if not hasattr(os, "pidfd_open"):
            lacking.append("no pidfd_open: a job goes on when its caller is killed with SIGKILL")
        if sys.platform != "linux":
            lacking.append("no parent-death signal: a job may outlive a killed supervisor a little")
        if lacking:
            advice = "pass Data as an argument instead of volumes=; all else works"
            return Finding(State.WARNING, "; ".join(lacking), advice)
        return Finding(State.OK, f"{os.uname().sysname} {os.uname().release}: all that is used")

    async def _supervisor(self) -> Finding:
        found = await running(self._home)
        if found is None:
            return Finding(State.OK, "none runs now; the first job starts it")
        if found.protocol != VERSION:
            return Finding(
                State.FAILED,
                f"process {found.pid} is the supervisor of another version of kinetic: it speaks "
                f"{'.'.join(map(str, found.protocol))}, and this one "
                f"{'.'.join(map(str, VERSION))}",
                f"`kill {found.pid}` when its jobs have ended or are not wanted; the next job "
                "starts another",
            )
        live = found.jobs.get("running", 0)
        return Finding(State.OK, f"process {found.pid}, of this version, runs {live} jobs")


def _halves(words: str) -> tuple[str, str]:
    """An objection says what is wrong, then what to type."""
    evidence, _, advice = words.partition("type ")
    return evidence.rstrip(" :;"), advice


def _existing(path: Path) -> Path:
    """*path*, or the nearest folder above it that exists."""
    return next(one for one in (path, *path.parents) if one.exists())


def _free_memory() -> int | None:
    """The bytes that programs can still get, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = (one.split()[1] for one in lines if one.startswith("MemAvailable:"))
    kib = next(found, None)
    return None if kib is None else int(kib) * 1024
