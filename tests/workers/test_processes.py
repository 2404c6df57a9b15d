"""Real workers: processes that run items, are killed, and are replaced."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.protocol import frames, metrics, signing, wire
from kinetic._runner.protocol.metrics import Reports
from kinetic._runner.worker.interpreter import Interpreter
from kinetic._runner.worker.item import RESULT_BYTES, ResultBox
from kinetic._runner.worker.main import Guard

from .process import KEY, SCOPE, Batch, running, wait_for

SUCCEEDED, FAILED = wire.ItemState.SUCCEEDED, wire.ItemState.FAILED
CANCELLED = wire.ItemState.CANCELLED
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc: run it on Linux")


def test_a_failure_is_retried_and_then_stays(tmp_path: Path) -> None:
    def fail_once(path: str) -> str:
        file = Path(path)
        file.write_text(file.read_text() + "x" if file.exists() else "x")
        if len(file.read_text()) < 2:
            raise ValueError("not yet")
        return file.read_text()

    def fail(path: str) -> None:
        raise ValueError("never")

    once = Batch(tmp_path / "a", fail_once, [str(tmp_path / "marks")], retries=1, backoff_s=0.01)
    once.run()
    assert once.value(0) == "xx"
    assert [outcome.kind for outcome in once.outcomes(0)] == ["error", "value"]
    never = Batch(tmp_path / "b", fail, [""], retries=2, backoff_s=0.01)
    never.run()
    assert never.states() == [FAILED]
    assert [outcome.reason for outcome in never.outcomes(0)] == ["user error"] * 3
    assert never.error(0, 3)["message"] == "never"


def test_a_large_value_has_an_object_of_its_own(tmp_path: Path) -> None:
    def large(size: int) -> bytes:
        return b"x" * size

    sizes = [10, RESULT_BYTES + 1, 10, wire.INLINE_BYTES + 1]
    batch = Batch(tmp_path, large, sizes)
    batch.run()
    assert [len(batch.value(index)) for index in range(4)] == sizes
    assert [batch.outcomes(index)[0].value is None for index in range(4)] == [True] * 3 + [False]


def test_a_result_that_is_not_whole_counts_as_none() -> None:
    result_box = ResultBox()
    for size in (1, RESULT_BYTES + 1, 2):
        result_box.put(b"x" * size)
        assert result_box.take() == b"x" * size
        assert result_box.take() == b"", "the next process dies before it leaves a result"
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (RESULT_BYTES, RESULT_BYTES))
            result_box.put(b"x" * (RESULT_BYTES + 1))  # it fails when a part is written
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert result_box.take() == b""
    result_box.put(b"y" * (RESULT_BYTES + 2))
    assert result_box.take() == b"y" * (RESULT_BYTES + 2)


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_the_reports_of_an_item_are_in_the_store_and_in_its_outcome(
    isolation: str, tmp_path: Path
) -> None:
    def learn(size: int) -> bytes:
        import kinetic

        for step in range(100):
            kinetic.report(step, 0.5)
            time.sleep(0.002)
        return b"x" * size

    batch = Batch(tmp_path, learn, [10, wire.INLINE_BYTES + 1], isolation=isolation)
    batch.run()
    for index in range(2):
        assert len(batch.value(index)) >= 10
        assert batch.outcomes(index)[0].metrics
        last = Reports.of(frames.unpack(batch.body(index, 1)).fields[metrics.METRICS])
        first, _ = batch.objects.get(metrics.metrics_key(SCOPE, index, 1, 0))
        assert Reports.of(json.loads(first)).first == 0
        assert last.first + len(last.entries) == 100


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_a_pruned_item_ends_as_a_value_and_the_worker_goes_on(
    isolation: str, tmp_path: Path
) -> None:
    def learn(name: str) -> int:
        import kinetic

        step = 0
        while name != "short":
            try:
                if name == "reports" or step == 0:
                    kinetic.report(step, 0.5)
                time.sleep(0.002)
            except BaseException:  # kinetic.Pruned, and the signal after the grace period
                if name == "sleeps" or (name == "reports" and step % 2):
                    raise
            step += 1
        return os.getpid()

    names = ["short", "reports", "sleeps", "short", "catches all", "short"]
    batch = Batch(tmp_path, learn, names, prunable=True, grace=0.3, isolation=isolation)
    pruned, ended = [1, 2, 4], [0, 3, 5]
    for index in pruned:
        name = metrics.prune_key(SCOPE, index, 1)
        batch.objects.create(name, b"", {"mac": signing.sign(KEY, SCOPE, name, b"")})
    batch.run()
    for index in pruned:
        (outcome,) = batch.outcomes(index)
        assert (outcome.kind, outcome.reason) == ("value", wire.PRUNED)
    pids = [batch.value(index) for index in ended]
    assert len(set(pids)) == (3 if isolation == "process" else 2)  # the last one needs another
    assert batch.codes == [(0, 0)]


@pytest.mark.parametrize(("timeout", "limit"), [(None, math.inf), (5.0, 3605.0)])
def test_only_a_timeout_limits_how_long_an_item_may_take_to_be_called_and_run(
    timeout: float | None, limit: float
) -> None:
    nowhere = wire.Input("", 0, 0, "")
    order = wire.Order(
        store="",
        scope=SCOPE,
        job_id="job",
        index=0,
        attempt=1,
        function=nowhere,
        arguments=nowhere,
        timeout=timeout,
    )
    no_items: Any = None
    guard = Guard(order, 0, Interpreter(no_items, lambda: ()))
    assert guard.act() == pytest.approx(time.monotonic() + limit, abs=60)
    assert not (guard.stopped or guard.timed_out)


@pytest.mark.full
@pytest.mark.timeout(60)
def test_the_time_for_a_large_input_grows_only_with_its_size(tmp_path: Path) -> None:
    def size(content: bytes) -> int:
        return len(content)

    batch = Batch(tmp_path, size, [bytes(96 << 20)])
    batch.run()
    assert batch.value(0) == 96 << 20


def test_a_worker_that_the_platform_ends_gives_its_item_back(tmp_path: Path) -> None:
    def wait(mark: str) -> str:
        first = not Path(mark).exists()
        Path(mark).write_text("x")
        if first:
            time.sleep(600)
        return "done"

    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", wait, [str(mark)], backoff_s=0.01)
    with running(batch):
        wait_for(mark)
        batch.processes[0].terminate()
        batch.finish()
    assert [it.reason for it in batch.outcomes(0)] == ["preempted", ""]
    assert [code for _, code in batch.codes] == [43, 0]


@LINUX
def test_nothing_of_an_item_is_left_when_the_next_begins(tmp_path: Path) -> None:
    def leave(number: int) -> bool:
        import subprocess

        mark = tmp_path / "sleeper"
        if number == 0:
            command = "setsid sleep 600 & echo $! > " + str(mark)
            subprocess.run(["sh", "-c", command], check=True)
            return True
        return Path(f"/proc/{mark.read_text().strip()}").exists()

    batch = Batch(tmp_path / "b", leave, range(2))
    batch.run()
    assert [batch.value(0), batch.value(1)] == [True, False]


def test_a_submission_that_cannot_be_opened_ends_with_one_error(tmp_path: Path) -> None:
    def never(number: int) -> int:
        return number

    batch = Batch(tmp_path, never, range(3))
    batch.objects.delete(["functions/f"])
    batch.objects.create("functions/f", b"garbled")
    batch.run()
    assert batch.states().count(FAILED) == 1
    assert batch.states().count(CANCELLED) == 2
    assert batch.requests().all_stopped
