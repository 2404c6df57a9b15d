"""A home with real clients in it, what runs there, and what a later client learns."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from kinetic import aio, errors
from kinetic.job_status import JobStatus
from tests.conftest import end_processes, processes_of

ROOT = Path(__file__).parents[2]
DEADLINE_S = 40.0
"""Seconds after which something hangs, on a machine with other things to do."""


class Client:
    """A process of the project in *folder* that talks line by line."""

    def __init__(self, folder: Path, script: Path, *arguments: object, **options: Any) -> None:
        (folder / "pyproject.toml").touch()
        shutil.copy(script, folder)
        self.lines: list[str] = []
        self._read = b""
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-W", "error", script.name, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "KINETIC_PACKAGE_ROOT": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **options,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()

    def hear(self, start: str, patience: float = DEADLINE_S) -> str:
        """The first line that begins with *start*; all before it are kept in ``lines``.

        It may say nothing for *patience* seconds.
        """
        while True:
            line = self._line(patience)
            self.lines.append(line)
            if line.startswith(start):
                return line

    def kill(self) -> None:
        """Kill it, and keep what it has said before."""
        self.process.kill()
        out, _ = self.process.communicate()
        self.lines += (self._read + out).decode().splitlines()

    def submitted(self) -> list[str]:
        """The ids it has got."""
        return [line.split()[1] for line in self.lines if line.startswith("submitted")]

    def ended(self) -> dict[str, str]:
        """The results it received: ID → value or the name of an exception's class."""
        words = [line.split() for line in self.lines]
        return {said[1]: said[2] for said in words if len(said) == 3 and said[0] == "ended"}

    def _line(self, patience: float) -> str:
        """The next line; those that came with it are kept for whoever asks next."""
        assert self.process.stdout is not None
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.process.stdout], [], [], patience)
            got = os.read(self.process.stdout.fileno(), 4096) if ready else b""
            if not got:
                pytest.fail(f"the client said no more (ended: {bool(ready)}) after {self.lines}")
            self._read += got
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()


@dataclass
class Scene:
    """One home and one project, whoever works with them."""

    home: Path
    folder: Path
    marks: Path = field(init=False)

    def __post_init__(self) -> None:
        self.marks = self.folder / "marks"
        self.marks.mkdir()
        (self.folder / "project").mkdir()

    def client(self, script: Path, *arguments: object, **options: Any) -> Client:
        """Start *script* as a client."""
        return Client(self.folder / "project", script, *arguments, **options)

    # --- who runs ---

    def supervisor(self) -> psutil.Process | None:
        """The supervisor, as its journal names it."""
        named = b""
        with contextlib.suppress(OSError):
            for line in (self.home / "local" / "v1" / "journal").read_bytes().splitlines():
                named = line if line.startswith(b'{"was":"supervisor"') else named
        with contextlib.suppress(psutil.Error, ValueError):
            process = psutil.Process(json.loads(named)["pid"])
            if process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def parents(self) -> list[psutil.Process]:
        """The warm parents."""
        supervisor = self.supervisor()
        found = children(supervisor) if supervisor is not None else []
        return [one for one in found if is_parent(one)]

    def jobs(self) -> list[psutil.Process]:
        """The processes of jobs."""
        return [one for parent in self.parents() for one in children(parent)]

    def others(self) -> list[psutil.Process]:
        """The processes that are neither supervisor nor warm parent."""
        supervisor, parents = self.supervisor(), self.parents()
        left = [one for one in processes_of(self.home) if one not in (supervisor, *parents)]
        return [one for one in left if one.is_running()]

    def nobody_else(self) -> None:
        """No process but supervisor and parents stays; they go when told, with all locks."""
        eventually(lambda: not self.others(), lambda: f"still there: {self.others()}", 0.05)
        assert end_processes(self.home) == []
        # A process that ends has no environment, by which it is found, before it lets go of files.
        eventually(lambda: not locked(self.home), lambda: f"locked: {locked(self.home)}", 0.05)

    # --- what they left ---

    def submissions(self) -> list[str]:
        """The IDs of all jobs and batches in the store."""
        found = [
            *(self.home / "store" / "jobs").glob("*"),
            *(self.home / "store" / "batches").glob("*"),
        ]
        return sorted(path.name for path in found)

    def committed(self) -> set[str]:
        """The ids of jobs whose value is in the store."""
        found: set[str] = set()
        for path in (self.home / "store").glob("*/*/attempts/*/*.outcome"):
            if b'\\"kind\\":\\"value\\"' in path.read_bytes():
                group = path.parents[2].name
                single = path.parents[3].name == "jobs"
                found.add(group if single else f"{group}-{int(path.name.split('.')[0])}")
        return found

    def requests(self, group: str) -> list[Path]:
        """The requests in the control log of a batch."""
        return [*(self.home / "store" / "batches" / group / "control").glob("*")]

    def started(self) -> list[str]:
        """Attempts whose code ran."""
        others = ("go", "held")
        return [path.name for path in self.marks.iterdir() if not path.name.startswith(others)]

    def started_twice(self) -> list[str]:
        """Attempts whose code ran more than once."""
        return [path.name for path in self.marks.glob("twice.*")]


def children(process: psutil.Process) -> list[psutil.Process]:
    """What *process*, of one thread, has started; without a look at all there is."""
    found = []
    with contextlib.suppress(OSError, psutil.Error):
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for pid in listed.split():
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(int(pid)))
    return found


def is_parent(process: psutil.Process) -> bool:
    """Whether it is a warm parent."""
    with contextlib.suppress(psutil.Error):
        return any("warm.py" in word for word in process.cmdline())
    return False


def eventually(
    condition: Any, complaint: Any = lambda: "it did not happen", pause: float = 0.005
) -> Any:
    """Poll *condition* until it is true, and return its value."""
    until = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < until, complaint()
        time.sleep(pause)
    return found


async def soon(condition: Any, complaint: Any = lambda: "it did not happen") -> Any:
    """`eventually`, while the event loop goes on."""
    return await asyncio.to_thread(eventually, condition, complaint)


def locked(home: Path) -> list[Path]:
    """The files under *home* that a process has locked."""
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


@dataclass(frozen=True)
class Word:
    """What a client reports about one job: its status, the reason, and its value or exception."""

    status: JobStatus
    reason: str
    end: Any


async def word_of(job: aio.JobHandle[Any]) -> Word:
    """Ask in every way there is; nothing may hang."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            end: Any = await job.result(cleanup=False)
        except (errors.KineticError, ArithmeticError) as error:
            end = error
        return Word(await job.status(), await job.reason(), end)


async def truth(scene: Scene) -> dict[str, Word]:
    """Ask a new client about all jobs; return its reports by job ID."""
    said: dict[str, Word] = {}
    async with aio.Client(backend="local") as client, asyncio.timeout(2 * DEADLINE_S):
        listed = {job.job_id for job in await client.list_jobs()}
        for begun in scene.submissions():
            jobs: list[aio.JobHandle[Any]] = []
            with contextlib.suppress(errors.NotFound):
                if begun.startswith("grp-"):
                    batch = await client.attach_batch(begun)
                    jobs = [await client.attach(f"{begun}-{i}") for i in range(len(batch.jobs))]
                else:
                    jobs = [await client.attach(begun)]
            words = await asyncio.gather(*map(word_of, jobs))
            said |= {job.job_id: word for job, word in zip(jobs, words, strict=True)}
        assert listed <= set(said), "what is listed can be attached to"
    return said


@pytest.fixture(autouse=True)
def project(small_project: Path) -> Path:
    """Of every test here."""
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
