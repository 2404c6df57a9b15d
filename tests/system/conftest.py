"""Homes that real clients share: find their processes, and ask a later client about their jobs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from kinetic import aio, errors
from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic.job_status import JobStatus
from tests.conftest import end_processes, processes_of
from tests.scripts import Script

DEADLINE_S = 40.0
"""Seconds to wait before calling something hung; generous, because the machine may be busy."""


@dataclass
class Scene:
    """One home and one project, which several clients may share."""

    home: Path
    folder: Path
    marks: Path = field(init=False)

    def __post_init__(self) -> None:
        self.marks = self.folder / "marks"
        self.marks.mkdir()
        (self.folder / "project").mkdir()

    def client(self, script: Path, *arguments: object) -> Script:
        """Start *script* as a client."""
        return Script(script, *arguments, folder=self.folder / "project", deadline=DEADLINE_S)

    # --- running processes ---

    def supervisor(self) -> psutil.Process | None:
        """Return the process of the supervisor, if it runs."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()  # empty for a zombie
                if "kinetic._supervisor" in command and str(self.home) in command:
                    return process
        return None

    def parents(self) -> list[psutil.Process]:
        """Return the warm parents."""
        supervisor = self.supervisor()
        processes = children(supervisor) if supervisor is not None else []
        return [process for process in processes if is_parent(process)]

    def jobs(self) -> list[psutil.Process]:
        """Return the processes of jobs."""
        return [process for parent in self.parents() for process in children(parent)]

    def others(self) -> list[psutil.Process]:
        """Return the processes that are neither supervisor nor warm parent."""
        known = (self.supervisor(), *self.parents())
        others = [process for process in processes_of(self.home) if process not in known]
        return [process for process in others if process.is_running()]

    def assert_only_supervisor_left(self) -> None:
        """Assert that only supervisor and parents still run, end on request, and release locks."""
        eventually(lambda: not self.others(), lambda: f"still running: {self.others()}", 0.05)
        assert end_processes(self.home) == []
        # end_processes finds processes by their environment. An exiting process loses that before
        # it closes its files, so its locks may outlast it briefly.
        eventually(lambda: not locked(self.home), lambda: f"locked: {locked(self.home)}", 0.05)

    # --- files in the store and marks ---

    def submissions(self) -> list[str]:
        """Return the IDs of all jobs and batches in the store."""
        paths = [
            *(self.home / "store" / "jobs").glob("*"),
            *(self.home / "store" / "batches").glob("*"),
        ]
        return sorted(path.name for path in paths)

    def committed(self) -> set[str]:
        """Return the IDs of jobs whose value is in the store."""
        job_ids: set[str] = set()
        for name in self._names_of_values(""):
            kind, group, _ = name.split("/", 2)
            index, _ = wire.parse_attempt_key(name)
            job_ids.add(group if kind == "jobs" else f"{group}-{index}")
        return job_ids

    def values(self, prefix: str) -> list[tuple[int, int]]:
        """Return item and attempt of each value in the store below *prefix*."""
        return [wire.parse_attempt_key(name) for name in self._names_of_values(prefix)]

    @property
    def objects(self) -> DirectoryObjects:
        """The store."""
        return DirectoryObjects(self.home / "store")

    def _names_of_values(self, prefix: str) -> list[str]:
        return [
            stored.name
            for stored in self.objects.list(prefix)
            if '"kind":"value"' in stored.metadata.get("header", "")
        ]

    def requests(self, group: str) -> list[Path]:
        """Return the requests in the control log of a batch."""
        return [*(self.home / "store" / "batches" / group / "control").glob("*")]

    def started(self) -> list[str]:
        """Return the attempts whose code ran."""
        gates = ("go", "held")
        return [path.name for path in self.marks.iterdir() if not path.name.startswith(gates)]

    def started_twice(self) -> list[str]:
        """Return the attempts whose code ran more than once."""
        return [path.name for path in self.marks.glob("twice.*")]


def children(process: psutil.Process) -> list[psutil.Process]:
    """List the children of single-threaded *process*, without scanning all processes."""
    processes = []
    with contextlib.suppress(OSError, psutil.Error):
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for pid in listed.split():
            with contextlib.suppress(psutil.Error):
                processes.append(psutil.Process(int(pid)))
    return processes


def is_parent(process: psutil.Process) -> bool:
    """Tell whether *process* is a warm parent."""
    with contextlib.suppress(psutil.Error):
        return "-P" in process.cmdline() and "remote_runner.py" in " ".join(process.cmdline())
    return False


def eventually(
    condition: Any, complaint: Any = lambda: "it didn't happen", pause: float = 0.005
) -> Any:
    """Poll *condition* until it is true, and return its value."""
    until = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < until, complaint()
        time.sleep(pause)
    return found


async def soon(condition: Any, complaint: Any = lambda: "it didn't happen") -> Any:
    """Call `eventually` in a thread, so that the event loop keeps running."""
    return await asyncio.to_thread(eventually, condition, complaint)


def locked(home: Path) -> list[Path]:
    """Return the files under *home* that a process has locked."""
    held = []
    # Unlike rglob, os.walk skips a folder that is removed meanwhile.
    files = (Path(folder, name) for folder, _, names in os.walk(home) for name in names)
    for path in files:
        if "lock" in path.name or path.name == "starting":
            with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(path)
    return held


def ended(client: Script) -> dict[str, str]:
    """Return the results that *client* received: ID → value or the name of an exception's class."""
    reports = [line.split() for line in client.lines]
    return {words[1]: words[2] for words in reports if len(words) == 3 and words[0] == "ended"}


@dataclass(frozen=True)
class Report:
    """What a client reports about one job: its status, the reason, and its value or exception."""

    status: JobStatus
    reason: str
    end: Any


async def report_on(job: aio.JobHandle[Any]) -> Report:
    """Call every method that tells about *job*; none may hang."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            end: Any = await job.result(cleanup=False)
        except (errors.KineticError, ArithmeticError) as error:
            end = error
        return Report(await job.status(), await job.reason(), end)


async def report_on_all(scene: Scene) -> dict[str, Report]:
    """Ask a new client about all jobs; return its reports by job ID."""
    reports: dict[str, Report] = {}
    async with aio.Client(backend="local") as client, asyncio.timeout(2 * DEADLINE_S):
        listed = {job.job_id for job in await client.list_jobs()}
        for submission in scene.submissions():
            jobs: list[aio.JobHandle[Any]] = []
            with contextlib.suppress(errors.NotFound):
                if submission.startswith("grp-"):
                    batch = await client.attach_batch(submission)
                    indexes = range(len(batch.jobs))
                    jobs = [await client.attach(f"{submission}-{index}") for index in indexes]
                else:
                    jobs = [await client.attach(submission)]
            for job, report in zip(jobs, await asyncio.gather(*map(report_on, jobs)), strict=True):
                reports[job.job_id] = report
        assert listed <= set(reports), "a client can attach to every listed job"
    return reports


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    """Run every test here in a small project."""
    return small_project


@pytest.fixture
def empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An almost empty project: submitting a builtin packs it."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def scene(home: Path, tmp_path: Path) -> Scene:
    return Scene(home, tmp_path)
