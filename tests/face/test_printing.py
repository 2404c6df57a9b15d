"""The output of a plain call, by scripts that print to files, pipes and terminals."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.face.child import DEADLINE, ROOT, until

COUNT = 80_000  # more than a pipe and the printer hold: 64 KiB and 1 MiB

TALKS = """
import os, pathlib, sys
import kinetic

os.environ["KINETIC_PROGRESS"] = "off"

@kinetic.run(backend="local", accelerator="cpu")
def talks(count, folder):
    for number in range(count):
        print("line number", number)
    pathlib.Path(folder, "written").touch()
    return count
"""


@contextlib.contextmanager
def script(code: str, folder: Path, stdout: int | IO[Any]) -> Iterator[subprocess.Popen[bytes]]:
    """A script of a project of its own, whose standard output is *stdout*."""
    (folder / "pyproject.toml").touch()
    (folder / "script.py").write_text(TALKS + textwrap.dedent(code))
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=stdout,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


CALL = f"print('returned', talks({COUNT}, os.getcwd()))"
LINES = [f"line number {number}" for number in range(COUNT)]
KEPT = r"kinetic\.attach\('(job-\S+)'\)\.logs\(\) reads it"
READ = "print(kinetic.attach(sys.argv[1]).logs())"


@pytest.mark.full
def test_a_slow_reader_of_a_pipe_gets_every_line(tmp_path: Path) -> None:
    """Also one that reads nothing for longer than a silent log is waited for."""
    with script(CALL, tmp_path, subprocess.PIPE) as process:
        until((tmp_path / "written").exists)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=11)
        out, err = process.communicate(timeout=2 * DEADLINE)
    assert (process.returncode, err) == (0, b"")
    assert out.decode().splitlines() == [*LINES, f"returned {COUNT}"]


def rest_of_log(process: subprocess.Popen[bytes], folder: Path, err: bytes) -> list[str]:
    """What is said to be kept, read by another script."""
    found = re.search(KEPT, err.decode())
    assert found, err.decode()
    (folder / "read.py").write_text(f"import sys, kinetic\n{READ}")
    read = subprocess.run(
        [sys.executable, "read.py", found[1]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KINETIC_BACKEND": "local"},
        capture_output=True,
        timeout=DEADLINE,
    )
    assert read.returncode == 0, read.stderr
    return read.stdout.decode().splitlines()


@pytest.mark.full
def test_an_interrupted_print_keeps_the_log_and_says_where(tmp_path: Path) -> None:
    code = f"""
from kinetic import aio, jobs

def ended():
    return [job for job in kinetic.list_jobs() if job.status().terminal]

import threading, time
def tell():
    while not ended():
        time.sleep(0.05)
    pathlib.Path("ended").touch()

threading.Thread(target=tell, daemon=True).start()
{CALL}
"""
    with script(code, tmp_path, subprocess.PIPE) as process:
        until((tmp_path / "ended").exists)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = b""
        while b"KeyboardInterrupt" not in said:
            ready, _, _ = select.select([process.stderr], [], [], DEADLINE)
            said += os.read(process.stderr.fileno(), 4096) if ready else b""
            assert ready
        process.communicate(timeout=DEADLINE)
    assert rest_of_log(process, tmp_path, said) == LINES


def test_a_closed_pipe_ends_the_print_quietly_and_keeps_the_log(tmp_path: Path) -> None:
    code = f"value = talks({COUNT}, os.getcwd()); sys.stderr.write(f'returned {{value}}')"
    with script(code, tmp_path, subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(100)
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        process.wait(timeout=DEADLINE)
    assert process.returncode == 0
    assert f"returned {COUNT}" in err.decode()
    assert b"BrokenPipe" not in err and b"Traceback" not in err, err.decode()
    assert rest_of_log(process, tmp_path, err) == LINES


PAINTS = """
@kinetic.run(backend="local", accelerator="cpu")
def paints():
    sys.stdout.buffer.write(b"\\x1b[31mred\\x1b[0m \\x1b[2J\\x1b]0;title\\x07 10%\\r20%\\n")

"""
RAW = b"\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07 10%\r20%\n"


@pytest.mark.parametrize(
    "call", ["paints()", "paints.run_async().logs(follow=True)"], ids=["call", "logs"]
)
def test_a_terminal_gets_colours_and_no_other_command(tmp_path: Path, call: str) -> None:
    ours, theirs = pty.openpty()
    if "logs" in call:
        call = (
            "job = paints.run_async()\njob.result(cleanup=False)\n"
            "job.logs(follow=True)\njob.cleanup()"
        )
    with script(PAINTS + call, tmp_path, theirs) as process:
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err
        got = os.read(ours, 4096)
    os.close(ours)
    os.close(theirs)
    assert got == b"\x1b[31m\x1b[0m20%\r\n"


def test_a_file_gets_what_the_job_wrote(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out:
        with script(PAINTS + "paints()", tmp_path, out) as process:
            process.communicate(timeout=DEADLINE)
    assert (tmp_path / "out").read_bytes() == RAW
