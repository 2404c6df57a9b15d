"""Items share and leave different things with ``isolation`` as "process" and "worker"."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects

from .process import SCOPE, Batch, exists, running, wait_for

SUCCEEDED, FAILED = wire.ItemState.SUCCEEDED, wire.ItemState.FAILED
CANCELLED = wire.ItemState.CANCELLED
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc: run it on Linux")


def values(batch: Batch, count: int) -> list[Any]:
    return [batch.value(index) for index in range(count)]


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_items_share_an_interpreter_and_its_state_or_nothing(
    tmp_path: Path, isolation: str
) -> None:
    seen: list[int] = []

    def remember(number: int) -> tuple[int, str, list[int], Any]:
        before = getattr(sys, "leaked", None)
        sys.leaked = number  # type: ignore[attr-defined]
        seen.append(number)
        return os.getpid(), os.environ["KINETIC_INDEX"], [*seen], before

    batch = Batch(tmp_path, remember, range(4), isolation=isolation)
    batch.run()
    pids, indexes, lists, before = zip(*values(batch, 4), strict=True)
    assert indexes == tuple("0123")
    if isolation == "worker":
        assert (len({*pids}), lists[3], before) == (1, [0, 1, 2, 3], (None, 0, 1, 2))
    else:
        assert (len({*pids}), lists, before) == (4, ([0], [1], [2], [3]), (None,) * 4)
    assert batch.codes == [(0, 0)]


def test_the_workspace_stays_as_an_item_leaves_it(tmp_path: Path) -> None:
    def write(number: int) -> list[str]:
        before = sorted(os.listdir())
        Path(f"file{number}").touch()
        return before

    batch = Batch(tmp_path, write, range(3), isolation="worker")
    batch.run()
    assert values(batch, 3) == [[], ["file0"], ["file0", "file1"]]


def test_what_is_cheap_is_restored(tmp_path: Path) -> None:
    def spoil(number: int) -> dict[str, Any]:
        import logging
        import warnings

        umask = os.umask(0o022)
        os.umask(umask)
        state = {
            "environment": "LEFT" in os.environ,
            "home": os.environ.get("HOME"),
            "folder": os.getcwd(),
            "umask": umask,
            "path": [*sys.path],
            "alarm": str(signal.getsignal(signal.SIGALRM)),
            "timer": signal.getitimer(signal.ITIMER_REAL),
            "usr1": signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "filters": len(warnings.filters),
            "level": logging.root.level,
            "handlers": len(logging.root.handlers),
            "disabled": logging.root.manager.disable,
            "stdout": type(sys.stdout).__name__,
            "stderr": sys.stderr.closed,
        }
        os.environ["LEFT"] = "x"
        os.environ["HOME"] = "elsewhere"
        os.chdir("/")
        os.umask(0)
        sys.path = ["nowhere"]
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 600)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        warnings.filterwarnings("ignore", message="left")
        logging.root.setLevel("DEBUG")
        logging.root.addHandler(logging.NullHandler())
        logging.disable(logging.CRITICAL)
        sys.stdout = None  # type: ignore[assignment]
        sys.stderr.close()
        return state

    batch = Batch(tmp_path, spoil, range(3), isolation="worker")
    batch.run()
    first, second, third = values(batch, 3)
    assert first == second == third
    assert not first["environment"]
    assert first["stdout"] == "TextIOWrapper"


def test_output_goes_to_the_log_after_an_item_that_redirects_it(tmp_path: Path) -> None:
    def speak(number: int) -> None:
        print(f"item {number}")
        sys.stdout.flush()
        os.dup2(os.open("/dev/null", os.O_WRONLY), 1)

    batch = Batch(tmp_path, speak, range(3), isolation="worker")
    batch.run()
    assert [batch.log(index) for index in range(1, 3)] == ["item 1\n", "item 2\n"]


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_each_item_has_a_range_of_the_output(tmp_path: Path, isolation: str) -> None:
    def speak(number: int) -> None:
        import subprocess

        print(f"out {number}", flush=True)
        subprocess.run(["echo", "child", str(number)], check=True)
        sys.stdout.write(f"no newline {number}")

    batch = Batch(tmp_path, speak, range(3), isolation=isolation)
    batch.run()
    for index in range(3):
        assert batch.log(index) == f"out {index}\nchild {index}\nno newline {index}"


def test_output_at_the_exit_of_a_process_is_its_items(tmp_path: Path) -> None:
    def speak(number: int) -> int:
        import atexit

        atexit.register(print, f"exit {number}")
        print(f"call {number}")
        return number

    batch = Batch(tmp_path, speak, range(3))
    batch.run()
    assert [batch.log(index) for index in range(3)] == [f"call {i}\nexit {i}\n" for i in range(3)]


def test_values_keep_their_types(tmp_path: Path) -> None:
    def same(value: Any) -> Any:
        return value

    inputs = [None, True, 0, -(1 << 62), 1 << 80, 1.5, "", "é\ud800", b"x", [1]]
    batch = Batch(tmp_path, same, inputs)
    batch.run()
    assert [repr(value) for value in values(batch, len(inputs))] == [*map(repr, inputs)]
    assert batch.outcomes(2)[0].note == {"result": 0}


@pytest.mark.full
def test_a_process_that_does_not_exit_is_killed(tmp_path: Path) -> None:
    def hang(number: int) -> int:
        class Stream:
            flushes = 0

            def __getattr__(self, name: str) -> Any:
                return getattr(sys.__stdout__, name)

            def flush(self) -> None:
                self.flushes += 1
                if number == 0 and self.flushes == 2:  # the first is before the report DONE
                    signal.pause()

        sys.stdout = Stream()  # type: ignore[assignment]
        return number

    batch = Batch(tmp_path, hang, range(2))
    batch.run()
    assert batch.states() == [SUCCEEDED, SUCCEEDED]
    assert batch.codes == [(0, 0)]


def test_coroutine_functions_share_one_event_loop(tmp_path: Path) -> None:
    async def loop(number: int) -> int:
        import asyncio

        await asyncio.sleep(0)
        return id(asyncio.get_running_loop())

    batch = Batch(tmp_path, loop, range(3), isolation="worker")
    batch.run()
    assert len(set(values(batch, 3))) == 1
    assert "open files" not in batch.output()  # those of the loop are the interpreter's


def test_an_error_leaves_the_interpreter_in_use(tmp_path: Path) -> None:
    def fail(number: int) -> int:
        if number == 1:
            raise ValueError("no")
        if number == 2:
            sys.exit(3)
        return os.getpid()

    batch = Batch(tmp_path, fail, range(4), isolation="worker")
    batch.run()
    assert batch.states() == [SUCCEEDED, FAILED, FAILED, SUCCEEDED]
    assert batch.value(0) == batch.value(3)
    assert batch.error(1)["traceback"].count("File ") == 1


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_a_timeout_replaces_the_interpreter_not_the_worker(tmp_path: Path, isolation: str) -> None:
    def sleep(seconds: float) -> int:
        if seconds > 5:
            signal.signal(signal.SIGXCPU, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(seconds)
        return os.getpid()

    inputs = [0.0, 3.0, 0.0, 600.0, 0.0]
    batch = Batch(tmp_path, sleep, inputs, timeout=0.3, grace=0.3, isolation=isolation)
    batch.run()
    assert batch.states() == [SUCCEEDED, FAILED, SUCCEEDED, FAILED, SUCCEEDED]
    assert [batch.outcomes(index)[0].reason for index in (1, 3)] == ["deadline", "deadline"]
    assert len({batch.value(index) for index in (0, 2, 4)}) == 3
    assert batch.codes == [(0, 0)]


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_a_stop_raises_in_the_function(tmp_path: Path, isolation: str) -> None:
    def wait(mark: str) -> None:
        try:
            Path(mark).write_text("x")
            time.sleep(600)
        finally:
            Path(f"{mark}.end").write_text("cleaned up")

    marks = [str(tmp_path / "mark"), str(tmp_path / "other")]
    batch = Batch(tmp_path / "b", wait, marks, isolation=isolation)
    with running(batch):
        wait_for(tmp_path / "mark")
        batch.append(wire.Request(kind="stop"))
        batch.finish()
    assert batch.states() == [CANCELLED, CANCELLED]
    assert (tmp_path / "mark.end").read_text() == "cleaned up"
    assert not (tmp_path / "other").exists()


def test_a_stop_of_one_item_replaces_the_interpreter(tmp_path: Path) -> None:
    async def wait(mark: str) -> int:
        import asyncio

        if mark:
            Path(mark).write_text("x")
            await asyncio.sleep(600)
        return os.getpid()

    inputs = ["", str(tmp_path / "mark"), ""]
    batch = Batch(tmp_path / "b", wait, inputs, isolation="worker")
    with running(batch):
        wait_for(tmp_path / "mark")
        batch.append(wire.Request(kind="stop", items=(1,)))
        batch.finish()
    assert batch.states() == [SUCCEEDED, CANCELLED, SUCCEEDED]
    assert batch.value(0) != batch.value(2)


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_a_crash_costs_its_item_alone_and_replaces_the_interpreter(
    tmp_path: Path, isolation: str
) -> None:
    def crash(number: int) -> int:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 3:
            os._exit(3)
        return os.getpid()

    batch = Batch(tmp_path, crash, range(5), isolation=isolation)
    batch.run()
    assert batch.states() == [SUCCEEDED, FAILED, SUCCEEDED, FAILED, SUCCEEDED]
    assert len({batch.value(index) for index in (0, 2, 4)}) == 3
    assert "SIGKILL" in batch.error(1)["message"] and "code 3" in batch.error(3)["message"]
    assert batch.codes == [(0, 0)]


@LINUX
def test_a_new_interpreter_begins_when_nothing_is_left_of_the_old_one(tmp_path: Path) -> None:
    mark = tmp_path / "sleepers"

    def leave(number: int) -> list[bool]:
        import subprocess

        if number == 0:
            subprocess.run(["sh", "-c", f"setsid sleep 600 & echo $! >> {mark}"], check=True)
            if (child := os.fork()) == 0:
                time.sleep(600)
            with open(mark, "a") as file:
                file.write(f"{child}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return [os.path.exists(f"/proc/{pid}") for pid in mark.read_text().split()]

    batch = Batch(tmp_path / "b", leave, range(2), isolation="worker")
    batch.run()
    assert batch.states() == [FAILED, SUCCEEDED]
    assert batch.value(1) == [False, False]


def test_running_out_of_memory_replaces_the_interpreter(tmp_path: Path) -> None:
    def fill(size: int) -> int:
        assert len(bytes(size)) == size
        return os.getpid()

    sizes = [1, 1 << 40, 1]
    batch = Batch(tmp_path, fill, sizes, isolation="worker", memory_bytes=1 << 30)
    batch.run()
    assert batch.states() == [SUCCEEDED, FAILED, SUCCEEDED]
    assert batch.outcomes(1)[0].reason == "out of memory"
    assert batch.value(0) != batch.value(2)


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_a_dead_worker_is_replaced_and_takes_its_item_along(tmp_path: Path, isolation: str) -> None:
    def wait(mark: str) -> str:
        if not Path(mark).exists():
            Path(mark).write_text(str(os.getpid()))
            time.sleep(600)
        return "done"

    mark = tmp_path / "mark"
    batch = Batch(tmp_path / "b", wait, [str(mark)], retries=1, backoff_s=0.01, isolation=isolation)
    with running(batch):
        pid = int(wait_for(mark))
        batch.processes[0].kill()
        batch.finish()
    assert [(it.kind, it.reason) for it in batch.outcomes(0)] == [("lost", "lost"), ("value", "")]
    assert not exists(pid)
    assert [code for _, code in batch.codes] == [-9, 0]


def test_a_fork_that_returns_from_the_function_leaves_no_result(tmp_path: Path) -> None:
    def fork(number: int) -> int:
        if (child := os.fork()) == 0:
            return -1
        os.waitpid(child, 0)
        return number

    batch = Batch(tmp_path, fork, range(3), isolation="worker")
    batch.run()
    assert values(batch, 3) == [0, 1, 2]


@LINUX
def test_what_stays_is_reported_once(tmp_path: Path) -> None:
    def leave(number: int) -> None:
        import subprocess
        import threading

        if number:
            threading.Thread(target=time.sleep, args=(600,), name="left", daemon=True).start()
            subprocess.Popen(["sleep", "600"])
            os.open("/dev/null", os.O_RDONLY)

    batch = Batch(tmp_path, leave, range(4), isolation="worker")
    batch.run()
    (line,) = [line for line in batch.output().splitlines() if line.startswith("kinetic:")]
    assert "grp-000000000000-1 " in line
    assert all(kind in line for kind in ("threads (left)", "child processes", "open files"))
    assert line in batch.log(1)


def test_recycle_replaces_the_interpreter_after_so_many_items(tmp_path: Path) -> None:
    def pid(number: int) -> int:
        return os.getpid()

    batch = Batch(tmp_path, pid, range(5), isolation="worker", recycle=2)
    batch.run()
    a, b, c, d, e = values(batch, 5)
    assert a == b != c == d != e
    assert batch.codes == [(0, 0)]


# --- init ---


def test_each_interpreter_calls_init_once(tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    def load() -> list[int]:
        with open(marks, "a") as file:
            file.write("x")
        return [os.getpid()]

    async def load_async() -> str:
        return "awaited"

    def use(number: int, *, model: list[int], other: str) -> tuple[list[int], str]:
        model.append(number)
        return [*model], other

    init = {"model": load, "other": load_async}
    batch = Batch(tmp_path / "b", use, range(4), isolation="worker", init=init, recycle=3)
    batch.run()
    found = values(batch, 4)
    assert [model[1:] for model, _ in found] == [[0], [0, 1], [0, 1, 2], [3]]
    assert {other for _, other in found} == {"awaited"}
    assert marks.read_text() == "xx"


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_init_cleans_up_when_the_interpreter_ends(tmp_path: Path, isolation: str) -> None:
    events = tmp_path / "events"

    def note(event: str) -> None:
        with open(events, "a") as file:
            file.write(f"{event} ")

    def load() -> Iterator[str]:
        note("load")
        yield "model"
        note("unload")

    async def connect() -> Any:
        note("connect")
        yield "connection"
        note("disconnect")

    def use(number: int, model: str, connection: str) -> tuple[str, str]:
        note(f"{number}")
        return model, connection

    init = {"model": load, "connection": connect}
    batch = Batch(tmp_path / "b", use, range(3), isolation=isolation, init=init, recycle=2)
    batch.run()
    assert values(batch, 3) == [("model", "connection")] * 3
    items = ("0", "1", "2") if isolation == "process" else ("0 1", "2")
    expected = [f"load connect {item} disconnect unload" for item in items]
    assert events.read_text().split() == " ".join(expected).split()


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_an_error_in_init_has_a_phase_of_its_own(tmp_path: Path, isolation: str) -> None:
    broken = tmp_path / "broken"

    def load() -> str:
        if broken.exists():
            broken.unlink()
            raise ValueError("no model")
        return "model"

    def use(number: int, model: str) -> str:
        if not number:
            broken.touch()
        return model

    recycle = 1 if isolation == "worker" else None
    init = {"model": load}
    batch = Batch(tmp_path / "b", use, range(3), isolation=isolation, init=init, recycle=recycle)
    batch.run()
    assert batch.states() == [SUCCEEDED, FAILED, SUCCEEDED], "init works elsewhere"
    outcome, error = batch.outcomes(1)[0], batch.error(1)
    assert (outcome.phase, outcome.reason) == ("init", "setup")
    assert error["message"] == "init= failed: ValueError: no model"
    assert error["traceback"].count("File ") == 1


@pytest.mark.parametrize("isolation", ["process", "worker"])
def test_the_first_error_of_init_ends_the_submission(tmp_path: Path, isolation: str) -> None:
    def load() -> str:
        raise ValueError("no model")

    def use(number: int, model: str) -> str:
        return model

    batch = Batch(tmp_path / "b", use, range(9), isolation=isolation, init={"model": load})
    batch.run()
    assert batch.states() == [FAILED] + 8 * [CANCELLED]
    outcome = batch.outcomes(0)[0]
    assert outcome.phase == "init" and outcome.log is not None
    log = (batch.folder / "log.0").read_text()[slice(*outcome.log)]
    assert log.startswith("Traceback") and log.endswith("ValueError: no model\n")


def test_an_input_that_was_not_submitted_does_not_show_that_init_works(tmp_path: Path) -> None:
    def load() -> str:
        raise ValueError("no model")

    def use(number: int, model: str) -> str:
        return model

    options: dict[str, Any] = {"isolation": "worker", "init": {"model": load}, "refused": [0]}
    batch = Batch(tmp_path / "b", use, range(4), **options)
    batch.run()
    assert batch.states() == [FAILED, FAILED, CANCELLED, CANCELLED]


@pytest.mark.parametrize(
    ("isolation", "is_killed"),
    [
        ("process", True),
        ("worker", False),
        pytest.param("process", False, marks=pytest.mark.full),
        pytest.param("worker", True, marks=pytest.mark.full),
    ],
)
def test_a_death_in_init_ends_the_submission(
    tmp_path: Path, isolation: str, is_killed: bool
) -> None:
    calls = tmp_path / "calls"

    def load() -> str:
        with open(calls, "a") as file:
            file.write("x")
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(4)

    def use(number: int, model: str) -> str:
        return model

    init = {"model": load}
    batch = Batch(tmp_path / "b", use, range(4), isolation=isolation, init=init, retries=1)
    batch.run()
    assert batch.states() == [FAILED] + 3 * [CANCELLED]
    assert calls.read_text() == "x"
    [outcome] = batch.outcomes(0)
    assert (outcome.kind, outcome.reason, outcome.phase) == ("lost", "lost", "init")
    message = batch.error(0)["message"]
    assert message.startswith("init= failed: its process ")
    assert ("SIGKILL" if is_killed else "code 4") in message


def test_a_death_in_a_later_init_costs_its_item_alone(tmp_path: Path) -> None:
    broken = tmp_path / "broken"

    def load() -> str:
        if broken.exists():
            broken.unlink()
            os._exit(4)
        return "model"

    def use(number: int, model: str) -> str:
        if not number:
            broken.touch()
        return model

    options: dict[str, Any] = {"isolation": "worker", "recycle": 1, "init": {"model": load}}
    batch = Batch(tmp_path / "b", use, range(3), **options)
    batch.run()
    assert batch.states() == [SUCCEEDED, FAILED, SUCCEEDED]
    assert batch.outcomes(1)[0].phase == "init"


@pytest.mark.parametrize("isolation", ["process", "worker"])
@pytest.mark.parametrize("stopped", ["item", "worker"])
@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_stop_while_init_runs_ends_no_other_item(
    tmp_path: Path, isolation: str, stopped: str, is_killed: bool
) -> None:
    mark = tmp_path / "mark"

    def load() -> str:
        if not mark.exists():
            if is_killed:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            mark.write_text("x")
            time.sleep(600)
        return "model"

    def use(number: int, model: str) -> str:
        return model

    options: dict[str, Any] = {"isolation": isolation, "init": {"model": load}, "grace": 0.3}
    batch = Batch(tmp_path / "b", use, range(3), **options)
    with running(batch):
        wait_for(mark)
        if stopped == "item":
            batch.append(wire.Request(kind="stop", items=(0,)))
        else:
            batch.processes[0].terminate()
        batch.finish()
    first = CANCELLED if stopped == "item" else SUCCEEDED
    assert batch.states() == [first, SUCCEEDED, SUCCEEDED]


def test_the_environment_that_init_sets_stays(tmp_path: Path) -> None:
    def load() -> str:
        os.environ["LOADED"] = "yes"
        return "model"

    def use(number: int, model: str) -> str | None:
        found = os.environ.pop("LOADED", None)
        os.environ["OTHER"] = "x"
        return found

    batch = Batch(tmp_path / "b", use, range(3), isolation="worker", init={"model": load})
    batch.run()
    assert values(batch, 3) == ["yes"] * 3


def test_an_error_in_the_cleanup_of_init_is_in_the_log(tmp_path: Path) -> None:
    def load() -> Iterator[str]:
        yield "model"
        raise ValueError("can't unload")

    def use(number: int, model: str) -> str:
        return model

    batch = Batch(tmp_path / "b", use, range(2), isolation="worker", init={"model": load})
    batch.run()
    assert batch.states() == [SUCCEEDED, SUCCEEDED]
    assert "ValueError: can't unload" in batch.output()


def test_a_cleanup_of_init_that_takes_too_long_is_killed_before_the_next_claim(
    tmp_path: Path,
) -> None:
    seen, store = tmp_path / "seen", str(tmp_path / "b" / "store")

    def load() -> Iterator[str]:
        yield "model"
        entries = DirectoryObjects(store).list(wire.block_prefix(SCOPE, 0))
        claims = [entry.name for entry in entries if entry.name.endswith(".claim")]
        with open(seen, "a") as file:
            file.write(f"{len(claims)} ")
        time.sleep(600)

    def use(number: int, model: str) -> str:
        return model

    options: dict[str, Any] = {"isolation": "worker", "recycle": 1, "init": {"model": load}}
    batch = Batch(tmp_path / "b", use, range(2), grace=1.0, **options)
    batch.run()
    assert batch.states() == [SUCCEEDED, SUCCEEDED]
    assert seen.read_text() == "1 2 "
    assert batch.output().count("killed the interpreter") == 2


def test_the_call_and_init_cannot_give_the_same_argument(tmp_path: Path) -> None:
    def use(number: int, **kwargs: Any) -> Any:
        return kwargs

    def load() -> str:
        return "model"

    batch = Batch(tmp_path / "b", use, [1], isolation="worker", init={"number": load})
    batch.run()
    assert batch.states() == [FAILED]
    assert "multiple values for argument 'number'" in batch.error(0)["message"]
