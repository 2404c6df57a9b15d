"""Test jobs of the sync API with scripts whose jobs run on this machine."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def test_the_methods_of_a_handle(script) -> None:
    code = """
@remote
def work(lines):
    for number in range(lines):
        print("line", number)
    while not pathlib.Path(os.environ["KINETIC_OUTPUT_DIR"], "go").exists():
        time.sleep(0.01)
    return lines

job = work.run_async(3)
seen, threads = [], set()

def note(status):
    seen.append(status.value)
    threads.add(threading.get_ident())
    if status is JobStatus.RUNNING:
        pathlib.Path(job.output_dir, "go").touch()
        raise ValueError("a broken callback")

try:
    job.result(timeout=0.01)
except TimeoutError as error:
    print("timeout", job.job_id in str(error))
os.makedirs(job.output_dir, exist_ok=True)
same = pickle.loads(pickle.dumps(job))
print(same.output_dir == job.output_dir != "")
print(same == job, hash(same) == hash(job), same is not job, kinetic.attach(job.job_id) == job)
print(job in kinetic.list_jobs())
print(job.result(on_status_change=note, cleanup=False))
print(seen[-1], seen.count("SUCCEEDED"), threads == {threading.get_ident()})
print(repr(job.logs()), repr(job.tail(1)))
print(job.logs(follow=True))
print(same.status(), repr(job.reason()), job.outputs())
job.cleanup()
print(job.status())
"""
    with script(code) as process:
        process.expect(
            "timeout True",
            "True",
            "True True True True",
            "True",
            "3",
            "SUCCEEDED 1 True",
            r"'line 0\nline 1\nline 2' 'line 2'",
            "line 0",
            "line 1",
            "line 2",
            "None",
            "JobStatus.SUCCEEDED '' ['go']",
            "JobStatus.NOT_FOUND",
        )
        status, _, err = process.end()
        assert status == 0 and err.count("ValueError: a broken callback") == 1


def test_a_sync_handle_is_awaitable_in_any_loop(script) -> None:
    code = """
import warnings

