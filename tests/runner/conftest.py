"""A runner as a real process over a real directory store."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from kinetic._runner.protocol import frames, pickles, wire
from kinetic._runner.stores.directory import DirectoryObjects
from tests.gcs.server import GcsServer
from tests.runner.pods import Pods
from tests.runner.served import served

KEY = b"k" * 32
SCOPE = "jobs/job-1/"
RUNNER = Path(__file__).resolve().parents[2] / "runner" / "remote_runner.py"


@dataclass
class Bench:
    """Builds orders, runs them, and reads what they leave in the store."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objects = DirectoryObjects(self.folder / "store")
        self.runs = 0

    def order(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> wire.Order:
        """Put a call into the store and describe it."""
        function_bytes = pickles.dumps(function)
        arguments = pickles.dumps((args, kwargs))
        digest = hashlib.sha256(function_bytes).hexdigest()
        self.objects.create(f"functions/{digest}.pkl", function_bytes)
        self.objects.create(wire.input_key(SCOPE, 0), arguments)
        return wire.Order(
            store=self.objects.url,
            scope=SCOPE,
            job_id="job-1",
            index=0,
            attempt=1,
            function=wire.Input(
                name=f"functions/{digest}.pkl", start=0, stop=len(function_bytes), digest=digest
            ),
            arguments=wire.Input(
                name=wire.input_key(SCOPE, 0),
                start=0,
                stop=len(arguments),
                digest=hashlib.sha256(arguments).hexdigest(),
            ),
        )

    def start(
        self, order: wire.Order, *, executor: str = "pod-1", **options: Any
    ) -> subprocess.Popen[str]:
        """Start a runner with this order."""
        self.runs += 1
        work = self.folder / f"work-{self.runs}"
        work.mkdir()
        cache = str(self.folder / "cache")
        local = {"executor": executor, "work": str(work), "cache": cache}
        local |= {"mounts": False, "spares": False}
        read, write = os.pipe()
        with open(write, "w") as pipe:
            pipe.write(f"{json.dumps(local)}\n{json.dumps({'key': KEY.hex()})}\n{order.encode()}")
        try:
            return subprocess.Popen(
                [sys.executable, "-u", str(RUNNER)],
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
        """Exit code and output of a runner that has ended."""
        process = self.start(order, **options)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def outcome(self, attempt: int = 1) -> wire.Outcome:
        """The verified header of what was committed."""
        name = wire.attempt_key(SCOPE, 0, attempt, "outcome")
        body, metadata = self.objects.get(name)
        outcome = wire.Outcome.verified(metadata, KEY, SCOPE, 0, attempt)
        assert hashlib.sha256(body).hexdigest() == outcome.body
        return outcome

    def value(self) -> Any:
        """What was returned."""
        outcome = self.outcome()
        assert outcome.kind is wire.Kind.VALUE, self.error()
        if outcome.value is not None:
            return pickles.load(self.objects.get(outcome.value[0])[0])
        return pickles.load(self.objects.get(wire.attempt_key(SCOPE, 0, 1, "outcome"))[0])

    def error(self) -> dict[str, str]:
        """What went wrong, in words."""
        body, _ = self.objects.get(wire.attempt_key(SCOPE, 0, 1, "outcome"))
        words: dict[str, str] = frames.unpack(body).fields["error"]
        return words

    def claim(self, executor: str, attempt: int = 1) -> None:
        """Claim an attempt as somebody else."""
        name = wire.attempt_key(SCOPE, 0, attempt, "claim")
        assert self.objects.create(name, b"", {"executor": executor, "fence": "1"})

    def close(self, outcome: wire.Outcome, attempt: int = 1) -> None:
        """Commit an outcome as somebody else."""
        outcome = outcome._replace(body=hashlib.sha256(b"").hexdigest())
        name = wire.attempt_key(SCOPE, 0, attempt, "outcome")
        assert self.objects.create(name, b"", outcome.signed(KEY, SCOPE, 0, attempt))

    def stop(self) -> None:
        """Ask for a stop of everything."""
        name = wire.control_key(SCOPE, 0)
        self.objects.create(name, *wire.Request(kind="stop").signed(KEY, SCOPE, name))


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
    """Pods over a directory, for behavior that doesn't depend on the store."""
    objects = DirectoryObjects(tmp_path / "store")
    with Pods(tmp_path, objects, objects.url) as made:
        yield made


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
