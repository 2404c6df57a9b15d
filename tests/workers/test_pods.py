"""Workers in pods: the first process of a container, with a worker and its items below."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.protocol import frames, signing, wire
from kinetic._runner.protocol.marks import mark
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic._runner.protocol.workers import Crew, Terms
from kinetic._runner.stores.gcs import EMULATOR
from tests.gcs.server import Stored
from tests.runner.served import served

from .process import KEY, ROOT, SCOPE, Batch, running, wait_for

INHERITED = ("PATH", "LANG", "LD_LIBRARY_PATH")
JOB = "3f0c8f5e-job"


class Pods(Batch):
    """A batch whose workers are the first processes of pods."""

    def __init__(self, folder: Path, *args: Any, **options: Any) -> None:
        super().__init__(folder, *args, **options)
        (folder / "key").write_bytes(KEY)
        self.disruptions = 0
        self.is_single = False
        self.isolation = options.get("isolation", "process")
        self.environ: dict[str, str] = {}

    def make_single(self, value: Any) -> None:
        """Make the submission a job without a batch, with one input."""
        content = frames.pack([pickle.dumps(((value,), {}))])
        self.objects.create("arguments", content)
        part = wire.Input("arguments", 0, len(content), hashlib.sha256(content).hexdigest())
        order = wire.Order.decode(self.order_text)
        order = replace(order, job_id="job-1", group_id=None, arguments=part)
        self.order_text, self.is_single = order.encode(), True
        self.budgets = RetryBudgets(infrastructure=3)

    def start(self, rank: int) -> None:
        restarts = self._restarts[rank]
        self._restarts[rank] = restarts + 1
        folder = self.folder / f"pod-{rank}-{restarts}"
        (folder / "tmp").mkdir(parents=True)
        (folder / "termination-log").touch()
        crew = Crew(
            terms=Terms(
                workers=self.workers, budgets=self.budgets, backoff_s=0.01, single=self.is_single
            ),
            isolation=self.isolation,
            outputs=str(self.folder / "outputs"),
            created=time.time(),
        )
        environment = {
            **{name: os.environ[name] for name in INHERITED if name in os.environ},
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "KINETIC_ORDER": self.order_text,
            "KINETIC_CREW": crew.encode(),
            "KINETIC_ROUND": "0",
            "KINETIC_JOB_UID": JOB,
            "JOB_COMPLETION_INDEX": str(rank),
            "KINETIC_KEY_FILE": str(self.folder / "key"),
            "KINETIC_POD_UID": f"{rank:08x}-{restarts}",
            "KINETIC_FAILURES": str(restarts - self.disruptions),
            "KINETIC_DISRUPTIONS": str(self.disruptions),
            "KINETIC_TERMINATION_LOG": str(folder / "termination-log"),
            **self.environ,
        }
        with open(self.folder / f"log.{rank}", "ab") as log:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-u", str(ROOT / "runner" / "remote_runner.py")],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def receipt(self, rank: int, restarts: int = 0) -> wire.Receipt | None:
        """Return the termination message of a pod."""
        path = self.folder / f"pod-{rank}-{restarts}" / "termination-log"
        return wire.parse_receipt(path.read_text())

    def kept_log(self, index: int, attempt: int = 1) -> str | None:
        """Return what was stored of an item's output; None if nothing was."""
        name = wire.log_key(SCOPE, index, attempt, 0)
        try:
            content, _ = self.objects.get(name)
        except KeyError:
            return None
        metadata = self.objects.stat(name).metadata
        assert signing.is_signed(metadata, KEY, SCOPE, name, content)
        return content.decode()


def test_pods_run_all_items(tmp_path: Path) -> None:
    def square(number: int) -> int:
        if number % 2:
            print(f"squares {number}")
        return number * number

    batch = Pods(tmp_path, square, range(20), workers=2)
    batch.run()
    assert [batch.value(index) for index in range(20)] == [i * i for i in range(20)]
    assert batch.requests().done == "all final"
    assert 0 in {code for _, code in batch.codes} <= {0, 44}
    assert [batch.kept_log(index) for index in range(4)] == [
        *(None, "squares 1\n", None, "squares 3\n")
    ]
    outcome = batch.outcomes(7)[0]
    assert outcome.log is None
    assert outcome.executor in ("00000000-0", "00000001-0")
    assert outcome.writer.startswith(f"0.{JOB}.")
    receipts = [receipt for rank in range(2) if (receipt := batch.receipt(rank)) is not None]
    for receipt in receipts:
        name = wire.attempt_key(SCOPE, receipt.index, receipt.attempt, "outcome")
        assert receipt.metadata == batch.objects.stat(name).metadata
        wire.Outcome.verified(receipt.metadata, KEY, SCOPE, receipt.index, receipt.attempt)
    assert receipts
    assert [*(tmp_path / "pod-0-0" / "tmp").iterdir()] == []


def test_the_log_of_a_pod_says_what_belongs_to_which_item(tmp_path: Path) -> None:
    def speak(name: str) -> None:
        print(f"I am {name}", end="")

    batch = Pods(tmp_path, speak, ["a", "b"])
    batch.run()
    lines = batch.output().splitlines()
    for index, name in enumerate("ab"):
        job = f"grp-000000000000-{index}"
        begin, end = (lines.index(mark(KEY, SCOPE, job, 1, it)) for it in ("begins", "has ended"))
        assert lines[begin + 1 : end] == [f"I am {name}"]


