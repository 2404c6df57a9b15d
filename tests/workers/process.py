"""A worker's process, and a platform that starts and replaces such processes, for tests.

``python -m tests.workers.process FOLDER RANK RESTARTS`` runs the submission that `Batch` has
stored in a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from kinetic._runner.job import temporary
from kinetic._runner.job.processes import LINUX
from kinetic._runner.job.workspace import JobPlace
from kinetic._runner.protocol import frames, signing, wire
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.workers import (
    EXIT_DONE,
    EXIT_SURPLUS,
    Crew,
    Requests,
    Terms,
    WorkerId,
)
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._runner.worker import main

SCOPE = "batches/grp-000000000000/"
ROOT = Path(__file__).resolve().parents[2]
KEY = signing.submission_key(b"root", SCOPE)


class Batch:
    """A stored submission, the processes of its workers, and what they left."""

    def __init__(
        self,
        folder: Path,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        *,
        workers: int = 1,
        timeout: float | None = None,
        grace: float = 5.0,
        prunable: bool = False,
        isolation: str = "process",
        init: Mapping[str, Callable[[], Any]] | None = None,
        recycle: int | None = None,
        memory_bytes: int | None = None,
        project: Mapping[str, bytes] | None = None,
        refused: Sequence[int] = (),
        reusable: bool = True,
        order: Mapping[str, Any] | None = None,
        **terms: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.objects = DirectoryObjects(str(folder / "store"))
        self.workers = workers
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.codes: list[tuple[int, int]] = []
        self._restarts = dict.fromkeys(range(workers), 0)
        self._count = len(inputs)
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)  # a worker can't import a module of tests
        try:
            stored = self._store_pickle("functions/f", function)
            stored_init = None if init is None else self._store_pickle("functions/init", dict(init))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        self.objects.create(f"{SCOPE}manifest", b"")
        self._store(inputs, refused)
        code = None if project is None else self._store_project(project)
        fields: dict[str, Any] = {"code": code, **(order or {})}
        whole = wire.Order(
            store=f"file://{folder}/store",
            scope=SCOPE,
            job_id="",
            group_id="grp-000000000000",
            index=0,
            attempt=1,
            function=stored,
            arguments=wire.Input("", 0, 0, ""),
            timeout=timeout,
            grace=grace,
            prunable=prunable,
            **fields,
        )
        self.budgets = RetryBudgets(user=terms.pop("retries", 0))
        self.order_text = whole.encode()
        options = {"isolation": isolation, "init": stored_init, "recycle": recycle}
        terms = {"workers": workers, "budgets": self.budgets, **terms}
        spec = (self.order_text, terms, options, memory_bytes, reusable)
        (folder / "spec").write_bytes(pickle.dumps(spec))

    def _store_pickle(self, name: str, value: Any) -> wire.Input:
        content = frames.pack([cloudpickle.dumps(value)])
        self.objects.create(name, content)
        return wire.Input(name, 0, len(content), _sha256(content))

    def _store_project(self, files: Mapping[str, bytes]) -> wire.Code:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name, body in files.items():
                archive.writestr(name, body)
        digest = _sha256(content.getvalue())
        self.objects.create(f"code/{digest}.zip", content.getvalue())
        return wire.Code(name=f"code/{digest}.zip", digest=digest)

    def _store(self, inputs: Sequence[Any], refused: Sequence[int]) -> None:
        # Not in a worker's process: its forks would run the callbacks of asyncio's modules.
        from kinetic.aio._preparing.inputs import EncodedInput, first_chunk
        from kinetic.aio._submissions.inputs import chunk_body

        contents = [frames.pack([pickle.dumps(((value,), {}))]) for value in inputs]
        rest = [EncodedInput(None, content, _sha256(content), "s") for content in contents]
        number = first = 0
        while rest:
            part = first_chunk(rest)
            failed = {i - first: ValueError("no") for i in refused if 0 <= i - first < len(part)}
            body = chunk_body(part, first, {}, failed)
            slot = wire.Slot(first, len(part), _sha256(frames.footer_of(body)), len(body))
            self._store_slot(number, slot, body)
            rest, number, first = rest[len(part) :], number + 1, first + len(part)
        self._store_slot(number, wire.Slot(total=len(inputs)), b"")

    def _store_slot(self, number: int, slot: wire.Slot, body: bytes) -> None:
        name = wire.input_key(SCOPE, number)
        self.objects.create(name, body, slot.signed(KEY, SCOPE, name))

    # --- the platform ---

    def start(self, rank: int) -> None:
        """Start the process of a rank, or its replacement."""
        restarts = self._restarts[rank]
        command = [
            sys.executable,
            "-m",
            "tests.workers.process",
            str(self.folder),
            str(rank),
            str(restarts),
        ]
        self._restarts[rank] = restarts + 1
        with open(self.folder / f"log.{rank}", "ab") as log:
            self.processes[rank] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)

    def run(self) -> None:
        """Start all workers, and replace those that die, until each has left."""
        for rank in range(self.workers):
            self.start(rank)
        self.finish()

    def finish(self) -> None:
        """Replace workers that die, until each has left."""
        while self.processes:
            rank = next((k for k, it in self.processes.items() if it.poll() is not None), None)
            if rank is None:
                time.sleep(0.01)
                continue
            code = self.processes.pop(rank).returncode
            self.codes.append((rank, code))
            if code in (1, 2):
                raise RuntimeError((self.folder / f"log.{rank}").read_text())
            if code not in (EXIT_DONE, EXIT_SURPLUS):
                self.start(rank)

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    # --- what it left ---

    def attempts(self) -> dict[int, dict[int, wire.Attempt]]:
        found: dict[int, dict[int, wire.Attempt]] = {}
        for first in range(0, self._count, wire.BLOCK_SIZE):
            listing = self.objects.list(wire.block_prefix(SCOPE, first))
            entries = [(entry.name, entry.metadata) for entry in listing]
            found |= wire.attempts_of(entries, KEY, SCOPE)
        return found

    def requests(self) -> Requests:
        requests = Requests()
        for stored in self.objects.list(f"{SCOPE}control/"):
            body, _ = self.objects.get(stored.name)
            requests.add(wire.Request.verified(body, stored.metadata, KEY, SCOPE, stored.name))
        return requests

    def states(self) -> list[wire.ItemState]:
        requests, attempts = self.requests(), self.attempts()
        return [
            wire.item_state(requests.standing(i), attempts.get(i, {}), self.budgets).state
            for i in range(self._count)
        ]

    def outcomes(self, index: int) -> list[wire.Outcome]:
        attempts = self.attempts()[index]
        return [it.outcome for _, it in sorted(attempts.items()) if it.outcome is not None]

    def value(self, index: int) -> Any:
        """Return the value of an item, which the outcome's digest covers."""
        number, outcome = next(
            (number, it.outcome)
            for number, it in self.attempts()[index].items()
            if it.outcome is not None and it.outcome.kind is wire.Kind.VALUE
        )
        body = self.body(index, number)
        assert _sha256(body) == outcome.body
        if outcome.value is not None:
            body, _ = self.objects.get(outcome.value[0])
            assert _sha256(body) == outcome.value[1]
        return pickle.loads(frames.unpack(body).frames[0])

    def error(self, index: int, attempt: int = 1) -> dict[str, str]:
        """Return the text fields of an attempt's error."""
        return dict(frames.unpack(self.body(index, attempt)).fields["error"])

    def body(self, index: int, attempt: int) -> bytes:
        """Return the body of an attempt's outcome."""
        name = wire.attempt_key(SCOPE, index, attempt, "outcome")
        return wire.body_of(self.objects.get(name)[0], self.objects.stat(name).metadata)

    def output(self, rank: int = 0) -> str:
        """Return all that a rank's workers and their items have written."""
        return (self.folder / f"log.{rank}").read_text()

    def log(self, index: int, rank: int = 0) -> str:
        """Return what the last attempt of an item has written."""
        start, stop = self.outcomes(index)[-1].log or (0, 0)
        return (self.folder / f"log.{rank}").read_bytes()[start:stop].decode()

    def append(self, request: wire.Request) -> None:
        number = self.requests().count
        name = wire.control_key(SCOPE, number)
        content, metadata = request.signed(KEY, SCOPE, name)
        assert self.objects.create(name, content, metadata)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wait_for(path: Path, timeout_s: float = 60.0) -> str:
    """Wait until a job has written *path*; return its text."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} doesn't appear"
        time.sleep(0.01)
    return path.read_text()


def exists(pid: int) -> bool:
    """Return whether a process exists, and isn't a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@contextlib.contextmanager
def running(batch: Batch) -> Iterator[Batch]:
    """Start the workers of *batch*, and kill at the end what is left."""
    try:
        for rank in range(batch.workers):
            batch.start(rank)
        yield batch
    finally:
        batch.end()


def run(folder: Path, rank: int, restarts: int) -> int:
    """Run a worker in this process; return its exit code."""
    text, terms, options, memory_bytes, reusable = pickle.loads((folder / "spec").read_bytes())
    work = folder / f"work.{rank}.{restarts}"
    work.mkdir()
    os.environ.update(
        temporary.make(str(work), f"{rank:04x}{restarts:04x}", {"KINETIC_TMPDIR": str(folder)})
    )
    crew = Crew(
        terms=Terms(**terms), outputs=str(folder / "outputs"), created=time.time(), **options
    )
    place = JobPlace(work=work, cache=folder / "cache", mounts=LINUX, reusable=reusable)
    me = WorkerId(0, "j", rank, restarts)
    objects = DirectoryObjects(str(folder / "store"))
    worker = main.Worker(
        me,
        f"{rank}-{restarts}-{os.getpid()}",
        objects,
        wire.Order.decode(text),
        KEY,
        crew,
        place,
        memory_bytes=memory_bytes,
    )
    return worker.run()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
