"""Test what a job does with its reports, and how it learns that it was pruned."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kinetic
from kinetic._runner.protocol import frames, metrics, pickles, signing, wire
from kinetic._runner.protocol.metrics import Reports
from kinetic._runner.protocol.wire import Kind
from tests.gcs.server import GcsServer
from tests.runner.calls import KEY, RUNNER, SCOPE, Calls
from tests.scripts import until


def stored(calls: Calls) -> list[Reports]:
    """Return what the attempt has stored, slot by slot."""
    found: list[Reports] = []
    while True:
        name = metrics.metrics_key(SCOPE, 0, 1, len(found))
        try:
            content, metadata = calls.objects.get(name)[0], calls.objects.stat(name).metadata
        except KeyError:
            return found
        found.append(Reports.verified(content, metadata, KEY, SCOPE, name))


def body(calls: Calls) -> frames.Frames:
    return frames.unpack(calls.body())


def curves(calls: Calls) -> dict[str, list[tuple[int, Any]]]:
    """Return the reports of each process of the job, from slots and outcome."""
    found: dict[str, list[tuple[int, Any]]] = {}
    batches = stored(calls)
    if (fields := body(calls).fields.get(metrics.METRICS)) is not None:
        batches.append(Reports.of(fields))
    for batch in batches:
        curve = found.setdefault(batch.writer, [])
        curve += batch.entries[max(0, len(curve) - batch.first) :]
    return found


def prune(calls: Calls, key: bytes = KEY) -> None:
    name = metrics.prune_key(SCOPE, 0, 1)
    assert calls.objects.create(name, b"", {"mac": signing.sign(key, SCOPE, name, b"")})


def assert_pruned(calls: Calls, step: int | None = None) -> None:
    outcome = calls.outcome()
    assert (outcome.kind, outcome.reason) == (Kind.VALUE, wire.PRUNED)
    assert outcome.executor and outcome.started <= outcome.ended
    if step is not None:
        assert metrics.read_pruned(body(calls).fields)[0] == step


def test_slots_and_outcome_together_have_every_report(bench) -> None:
    def run() -> str:
        for step in range(300):
            kinetic.report(step, step / 2 if step % 2 else {"loss": 1.0, "rate": step})
            time.sleep(0.001)
        return "done"

    bench.run(bench.order(run))
    assert bench.value() == "done"
    (curve,) = curves(bench).values()
    assert curve == [(n, n / 2 if n % 2 else {"loss": 1.0, "rate": n}) for n in range(300)]
    assert bench.outcome().metrics
    assert 1 <= len(stored(bench)) <= 20, "one object has many reports"


def test_a_job_without_reports_stores_nothing_and_starts_no_thread(bench) -> None:
    def run() -> tuple[int, bool]:
        return len(os.listdir("/proc/self/task")), kinetic.should_stop()

    bench.run(bench.order(run, prunable=True))
    assert bench.value() == (1, False)
    assert not bench.outcome().metrics
    assert stored(bench) == []


def test_the_last_reports_travel_with_a_large_value_and_with_an_error(bench) -> None:
    def succeed() -> bytes:
        kinetic.report(1, 1.0)
        return os.urandom(wire.INLINE_BYTES + 1)

    def fail() -> None:
        kinetic.report(2, 2.0)
        raise ValueError

    bench.run(bench.order(succeed))
    assert len(bench.value()) > wire.INLINE_BYTES
    assert [*curves(bench).values()] == [[(1, 1.0)]]
    bench.objects.delete([info.name for info in bench.objects.list("batches/")])
    bench.run(bench.order(fail))
    assert bench.error()["qualname"] == "ValueError"
    assert [*curves(bench).values()] == [[(2, 2.0)]]


def test_reports_come_from_a_coroutine_and_from_threads(bench) -> None:
    async def run() -> None:
        for step in range(20):
            kinetic.report(step, 1.0)
            await asyncio.sleep(0.005)
        threads = [threading.Thread(target=kinetic.report, args=(20, 2.0)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    bench.run(bench.order(run))
    (curve,) = curves(bench).values()
    assert curve == [*((step, 1.0) for step in range(20)), *[(20, 2.0)] * 8]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_fork_of_the_job_reports_beside_it(bench, is_first: bool) -> None:
    def run() -> None:
        if not is_first:
            kinetic.report(0, 0.0)
        child = multiprocessing.get_context("fork").Process(target=report_in_fork)
        child.start()
        child.join()
        assert child.exitcode == 0
        kinetic.report(1, 0.0)

    def report_in_fork() -> None:
        for step in range(5):
            kinetic.report(10 + step, 1.0)

    bench.run(bench.order(run))
    bench.value()
    found = sorted(curves(bench).values(), key=len)
    assert found == [[(1, 0.0)] if is_first else [(0, 0.0), (1, 0.0)], forked()]


def forked() -> list[tuple[int, float]]:
    return [(10 + step, 1.0) for step in range(5)]


def test_reports_of_a_fork_alone_are_found_by_the_outcome(bench) -> None:
    def run() -> None:
        child = multiprocessing.get_context("fork").Process(target=kinetic.report, args=(3, 1.0))
        child.start()
        child.join()

    bench.run(bench.order(run))
    assert bench.outcome().metrics
    assert [*curves(bench).values()] == [[(3, 1.0)]]


def test_a_store_that_refuses_reports_fails_no_job(bench) -> None:
    """A file in the place of the folder is an error, as on a full disk."""

    def run() -> int:
        for step in range(50):
            kinetic.report(step, 1.0)
            time.sleep(0.005)
        return 7

    folder = bench.folder / "store" / SCOPE / "metrics"
    order = bench.order(run)
    folder.touch()
    _, printed = bench.run(order)
    assert bench.value() == 7
    (curve,) = curves(bench).values()
    assert curve == [(step, 1.0) for step in range(50)]
    assert printed.count("can't store metrics") == 1


def test_reports_arrive_after_an_outage_of_the_store(bench) -> None:
    def run(resumed: str) -> None:
        step = 0
        while not os.path.exists(resumed):
            kinetic.report(step, 1.0)
            step += 1
            time.sleep(0.005)

    folder, resumed = bench.folder / "store" / SCOPE / "metrics", bench.folder / "resumed"
    order = bench.order(run, str(resumed))
    folder.touch()
    process = bench.start(order)
    assert "can't store metrics" in process.stdout.readline()
    folder.unlink()
    until(lambda: stored(bench))
    resumed.touch()
    process.communicate(timeout=60)
    (curve,) = curves(bench).values()
    assert curve == [(step, 1.0) for step in range(len(curve))]


@pytest.mark.full
def test_a_silent_store_delays_no_report(in_bucket, server: GcsServer, tmp_path: Path) -> None:
    def run(resumed: str) -> float:
        slowest = 0.0
        for step in range(5000):
            before = time.perf_counter()
            kinetic.report(step, 1.0)
            slowest = max(slowest, time.perf_counter() - before)
        open(resumed, "w").close()
        return slowest

    order = in_bucket.order(run, str(tmp_path / "resumed"))
    pod = in_bucket.start(order)
    until(lambda: server.requests["create"])  # the claim
    fault = server.fail("create", stall=True, stall_s=3.0)
    pod.wait()
    assert in_bucket.value() < 1.0, pod.output
    (curve,) = curves(in_bucket).values()
    assert curve[-1] == (4999, 1.0)
    assert fault.seen == 1


def test_under_pressure_the_latest_reports_win(bench) -> None:
    def run() -> None:
        for step in range(20_000):
            kinetic.report(step, 1.0)

    folder = bench.folder / "store" / SCOPE / "metrics"
    order = bench.order(run)
    folder.touch()
    bench.run(order)
    (curve,) = curves(bench).values()
    assert [step for step, _ in curve] == [*range(20_000 - 4096, 20_000)]


def test_a_job_of_hours_stores_few_objects_and_loses_no_report(bench) -> None:
    def run() -> None:
        kinetic.report(0, 0.0)
        sink: Any = sys.modules[kinetic.report.__module__].sink
        sink._began_at -= 10_000
        until(lambda: not sink._waiting)
        for step in range(1, 120):
            time.sleep(0.01)
            kinetic.report(step, 0.0)
        assert len(sink._waiting) == 119
        for step in range(120, 6000):
            kinetic.report(step, 0.0)
            if step % 2500 == 0:
                until(lambda: not sink._waiting)

    bench.run(bench.order(run))
    (curve,) = curves(bench).values()
    assert [step for step, _ in curve] == [*range(6000)]
    assert len(stored(bench)) <= 4


def test_a_report_of_an_earlier_step_is_dropped_with_one_warning(bench) -> None:
    def run() -> None:
        for step in (5, 3, 6, 1, 6):
            kinetic.report(step, 1.0)

    _, printed = bench.run(bench.order(run))
    assert [*curves(bench).values()] == [[(5, 1.0), (6, 1.0), (6, 1.0)]]
    assert printed.count("earlier step is dropped") == 1
    assert "step 3 comes after step 5" in printed


def test_a_wrong_value_is_an_error_of_the_function(bench) -> None:
    bench.run(bench.order(lambda: kinetic.report(4, float("nan"))))
    assert bench.error()["qualname"] == "ValueError"
    assert "step 4" in bench.error()["message"]


def test_a_program_that_a_job_starts_is_told_that_it_can_not_report(bench) -> None:
    def run() -> str:
        import subprocess
        import sys

        code = "import kinetic; kinetic.report(1, 1.0); kinetic.report(2, 1.0)"
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    bench.run(bench.order(run))
    assert bench.value().count("report() does nothing in this process") == 1


# --- pruning ---


def report_until_pruned(seen: str = "") -> None:
    for step in range(100_000):
        try:
            kinetic.report(step, step / 2)
        except kinetic.Pruned as pruned:
            Path(seen or "seen").write_text(f"{pruned.step} {pruned.value}")
            raise
        time.sleep(0.002)


def start_and_prune(calls: Any, order: wire.Order) -> tuple[int, str]:
    process = calls.start(order)
    until(lambda: stored(calls))
    prune(calls)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_the_next_report_raises_pruned(bench) -> None:
    seen = bench.folder / "seen"
    code, printed = start_and_prune(
        bench, bench.order(report_until_pruned, str(seen), prunable=True)
    )
    step = int(seen.read_text().split()[0])
    assert seen.read_text() == f"{step} {step / 2}"
    assert code == wire.EXIT_VALUE
    assert_pruned(bench, step)
    (curve,) = curves(bench).values()
    assert curve == [(n, n / 2) for n in range(step + 1)]
    assert "Traceback" not in printed


def test_an_attempt_that_can_not_be_pruned_does_not_look(bench) -> None:
    def run(flag: str) -> str:
        step = 0
        while not os.path.exists(flag):
            kinetic.report(step, 1.0)
            step += 1
            time.sleep(0.002)
        return "finished"

    flag = bench.folder / "flag"
    process = bench.start(bench.order(run, str(flag)))
    until(lambda: stored(bench))
    prune(bench)
    count = len(stored(bench))
    until(lambda: len(stored(bench)) > count + 3)
    flag.touch()
    process.communicate(timeout=60)
    assert bench.value() == "finished"


def test_an_unsigned_object_prunes_nothing(bench) -> None:
    def run(flag: str) -> str:
        step = 0
        while not os.path.exists(flag):
            kinetic.report(step, 1.0)
            step += 1
            time.sleep(0.002)
        return "finished"

    flag = bench.folder / "flag"
    process = bench.start(bench.order(run, str(flag), prunable=True))
    until(lambda: stored(bench))
    prune(bench, b"another key".ljust(32))
    assert "is forged or damaged" in process.stdout.readline()
    flag.touch()
    process.communicate(timeout=60)
    assert bench.value() == "finished"


def test_a_function_that_asks_and_returns_counts_as_pruned(bench) -> None:
    def run() -> str:
        step = 0
        while not kinetic.should_stop():
            with contextlib.suppress(Exception):
                kinetic.report(step, 1.0)
            step += 1
            time.sleep(0.002)
        return "a value that nobody gets"

    start_and_prune(bench, bench.order(run, prunable=True))
    assert_pruned(bench)


def test_a_function_that_learns_nothing_of_it_keeps_its_value(bench) -> None:
    def run(flag: str) -> str:
        kinetic.report(0, 1.0)
        while not os.path.exists(flag):
            time.sleep(0.002)
        return "whole"

    flag = bench.folder / "flag"
    process = bench.start(bench.order(run, str(flag), prunable=True))
    until(lambda: stored(bench))
    prune(bench)
    flag.touch()
    process.communicate(timeout=60)
    assert bench.value() == "whole"


def test_an_error_after_pruning_counts_as_pruned_and_is_in_the_log(bench) -> None:
    def run() -> None:
        step = 0
        while True:
            try:
                kinetic.report(step, 1.0)
            except kinetic.Pruned as error:
                raise RuntimeError("a library wraps it") from error
            step += 1
            time.sleep(0.002)

    _, printed = start_and_prune(bench, bench.order(run, prunable=True))
    assert_pruned(bench)
    assert "a library wraps it" in printed


def test_a_fork_learns_it_and_its_parent_counts_as_pruned(bench) -> None:
    def run() -> None:
        child = multiprocessing.get_context("fork").Process(target=report_until_pruned)
        child.start()
        child.join()
        raise RuntimeError(f"the child ended with {child.exitcode}")

    start_and_prune(bench, bench.order(run, prunable=True))
    assert_pruned(bench)


@pytest.mark.parametrize("ignored", [Exception, BaseException])
def test_a_function_that_ignores_it_is_ended_after_the_grace_period(bench, ignored: Any) -> None:
    def run() -> None:
        step = 0
        while True:
            with contextlib.suppress(ignored):
                kinetic.report(step, 1.0)
                step += 1
                time.sleep(0.002)

    code, printed = start_and_prune(bench, bench.order(run, prunable=True, grace=0.3))
    assert code == wire.EXIT_VALUE
    assert_pruned(bench)
    assert "the job was pruned, and runs on after 0.3 s" in printed


def test_a_function_that_stays_in_c_is_ended_too(bench) -> None:
    def run() -> None:
        kinetic.report(0, 1.0)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Event().wait()

    start_and_prune(bench, bench.order(run, prunable=True, grace=0.2))
    assert_pruned(bench, 0)


def test_a_job_whose_image_lacks_kinetic_reports_and_is_pruned(bench) -> None:
    folder = str(RUNNER.parent)
    program = f"""
