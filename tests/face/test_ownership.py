"""Test which jobs end with their script: after Ctrl-C, SIGTERM, and SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import kinetic
from tests.scripts import Script, prelude, until

COMMON = """
@remote
def waits(folder):
    partial = pathlib.Path(folder, "partial")
    partial.write_text(f"{os.getpid()} {os.environ['KINETIC_JOB_ID']}")
    partial.rename(pathlib.Path(folder, "job"))
    time.sleep(1000)
"""
BEGINNING = prelude(backend="local", accelerator="cpu") + COMMON

CALLS = {"sync": "waits(here)", "aio": "asyncio.run(kinetic.aio.run(waits, here))"}
owned = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Script]:
    return lambda code: Script(BEGINNING + code, folder=tmp_path)


def wait_for_job(folder: Path) -> tuple[int, str]:
    """Wait until the job runs; return its process ID and its job ID."""
    until((folder / "job").exists)
    pid, job_id = (folder / "job").read_text().split()
    return int(pid), job_id


def files_of(home: Path, job_id: str) -> list[str]:
    """Return the files of a job, in the store and in the log, except its outputs."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(home) for name in names]
    return [path for path in found if job_id in path and "/outputs/" not in path]


def has_ended(pid: int) -> bool:
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
        pid, job_id = wait_for_job(tmp_path)
        os.kill(process.pid, signal.SIGTERM)
        status, _, err = process.end()
    assert status == -signal.SIGTERM and "Traceback" not in err, err
    assert has_ended(pid) and files_of(home, job_id) == []


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
        return {job.job_id for job in kinetic.list_jobs()} - {job_id}

    with script(DOCTOR) as process:
        _, job_id = wait_for_job(tmp_path)
        (waits,) = until(waiting)
        os.kill(process.pid, signal.SIGTERM)
        status, _, err = process.end()
        assert status == -signal.SIGTERM and "Traceback" not in err, err
        assert files_of(home, waits) == []
        kinetic.attach(job_id).cleanup()


def test_sigterm_removes_the_jobs_of_several_calls(script, tmp_path: Path, home: Path) -> None:
    code = """
async def main():
    folders = [here + "/a", here + "/b"]
    for folder in folders:
        os.mkdir(folder)
    await asyncio.gather(*(kinetic.aio.run(waits, folder) for folder in folders))

asyncio.run(main())
"""
    with script(code) as process:
        jobs = [wait_for_job(tmp_path / name) for name in "ab"]
        os.kill(process.pid, signal.SIGTERM)
        assert process.end()[0] == -signal.SIGTERM
    for pid, job_id in jobs:
        assert has_ended(pid) and files_of(home, job_id) == []


@owned
def test_a_handler_of_sigterm_that_the_script_has_set_stays(
    script, tmp_path: Path, call: str
) -> None:
    code = f"""
def handler(number, frame):
    print("handled", flush=True)

signal.signal(signal.SIGTERM, handler)
{call}
"""
    with script(code) as process:
        pid, _ = wait_for_job(tmp_path)
        os.kill(process.pid, signal.SIGTERM)
        process.expect("handled")
        assert not has_ended(pid)
        process.interrupt()
        process.end()
        assert has_ended(pid)


def test_a_call_restores_the_handler_of_sigterm(script) -> None:
    code = """
@kinetic.run(backend="local", accelerator="cpu")
def nothing():
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

nothing()
asyncio.run(kinetic.aio.run(nothing))
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
"""
    script(code).prints("True")


@owned
def test_the_job_of_a_call_ends_when_the_script_is_killed(
    script, tmp_path: Path, home: Path, call: str
) -> None:
    with script(call) as process:
        pid, job_id = wait_for_job(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.end()
        until(lambda: has_ended(pid) and not files_of(home, job_id))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_job_of_a_handle_outlives_its_script(script, tmp_path: Path, number: int) -> None:
    with script("waits.run_async(here).result()") as process:
        pid, job_id = wait_for_job(tmp_path)
        os.kill(process.pid, number)
        _, _, err = process.end()
    if number == signal.SIGINT:
        assert f"kinetic jobs result {job_id}" in err
    # Once the supervisor ends the job of this second script, it has also seen the first one end.
    (tmp_path / "other").mkdir()
    with script("waits(here + '/other')") as process:
        other, _ = wait_for_job(tmp_path / "other")
        os.kill(process.pid, signal.SIGKILL)
        process.end()
        until(lambda: has_ended(other))
    assert not has_ended(pid)
