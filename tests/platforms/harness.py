"""What a behaviour gets: a client of the tested platform, and a folder of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop

import kinetic
from kinetic import aio
from kinetic.aio.platforms import Platform as Ports
from kinetic.job_status import JobStatus
from tests.scripts import Script, prelude

T = TypeVar("T")
SHARED = ("code/", "functions/", "data/")
PAUSE_S = 0.05
DEADLINE_S, LONG_S = 150.0, 1200.0
"""After how many seconds a behaviour counts as hanging, even on a busy machine."""

ON_UVLOOP = " on uvloop"
IN_A_DIRECTORY = " in a directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A platform that the suite runs on, and the decorator ``options`` that it needs.

    ``title`` is the backend, with `ON_UVLOOP` or `IN_A_DIRECTORY` appended in such variants.
    """

    title: str
    home: Path
    folder: Path
    side_by_side: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self.title.removesuffix(ON_UVLOOP).removesuffix(IN_A_DIRECTORY)

    @property
    def new_loop(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """Factory of the clients' event loop; None means asyncio's default."""
        return uvloop.new_event_loop if self.title.endswith(ON_UVLOOP) else None


class Harness:
    """Submit to a platform and check what happens; jobs can access ``folder`` like the test.

    ``runs_alone`` says that workers run a batch, so that it needs no client.
    """

    def __init__(self, platform: Platform, client: aio.Client, ports: Ports, folder: Path) -> None:
        self.platform = platform
        self.name = platform.name
        self.runs_alone = platform.name != "pathways"
        self.client = client
        self.ports = ports
        self.folder = folder

    def on(self, function: Callable[..., Any], **options: Any) -> Any:
        """Decorate *function* for the platform."""
        return kinetic.run(accelerator="cpu", **{**self.platform.options, **options})(function)

    async def submit(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> aio.JobHandle[Any]:
        """Submit a job of *function*."""
        return await self.client.submit(self._decorated(function), *args, **kwargs)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run *function* in a job and return its value."""
        return await self.client.run(self._decorated(function), *args, **kwargs)

    async def map(
        self, function: Callable[..., Any], inputs: Any, **terms: Any
    ) -> aio.BatchHandle[Any]:
        """Submit a batch of *function*."""
        terms = {"progress": False, **terms}
        return await self.client.run_async_map(self._decorated(function), inputs, **terms)

    def _decorated(self, function: Callable[..., Any]) -> Any:
        return function if hasattr(function, "__kinetic__") else self.on(function)

    def size(self, **sizes: T) -> T:
        """Choose a size that the platform can handle in time; all clusters use that of ``gke``."""
        return sizes["local" if self.name == "local" else "gke"]

    def gate(self, name: str = "gate") -> Gate:
        """Create a gate."""
        return Gate(self.folder / name)

    def marks(self, pattern: str = "*") -> list[str]:
        """Return the names of the files that jobs have left in the folder."""
        return sorted(path.name for path in self.folder.glob(pattern))

    async def marked(self, pattern: str, count: int = 1) -> None:
        """Wait until jobs have left *count* files that match."""
        await until(lambda: len(self.marks(pattern)) >= count)

    async def running(self, job: aio.JobHandle[Any]) -> None:
        """Wait until the platform reports that *job* runs; its process may have started earlier."""
        while await job.status() is not JobStatus.RUNNING:
            await asyncio.sleep(PAUSE_S)

    async def counted(self, batch: aio.BatchHandle[Any], **counts: int) -> None:
        """Wait until the batch reports exactly these counts of statuses."""
        while await batch.status_counts() != counts:
            await asyncio.sleep(PAUSE_S)

    async def objects(self, identity: str) -> list[str]:
        """Return the names of the objects that belong to the submission *identity*."""
        found = await self.ports.store.list("")
        return [
            stored.name
            for stored in found
            if not stored.name.startswith(SHARED) and identity in stored.name
        ]

    @contextmanager
    def messages(self) -> Iterator[list[str]]:
        """Collect the log messages of the library that mention this folder."""
        lines: list[str] = []
        folder = str(self.folder)

        class Collector(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if folder in (line := record.getMessage()):
                    lines.append(line)

        collector = Collector()
        logging.getLogger("absl").addHandler(collector)
        try:
            yield lines
        finally:
            logging.getLogger("absl").removeHandler(collector)

    @contextmanager
    def script(self, code: str) -> Iterator[Script]:
        """Run *code* in another process, in a project of its own; threads wait for its lines."""
        folder = self.folder / "project"
        folder.mkdir(exist_ok=True)
        options = {"accelerator": "cpu", **self.platform.options}
        with Script(prelude(**options) + code, folder=folder, deadline=DEADLINE_S) as script:
            yield script


class Gate:
    """Let jobs report that they run, and hold them until the test sends them a text."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir()

    @property
    def path(self) -> str:
        """Argument for `wait_at`."""
        return str(self._path)

    async def entered(self, count: int = 1) -> None:
        """Wait until *count* attempts have arrived."""
        await until(lambda: len([*self._path.glob("in.*")]) >= count)

    def open(self, text: str = "go") -> None:
        """Let the jobs continue and return *text*."""
        (self._path / "text").write_text(text)
        (self._path / "text").rename(self._path / "out")


def wait_at(gate: str) -> str:
    """In a job, report arrival at *gate*, wait until it opens, and return its text."""
    Path(gate, f"in.{os.environ['KINETIC_JOB_ID']}.{os.environ['KINETIC_ATTEMPT']}").touch()
    print("waiting", flush=True)
    while not Path(gate, "out").exists():
        time.sleep(0.01)
    return Path(gate, "out").read_text()


async def until(condition: Callable[[], Any]) -> None:
    """Poll until *condition* is true."""
    while not condition():
        await asyncio.sleep(PAUSE_S)
