"""Users' scripts, including those of the sync API, that end, are interrupted, or are killed."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from asyncio import to_thread
from pathlib import Path

import pytest

from kinetic import aio, errors

from .crew import behaviour, long_behaviour
from .harness import Harness

COUNT = 6

WORK = """
@remote
def work(folder, number):
    import os, pathlib, time
    name = f"{number}.{os.environ['KINETIC_ATTEMPT']}"
    pathlib.Path(folder, name).touch(exist_ok=False)
    while number and not pathlib.Path(folder, "go").exists():
        time.sleep(0.02)
    return -number
"""

BATCH = """
batch = work.run_async_map([(here, number) for number in range(6)], max_concurrent=2)
print(batch.group_id)
"""


@behaviour
async def test_a_call_prints_its_output_and_returns_its_value(harness: Harness) -> None:
    """A failed call raises the job's exception; handles work without an event loop."""
    code = """
@remote
def fact(n):
    if n == 3:
        print("computing")
    return 1 if n == 0 else n * fact(n - 1)

@remote
def inverse(value):
    return 1 / value

print(fact(3))
job, batch = fact.run_async(4), inverse.run_async_map([1, 0, 4])
try:
    inverse(0)
except ZeroDivisionError as error:
    print("Remote traceback" in error.__notes__[0])
print(kinetic.attach(job.job_id) == job, job in kinetic.list_jobs())
print(job.result(), job.status())
try:
    batch.results()
except kinetic.BatchError as error:
    print(error.partial_results, [job.group_index for job in error.failures])
print(sorted(job.status().value for job in batch.as_completed()))
batch.cleanup()
"""
    with harness.script(code) as script:
        await to_thread(script.expect, "computing", "6")
        status, out, err = await to_thread(script.end)
        assert status == 0 and "Traceback" not in err, err
        assert out.splitlines()[-5:] == [  # before these come remote tracebacks
            "True",
            "True True",
            "24 JobStatus.NOT_FOUND",
            "[1.0, None, 0.25] [1]",
            "['NOT_FOUND', 'NOT_FOUND', 'NOT_FOUND']",
        ]


@behaviour
async def test_a_job_sees_the_files_of_its_call(harness: Harness) -> None:
    """Files that change between two calls of a client ship as an overlay."""
    code = """
@remote
def read(*_):
    names = sorted(path.name for path in pathlib.Path("out").iterdir())
    return names, pathlib.Path("results.csv").read_text(), len(pathlib.Path("large").read_bytes())

for name in ("out/1", "large"):
    pathlib.Path(name).parent.mkdir(exist_ok=True)
    pathlib.Path(name).write_bytes(bytes(2 << 20))
pathlib.Path("results.csv").write_text("a")
print(read())
pathlib.Path("results.csv").write_text("ab")
pathlib.Path("out/2").touch()
os.remove("out/1")
print(read(), read.run_async_map([(), ()]).results())
"""
    with harness.script(code) as script:
        first, second = (["1"], "a", 2 << 20), (["2"], "ab", 2 << 20)
        await to_thread(script.expect, f"{first}", f"{second} {[second, second]}")
        status, _, err = await to_thread(script.end)
        assert status == 0 and "Traceback" not in err, err


@behaviour
async def test_ctrl_c_of_a_call_cancels_its_job_and_of_a_handle_does_not(harness: Harness) -> None:
    code = """
@remote
def waits(name):
    pathlib.Path(name + ".job").write_text(os.environ["KINETIC_JOB_ID"])
    print("started")
    while not pathlib.Path(name).exists():
        time.sleep(0.02)
    return "went on"

job = waits.run_async(here + "/go")
for call in (lambda: waits(here + "/never"), lambda: print("waiting") or job.result()):
    try:
        call()
    except KeyboardInterrupt:
        listed = [found for found in kinetic.list_jobs() if found.func_name == "waits"]
        other = [found.status().value for found in listed if found != job]
        print("interrupted", job.status().terminal, *(other or ["NOT_FOUND"]))
pathlib.Path("go").touch()
print(job.result())
"""
    with harness.script(code) as script:
        await to_thread(script.expect, "started")
        script.interrupt()
        await to_thread(script.expect, "interrupted False NOT_FOUND", "waiting")
        script.interrupt()
        await to_thread(script.expect, "interrupted False NOT_FOUND", "went on")
        # On a busy cluster, standard error may say that it waited.
        status, out, err = await to_thread(script.end)
        assert (status, out) == (0, "") and "Traceback" not in err, err
    for name in harness.marks("project/*.job"):
        job_id = (harness.folder / "project" / name).read_text()
        assert await harness.objects(job_id) == [], name


