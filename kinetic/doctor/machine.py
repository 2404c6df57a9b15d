"""Check the local platform: its home, the machine's resources, its kernel, and the supervisor."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from kinetic import configuration
from kinetic._devices import count_cpus, gpu_ids, memory_bytes
from kinetic._runner.protocol import private
from kinetic._supervisor.protocol import VERSION, SupervisorPaths
from kinetic.aio.local.supervisor import running
from kinetic.doctor.checks import Check, Finding, failed, ok, warning

GROUP = "this machine"
MIB = 1024 * 1024

MIN_DISK_BYTES = 100 * MIB
"""With less free space than this many bytes on a disk, no job can run."""

LOW_DISK_BYTES = 2048 * MIB
"""With less free space than this many bytes on a disk, some jobs may fail."""

LOW_MEMORY_BYTES = 512 * MIB
"""With less free memory than this many bytes, some jobs may fail."""


class Machine:
    """Check what jobs of ``backend="local"`` need from this machine."""

    def __init__(self, target: configuration.Target, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._home = configuration.home(environ)
        self._store = Path(target.store).expanduser() if target.store else self._home / "store"

    def checks(self) -> list[Check]:
        """Return the checks of the local platform."""
        check = partial(Check, group=GROUP)
        writable = (
            f"make {self._home} writable and free some space, or set KINETIC_HOME to another folder"
        )
        space = (
            "free some space (`kinetic gc` removes unused content), or set KINETIC_HOME and "
            "KINETIC_STORE to folders on another disk"
        )
        memory = "end other programs, or set KINETIC_LOCAL_SLOTS to run fewer jobs at once"
        return [
            check(name="home", probe=partial(run_sync, self._try_folders), advice=writable),
            check(name="disk", probe=self._disk, needs=("home",), advice=space),
            check(name="memory", probe=self._memory, advice=memory),
            check(name="processors", probe=self._processors),
            check(name="kernel", probe=self._kernel),
            check(name="supervisor", probe=self._supervisor, needs=("home",)),
        ]

    def _try_folders(self) -> Finding:
        """Check the owners and modes of kinetic's folders, then write to the folders."""
        key = self._home / "key"
        for path in (self._home, self._store, SupervisorPaths(self._home).state, key):
            if objection := private.objection(path, secret=path == key):
                # The message ends with a command to type.
                evidence, _, advice = objection.partition("type ")
                return failed(evidence.rstrip(" :;"), advice)
        for folder in (self._home, self._store):
            with tempfile.TemporaryFile(dir=_nearest_existing(folder)) as probe:
                probe.write(b"\0" * 4096)
                probe.flush()
        return ok(f"{self._home} and the store {self._store} are writable")

    async def _disk(self) -> Finding:
        free = {
            folder: shutil.disk_usage(_nearest_existing(folder)).free
            for folder in (self._home, self._store, Path(tempfile.gettempdir()))
        }
        evidence = ", ".join(f"{folder}: {size // MIB} MiB free" for folder, size in free.items())
        least = min(free.values())
        if least < MIN_DISK_BYTES:
            return failed(evidence)
        return warning(evidence) if least < LOW_DISK_BYTES else ok(evidence)

    async def _memory(self) -> Finding:
        total, free = memory_bytes(), _free_memory()
        if free is None:
            return ok(f"{total // MIB} MiB")
        evidence = f"{total // MIB} MiB, {free // MIB} MiB of it free"
        return warning(evidence) if free < LOW_MEMORY_BYTES else ok(evidence)

    async def _processors(self) -> Finding:
        gpus = len(gpu_ids(self._environ))
        return ok(f"jobs may use {count_cpus(self._environ)} CPUs and {gpus} GPUs together")

    async def _kernel(self) -> Finding:
        problems: list[str] = []
        advice = ""
        if not await self._has_namespaces():
            problems.append("no mount namespaces: volumes= at absolute paths won't work")
            advice = "pass Data as an argument instead of volumes="
        if sys.platform != "linux":
            problems.append("no parent-death signal: a job may briefly outlive a killed supervisor")
        if problems:
            return warning("; ".join(problems), advice)
        return ok(f"{os.uname().sysname} {os.uname().release} has everything that kinetic uses")

    async def _has_namespaces(self) -> bool:
        # In a new process, because `available` forks, which is unsafe if this process has threads.
        command = (
            "import sys; sys.path.append(sys.argv[1]); "
            "from kinetic._runner.job.namespace import available; print(available())"
        )
        package = Path(configuration.__file__).parents[1]
        probe = await anyio.run_process(
            [sys.executable, "-S", "-P", "-c", command, str(package)],
            check=False,
            env={"PATH": os.defpath},
        )
        return bool(probe.stdout.strip())

    async def _supervisor(self) -> Finding:
        """Check that the supervisor, if one runs, speaks this version's protocol."""
        supervisor = await running(self._home)
        if supervisor is None:
            return ok("not running; the first job starts it")
        if supervisor.protocol != VERSION:
            protocol, own_protocol = (
                ".".join(map(str, version)) for version in (supervisor.protocol, VERSION)
            )
            return failed(
                f"process {supervisor.pid} is the supervisor of another version of kinetic: its "
                f"protocol is {protocol}, not {own_protocol}",
                f"run `kill {supervisor.pid}` after its jobs end; the next job starts a new one",
            )
        count = supervisor.jobs.get("running", 0)
        return ok(f"process {supervisor.pid}, of this version, runs {count} jobs")


def _nearest_existing(path: Path) -> Path:
    """Return *path*, or the nearest folder above it that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _free_memory() -> int | None:
    """Return the bytes that programs can still allocate; None if the system doesn't report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    amounts = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    kib = next(amounts, None)
    return None if kib is None else int(kib) * 1024
