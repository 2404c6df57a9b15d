"""Who owns a job ends it: Ctrl-C, SIGTERM and SIGKILL of a script that waits for one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import kinetic
from tests.face.child import Child, until

COMMON = """
import asyncio, os, pathlib, signal, sys, time
import kinetic

os.environ["KINETIC_PROGRESS"] = "off"
here = os.getcwd()

@kinetic.run(backend="local", accelerator="cpu")
def waits(folder):
    partial = pathlib.Path(folder, "partial")
    partial.write_text(f"{os.getpid()} {os.environ['KINETIC_JOB_ID']}")
    partial.rename(pathlib.Path(folder, "job"))
    time.sleep(1000)
"""

CALLS = {"sync": "waits(here)", "aio": "asyncio.run(kinetic.aio.run(waits, here))"}
owned = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Child]:
    return lambda code: Child(COMMON + code, folder=tmp_path)


def started(folder: Path) -> tuple[int, str]:
    """The process and the id of the job, once it runs."""
    until((folder / "job").exists)
    pid, job_id = (folder / "job").read_text().split()
    return int(pid), job_id


def left(home: Path, job_id: str) -> list[str]:
    """What there is of a job: in the store, and its log."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(home) for name in names]
    return [path for path in found if job_id in path and "/outputs/" not in path]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


RUN = """
from kinetic.cli.app import main

if __name__ == "__main__":
    main(["run", __file__ + ":waits", "--arg", "folder=" + here, "--backend", "local"])
"""


@pytest.mark.parametrize("call", [*CALLS.values(), RUN], ids=[*CALLS, "kinetic run"])
def test_sigterm_of_a_call_removes_its_job_and_then_ends_the_script(
    script, tmp_path: Path, home: Path, call: str
) -> None:
    with script(call) as process:
        pid, job_id = started(tmp_path)
        os.kill(process.pid, signal.SIGTERM)
        status, _, err = process.end()
    assert status == -signal.SIGTERM and "Traceback" not in err, err
    assert gone(pid) and left(home, job_id) == []


DOCTOR = """
from kinetic.cli.app import main

if __name__ == "__main__":
    os.environ["KINETIC_LOCAL_SLOTS"] = "1"
    waits.run_async(here)
    while not os.path.exists("job"):
        time.sleep(0.01)
    main(["doctor", "--run", "--backend", "local"])
"""


def test_sigterm_of_the_doctor_removes_its_waiting_job(script, tmp_path: Path, home: Path) -> None:
    def waiting() -> set[str]:
        return {one.job_id for one in kinetic.list_jobs()} - {job_id}

    with script(DOCTOR) as process:
        _, job_id = started(tmp_path)
        (waits,) = until(waiting)
        os.kill(process.pid, signal.SIGTERM)
        status, _, err = process.end()
        assert status == -signal.SIGTERM and "Traceback" not in err, err
        assert left(home, waits) == []
        kinetic.attach(job_id).cleanup()


def test_of_several_calls_sigterm_removes_every_job(script, tmp_path: Path, home: Path) -> None:
    code = """
async def main():
    folders = [here + "/a", here + "/b"]
    for folder in folders:
        os.mkdir(folder)
    await asyncio.gather(*(kinetic.aio.run(waits, folder) for folder in folders))

asyncio.run(main())
"""
    with script(code) as process:
        jobs = [started(tmp_path / name) for name in "ab"]
        os.kill(process.pid, signal.SIGTERM)
        assert process.end()[0] == -signal.SIGTERM
    for pid, job_id in jobs:
        assert gone(pid) and left(home, job_id) == []


@owned
def test_a_handler_of_sigterm_that_is_there_is_left_alone(
    script, tmp_path: Path, call: str
) -> None:
    code = f"""
def mine(number, frame):
    print("mine", flush=True)

signal.signal(signal.SIGTERM, mine)
{call}
"""
    with script(code) as process:
        pid, _ = started(tmp_path)
        os.kill(process.pid, signal.SIGTERM)
        process.expect("mine")
        assert not gone(pid)
        process.interrupt()
        process.end()
        assert gone(pid)


def test_after_a_call_sigterm_is_as_it_was(script) -> None:
    code = """
@kinetic.run(backend="local", accelerator="cpu")
def nothing():
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

nothing()
asyncio.run(kinetic.aio.run(nothing))
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    script(code).prints("True")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no process can be watched here")
@owned
def test_the_job_of_a_call_ends_when_the_script_is_killed(
    script, tmp_path: Path, home: Path, call: str
) -> None:
    with script(call) as process:
        pid, job_id = started(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.end()
        until(lambda: gone(pid) and not left(home, job_id))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_job_of_a_handle_goes_on_whatever_ends_the_script(
    script, tmp_path: Path, number: int
) -> None:
    with script("waits.run_async(here).result()") as process:
        pid, job_id = started(tmp_path)
        os.kill(process.pid, number)
        _, _, err = process.end()
    if number == signal.SIGINT:
        assert f"kinetic jobs result {job_id}" in err
    # A call that is killed later is ended by the supervisor, which has then seen the other end.
    (tmp_path / "other").mkdir()
    with script("waits(here + '/other')") as process:
        other, _ = started(tmp_path / "other")
        os.kill(process.pid, signal.SIGKILL)
        process.end()
        until(lambda: gone(other))
    assert not gone(pid)
