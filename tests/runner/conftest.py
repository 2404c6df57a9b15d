"""Fixtures that run the runner as a real process over a directory store or a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects
from tests.gcs.processes import fake_gcs
from tests.gcs.server import GcsServer
from tests.runner.calls import KEY, RUNNER, Calls
from tests.runner.pods import Pods
from tests.runner.served import served

__all__ = ["fake_gcs"]


@dataclass
class Bench(Calls):
    """Run each call in its own interpreter, like the supervisor of local jobs."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objects = DirectoryObjects(self.folder / "store")
        self.store = self.objects.url
        self.runs = 0

    def start(
        self, order: wire.Order, *, program: Sequence[str] = (str(RUNNER),), **options: Any
    ) -> subprocess.Popen[str]:
        """Start *program*, by default the runner, with *order*."""
        self.runs += 1
        work = self.folder / f"work-{self.runs}"
        work.mkdir()
        local = {"executor": "pod-1", "work": str(work), "cache": str(self.folder / "cache")}
        local["spares"] = False
        read, write = os.pipe()
        with open(write, "w") as pipe:
            pipe.write(f"{json.dumps(local)}\n{json.dumps({'key': KEY.hex()})}\n{order.encode()}")
        try:
            return subprocess.Popen(
                [sys.executable, "-u", *program],
                env={**os.environ, **self.environment, "KINETIC_ORDER_FD": str(read)},
                pass_fds=[read],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                **options,
            )
        finally:
            os.close(read)

    def run(self, order: wire.Order, **options: Any) -> tuple[int, str]:
        """Run *order* and return the exit code and the output."""
        process = self.start(order, **options)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output


@pytest.fixture(autouse=True, scope="module")
def by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pickle the functions of the test module by value, like those of a script."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with served() as running:
        yield running


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with Pods.over_directory(tmp_path) as pods:
        yield pods


@pytest.fixture
def in_bucket(server: GcsServer, tmp_path: Path) -> Iterator[Pods]:
    """Return pods over a bucket of *server*."""
    with Pods.over_bucket(tmp_path, server.url) as pods:
        yield pods


@pytest.fixture(params=["gcs", "fake-gcs-server"])
def any_server(request: pytest.FixtureRequest) -> str:
    """Return the URL of a storage server: the tests' own, then fake-gcs-server."""
    if request.param == "gcs":
        own: GcsServer = request.getfixturevalue("server")
        return own.url
    return request.getfixturevalue("fake_gcs")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
