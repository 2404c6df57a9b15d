"""Programs of users, the sync face among them, that end, are interrupted, or are killed."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from pathlib import Path

import pytest

from kinetic import aio, errors

from .crew import behaviour, long_behaviour
from .place import Place

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
async def test_a_call_prints_its_output_and_returns_its_value(place: Place) -> None:
    """Raises what it raised, and jobs and batches are followed without a loop."""
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
    async with place.script(code) as script:
        await script.expect("computing", "6")
        status, out, err = await script.end()
        assert status == 0 and "Traceback" not in err, err
        assert out.splitlines()[-5:] == [  # what failed has printed its traceback before
            "True",
            "True True",
            "24 JobStatus.NOT_FOUND",
            "[1.0, None, 0.25] [1]",
            "['NOT_FOUND', 'NOT_FOUND', 'NOT_FOUND']",
        ]


@behaviour
async def test_ctrl_c_of_a_call_cancels_its_job_and_of_a_handle_does_not(place: Place) -> None:
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
        mine = [one for one in kinetic.list_jobs() if one.func_name == "waits"]
        other = [one.status().value for one in mine if one != job]
        print("interrupted", job.status().terminal, *(other or ["NOT_FOUND"]))
pathlib.Path("go").touch()
print(job.result())
"""
    async with place.script(code) as script:
        await script.expect("started")
        script.interrupt()
        await script.expect("interrupted False NOT_FOUND", "waiting")
        script.interrupt()
        await script.expect("interrupted False NOT_FOUND", "went on")
        status, out, err = await script.end()  # on a busy cluster it may have told of waiting
        assert (status, out) == (0, "") and "Traceback" not in err, err
    for name in place.marks("project/*.job"):
        job_id = (place.folder / "project" / name).read_text()
        assert await place.objects(job_id) == [], name


@behaviour
async def test_another_process_goes_on_with_the_batch_of_one_that_was_killed(
    place: Place,
) -> None:
    """Whoever waits is told; what was committed does not run again."""
    async with place.script(WORK + BATCH + "batch.wait()") as submitter:
        batch = await place.client.attach_batch(await submitter.line())
        async for job in batch.as_completed():
            assert (job.group_index, await job.result(cleanup=False)) == (0, 0)
            break
        await place.marked("project/[12].1", 2)
        await submitter.kill()
    async with aio.Client() as other:
        found = await other.attach_batch(batch.group_id)
        for one in (found, await found.job(COUNT - 1)):
            assert f"kinetic batches resume {batch.group_id}" in await one.reason()
    with pytest.raises(errors.SubmitterLost, match="resume"):
        await batch.results()
    await batch.resume()
    (place.folder / "project" / "go").touch()
    assert await batch.results() == [-number for number in range(COUNT)]
    assert place.marks("project/*.[0-9]") == [f"{number}.1" for number in range(COUNT)]
    await batch.cleanup()
    assert await place.objects(batch.group_id) == []


@behaviour
async def test_inputs_that_died_with_their_process_are_given_anew(place: Place) -> None:
    code = """
def lazily():
    yield here, 0
    yield here, 0.5
    threading.Event().wait()

batch = work.run_async_map(lazily(), max_concurrent=2)
print(batch.group_id)
batch.wait()
"""
    (place.folder / "project").mkdir()
    (place.folder / "project" / "go").touch()
    async with place.script(WORK + code) as submitter:
        batch = await place.client.attach_batch(await submitter.line())
        await place.marked("project/0.*1", 2)
        await submitter.kill()
    folder = str(place.folder / "project")
    await batch.resume()
    with pytest.raises(errors.InputsUnfinished) as caught:
        await batch.results()
    assert caught.value.stored == batch.stored == 2
    await batch.resume(inputs=[(folder, 7)])
    assert await batch.results() == [0, -0.5, -7]
    assert place.marks("project/*.1") == ["0.1", "0.5.1", "7.1"]