@pytest.mark.full
@behaviour
async def test_another_process_goes_on_with_the_batch_of_one_that_was_killed(
    harness: Harness,
) -> None:
    """Waiting callers get an error; items with an outcome don't run again.

    Where workers run the items, they go on, and nobody gets an error.
    """
    with harness.script(WORK + BATCH + "batch.wait()") as submitter:
        batch = await harness.client.attach_batch(await to_thread(submitter.line))
        async for job in batch.as_completed():
            assert (job.group_index, await job.result(cleanup=False)) == (0, 0)
            break
        await harness.marked("project/[12].1", 2)
        submitter.kill()
    if not harness.runs_alone:
        async with aio.Client() as other:
            found = await other.attach_batch(batch.group_id)
            for handle in (found, await found.job(COUNT - 1)):
                assert f"kinetic batches resume {batch.group_id}" in await handle.reason()
        with pytest.raises(errors.SubmitterLost, match="resume"):
            await batch.results()
    await batch.resume()
    (harness.folder / "project" / "go").touch()
    assert await batch.results() == [-number for number in range(COUNT)]
    assert harness.marks("project/*.[0-9]") == [f"{number}.1" for number in range(COUNT)]
    await batch.cleanup()
    assert await harness.objects(batch.group_id) == []


@behaviour
async def test_inputs_that_died_with_their_process_are_given_anew(harness: Harness) -> None:
    code = """
def lazily():
    yield here, 0
    yield here, 0.5
    threading.Event().wait()

batch = work.run_async_map(lazily(), max_concurrent=2)
print(batch.group_id)
batch.wait()
"""
    (harness.folder / "project").mkdir()
    (harness.folder / "project" / "go").touch()
    with harness.script(WORK + code) as submitter:
        batch = await harness.client.attach_batch(await to_thread(submitter.line))
        await harness.marked("project/0.*1", 2)
        submitter.kill()
    folder = str(harness.folder / "project")
    await batch.resume()
    with pytest.raises(errors.InputsUnfinished) as caught:
        await batch.results()
    assert caught.value.stored == batch.stored == 2
    await batch.resume(inputs=[(folder, 7)])
    assert await batch.results() == [0, -0.5, -7]
    assert harness.marks("project/*.1") == ["0.1", "0.5.1", "7.1"]


@pytest.mark.full
@behaviour
async def test_the_traceback_of_a_jobs_exception_has_the_callers_lines_and_the_jobs(
    harness: Harness,
) -> None:
    code = """
@remote
def inverse(value):
    return 1 / value

@remote
def half(value):
    return inverse(value) / 2

@remote
async def later(value):
    return 1 / value

def ask(how):
    if how == "await":
        return asyncio.run(wait())
    return half(0) if how == "call" else inverse.run_async(0).result()

async def wait():
    return await later(0)

ask(pathlib.Path("how").read_text())
"""
    (harness.folder / "project").mkdir()
    for how, line, *frames in [
        ("call", "return half(0) if", "half", "inverse"),
        ("handle", "inverse.run_async(0).result()", "inverse"),
        ("await", "return await later(0)", "later"),
    ]:
        (harness.folder / "project" / "how").write_text(how)
        with harness.script(code) as script:
            status, _, err = await to_thread(script.end)
        local, remote = err.split("Remote traceback of ")
        assert status == 1 and local.endswith("\nZeroDivisionError: division by zero\n"), err
        files = [row.split('"')[1] for row in local.splitlines() if row.startswith("  File ")]
        assert line in local and not any("/kinetic/" in file for file in files), err
        rows = [row for row in remote.splitlines() if row.startswith("  File ")]
        assert [row.rpartition(" ")[2] for row in rows] == [*frames], err