@remote
def waits(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
    return name

here = os.path.abspath("go")
jobs = [waits.run_async(here) for _ in range(2)]

async def main():
    waiting = asyncio.gather(*jobs)
    await asyncio.sleep(0)
    pathlib.Path(here).touch()
    print(set(await waiting) == {here})
    warnings.simplefilter("default")
    print(jobs[0].status())

asyncio.run(main())
"""
    with script(code) as process:
        process.expect("True", "JobStatus.NOT_FOUND")
        status, _, err = process.end()
        assert status == 0
        assert err.count("RuntimeWarning") == 1 and "script.py" in err


def test_handles_work_in_a_forked_child(script) -> None:
    code = """
@remote
def double(value):
    return 2 * value

if __name__ == "__main__":
    job = double.run_async(4)
    batch = double.run_async_map([1, 2])
    batch.wait()
    pid = os.fork()
    if pid == 0:
        print("child", job.result(cleanup=False), batch.results(), double.run_async(1).result())
        sys.exit(0)
    print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print("parent", job.result(), batch.status_counts())
"""
    script(code, "-Wignore::DeprecationWarning").prints(
        "child 8 [2, 4] 2", "status 0", "parent 8 {'SUCCEEDED': 2}"
    )


def test_a_thread_that_outlives_the_script_may_make_the_first_calls(script) -> None:
    code = """
def work():
    print(inverse(2), inverse.run_async_map([4]).results())

threading.Thread(target=work).start()
"""
    script(code).prints("0.5 [0.25]")


def test_slots_and_keyword_names_work_in_a_job(script) -> None:
    """Values may have slots, and keywords may have any name."""
    code = """
import dataclasses

@dataclasses.dataclass(slots=True)
class Point:
    x: int

class Named:
    __slots__ = "name"

    def __init__(self):
        self.name = "n"

class Private(Named):
    __slots__ = ("__hidden", "__weakref__")

    def __init__(self):
        super().__init__()
        self.__hidden = "h"

    def __eq__(self, other):
        return type(self) is type(other) and self.__hidden == other.__hidden

class Open(Private):
    pass

@remote
def send_back(value):
    return hasattr(value, "__dict__"), value

for value in (Point(1), Named(), Private(), Open()):
    is_open, back = send_back(value)
    print(type(back) is type(value), is_open, back == value or back.name)

@remote
def names(**keywords):
    return sorted(keywords)

keywords = dict.fromkeys(["args", "begin", "function", "made", "options", "self"], 1)
print(names(**keywords) == names.local(**keywords) == names.run_async(**keywords).result())
"""
    with script(code) as process:
        process.expect(
            "True False True", "True False n", "True False True", "True True True", "True"
        )
        assert process.end() == (0, "", "")


@pytest.mark.parametrize("begin", ["run_async(1)", "run_async_map([1, 2])"])
def test_ctrl_c_at_the_end_of_a_submission_removes_its_jobs(script, begin: str) -> None:
    """The script never gets the handle. The last step of a submission logs its success."""
    code = f"""
import logging, queue
from absl import logging as absl_logging

interrupted = queue.SimpleQueue()

def interrupt(number, frame):
    interrupted.put(None)
    raise KeyboardInterrupt

class InterruptOnSuccess(logging.Handler):
    def emit(self, record):
        if "runs on local" in record.getMessage():
            os.kill(os.getpid(), signal.SIGINT)
            interrupted.get(timeout=30)

@remote
def sleeps(number):
    time.sleep(1000)

signal.signal(signal.SIGINT, interrupt)
absl_logging.set_verbosity(absl_logging.INFO)
logging.getLogger("absl").addHandler(InterruptOnSuccess())
try:
    sleeps.{begin}
except KeyboardInterrupt:
    store = pathlib.Path(os.environ["KINETIC_HOME"], "store")
    kinds = ("jobs", "batches", "groups")
    print(*[path for path in store.glob("*/*") if path.parent.name in kinds])
    print(kinetic.list_jobs())
"""
    with script(code) as process:
        process.expect("", "[]")
        assert process.end()[0] == 0


@pytest.mark.full
def test_a_job_with_a_pool_of_joblib_ends_with_its_function(script) -> None:
    """The pool's processes end too, the slot is free, and no warning appears."""
    code = """
@remote
def squares(count):
    from joblib import Parallel, delayed
    return Parallel(n_jobs=2)(delayed(pow)(number, 2) for number in range(count))

os.environ["KINETIC_LOCAL_SLOTS"] = "1"
jobs = [squares.run_async(count) for count in (1, 2, 3)]
print([job.result() for job in jobs])
print(squares(4))
"""
    with script(code) as process:
        process.expect("[[0], [0, 1], [0, 1, 4]]", "[0, 1, 4, 9]")
        status, out, err = process.end()
        assert (status, out) == (0, "")
        assert "lines of the output" not in err and "Error" not in err, err


@pytest.mark.full
def test_a_child_of_a_job_that_never_ends_is_reported_and_killed(script) -> None:
    """The job's process is killed with it. The slot is free and the value is kept."""
    code = """
@remote
def stubborn(number):
    import multiprocessing
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    return number, process.pid

os.environ["KINETIC_LOCAL_SLOTS"] = "1"
job = stubborn.run_async(1)
number, pid = job.result(cleanup=False)
print(number, remote(abs)(-2))
print(os.path.exists(f"/proc/{pid}"), "still runs" in job.tail())
"""
    with script(code) as process:
        process.expect("1 2", "False True")
        assert process.end()[:2] == (0, "")


@pytest.mark.parametrize(
    "method",
    [
        "spawn",
        pytest.param("fork", marks=pytest.mark.full),
        pytest.param("forkserver", marks=pytest.mark.full),
    ],
)
def test_processes_of_a_job_use_functions_and_classes_of_the_project(
    script, tmp_path: Path, method: str
) -> None:
    """Pools and single processes send functions and instances both ways."""
    (tmp_path / "stages.py").write_text(
        "import kinetic\n"
        "class Point:\n"
        "    def __init__(self, x):\n"
        "        self.x = x\n"
        "def triple(x):\n"
        "    return thrice(x)\n"
        "def thrice(x):\n"
        "    return Point(3 * x.x)\n"
        "def put(queue, x):\n"
        "    queue.put(triple(x))\n"
        "@kinetic.run(backend='local', accelerator='cpu')\n"
        "def triple_decorated(x):\n"
        "    return triple(x)\n"
        "@kinetic.run(backend='local', accelerator='cpu')\n"
        "def work(method):\n"
        "    import multiprocessing\n"
        "    from concurrent.futures import ProcessPoolExecutor\n"
        "    context = multiprocessing.get_context(method)\n"
        "    with context.Pool(2) as pool:\n"
        "        found = pool.map(triple, [Point(1)])\n"
        "    with ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "        found += pool.map(triple_decorated, [Point(2)])\n"
        "    queue = context.SimpleQueue()\n"
        "    process = context.Process(target=put, args=(queue, Point(3)))\n"
        "    process.start()\n"
        "    found.append(queue.get())\n"
        "    process.join()\n"
        "    return found\n"
    )
    code = f"""
import stages
found = stages.work({method!r})
print([type(point) is stages.Point for point in found], [point.x for point in found])
"""
    script(code).prints("[True, True, True] [3, 6, 9]")


def test_the_main_module_of_a_job_is_the_script(script) -> None:
    code = """
@remote
def look():
    main = sys.modules["__main__"]
    return main.__name__, os.path.basename(main.__file__), sys.argv

print(look())
"""
    script(code).prints("('__main__', 'script.py', [''])")


def test_jobs_have_the_arguments_of_the_program(script, tmp_path: Path) -> None:
    """A function may parse them, and so may a module at its import."""
    (tmp_path / "chosen.py").write_text("import sys\nrate = sys.argv[2]\n")
    code = """
sys.argv[1:] = ["--rate", "0.5"]
import chosen

@remote
def look(x):
    return chosen.rate, sys.argv[1:]

print(look(1), *look.run_async_map([1]).results())

@remote
def look_in_notebook():
    return sys.argv[1:]

sys.argv[0] = "/lib/ipykernel_launcher.py"
print(look_in_notebook())
"""
    script(code).prints("('0.5', ['--rate', '0.5']) ('0.5', ['--rate', '0.5'])", "[]")


@pytest.mark.full
def test_processes_of_a_job_use_functions_and_classes_of_the_script(script) -> None:
    """No child runs the script again: it has no guard against that."""
    code = """
class Point:
    def __init__(self, x):
        self.x = x

def double(point):
    return Point(2 * point.x)

def put(queue, point):
    queue.put(double(point))

@remote
def double_decorated(point):
    return double(point)

@remote
def work(method):
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        found = pool.map(double, [Point(1)])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        found += pool.map(double_decorated, [Point(2)])
        found += pool.map(double_decorated.local, [Point(3)])
    queue = context.SimpleQueue()
    process = context.Process(target=put, args=(queue, Point(3)))
    process.start()
    found.append(queue.get())
    process.join()
    assert all(type(point) is Point for point in found)
    return pickle.loads(pickle.dumps(found))

for method in ("fork", "forkserver", "spawn"):
    found = work(method)
    print([type(point) is Point for point in found], [point.x for point in found])
"""
    script(code).prints(*["[True, True, True, True] [2, 4, 6, 6]"] * 3)


@pytest.mark.full
def test_a_script_without_assertions_and_docstrings_runs_jobs(script) -> None:
    code = """
    import asyncio

    @remote
    def double(number):
        return 2 * number

    async def main():
        return await (await kinetic.submit(double, 4))

    print(double(1), double.run_async(2).result())
    with double.run_async_map([1, 2, 3]) as batch:
        print(batch.results())
    print(asyncio.run(main()), double.__doc__)
    """
    with script(textwrap.dedent(code), "-OO") as process:
        process.expect("2 4", "[2, 4, 6]", "8 None")
        assert process.end()[0] == 0
    command = [sys.executable, "-OO", "-m", "kinetic", "--help"]
    assert subprocess.run(command, capture_output=True, check=True).stdout