def test_an_error_has_the_last_lines_of_its_item_only(tmp_path: Path) -> None:
    def fail(number: int) -> None:
        print(f"item {number}", flush=True)
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(number)

    batch = Pods(tmp_path, fail, range(3))
    batch.run()
    for index in range(3):
        log = batch.error(index)["log"]
        assert f"item {index}" in log
        assert not any(f"item {other}" in log for other in {0, 1, 2} - {index})
    assert [batch.outcomes(index)[0].reason for index in range(3)] == [
        *("user error", "lost", "user error")
    ]


def test_a_worker_downloads_data_once_and_again_after_an_item_has_changed_it(
    tmp_path: Path,
) -> None:
    volume = str(tmp_path / "volume")

    def read(number: int) -> list[str]:
        from kinetic_runner.protocol import stand_ins

        data = stand_ins.data_path(1)
        found = [path.read_text() for path in (Path(data, "a"), Path(volume, "b"))]
        found += sorted(os.listdir(volume)) + sorted(os.listdir(data))
        if number == 2:
            Path(data, "a").write_text("2")
        if number == 4:
            Path(volume, "new").mkdir()
        if number == 6:
            shutil.rmtree(data)
        return found

    refs = (
        wire.DataRef(uri="gs://kn-test/volume/", mount=volume),
        wire.DataRef(uri="gs://kn-test/set/"),
    )
    with served() as server:
        server.objects["set/a"] = Stored(b"1", {}, 1)
        server.objects["volume/b"] = Stored(b"2", {}, 2)
        batch = Pods(tmp_path, read, range(10), order={"data": refs})
        batch.environ = {EMULATOR: server.url}
        batch.run()
    assert [batch.value(index) for index in range(10)] == [["1", "2", "b", "a"]] * 10
    assert server.requests["media"] == 5  # two at first, and one after each of three changes


def test_items_of_a_worker_find_variables_and_temporary_files_of_their_own(tmp_path: Path) -> None:
    def look(number: int) -> tuple[str, ...]:
        import tempfile

        names = ("KINETIC_JOB_ID", "JOB_ID", "KINETIC_INDEX", "KINETIC_OUTPUT_DIR")
        assert tempfile.gettempdir() == os.environ["TMPDIR"]
        assert os.listdir(tempfile.gettempdir()) == []
        tempfile.mkstemp()
        return tuple(os.environ[name] for name in names)

    batch = Pods(tmp_path, look, range(3))
    batch.environ = {"JOB_ID": "grp-000000000000"}
    batch.run()
    for index in range(3):
        job, outputs = f"grp-000000000000-{index}", f"{tmp_path}/outputs/{index}"
        assert batch.value(index) == (job, job, str(index), outputs)


@pytest.mark.full
@pytest.mark.parametrize("is_single", [False, True])
def test_a_replacement_closes_what_a_killed_pod_had_claimed(
    tmp_path: Path, is_single: bool
) -> None:
    def wait_once(marks: str) -> str:
        path = Path(marks)
        if not path.exists():
            path.write_text("waits")
            time.sleep(60)
        return os.environ["KINETIC_ATTEMPT"]

    batch = Pods(tmp_path, wait_once, [str(tmp_path / "mark")])
    if is_single:
        batch.make_single(str(tmp_path / "mark"))
    with running(batch):
        wait_for(tmp_path / "mark")
        batch.disruptions = 1  # its replacement hears that a node was removed
        os.killpg(batch.processes[0].pid, signal.SIGKILL)
        batch.finish()
    assert batch.codes == [(0, -signal.SIGKILL), (0, 0)]
    assert [outcome.reason for outcome in batch.outcomes(0)] == ["preempted", ""]
    assert batch.value(0) == "2"
    assert ("kinetic" in batch.output()) is not is_single  # its log has no marks


GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 256 << 20


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Path]:
    """A control group with a limit, whose files are those that a container sees in version 2."""
    group = GROUPS / f"kinetic-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as exc:
        pytest.skip(f"no memory control group can be made here: {exc}")
    seen = tmp_path / "cgroup"
    seen.mkdir()
    names = {"memory.max": "memory.limit_in_bytes", "memory.current": "memory.usage_in_bytes"}
    for name, old in (names | {"memory.stat": "memory.stat"}).items():
        (seen / name).symlink_to(group / old)
    (seen / "memory.oom.group").write_text("1\n")
    yield group
    deadline = time.monotonic() + 30
    while (group / "cgroup.procs").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    group.rmdir()


@pytest.mark.full
@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_a_worker_survives_an_item_that_runs_out_of_memory(
    tmp_path: Path, container: Path, isolation: str
) -> None:
    """The guard is faster than the kernel, which would kill all processes of the container."""

    class Limited(Pods):
        def start(self, rank: int) -> None:
            super().start(rank)
            (container / "cgroup.procs").write_text(str(self.processes[rank].pid))

    def fill(size: int) -> int:
        parts = []
        for _ in range(size // (1 << 20)):
            parts.append(b"x" * (1 << 20))
            time.sleep(0.001)
        return len(parts)

    batch = Limited(tmp_path, fill, [1 << 20, 4 * LIMIT, 2 << 20], isolation=isolation)
    batch.environ["KINETIC_POD_CGROUP_FOLDER"] = str(tmp_path / "cgroup")
    batch.run()
    assert batch.outcomes(1)[0].reason == "out of memory"
    assert [batch.value(0), batch.value(2)] == [1, 2]
    assert batch.codes == [(0, 0)]
    assert "the container nears 256 MiB" in batch.output()
    assert b"oom_kill 0" in (container / "memory.oom_control").read_bytes()