@behaviour
async def test_another_process_catches_the_exceptions_of_a_job_by_its_own_classes(
    harness: Harness,
) -> None:
    (harness.folder / "project").mkdir()
    (harness.folder / "project" / "model.py").write_text(
        """class Coded(Exception):
    def __init__(self, code, *, where):
        super().__init__(f"{code} at {where}")
        self.code = code
"""
    )
    code = """
import model

class Own(model.Coded):
    def __init__(self, code):
        super().__init__(code, where="main")

@remote
def fail(number):
    raise model.Coded(3, where="x") if number else Own(4)

if pathlib.Path("group").exists():
    batch = kinetic.attach_batch(pathlib.Path("group").read_text())
else:
    batch = fail.run_async_map([0, 1])
    pathlib.Path("group").write_text(batch.group_id)
for number, kind in enumerate([Own, model.Coded]):
    try:
        batch.job(number).result()
    except kind as error:
        print(type(error) is kind, error.code)
"""
    for _ in range(2):
        with harness.script(code) as script:
            status, out, err = await to_thread(script.end)
            assert (status, out) == (0, "True 4\nTrue 3\n"), err


@behaviour
async def test_keras_uses_jax_where_installed_unless_the_caller_chooses(harness: Harness) -> None:
    code = """
@remote
def backend():
    return os.environ.get("KERAS_BACKEND")

print(backend())
os.environ["KERAS_BACKEND"] = "torch"
print(backend.options(capture_env_vars=["KERAS_BACKEND"])())
"""
    installed = importlib.util.find_spec("jax") is not None
    expected = "jax" if installed or harness.name != "local" else "None"
    with harness.script(code) as script:
        status, out, err = await to_thread(script.end)
        assert (status, out) == (0, f"{expected}\ntorch\n"), err


@behaviour
async def test_keras_uses_jax_that_a_captured_path_leads_to(harness: Harness) -> None:
    package = harness.folder / "elsewhere" / "jax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('only looked for')")
    code = f"""
os.environ["PYTHONPATH"] = {str(package.parent)!r}

@remote
def backend():
    return os.environ.get("KERAS_BACKEND")

print(backend.options(capture_env_vars=["PYTHONPATH"])())
"""
    with harness.script(code) as script:
        status, out, err = await to_thread(script.end)
        assert (status, out) == (0, "jax\n"), err


@behaviour
async def test_a_decorated_function_in_a_job_is_itself_and_runs_in_place(harness: Harness) -> None:
    """This holds for functions of the script and the project, async functions and methods."""
    (harness.folder / "project").mkdir()
    (harness.folder / "project" / "stages.py").write_text(
        """import os, kinetic

class Stage:
    def __init__(self, number):
        self.number = number

    @kinetic.run("cpu")
    def add(self, more):
        return os.getpid(), self.number + more
"""
    )
    code = """
import functools, inspect
from stages import Stage

@remote
def add(number: int, *, more: int = 1):
    "Adds."
    return os.getpid(), number + more

def plus(number, more):
    return os.getpid(), number + more

two = remote(functools.partial(plus, 1))

@remote
async def later(number):
    return os.getpid(), number

def refused(call, *args):
    try:
        call(*args)
    except RuntimeError as error:
        return str(error)

def submit(function):
    import kinetic.jobs
    kinetic.jobs.submit(function, 2)

async def gathered():
    return [*await asyncio.gather(later(3), later.local(3), later.options(spot=True)(3))]

@remote
def look(passed):
    calls = [add(2), add.local(2), add.options(accelerator="l4", timeout=3)(2), passed(1, more=2)]
    calls += [two(more=2), two.local(more=2), two.options(spot=True)(more=2)]
    stage = Stage(1)
    calls += [stage.add(2), stage.add.local(2), stage.add.options(spot=True)(2)]
    calls += asyncio.run(gathered())
    messages = [refused(add.run_async, 2), refused(later.run_async_map, [2])]
    messages += [refused(stage.add.run_async), refused(submit, add)]
    facts = (add.__name__, add.__doc__, str(inspect.signature(add)), add.__module__)
    coroutine = inspect.iscoroutinefunction(later) or sys.version_info < (3, 12)
    return set(calls) == {(os.getpid(), 3)}, messages, facts, coroutine

same, messages, facts, coroutine = look(add)
print(same, coroutine, all(".local(" in message for message in messages), *facts)
"""
    with harness.script(code) as script:
        status, out, err = await to_thread(script.end)
        facts = "add Adds. (number: int, *, more: int = 1) __main__"
        assert (status, out) == (0, f"True True True {facts}\n"), err


