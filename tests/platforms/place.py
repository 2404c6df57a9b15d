"""What a behaviour is given: a client of some platform, and a folder of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop

import kinetic
from kinetic import aio
from kinetic.aio.platforms import Platform as Ports
from kinetic.job_status import JobStatus

from .script import Script

T = TypeVar("T")
SHARED = ("code/", "functions/", "data/")
PAUSE_S = 0.05
ON_UVLOOP = " on uvloop"
IN_A_DIRECTORY = " in a directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One platform of the suite; ``options`` is what a decorator must say there.

    ``title`` is its name, and perhaps `ON_UVLOOP` or `IN_A_DIRECTORY`.
    """

    title: str
    home: Path
    folder: Path
    side_by_side: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The backend."""
        return self.title.removesuffix(ON_UVLOOP).removesuffix(IN_A_DIRECTORY)

    @property
    def new_loop(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """What makes the event loop of the clients; None for asyncio's own."""
        return uvloop.new_event_loop if self.title.endswith(ON_UVLOOP) else None


class Place:
    """Somewhere on a platform; ``folder`` is what jobs there can see as well."""

    def __init__(self, platform: Platform, client: aio.Client, ports: Ports, folder: Path) -> None:
        self.platform = platform
        self.name = platform.name
        self.client = client
        self.ports = ports
        self.folder = folder

    def on(self, function: Callable[..., Any], **options: Any) -> Any:
        """*function*, decorated for the platform."""
        return kinetic.run(accelerator="cpu", **{**self.platform.options, **options})(function)

    async def submit(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> aio.JobHandle[Any]:
        """A job of *function*."""
        return await self.client.submit(self._decorated(function), *args, **kwargs)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The value of a job of *function*."""
        return await self.client.run(self._decorated(function), *args, **kwargs)

    async def map(
        self, function: Callable[..., Any], inputs: Any, **terms: Any
    ) -> aio.BatchHandle[Any]:
        """A batch of *function*."""
        terms = {"progress": False, **terms}
        return await self.client.run_async_map(self._decorated(function), inputs, **terms)

    def _decorated(self, function: Callable[..., Any]) -> Any:
        return function if hasattr(function, "__kinetic__") else self.on(function)

    def size(self, **of_platform: T) -> T:
        """As large as the platform can do in the time there is; clusters are alike."""
        return of_platform["local" if self.name == "local" else "gke"]

    def gate(self, name: str = "gate") -> Gate:
        """A new one."""
        return Gate(self.folder / name)

    def marks(self, pattern: str = "*") -> list[str]:
        """The names of files that jobs have left in the folder."""
        return sorted(path.name for path in self.folder.glob(pattern))

    async def marked(self, pattern: str, count: int = 1) -> None:
        """Return once jobs have left so many files."""
        await until(lambda: len(self.marks(pattern)) >= count)

    async def running(self, job: aio.JobHandle[Any]) -> None:
        """Return once the platform says that *job* runs: its process may be ahead of that."""
        while await job.status() is not JobStatus.RUNNING:
            await asyncio.sleep(PAUSE_S)

    async def counted(self, batch: aio.BatchHandle[Any], **counts: int) -> None:
        """Return once so many of the batch's jobs are told to be in each status."""
        while await batch.status_counts() != counts:
            await asyncio.sleep(PAUSE_S)

    async def objects(self, identity: str) -> list[str]:
        """All in the store that belongs to a submission."""
        found = await self.ports.store.list("")
        return [
            one.name for one in found if not one.name.startswith(SHARED) and identity in one.name
        ]

    @contextmanager
    def told(self) -> Iterator[list[str]]:
        """What the library says of this folder meanwhile, in its log."""
        lines: list[str] = []
        folder = str(self.folder)

        class Ear(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if folder in (line := record.getMessage()):
                    lines.append(line)

        ear = Ear()
        logging.getLogger("absl").addHandler(ear)
        try:
            yield lines
        finally:
            logging.getLogger("absl").removeHandler(ear)

    @asynccontextmanager
    async def script(self, code: str) -> AsyncIterator[Script]:
        """Another process, which runs *code* in a project of its own."""
        folder = self.folder / "project"
        folder.mkdir(exist_ok=True)
        options = {"accelerator": "cpu", **self.platform.options}
        script = await Script.started(code, folder, options)
        try:
            yield script
        finally:
            await script.kill()


class Gate:
    """Where jobs meet the test: they tell that they run, and wait for a word."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir()

    @property
    def path(self) -> str:
        """What `wait_at` takes."""
        return str(self._path)

    async def entered(self, count: int = 1) -> None:
        """So many have come."""
        await until(lambda: len([*self._path.glob("in.*")]) >= count)

    def open(self, word: str = "go") -> None:
        """Let them go on."""
        (self._path / "word").write_text(word)
        (self._path / "word").rename(self._path / "out")


def wait_at(gate: str) -> str:
    """In the job: come to *gate*, and return the word."""
    Path(gate, f"in.{os.environ['KINETIC_JOB_ID']}.{os.environ['KINETIC_ATTEMPT']}").touch()
    print("waiting", flush=True)
    while not Path(gate, "out").exists():
        time.sleep(0.01)
    return Path(gate, "out").read_text()


async def until(condition: Callable[[], Any]) -> None:
    """Return once *condition* is true: something that nobody tells of."""
    while not condition():
        await asyncio.sleep(PAUSE_S)
