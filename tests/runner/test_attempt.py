"""Test one attempt in a runner process: claim, check, run, commit, and their failures."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.job.attempt import Attempt
from kinetic._runner.job.processes import Stopping
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.spool import Spooled
from kinetic._runner.protocol.wire import Kind, Outcome
from kinetic._runner.stores.directory import DirectoryObjects
from tests.orders import NOTHING, order_of
from tests.runner.calls import KEY, RUNNER


def add(a: int, b: int = 0) -> int:
    return a + b


def test_the_text_of_an_exception_is_kept_outside_the_pickle(bench) -> None:
    def fail() -> None:
        error = ValueError("no good")
        error.add_note("a note")
        raise error

    code, _ = bench.run(bench.order(fail))
    assert code == wire.EXIT_FINAL
    outcome, fields = bench.outcome(), bench.error()
    assert (outcome.kind, outcome.reason, outcome.phase) == (Kind.ERROR, "user error", "execute")
    assert (fields["qualname"], fields["message"]) == ("ValueError", "no good")
    assert "in fail" in fields["traceback"] and "a note" in fields["traceback"]
    assert "kinetic_runner" not in fields["traceback"], "the runner's own frames are noise"


def test_a_job_calls_few_functions_of_the_runner(bench) -> None:
    """In a fork, each function costs copies of about four pages of the parent's memory."""
    folder = str(RUNNER.parent)
    counting = f"""
import sys
sys.path.insert(0, {folder!r})
import remote_runner
called = set()

def count(frame, event, argument):
    code = frame.f_code
    is_function = code.co_flags & 1
    if event == "call" and is_function and code.co_filename.startswith({folder!r}):
        called.add(code)

sys.setprofile(count)
status = remote_runner.main()
sys.setprofile(None)
print(len(called))
sys.exit(status)
"""
    order = replace(bench.order(add, 40, 2), scope="jobs/job-1/")
    code, printed = bench.run(order, program=["-c", counting])
    assert code == wire.EXIT_VALUE
    assert int(printed) <= 95


@pytest.mark.parametrize("status", [None, 0, "message"])
def test_an_exit_succeeds_without_a_status_or_with_zero(bench, status: Any) -> None:
    code, _ = bench.run(bench.order(lambda: sys.exit(status)))
    if status == "message":
        assert (code, bench.error()["message"]) == (wire.EXIT_FINAL, "message")
    else:
        assert (code, bench.value()) == (wire.EXIT_VALUE, None)


def test_damaged_content_is_refused(bench) -> None:
    order = bench.order(add, 1)
    bad = replace(order, arguments=order.arguments._replace(digest="0" * 64))
    bench.run(bad)
    assert bench.outcome().reason == "setup"
    assert "artifact verification" in bench.error()["message"]
    assert "SHA-256" in bench.error()["message"]


def test_another_python_version_is_reported_before_unpickling(bench) -> None:
    bench.run(bench.order(add, 1, client={"python": "3.5.1"}))
    assert "Python 3.5.1" in bench.error()["message"]
    assert "environment setup" in bench.error()["message"]


