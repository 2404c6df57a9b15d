"""Test batches of the sync API with real jobs: iteration, Ctrl-C, exits, and forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import until


def test_outcomes_and_progress_work_in_for_and_async_for(script) -> None:
    code = """
batch = inverse.run_async_map([1, 0, 4])
for index, given, outcome in batch.outcomes(ordered=True):
    match outcome:
        case Succeeded(value):
            print(index, given, value)
        case Failed(ZeroDivisionError()):
            print(index, given, "failed")

async def main():
    found = {}
    async for completion in batch.outcomes():
        found[completion.index] = completion.outcome.ok
    print(sorted(found.items()))
    jobs = [job async for job in batch.as_completed()]
    print({type(job) is kinetic.JobHandle for job in jobs}, sorted(job.group_index for job in jobs))

asyncio.run(main())
try:
    batch.results()
except kinetic.BatchError as error:
    print(error.partial_results, batch.results(return_exceptions=True)[0])
    print([type(job) is kinetic.JobHandle for job in (*error.failures, *batch.failures())])
last = [progress for progress in batch.progress()][-1]
print(last.total, last.succeeded, last.failed, last.first_failure)

async def progress():
    print([progress.ended async for progress in batch.progress()][-1])

asyncio.run(progress())
for _ in batch.outcomes():
    break  # leaves the iteration unfinished
print([completion.outcome.ok for completion in batch.outcomes(ordered=True)])
"""
    script(code).prints(
        "0 1 1.0",
        "1 0 failed",
        "2 4 0.25",
        "[(0, True), (1, False), (2, True)]",
        "{True} [0, 1, 2]",
        "[1.0, None, 0.25] 1.0",
        "[True, True]",
        "3 2 1 item 1 (0): ZeroDivisionError: division by zero",
        "3",
        "[True, False, True]",
    )


def test_the_batch_keeps_no_reference_to_completed_jobs(script) -> None:
    code = """
import gc, weakref

batch = inverse.run_async_map(iter(range(1, 9)))
held = []
for job in batch.as_completed():
    held.append(weakref.ref(job))
    held.append(weakref.ref(job._async_handle))
print(batch.jobs[job.group_index] is job, batch.job(job.group_index) is job)
del job
gc.collect()
print(len(held), sum(reference() is not None for reference in held))
print(batch.jobs[0] is batch.jobs[0], batch.jobs[0].result())
"""
    script(code).prints("True True", "16 0", "True 1.0")


def test_ctrl_c_while_waiting_does_not_cancel_the_batch(script) -> None:
    code = """
import threading

def is_waiting():
    frame, names = sys._current_frames()[threading.main_thread().ident], []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return "_wait" in names

def report_waiting():
    until(is_waiting)
    print("waiting")

batch = waits_for.run_async_map([f"{here}/go", f"{here}/go"], progress=False)
print(batch.group_id)
until(lambda: batch.status_counts().get("RUNNING"))
outcomes = batch.outcomes()
waits = (
    batch.wait,
    batch.results,
    lambda: next(outcomes),
    lambda: next(batch.as_completed()),
)
for wait in waits:
    try:
        threading.Thread(target=report_waiting).start()
        wait()
    except KeyboardInterrupt:
        print("interrupted", "NOT_FOUND" in batch.status_counts())
try:
    print(list(outcomes))
except kinetic.KineticError as error:
    print("begin another one" in str(error))
pathlib.Path("go").touch()
print(batch.results())
"""
    with script(code) as process:
        group = process.line()
        for _ in range(4):
            process.expect("waiting")
            process.interrupt()
            process.expect("interrupted False")
        process.expect("True")
        process.expect("['go', 'go']")
        status, _, err = process.end()
    assert status == 0
    assert len(err.splitlines()) == 4
    for line in err.splitlines():
        assert f"interrupted: batch {group} continues" in line
        for command in ("watch", "cancel"):
            assert f"kinetic batches {command} {group}" in line


def test_ctrl_c_within_the_block_cancels_the_batch(script) -> None:
    code = """
try:
    with waits_for.run_async_map([f"{here}/never"] * 3, progress=False) as batch:
        until(lambda: batch.status_counts().get("RUNNING"))
        print("waiting")
        batch.wait()
except KeyboardInterrupt:
    print(batch.status_counts())
"""
    with script(code) as process:
        process.expect("waiting")
        process.interrupt()
        process.expect("{'NOT_FOUND': 3}")
        status, _, err = process.end()
        assert status == 0
        assert "interrupted; unfinished items are cancelled" in err
        assert "kinetic batches retry grp-local-" in err
        assert len(err.splitlines()) == 1


STUBBORN = """
@remote
def stubborn(folder):
    signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(folder, "asked").touch())
    pathlib.Path(folder, "runs").touch()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.01)