@behaviour
async def test_a_job_outlives_its_client(harness: Harness) -> None:
    code = "print(work.run_async(here, 1).job_id)\nos.kill(os.getpid(), signal.SIGKILL)"
    with harness.script(WORK + code) as script:
        job_id = await to_thread(script.line)
        await to_thread(script.end)
    job = await harness.client.attach(job_id)
    await harness.marked("project/1.1")
    await harness.running(job)
    (harness.folder / "project" / "go").touch()
    assert await job.result() == -1


@behaviour
async def test_a_process_hears_that_another_cancels_its_batch(harness: Harness) -> None:
    code = """
try:
    batch.results()
except kinetic.BatchError as error:
    print({type(result).__name__ for result in batch.results(return_exceptions=True)})
"""
    with harness.script(WORK.replace("while number", "while True") + BATCH + code) as script:
        batch = await harness.client.attach_batch(await to_thread(script.line))
        await harness.marked("project/[01].1", 2)
        await batch.cancel()
        assert await batch.status_counts() == {"NOT_FOUND": COUNT}
        await to_thread(script.expect, "{'JobCancelled'}")
        assert (await to_thread(script.end))[0] == 0
    assert len(harness.marks("project/*.[0-9]")) <= 4, "nothing started after the cancellation"


@behaviour
async def test_a_script_that_ends_submits_the_rest_first(harness: Harness) -> None:
    """Workers run what is stored, so the script doesn't wait for them."""
    with harness.script(WORK + BATCH) as script:
        if not harness.runs_alone:
            await to_thread(script.wait_for_error, "this process ends when they are")
            # Only now: earlier, the script might submit everything.
            (harness.folder / "project" / "go").touch()
        status, out, err = await to_thread(script.end)
    assert status == 0
    if harness.runs_alone:
        assert "inputs that are not submitted" not in err
        (harness.folder / "project" / "go").touch()
    else:
        assert out.strip() in err and "this process ends when they are" in err
    batch = await harness.client.attach_batch(out.strip())
    assert await batch.results() == [-number for number in range(COUNT)]


@long_behaviour
async def test_a_batch_outlives_any_number_of_submitters(harness: Harness) -> None:
    """Each submitter resumes the batch of the killed one before it, and is killed in turn."""
    rng = random.Random(harness.name)
    resume = """
batch = kinetic.attach_batch(GROUP).resume(force=True)
print("resumed")
batch.wait()
"""
    (harness.folder / "project").mkdir()
    (harness.folder / "project" / "go").touch()
    code = WORK + BATCH.replace("range(6)", "range(60)") + "batch.wait()"
    with harness.script(code) as submitter:
        group = await to_thread(submitter.line)
        await asyncio.sleep(rng.uniform(0, 3))
        submitter.kill()
    for _ in range(5):
        with harness.script(resume.replace("GROUP", repr(group))) as script:
            await to_thread(script.expect, "resumed")
            await asyncio.sleep(rng.uniform(0, 3))
            script.kill()
    async with aio.Client() as client:
        batch = await client.attach_batch(group)
        await batch.resume(force=True)
        assert await batch.results() == [-number for number in range(60)]
    marks = [Path(name).stem for name in harness.marks("project/*.[0-9]")]
    assert len(marks) == len({*marks}), "nothing ran twice"