def test_the_error_names_a_missing_module_and_how_to_install_it(bench, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("claimant", ["of an earlier supervisor", wire.VOID])
def test_a_duplicate_on_this_machine_neither_runs_nor_waits(bench, claimant: str) -> None:
    order = bench.order(add, 1)
    bench.claim(claimant)
    code, _ = bench.run(order)
    assert code == wire.EXIT_FINAL
    assert not bench.objects.exists(order.part_name("outcome"))


def test_a_restarted_claimant_runs_the_attempt(bench) -> None:
    order = bench.order(add, 1, 1)
    bench.claim("pod-1")
    bench.run(order)
    assert bench.value() == 2


def test_a_forged_stop_stops_no_job(bench) -> None:
    """The runner ignores requests without a signature for their own slot of the batch."""
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


def test_a_valid_stop_after_a_forged_one_stops_the_job(bench, tmp_path: Path) -> None:
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


def test_a_late_process_of_a_deleted_batch_creates_no_objects(bench) -> None:
    order = bench.order(add, 1)
    bench.objects.delete([order.arguments.name])
    code, _ = bench.run(order)
    assert code == wire.EXIT_FINAL
    assert bench.objects.list(order.scope) == []


def test_sigterm_after_the_timeout_is_a_deadline(bench, tmp_path: Path) -> None:
    def wait(fifo: str) -> None:
        import time

        with open(fifo, "w"):
            pass
        while True:
            time.sleep(0.05)  # a signal just before a sleep is handled after it

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = bench.start(bench.order(wait, str(fifo), timeout=1e-9))
    fifo.read_text()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert bench.outcome().reason == "deadline"
    error = bench.error()
    assert "timeout of 1e-09 s" in error["message"]
    # The traceback has the function's frame and none of the runner's.
    assert error["traceback"].count("  File ") == 1 and ", in wait\n" in error["traceback"]


def test_a_dictionary_that_has_every_attribute_is_a_value(bench) -> None:
    def measure() -> Any:
        class Tree(dict[str, Any]):  # such as `addict.Dict`
            def __getattr__(self, name: str) -> Any:
                return self.get(name, type(self)())

        return Tree(loss=0.5)

    bench.run(bench.order(measure))
    assert bench.value() == {"loss": 0.5}


def test_a_function_that_has_opened_too_many_files_says_so(bench) -> None:
    def leak() -> None:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        files: list[Any] = []
        while True:
            files.append(open("/dev/null"))  # noqa: SIM115 - the test of a leak

    bench.run(bench.order(leak))
    assert bench.outcome().reason == "user error"
    assert "Too many open files" in bench.error()["message"]


@pytest.mark.parametrize("in_group", [True, False])
def test_sigterm_in_a_task_beside_the_function_is_a_preemption(
    bench, tmp_path: Path, in_group: bool
) -> None:
    async def wait(fifo: str, in_group: bool) -> None:
        import asyncio
        import contextlib
        import time

        async def work() -> None:
            with open(fifo, "w"):
                pass
            while True:
                time.sleep(0.05)

        async with asyncio.TaskGroup() if in_group else contextlib.nullcontext(asyncio) as tasks:
            task = tasks.create_task(work())
            while not task.cancelled():
                await asyncio.sleep(0.05)

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = bench.start(bench.order(wait, str(fifo), in_group))
    fifo.read_text()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert bench.outcome().reason == "preempted"


def test_a_thread_that_still_runs_does_not_delay_the_end_of_the_job(bench) -> None:
    def leave_a_thread() -> str:
        import threading

        threading.Thread(target=threading.Event().wait).start()
        return "done"

    code, _ = bench.run(bench.order(leave_a_thread))
    assert (code, bench.value()) == (0, "done")


def test_exit_callbacks_of_the_job_run(bench, tmp_path: Path) -> None:
    def register(path: str) -> None:
        import atexit
        import pathlib
        import threading

        atexit.register(pathlib.Path(path).touch)
        atexit.register(print, "last")
        threading._register_atexit(print, "first")  # type: ignore[attr-defined]

    _, output = bench.run(bench.order(register, str(tmp_path / "flushed")))
    assert (tmp_path / "flushed").exists() and output == "first\nlast\n"


def test_a_forked_child_that_returns_from_the_function_commits_nothing(bench) -> None:
    def fork() -> int:
        import os

        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return child

    bench.run(bench.order(fork))
    assert bench.value() > 0


def test_the_runner_hides_no_module_of_the_users(bench) -> None:
    def imported() -> list[str]:
        import importlib.util

        names = ("wire", "frames", "views", "attempt", "workspace", "kinetic")
        return [name for name in names if importlib.util.find_spec(name) is not None]

    bench.environment["PYTHONSAFEPATH"] = "1"
    bench.run(bench.order(imported))
    assert "wire" not in bench.value() and "attempt" not in bench.value()


class FullDisk(DirectoryObjects):
    """A store without space for an outcome; it fails the test on a second try."""

    tried = False

    def create(self, name: str, *content: Any, **options: Any) -> bool:
        if not name.endswith(".outcome"):
            return super().create(name, *content, **options)
        assert not self.tried
        self.tried = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))


@pytest.mark.parametrize("reason", ["setup", wire.STORE_FULL])
def test_a_job_whose_setup_failed_does_not_wait_for_space(tmp_path: Path, reason: str) -> None:
    objects = FullDisk(tmp_path)
    objects.create("inputs", b"")
    order = replace(order_of({}), arguments=NOTHING._replace(name="inputs", stop=2 << 20))
    failed = Outcome(Kind.ERROR, reason=reason, phase="context extract")
    result = failed, Spooled(b"", "", 0)
    attempt = Attempt(order, KEY, "e" * 32, objects, Stopping(), lambda: result)
    assert attempt.run() == wire.EXIT_STORE_FULL


@pytest.mark.parametrize(("outage_s", "code"), [(3000, 0), (10_000, wire.EXIT_UNCOMMITTED)])
def test_an_outcome_waits_an_hour_for_a_store_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outage_s: float, code: int
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Away(DirectoryObjects):
        def create(self, name: str, *content: Any, **options: Any) -> bool:
            if name.endswith(".outcome") and now < outage_s:
                raise TimeoutError("no answer")
            return super().create(name, *content, **options)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    objects = Away(tmp_path)
    objects.create("inputs", b"")
    order = replace(order_of({}), arguments=NOTHING._replace(name="inputs"))
    result = Outcome(Kind.VALUE), Spooled(b"", "", 0)
    assert Attempt(order, KEY, "e" * 32, objects, Stopping(), lambda: result).run() == code
    assert objects.exists(order.part_name("outcome")) == (code == 0)