"""


@pytest.mark.full
def test_a_second_ctrl_c_exits_at_once(script, tmp_path: Path) -> None:
    """The script doesn't wait for jobs that ignore SIGTERM."""
    code = f"""{STUBBORN}
try:
    with stubborn.run_async_map([here], progress=False) as batch:
        print(batch.group_id)
        until(pathlib.Path("runs").exists)
        print("waiting")
        batch.wait()
except KeyboardInterrupt:
    print("left")
"""
    with script(code) as process:
        group = process.line()
        process.expect("waiting")
        process.interrupt()
        until((tmp_path / "asked").exists)
        process.interrupt()
        process.expect("left")
        status, _, err = process.end()
    assert status == 0
    first, second = err.splitlines()
    assert "unfinished items are cancelled" in first
    assert "interrupted again" in second and f"kinetic batches cancel {group}" in second


@pytest.mark.full
@pytest.mark.parametrize("cause", ["Ctrl-C", "cancel scope"])
def test_ctrl_c_while_an_async_block_is_cancelled_exits_at_once(
    script, tmp_path: Path, cause: str
) -> None:
    """A cancel scope cancels each ``await``, but only the signal ends the wait for the items."""
    code = f"""{STUBBORN}
import anyio

async def main():
    async with kinetic.aio.Client(backend="local") as client:
        with anyio.CancelScope() as scope:
            async with await client.run_async_map(stubborn, [here]) as batch:
                while not pathlib.Path("runs").exists():
                    await asyncio.sleep(0.01)
                print("waiting")
                if {cause!r} == "cancel scope":
                    scope.cancel()
                await batch.wait()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("left")
"""
    with script(code) as process:
        process.expect("waiting")
        if cause == "Ctrl-C":
            process.interrupt()
        until((tmp_path / "asked").exists)
        process.interrupt()
        process.expect("left")
        status, _, err = process.end()
    assert status == 0
    assert "interrupted again" in err and "kinetic batches cancel grp-local-" in err


def test_ctrl_c_within_the_block_of_an_async_program_cancels_the_batch(script) -> None:
    code = """
async def main():
    running = kinetic.aio.run_async_map(waits_for, [f"{here}/never"] * 3)
    async with await running as batch:
        while not (await batch.status_counts()).get("RUNNING"):
            await asyncio.sleep(0.01)
        print(batch.group_id)
        await batch.wait()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""
    with script(code) as process:
        group = process.line()
        process.interrupt()
        process.expect("interrupted")
        status, _, err = process.end()
        assert status == 0
        assert "interrupted; unfinished items are cancelled" in err and group in err
        assert len(err.splitlines()) == 1
    with script(f"print(kinetic.attach_batch({group!r}).status_counts())") as process:
        process.expect("{'NOT_FOUND': 3}")


def test_the_end_of_a_script_ends_an_infinite_input(script, tmp_path: Path) -> None:
    code = """
(folder := pathlib.Path(here, "done")).mkdir()

@remote
def note(number):
    (folder / str(number)).touch()

batch = note.run_async_map(itertools.count(), max_concurrent=2, progress=False)
until(lambda: len(os.listdir(folder)) > 3)
print(batch.group_id)
"""
    with script(code) as process:
        group = process.line()
        status, _, err = process.end()
        assert status == 0 and "Traceback" not in err
        assert f"{group}: this process ends, so it takes no more inputs" in err
    after = f"""
batch = kinetic.attach_batch({group!r})
batch.wait(timeout=60)
print(batch.stored)
counts = batch.status_counts()
print(set(counts), counts["SUCCEEDED"] == len(os.listdir("done")) == len(batch.jobs))
print(batch.reason())

from kinetic.cli.app import main
main(["batches", "list", "--json"])
"""
    with script(after) as process:
        stored = process.line()
        assert f"only the {stored} stored ones" in err
        process.expect("{'SUCCEEDED'} True")
        process.expect(f"{stored} inputs were taken from their iterator, which may have more")
        status, out, err = process.end()
    assert (status, err) == (0, "") and '"status": "CANCELLED"' in out


def test_the_end_of_a_script_that_has_taken_no_input_yet_says_so(script) -> None:
    code = """
def inputs():
    threading.Event().wait()
    yield 1

print(inverse.run_async_map(inputs(), progress=False).group_id)
"""
    with script(code) as process:
        group = process.line()
        status, _, err = process.end()
    assert status == 0
    assert f"{group}: this process ends" in err and "only the 0 stored ones" in err


def test_at_the_end_of_a_script_the_window_no_longer_limits_a_batch(script, tmp_path: Path) -> None:
    """A started iteration limits the batch to its window, but not after the script has ended."""
    code = """
