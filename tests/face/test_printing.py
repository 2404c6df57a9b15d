"""Test how a script prints the output of a job to files, pipes, and terminals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import IO, Any

import anyio.to_thread
import pytest

from kinetic.aio._log_printer import LogPrinter
from tests.scripts import DEADLINE_S, ROOT, until

COUNT = 80_000  # more than the buffers of a pipe (64 KiB) and of the printer (1 MiB)

PRINTS_LINES = """
import os, pathlib, sys
import kinetic

os.environ["KINETIC_PROGRESS"] = "off"

@kinetic.run(backend="local", accelerator="cpu")
def prints_lines(count, folder):
    for number in range(count):
        print("line number", number)
    pathlib.Path(folder, "written").touch()
    return count
"""


@contextlib.contextmanager
def script(code: str, folder: Path, stdout: int | IO[Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script in a new project, with *stdout* as its standard output."""
    (folder / "pyproject.toml").touch()
    (folder / "script.py").write_text(PRINTS_LINES + textwrap.dedent(code))
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


CALL = f"print('returned', prints_lines({COUNT}, os.getcwd()))"
LINES = [f"line number {number}" for number in range(COUNT)]
LOG_HINT = r"kinetic\.attach\('(job-\S+)'\)\.logs\(\) reads it"
PRINT_LOG = "print(kinetic.attach(sys.argv[1]).logs())"


@pytest.mark.full
def test_a_slow_reader_of_a_pipe_gets_every_line(tmp_path: Path) -> None:
    """The reader pauses for longer than kinetic waits for a silent log."""
    with script(CALL, tmp_path, subprocess.PIPE) as process:
        until((tmp_path / "written").exists)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=11)
        out, err = process.communicate(timeout=2 * DEADLINE_S)
    assert (process.returncode, err) == (0, b"")
    assert out.decode().splitlines() == [*LINES, f"returned {COUNT}"]


def rest_of_log(process: subprocess.Popen[bytes], folder: Path, err: bytes) -> list[str]:
    """Read the log of the job that the warning names, in another script."""
    match = re.search(LOG_HINT, err.decode())
    assert match, err.decode()
    (folder / "read.py").write_text(f"import sys, kinetic\n{PRINT_LOG}")
    read = subprocess.run(
        [sys.executable, "read.py", match[1]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KINETIC_BACKEND": "local"},
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert read.returncode == 0, read.stderr
    return read.stdout.decode().splitlines()


@pytest.mark.full
def test_ctrl_c_while_printing_keeps_the_log_and_names_its_job(tmp_path: Path) -> None:
    code = f"""
from kinetic import aio, jobs

def ended_jobs():
    return [job for job in kinetic.list_jobs() if job.status().terminal]

import threading, time
def report_end():
    while not ended_jobs():
        time.sleep(0.05)
    pathlib.Path("ended").touch()

threading.Thread(target=report_end, daemon=True).start()
{CALL}
"""
    with script(code, tmp_path, subprocess.PIPE) as process:
        until((tmp_path / "ended").exists)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        stderr = b""
        while b"KeyboardInterrupt" not in stderr:
            ready, _, _ = select.select([process.stderr], [], [], DEADLINE_S)
            stderr += os.read(process.stderr.fileno(), 4096) if ready else b""
            assert ready
        process.communicate(timeout=DEADLINE_S)
    assert rest_of_log(process, tmp_path, stderr) == LINES


@pytest.mark.full
def test_a_closed_pipe_ends_the_printing_without_error_and_keeps_the_log(tmp_path: Path) -> None:
    code = f"value = prints_lines({COUNT}, os.getcwd()); sys.stderr.write(f'returned {{value}}')"
    with script(code, tmp_path, subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(100)
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        process.wait(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert f"returned {COUNT}" in err.decode()
    assert b"BrokenPipe" not in err and b"Traceback" not in err, err.decode()
    assert rest_of_log(process, tmp_path, err) == LINES


def test_a_closed_pipe_shows_the_line_of_the_script_alone(tmp_path: Path) -> None:
    code = f"job = prints_lines.run_async({COUNT}, os.getcwd())\njob.wait()\njob.logs(follow=True)"
    with script(code, tmp_path, subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(100)
        process.stdout.close()
        err = process.stderr.read().decode()
    files = [line.split('"')[1] for line in err.splitlines() if line.startswith("  File")]
    assert files == [str(tmp_path / "script.py")] and "BrokenPipeError" in err, err


PRINTS_COLORS = """
@kinetic.run(backend="local", accelerator="cpu")
def prints_colors():
    sys.stdout.buffer.write(b"\\x1b[31mred\\x1b[0m \\x1b[2J\\x1b]0;title\\x07 10%\\r20%\\n")

"""
RAW = b"\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07 10%\r20%\n"


def test_a_terminal_gets_colors_and_no_other_control_sequence(tmp_path: Path) -> None:
    terminal, stdout = pty.openpty()
    code = """
prints_colors()
job = prints_colors.run_async()
job.result(cleanup=False)
job.logs(follow=True)
job.cleanup()
"""
    with script(PRINTS_COLORS + code, tmp_path, stdout) as process:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        shown = b""
        while shown.count(b"\r\n") < 2:  # a terminal can pass output on in parts
            shown += os.read(terminal, 4096)
    os.close(terminal)
    os.close(stdout)
    assert shown == 2 * b"\x1b[31m\x1b[0m20%\r\n"


def test_a_file_gets_the_output_unchanged(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as out:
        with script(PRINTS_COLORS + "prints_colors()", tmp_path, out) as process:
            process.communicate(timeout=DEADLINE_S)
    assert (tmp_path / "out").read_bytes() == RAW


PRINTS_ACCENT = """
@kinetic.run(backend="local", accelerator="cpu")
def prints_accent():
    print("caf\u00e9")
"""


def test_output_that_a_stream_cannot_take_keeps_no_job(tmp_path: Path) -> None:
    """ASCII, the C locale, and no standard output."""
    code = """
for settings in ({}, {"errors": "surrogateescape"}):
    sys.stdout.reconfigure(encoding="ascii", **settings)
    prints_accent()
    print(len(kinetic.list_jobs()))
sys.stdout = None
prints_accent()
sys.exit(len(kinetic.list_jobs()))
"""
    with script(PRINTS_ACCENT + code, tmp_path, subprocess.PIPE) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (0, 2 * b"caf?\n0\n", b"")


async def test_a_blocked_standard_output_takes_no_shared_thread(monkeypatch) -> None:
    async def lines() -> AsyncGenerator[str]:
        yield "x" * 1_000_000

    anyio.to_thread.current_default_thread_limiter().total_tokens = 1
    reader, writer = os.pipe()
    with open(reader), open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        printing = asyncio.create_task(LogPrinter().run(lines()))
        async with asyncio.timeout(DEADLINE_S):
            while not select.select([reader], [], [], 0)[0]:  # the thread has printed nothing yet
                await asyncio.sleep(0)
            assert await anyio.to_thread.run_sync(os.getpid) == os.getpid()
        printing.cancel()
        await asyncio.wait({printing})
