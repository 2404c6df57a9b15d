"""Where the measurements run: a scratch folder, a project, a home of kinetic.

The scratch folder is in /dev/shm if that exists. For measurements on the disk, it is
beside the default home of kinetic, as for users.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
WORK = '''"""What the jobs do."""


def square(x: int) -> int:
    return x * x
'''


@contextlib.contextmanager
def scratch(*, disk: bool = False) -> Iterator[Path]:
    """Make a folder, in memory or on the *disk*, and remove it afterwards."""
    base = Path.home() if disk else MEMORY if os.access(MEMORY, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="bench-", dir=base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def project(scratch: Path, files: int = 5) -> Iterator[None]:
    """Enter a project of *files*; this process and its children can import ``work.square``."""
    root = scratch / "project"
    (root / "package").mkdir(parents=True)
    (root / "pyproject.toml").touch()
    (root / "work.py").write_text(WORK)
    for name in ("__init__", "model", "training"):
        (root / "package" / f"{name}.py").write_text(WORK * 20)
    for number in range(files - 5):
        (root / "package" / f"module{number}.py").write_text(WORK * 20)
    previous_folder = Path.cwd()
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    try:
        yield
    finally:
        os.chdir(previous_folder)
        sys.path.remove(str(root))
        sys.modules.pop("work", None)  # the next project has its own; this one's folder is gone


@contextlib.contextmanager
def home(scratch: Path, slots: int) -> Iterator[Path]:
    """Make a ``KINETIC_HOME`` whose supervisor has *slots*; stop the supervisor at the end."""
    for name in [name for name in os.environ if name.startswith("KINETIC_")]:
        del os.environ[name]
    path = Path(tempfile.mkdtemp(prefix="home-", dir=scratch))
    os.environ |= {
        "KINETIC_HOME": str(path),
        "KINETIC_LOCAL_IDLE_S": "20",
        "KINETIC_LOCAL_SLOTS": str(slots),
    }
    try:
        yield path
    finally:
        with contextlib.suppress(psutil.Error, LookupError):
            process = supervisor(path)
            process.terminate()
            process.wait(10)
        shutil.rmtree(path, ignore_errors=True)


def supervisor(home: Path) -> psutil.Process:
    """Return the supervisor of *home*.

    Raises:
        LookupError: There is none.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "kinetic._supervisor" in command and str(home) in command:
                return process
    raise LookupError(f"no supervisor serves {home}")


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Processor seconds of a process and its ended children, and the children's page faults."""

    own: float
    children: float
    faults: int

    def since(self, before: ResourceUse) -> ResourceUse:
        """Return the difference to *before*."""
        return ResourceUse(
            self.own - before.own,
            self.children - before.children,
            self.faults - before.faults,
        )


def resource_use(process: psutil.Process) -> ResourceUse:
    """Return what *process* has used so far; outside Linux, ``faults`` is 0."""
    times = process.cpu_times()
    faults = 0
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        faults = int(stat.rpartition(")")[2].split()[8])
    return ResourceUse(
        times.user + times.system, times.children_user + times.children_system, faults
    )
