"""Batches that workers run: what survives clients and supervisors, and what ends a batch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.scripts import until

WORKERS = """
def load():
    pathlib.Path(f"{here}/loads/{os.getpid()}").touch()
    return "model"

os.makedirs("loads", exist_ok=True)

def worker(**options):
    return kinetic.run(backend="local", accelerator="cpu", isolation="worker", **options)

@worker(init={"model": load})
def use(value, model):
    return value, model, os.getpid()

@worker()
def wait_for(name):
    pathlib.Path(f"{name}.begun").touch()
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
    return os.path.basename(name)
"""


@pytest.fixture
def program(script):
    """Return a function that starts a script with functions that run in workers."""
    return lambda code: script(WORKERS + code)


def kill_supervisor() -> None:
    """Kill the supervisor of the test's home, and with it all workers."""
    lock = str(Path(os.environ["KINETIC_HOME"]) / "local" / "v1" / "lock")

    def holds_lock(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return any(file.path == lock for file in process.open_files())
        return False

    (holder,) = filter(holds_lock, psutil.process_iter())
    holder.kill()


def test_the_items_of_a_worker_share_what_init_has_made(program) -> None:
    code = """
batch = use.run_async_map(range(40), max_concurrent=2)
results = batch.results()
print([value for value, _, _ in results] == list(range(40)), {model for _, model, _ in results})
processes = {pid for _, _, pid in results}
print(len(processes) <= 2, {int(name) for name in os.listdir("loads")} == processes)
print(use(41)[:2], use.local(42)[:2])
"""
    program(code).prints("True {'model'}", "True True", "(41, 'model') (42, 'model')")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shares imports")
@pytest.mark.parametrize("fresh", ["0", "1"])
def test_a_variable_lets_each_item_import_its_packages(
    program, fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_FRESH", fresh)
    code = """
@kinetic.run(backend="local", accelerator="cpu")
def is_imported(number):
    import sys
    known = "pathspec" in sys.modules
    import pathspec
    return known

print(is_imported.run_async_map(range(3), max_concurrent=1).results())
"""
    program(code).prints(f"[False, {fresh == '0'}, {fresh == '0'}]")


def test_a_batch_goes_on_after_the_death_of_its_supervisor(program, tmp_path: Path) -> None:
    code = """
names = [f"{here}/{number}" for number in range(4)]
batch = wait_for.run_async_map(names, max_concurrent=1, retries=1)
until(pathlib.Path(f"{names[0]}.begun").exists)
import psutil
from kinetic.aio.local.cluster import LocalCluster
print("begun")
sys.stdin.readline()
for name in names:
    pathlib.Path(name).touch()
print(batch.results())
"""
    with program(code) as process:
        process.expect("begun")
        kill_supervisor()
        process.write_line("go")
        process.expect("['0', '1', '2', '3']")


@pytest.mark.full
def test_a_new_client_starts_workers_for_a_batch_that_has_none(program, tmp_path: Path) -> None:
    code = """
batch = wait_for.run_async_map([f"{here}/0", f"{here}/1"], max_concurrent=1, retries=1)
print(batch.group_id)
until(pathlib.Path("0.begun").exists)
print("begun")
time.sleep(1000)
"""
    with program(code) as process:
        group = process.line()
        process.expect("begun")
        os.kill(process.pid, signal.SIGKILL)
    kill_supervisor()
    (tmp_path / "0").touch()
    (tmp_path / "1").touch()
    program(f"print(kinetic.attach_batch({group!r}).results())").prints("['0', '1']")


def test_an_item_that_is_cleaned_up_is_cancelled_and_the_others_go_on(program) -> None:
    code = """
batch = wait_for.run_async_map([f"{here}/a", f"{here}/b"], max_concurrent=1)
until(pathlib.Path("a.begun").exists)
batch.job(0).cleanup()
pathlib.Path("b").touch()
print([type(outcome).__name__ for _, _, outcome in batch.outcomes(ordered=True)])
"""
    program(code).prints("['Cancelled', 'Succeeded']")


def test_a_batch_whose_workers_cannot_start_in_time_fails(program, monkeypatch) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "1")
    code = """
@kinetic.run(backend="local", accelerator="cpu", start_timeout=0.5)
def late(value):
    return value

with wait_for.run_async_map([f"{here}/never"]) as blocker:
    until(pathlib.Path("never.begun").exists)
    batch = late.run_async_map([1, 2], retries=2)
    for _, _, outcome in batch.outcomes():
        print(type(outcome).__name__, "start_timeout" in str(outcome.error))
    print([record["attempts"] for record in batch.records()])
"""
    program(code).prints(*["Lost True"] * 2, "[3, 3]")


def test_a_batch_whose_client_is_killed_as_soon_as_it_has_the_handle_runs(
    program, tmp_path: Path
) -> None:
    code = """
names = [f"{here}/{number}" for number in range(3)]
batch = wait_for.run_async_map(names, max_concurrent=1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with program(code):
        until((tmp_path / "0.begun").exists)
    for number in range(3):
        (tmp_path / str(number)).touch()
    program("print(kinetic.list_batches()[0].results())").prints("['0', '1', '2']")


def test_a_window_without_its_client_says_what_is_missing(program, tmp_path: Path) -> None:
    code = """
names = [f"{here}/{number}" for number in range(9)]
batch = wait_for.run_async_map(names, max_concurrent=1, window=2)
outcomes = batch.outcomes()
threading.Thread(target=lambda: next(outcomes), daemon=True).start()
until(pathlib.Path("0.begun").exists)
print(batch.group_id)
time.sleep(1000)
"""
    with program(code) as process:
        group = process.line()
        os.kill(process.pid, signal.SIGKILL)
    for number in range(9):
        (tmp_path / str(number)).touch()
    code = f"""
batch = kinetic.attach_batch({group!r})
try:
    batch.results()
except kinetic.errors.SubmitterLost as error:
    print("the end of its inputs isn't known" in str(error))
print(batch.resume(inputs=[f"{{here}}/{{n}}" for n in range(batch.stored, 9)]).results()[-1])
"""
    program(code).prints("True", "8")