import runpy, sys
runpy.run_path({str(RUNNER)!r})["load_runner"](__import__("pathlib").Path({folder!r}))
from kinetic_runner import remote_runner
from kinetic_runner.protocol import stand_ins
class Hidden:
    def find_spec(self, name, path=None, target=None):
        return stand_ins.MissingKinetic.find_spec(name)
sys.meta_path.insert(0, Hidden())
sys.exit(remote_runner.main())
"""

    def run() -> None:
        from kinetic.errors import Pruned

        for step in range(100_000):
            try:
                kinetic.report(step, 1.0)
            except Pruned:
                if Pruned is kinetic.Pruned and not hasattr(kinetic, "__file__"):
                    raise
            time.sleep(0.002)

    process = bench.start(bench.order(run, prunable=True), program=["-c", program])
    until(lambda: stored(bench))
    prune(bench)
    output, _ = process.communicate(timeout=60)
    assert_pruned(bench)
    assert "Traceback" not in output


# --- in a pod ---


def test_a_pod_that_ignores_it_tells_its_guard(pods) -> None:
    def run() -> None:
        kinetic.report(0, 1.0)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)

    pod = pods.start(pods.order(run, prunable=True, grace=0.2))
    until(lambda: stored(pods))
    prune(pods)
    assert pod.wait() == wire.EXIT_VALUE
    assert_pruned(pods)
    assert "left no outcome" not in pod.output


def test_the_first_host_ends_a_pruned_attempt_for_all(pods) -> None:
    def run() -> None:
        step = 0
        while True:
            kinetic.report(step, float(os.environ["KINETIC_HOST"]))
            step += 1
            time.sleep(0.002)

    order = pods.order(run, prunable=True)
    hosts = [
        pods.start(
            order,
            f"uid-{host}",
            KINETIC_HOSTS="2",
            KINETIC_HOST=str(host),
            KINETIC_COORDINATOR="127.0.0.1:1",
            KINETIC_JAX="0",
        )
        for host in range(2)
    ]
    until(lambda: stored(pods))
    prune(pods)
    assert [pod.wait() for pod in hosts] == [wire.EXIT_VALUE, wire.EXIT_VALUE]
    assert_pruned(pods)
    (curve,) = curves(pods).values()
    assert {value for _, value in curve} == {0.0}


def test_pickles_of_the_functions_and_the_error_refer_to_the_runner() -> None:
    """A job's image may lack kinetic: a script that imports the names still works there."""
    loaded = pickles.load(pickles.dumps((kinetic.report, kinetic.should_stop)))
    assert loaded == (kinetic.report, kinetic.should_stop)
    assert kinetic.report.__module__.startswith("kinetic._runner.")
