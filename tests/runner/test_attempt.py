"""The runner, as a process: claim, check, run, commit, and everything that can go wrong."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job.attempt import Attempt
from kinetic._runner.job.processes import Stopping
from kinetic._runner.protocol import pickles, wire
from kinetic._runner.protocol.spool import Stored
from kinetic._runner.protocol.wire import Kind, Outcome
from kinetic._runner.stores.directory import DirectoryObjects
from tests.orders import NOTHING, order_of
from tests.runner.calls import KEY


def add(a: int, b: int = 0) -> int:
    return a + b


def test_a_value_is_committed(bench) -> None:
    code, _ = bench.run(bench.order(add, 40, 2))
    assert (code, bench.value()) == (wire.EXIT_VALUE, 42)
    outcome = bench.outcome()
    assert (outcome.executor, outcome.fence) == ("pod-1", 1)
    assert outcome.started <= outcome.ended


def test_a_coroutine_function_is_awaited(bench) -> None:
    async def later() -> str:
        import asyncio

        await asyncio.sleep(0)
        return "done"

    bench.run(bench.order(later))
    assert bench.value() == "done"


def test_an_exception_is_kept_with_its_words_outside_the_pickle(bench) -> None:
    def fail() -> None:
        error = ValueError("no good")
        error.add_note("a note")
        raise error

    code, _ = bench.run(bench.order(fail))
    assert code == wire.EXIT_FINAL
    outcome, words = bench.outcome(), bench.error()
    assert (outcome.kind, outcome.reason, outcome.phase) == (Kind.ERROR, "user error", "execute")
    assert (words["qualname"], words["message"]) == ("ValueError", "no good")
    assert "in fail" in words["traceback"] and "a note" in words["traceback"]
    assert "kinetic_runner" not in words["traceback"], "the runner's own frames are noise"


def test_an_exception_that_cannot_be_pickled_is_told_in_words_that_say_why(bench) -> None:
    def fail() -> None:
        raise type("Picky", (Exception,), {"lock": threading.Lock()})("one two")

    bench.run(bench.order(fail))
    assert bench.error()["message"] == "one two"
    assert bench.error()["qualname"].endswith("Picky")
    assert "cannot pickle" in bench.error()["withheld"]


@pytest.mark.parametrize("leaving", [None, 0])
def test_leaving_with_success_is_success(bench, leaving) -> None:
    code, _ = bench.run(bench.order(lambda: sys.exit(leaving)))
    assert (code, bench.value()) == (0, None)


@pytest.mark.parametrize("leaving", [3, "words"])
def test_leaving_otherwise_is_a_failure(bench, leaving) -> None:
    code, _ = bench.run(bench.order(lambda: sys.exit(leaving)))
    assert code == wire.EXIT_FINAL
    assert bench.error()["qualname"] == "SystemExit"
    assert str(leaving) in bench.error()["message"]


def test_a_result_that_cannot_be_pickled_is_shown(bench) -> None:
    def lock() -> Any:
        return {"lock": threading.Lock()}

    bench.run(bench.order(lock))
    words = bench.error()
    assert bench.outcome().phase == "result serialization"
    assert "cannot be pickled" in words["message"]
    assert "lock" in words["result_repr"]


def test_an_exception_that_is_returned_is_a_value(bench) -> None:
    bench.run(bench.order(lambda: ValueError("returned")))
    assert isinstance(bench.value(), ValueError)


def test_damaged_content_is_refused(bench) -> None:
    order = bench.order(add, 1)
    bad = replace(order, arguments=order.arguments._replace(digest="0" * 64))
    bench.run(bad)
    assert bench.outcome().reason == "setup"
    assert "artifact verification" in bench.error()["message"]
    assert "SHA-256" in bench.error()["message"]


def test_another_python_is_told_before_anything_is_unpickled(bench) -> None:
    bench.run(bench.order(add, 1, client={"python": "3.5.1"}))
    assert "Python 3.5.1" in bench.error()["message"]
    assert "environment setup" in bench.error()["message"]


def test_a_missing_module_is_named_with_what_to_do(bench, tmp_path: Path) -> None:
    import types

    module = types.ModuleType("only_here")
    exec("def f(): return 1", module.__dict__)
    sys.modules["only_here"] = module
    try:
        order = bench.order(module.f)
    finally:
        del sys.modules["only_here"]
    bench.run(order)
    assert "only_here" in bench.error()["message"]
    assert f"install only_here for {sys.executable}" in bench.error()["message"]


def test_a_duplicate_waits_for_the_claimant_and_runs_nothing(bench) -> None:
    order = bench.order(add, 1)
    bench.claim("pod-0")
    bench.close(wire.Outcome(kind=Kind.VALUE, executor="pod-0"))
    code, _ = bench.run(order)
    assert code == 0
    assert bench.outcome().executor == "pod-0"


def test_nobody_is_waited_for_when_the_attempt_was_voided(bench) -> None:
    order = bench.order(add, 1)
    bench.claim(wire.VOID)
    code, _ = bench.run(order)
    assert code == wire.EXIT_FINAL


def test_a_restarted_process_of_the_claimant_goes_on(bench) -> None:
    order = bench.order(add, 1, 1)
    bench.claim("pod-1")
    bench.run(order)
    assert bench.value() == 2


def test_a_stop_before_the_start_means_not_started(bench, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    order = bench.order(mark.touch)
    bench.stop()
    code, _ = bench.run(order)
    assert code == wire.EXIT_FINAL
    assert bench.outcome().kind is Kind.CANCELLED
    assert not mark.exists()


def test_a_forged_stop_stops_no_job(bench) -> None:
    """It lies in a slot of control, and was not signed for it by who may ask."""
    order = bench.order(add, 1, 1)
    stop, first = wire.Request(kind="stop"), wire.control_key(order.scope, 0)
    bench.objects.create(first, stop.to_bytes())
    bench.objects.create(
        wire.control_key(order.scope, 1), *stop.signed(b"x" * 32, order.scope, first)
    )
    bench.objects.create(wire.control_key(order.scope, 2), *stop.signed(KEY, order.scope, first))
    bench.objects.create(f"{order.scope}control/\udcff", b"no request", {"mac": "\xe9"})
    code, _ = bench.run(order)
    assert (code, bench.value()) == (0, 2)


def test_a_stop_after_a_forged_one_is_heeded(bench, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    order = bench.order(mark.touch)
    bench.objects.create(wire.control_key(order.scope, 0), b"no request")
    bench.stop(1)
    code, _ = bench.run(order)
    assert (code, bench.outcome().kind) == (wire.EXIT_FINAL, Kind.CANCELLED)
    assert not mark.exists()


def test_a_later_attempt_does_not_run_before_the_earlier_is_closed(bench) -> None:
    code, _ = bench.run(bench.order(add, 1, attempt=2))
    assert code == wire.EXIT_FINAL
    assert bench.outcome(2).kind is Kind.CANCELLED


def test_a_late_process_of_a_cleaned_batch_leaves_nothing(bench) -> None:
    order = bench.order(add, 1)
    bench.objects.delete([order.arguments.name])
    code, _ = bench.run(order)
    assert code == wire.EXIT_FINAL
    assert bench.objects.list(order.scope) == []


def test_sigterm_at_the_end_of_the_time_is_a_deadline(bench, tmp_path: Path) -> None:
    def wait(fifo: str) -> None:
        import time

        with open(fifo, "w"):
            pass
        while True:
            time.sleep(60)

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = bench.start(bench.order(wait, str(fifo), timeout=1e-9))
    fifo.read_text()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert bench.outcome().reason == "deadline"
    error = bench.error()
    assert "timeout of 1e-09 s" in error["message"]
    # The traceback shows where the signal stopped the function, and no frame of the runner.
    assert error["traceback"].count("  File ") == 1 and ", in wait\n" in error["traceback"]


def test_threads_left_behind_do_not_hold_the_job(bench) -> None:
    def leave_a_thread() -> str:
        import threading

        threading.Thread(target=threading.Event().wait).start()
        return "done"

    code, _ = bench.run(bench.order(leave_a_thread))
    assert (code, bench.value()) == (0, "done")


def test_what_libraries_do_at_exit_is_done(bench, tmp_path: Path) -> None:
    def register(path: str) -> None:
        import atexit
        import pathlib

        atexit.register(pathlib.Path(path).touch)

    bench.run(bench.order(register, str(tmp_path / "flushed")))
    assert (tmp_path / "flushed").exists()


def test_a_fork_that_comes_out_of_the_function_says_nothing(bench) -> None:
    def fork() -> int:
        import os

        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return child

    bench.run(bench.order(fork))
    assert bench.value() > 0


def test_the_output_directory_is_there(bench, tmp_path: Path) -> None:
    out = tmp_path / "out" / "0"
    bench.run(bench.order(lambda: os.path.isdir(str(out)), output_dir=str(out)))
    assert bench.value() is True


def test_the_runner_hides_no_module_of_the_users(bench) -> None:
    def imported() -> list[str]:
        import importlib.util

        names = ("wire", "frames", "views", "attempt", "workspace", "kinetic")
        return [name for name in names if importlib.util.find_spec(name) is not None]

    bench.environment["PYTHONSAFEPATH"] = "1"
    bench.run(bench.order(imported))
    assert "wire" not in bench.value() and "attempt" not in bench.value()


def test_pickles_of_values_are_writable_arrays() -> None:
    numpy = pytest.importorskip("numpy")
    array = pickles.load(pickles.dumps(numpy.zeros(100_000)))
    array[0] = 1.0
    assert array.flags.writeable


class FullDisk(DirectoryObjects):
    """A store that takes no outcome, and is asked once."""

    asked = False

    def create(self, name: str, *content: Any, **how: Any) -> bool:
        if not name.endswith(".outcome"):
            return super().create(name, *content, **how)
        assert not self.asked
        self.asked = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))


def test_a_job_whose_setup_failed_does_not_wait_for_space(tmp_path: Path) -> None:
    objects = FullDisk(tmp_path)
    objects.create("inputs", b"")
    order = replace(order_of({}), arguments=NOTHING._replace(name="inputs", stop=2 << 20))
    failed = Outcome(Kind.ERROR, reason="setup", phase="context extract")
    attempt = Attempt(
        order, KEY, "e" * 32, objects, Stopping(), lambda: (failed, Stored(b"", "", 0))
    )
    assert attempt.run() == wire.EXIT_UNCOMMITTED