import threading

@remote
def note(name):
    while not os.path.exists(os.path.join(here, "read")):
        time.sleep(0.01)
    pathlib.Path(name).touch()

def report_reading():
    until(lambda: batch._async_handle._batch.coordinator.window.delivered is not None)
    pathlib.Path("read").touch()

folder = os.path.join(here, "done")
os.mkdir(folder)
names = [f"{folder}/{n}" for n in range(6)]
batch = note.run_async_map(names, max_concurrent=1, window=1, progress=False)
threading.Thread(target=report_reading).start()
reading = batch.outcomes()
print(next(reading).index, len(os.listdir(folder)) < 3)
"""
    with script(code) as process:
        process.expect("0 True")
        assert process.end()[0] == 0
    until(lambda: len([*(tmp_path / "done").iterdir()]) == 6)


def test_a_file_that_is_written_again_has_the_content_of_its_yield(script) -> None:
    code = """
@remote
def read(source):
    return pathlib.Path(source).read_text()

path = pathlib.Path("input.txt")
path.touch()

def rewritten():
    for number in range(3):
        path.write_text(str(number))
        yield kinetic.Data(str(path))

async def async_rewritten():
    for source in rewritten():
        yield source

for inputs in rewritten(), async_rewritten(), [kinetic.Data(str(path))]:
    batch = read.run_async_map(inputs)
    if isinstance(inputs, list):
        path.write_text("99")
    print(batch.results())
"""
    script(code).prints("['0', '1', '2']", "['0', '1', '2']", "['2']")


@pytest.mark.parametrize(
    "kind", ["iterator", pytest.param("async iterator", marks=pytest.mark.full)]
)
def test_a_script_ends_although_its_inputs_block(script, kind: str) -> None:
    code = f"""
import threading

def stuck():
    yield 1
    yield 2
    threading.Event().wait()

async def stuck_async():
    yield 1
    yield 2
    await asyncio.Event().wait()

inputs = stuck() if {kind!r} == "iterator" else stuck_async()
batch = inverse.run_async_map(inputs, progress=False)
print(sorted(next(batch.outcomes(ordered=True)).index for _ in range(2)))
print(len([completion for _, completion in zip(range(2), batch.outcomes())]))
"""
    with script(code) as process:
        process.expect("[0, 0]", "2")
        status, _, err = process.end()
        assert status == 0 and "Traceback" not in err


def test_a_debugger_without_a_terminal_is_refused_before_anything_is_uploaded(script) -> None:
    code = """
try:
    inverse.options(debug=True)(1)
except kinetic.errors.ConfigurationError as error:
    print("terminal" in str(error), kinetic.list_jobs())
"""
    script(code).prints("True []")


def test_a_child_forked_in_a_block_does_not_end_the_batch(script) -> None:
    """The child may exit inside the block or at its end, and may run its own jobs.

    It keeps the values in the store, because the parent may not have read them yet.
    """
    code = """
def exit_code_of_child(work):
    pid = os.fork()
    if pid == 0:
        work()
    else:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def use_batch():
    print(inverse(4), list(batch.results(cleanup=False)))
    sys.exit(4)

with waits_for.run_async_map([f"{here}/a", f"{here}/b"]) as batch:
    print(exit_code_of_child(lambda: sys.exit(3)), batch.finished)
    pathlib.Path("a").touch()
    pathlib.Path("b").touch()
    print(exit_code_of_child(use_batch))
    print(batch.results())
"""
    with script(code, "-Wignore::DeprecationWarning") as process:
        process.expect("3 False", "0.25 ['a', 'b']", "4", "['a', 'b']")
        assert process.end()[0] == 0


def test_an_async_client_is_closed_in_a_forked_child_and_works_in_the_parent(script) -> None:
    """The child leaves by ``os._exit``, because closing the loop would affect the parent's."""
    code = """
from kinetic import aio, errors

with asyncio.Runner() as runner:
    client = aio.Client(backend="local")
    job = runner.run(client.submit(waits_for, f"{here}/a"))
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(client.run(abs, -1))
        except errors.ClientClosed as error:
            print(error)
        asyncio.run(client.aclose())
        print(runner.get_loop().is_closed(), flush=True)
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    pathlib.Path("a").touch()
    print(runner.run(job.result()))
    runner.run(client.aclose())
"""
    with script(code, "-Wignore::DeprecationWarning") as process:
        assert "another" in process.line()
        process.expect("False", "3", "a")
        assert process.end() == (0, "", "")