@behaviour
async def test_the_traceback_of_a_jobs_exception_has_the_callers_lines_and_the_jobs(
    place: Place,
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
    (place.folder / "project").mkdir()
    for how, line, *frames in [
        ("call", "return half(0) if", "half", "inverse"),
        ("handle", "inverse.run_async(0).result()", "inverse"),
        ("await", "return await later(0)", "later"),
    ]:
        (place.folder / "project" / "how").write_text(how)
        async with place.script(code) as script:
            status, _, err = await script.end()
        local, remote = err.split("Remote traceback of ")
        assert status == 1 and local.endswith("\nZeroDivisionError: division by zero\n"), err
        files = [row.split('"')[1] for row in local.splitlines() if row.startswith("  File ")]
        assert line in local and not any("/kinetic/" in file for file in files), err
        rows = [row for row in remote.splitlines() if row.startswith("  File ")]
        assert [row.rpartition(" ")[2] for row in rows] == [*frames], err


@behaviour
async def test_another_process_catches_the_exceptions_of_a_job_by_its_own_classes(
    place: Place,
) -> None:
    (place.folder / "project").mkdir()
    (place.folder / "project" / "model.py").write_text(
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
        async with place.script(code) as script:
            status, out, err = await script.end()
            assert (status, out) == (0, "True 4\nTrue 3\n"), err


@behaviour
async def test_keras_is_told_to_use_jax_where_it_is_unless_the_caller_says_otherwise(
    place: Place,
) -> None:
    code = """
@remote
def backend():
    return os.environ.get("KERAS_BACKEND")

print(backend())
os.environ["KERAS_BACKEND"] = "torch"
print(backend.options(capture_env_vars=["KERAS_BACKEND"])())
"""
    installed = importlib.util.find_spec("jax") is not None
    expected = "jax" if installed or place.name != "local" else "None"
    async with place.script(code) as script:
        status, out, err = await script.end()
        assert (status, out) == (0, f"{expected}\ntorch\n"), err
    package = place.folder / "project" / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('only looked for')")
    async with place.script(code) as script:
        status, out, err = await script.end()
        assert (status, out) == (0, "jax\ntorch\n"), err


@behaviour
async def test_a_decorated_function_in_a_job_is_itself_and_runs_in_place(place: Place) -> None:
    """Those of the script and of the project, also async ones and methods."""
    (place.folder / "project").mkdir()
    (place.folder / "project" / "stages.py").write_text(
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

def refused(ask, *args):
    try:
        ask(*args)
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
    words = [refused(add.run_async, 2), refused(later.run_async_map, [2])]
    words += [refused(stage.add.run_async), refused(submit, add)]
    facts = (add.__name__, add.__doc__, str(inspect.signature(add)), add.__module__)
    coroutine = inspect.iscoroutinefunction(later) or sys.version_info < (3, 12)
    return set(calls) == {(os.getpid(), 3)}, words, facts, coroutine

same, words, facts, coroutine = look(add)
print(same, coroutine, all(".local(" in one for one in words), *facts)
"""
    async with place.script(code) as script:
        status, out, err = await script.end()
        facts = "add Adds. (number: int, *, more: int = 1) __main__"
        assert (status, out) == (0, f"True True True {facts}\n"), err


@behaviour
async def test_a_job_outlives_its_client(place: Place) -> None:
    code = "print(work.run_async(here, 1).job_id)\nos.kill(os.getpid(), signal.SIGKILL)"
    async with place.script(WORK + code) as script:
        job_id = await script.line()
        await script.end()
    job = await place.client.attach(job_id)
    await place.marked("project/1.1")
    await place.running(job)
    (place.folder / "project" / "go").touch()
    assert await job.result() == -1


@behaviour
async def test_a_process_hears_that_another_cancels_its_batch(place: Place) -> None:
    code = """
try:
    batch.results()
except kinetic.BatchError as error:
    print({type(one).__name__ for one in batch.results(return_exceptions=True)})
"""
    async with place.script(WORK.replace("while number", "while True") + BATCH + code) as script:
        batch = await place.client.attach_batch(await script.line())
        await place.marked("project/[01].1", 2)
        await batch.cancel()
        assert await batch.status_counts() == {"NOT_FOUND": COUNT}
        await script.expect("{'JobCancelled'}")
        assert (await script.end())[0] == 0
    assert len(place.marks("project/*.[0-9]")) <= 4, "nothing more was started"


@behaviour
async def test_a_script_that_ends_submits_the_rest_first(place: Place) -> None:
    async with place.script(WORK + BATCH) as script:
        await script.complaint("not submitted yet")
        (place.folder / "project" / "go").touch()  # not before: all might be submitted by then
        status, out, err = await script.end()
    assert status == 0 and out.strip() in err and "not submitted yet" in err
    batch = await place.client.attach_batch(out.strip())
    assert await batch.results() == [-number for number in range(COUNT)]


@long_behaviour
async def test_a_batch_outlives_any_number_of_submitters(place: Place) -> None:
    """Each goes on with what the one before has left, and is killed as well."""
    chance = random.Random(place.name)
    resume = """
batch = kinetic.attach_batch(GROUP).resume(force=True)
print("resumed")
batch.wait()
"""
    (place.folder / "project").mkdir()
    (place.folder / "project" / "go").touch()
    async with place.script(WORK + BATCH.replace("range(6)", "range(60)") + "batch.wait()") as one:
        group = await one.line()
        await asyncio.sleep(chance.uniform(0, 3))
        await one.kill()
    for _ in range(5):
        async with place.script(resume.replace("GROUP", repr(group))) as script:
            await script.expect("resumed")
            await asyncio.sleep(chance.uniform(0, 3))
            await script.kill()
    async with aio.Client() as client:
        batch = await client.attach_batch(group)
        await batch.resume(force=True)
        assert await batch.results() == [-number for number in range(60)]
    marks = [Path(name).stem for name in place.marks("project/*.[0-9]")]
    assert len(marks) == len({*marks}), "nothing ran twice"
