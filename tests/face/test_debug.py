"""Test debugging of local jobs: attaching, forwarding, errors, and the end of the forwarder."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

import kinetic
from kinetic import aio, errors
from kinetic.aio._debugging import attaching
from tests.conftest import processes_of
from tests.face.editor import Editor, attached
from tests.scripts import Script, listener

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

DEADLINE_S = 120.0
PROGRAM = """
import time
import kinetic

@kinetic.run(backend="local", accelerator="cpu", debug=True)
def double(x):
    y = x * 2
    breakpoint()
    return y

@kinetic.run(backend="local", accelerator="cpu")
def run_long():
    print("here")
    time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import and return the user's module ``experiment``."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "experiment.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("experiment")
    del sys.modules["experiment"]


@pytest.fixture
async def client(project: ModuleType) -> AsyncIterator[aio.Client]:
    async with aio.Client() as client:
        yield client


def listening_addresses(home: Path) -> set[str]:
    """Return the addresses on which processes of *home* listen."""
    found = []
    for process in processes_of(home):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.net_connections("tcp")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def test_a_forwarder_is_ended_and_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as forwarder:
        kinetic.debug.cleanup_port_forward(forwarder)
        assert forwarder.returncode is not None
        kinetic.debug.cleanup_port_forward(forwarder)
    kinetic.debug.cleanup_port_forward(None)


async def test_the_function_stops_where_the_editor_says(
    client: aio.Client, project: ModuleType, home: Path
) -> None:
    """The function also stops at ``breakpoint()``.

    Ending a forwarder frees its port, and processes listen only on the loopback address.
    """

    def stop_twice() -> list[Any]:
        with Editor(configuration["connect"]["port"]) as editor:
            assert editor.begin(configuration, Path(str(project.__file__)), 8)
            stops = [editor.stopped()]
            editor.continue_job()
            stops.append(editor.stopped())
            editor.continue_job()
            editor.event("terminated")
        return stops

    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(project.double, 21)
        first, configuration = await attached(job, working_dir="/elsewhere")
        assert configuration["pathMappings"][0]["localRoot"] == "/elsewhere"
        port = configuration["connect"]["port"]
        with pytest.raises(errors.ConfigurationError, match=f"port {port} .* local_port="):
            await job.debug_attach(local_port=port)
        await asyncio.to_thread(kinetic.debug.cleanup_port_forward, first)
        attaching.require_port(port)
        forwarder, configuration = await attached(job)
        assert listening_addresses(home) == {"127.0.0.1"}
        (frame, variables), (later, _) = await asyncio.to_thread(stop_twice)
        assert (frame["source"]["path"], frame["name"]) == (project.__file__, "double")
        assert variables == {"x": "21", "y": "42"}
        assert later["line"] == 9
        assert await job.result() == 42
        assert await job.status() is kinetic.JobStatus.SUCCEEDED, "the job is not cleaned up"
        assert await asyncio.to_thread(forwarder.wait, DEADLINE_S) == 0, (
            "the forwarder ends with the job"
        )
    kinetic.debug.cleanup_port_forward(forwarder)


async def test_the_error_says_why_a_job_cannot_be_attached_to(
    client: aio.Client, project: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_DEBUG_WAIT_S", "0.2")
    async with asyncio.timeout(DEADLINE_S):
        plain = await client.submit(project.run_long)
        with pytest.raises(errors.ConfigurationError, match=r"not submitted with debug=True"):
            await plain.debug_attach()
        await plain.cancel()
        unattended = await client.submit(project.double, 4)
        with pytest.raises(errors.ConfigurationError, match=r"only worker 0, not 1"):
            await unattended.debug_attach(worker=1)
        assert await unattended.result() == 8, "the job continues if no editor attaches"
        with pytest.raises(errors.JobError, match="has ended"):
            await unattended.debug_attach(local_port=0)
        (tmp_path / "debugpy.py").write_text("raise ImportError('there is no debugpy')")
        without = await client.submit(project.double, 4)
        monkeypatch.setenv("KINETIC_DEBUG_WAIT_S", "60")
        with pytest.raises(errors.JobError, match=r"install debugpy for .*local jobs"):
            await without.debug_attach(local_port=0)


async def test_attaching_to_a_job_that_does_not_start_times_out(
    client: aio.Client, project: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "1")
    monkeypatch.setenv("KINETIC_DEBUG_WAIT_S", "0.2")
    async with asyncio.timeout(DEADLINE_S):
        before = await client.submit(project.run_long)
        while await before.status() is not kinetic.JobStatus.RUNNING:  # until it has the slot
            await asyncio.sleep(0.01)
        queued = await client.submit(project.double, 1)
        with pytest.raises(errors.ResultTimeout, match=r"not ready .* is PENDING"):
            await queued.debug_attach(local_port=0)
        for job in (queued, before):
            await job.cancel()


CALL = """
import os, sys
import kinetic

@kinetic.run(backend="local", accelerator="cpu", debug=True)
def double(x):
    y = x * 2
    return y
"""


def test_a_call_waits_for_an_editor_on_the_configured_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port must be free. Ctrl-C ends the wait and the job."""
    monkeypatch.setenv("KINETIC_NO_TTY_DEBUG", "1")
    with listener() as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("KINETIC_DEBUG_PORT", str(port))
        code = """
try:
    double(1)
except kinetic.errors.ConfigurationError as error:
    print("KINETIC_DEBUG_PORT" in str(error), kinetic.list_jobs())
input()
print(double(4))
try:
    double(5)
except KeyboardInterrupt:
    print([job.status().value for job in kinetic.list_jobs()])
"""
        process = Script(CALL + code, folder=tmp_path, deadline=DEADLINE_S)
        with process:
            process.expect("True []")
            taken.close()
            process.write_line("")
            assert f"waits for a debugger on 127.0.0.1:{port}" in process.line()
            process.hear("}")
            with Editor(port) as editor:
                mapping = [{"localRoot": str(tmp_path), "remoteRoot": "/nowhere"}]
                editor.begin({"pathMappings": mapping}, tmp_path / "none.py", 1)
            process.expect("8")
            process.hear("}")
            process.interrupt()
            process.expect("['SUCCEEDED']")
            assert process.end()[0] == 0


def test_a_forwarder_ends_with_its_process(tmp_path: Path) -> None:
    code = """
job = double.run_async(4)
forwarder = job.debug_attach(local_port=0)
del job
print("forwarder", forwarder.pid, flush=True)
input()
"""
    with Script(CALL + code, folder=tmp_path, deadline=DEADLINE_S) as process:
        forwarder = psutil.Process(int(process.hear("forwarder").split()[-1]))
        psutil.Process(process.pid).kill()
        forwarder.wait(DEADLINE_S)


def test_the_steps_of_attaching_can_be_taken_one_by_one(tmp_path: Path) -> None:
    """Wait, forward, print; a job that has ended or has no debugger is an error."""
    with listener() as taken:
        local = taken.getsockname()[1]
    code = f"""
from kinetic.debug import *

job = double.run_async(4)
port = wait_for_debug_server(job)
os.environ["KINETIC_PROJECT"] = "another"  # the job is on this machine, whatever is configured
forwarder = start_port_forward(job.k8s_name, job.namespace, {local}, port)
print_attach_instructions({local}, working_dir={str(tmp_path)!r})
print("value", job.result())
print("ended", forwarder.wait(60))
cleanup_port_forward(forwarder)
for undebuggable in (job, double.options(debug=False).run_async(1)):
    try:
        wait_for_debug_server(undebuggable, timeout=60)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__)
try:
    start_port_forward(job.k8s_name, job.namespace, {local}, port)
except kinetic.errors.NotFound as error:
    print(job.k8s_name in str(error))
job.cleanup()
"""
    with Script(CALL + code, folder=tmp_path, deadline=DEADLINE_S) as process:
        assert f"127.0.0.1:{local}" in process.line()
        entry = process.line()
        while not entry.endswith("\n}"):
            entry += "\n" + process.line()
        configuration = json.loads(entry)
        assert configuration["pathMappings"] == [{"localRoot": str(tmp_path), "remoteRoot": "."}]
        with Editor(local) as editor:
            assert editor.begin(configuration, tmp_path / "script.py", 8)
            frame, variables = editor.stopped()
            assert (frame["source"]["path"], variables["x"]) == (str(tmp_path / "script.py"), "4")
            editor.continue_job()
            editor.event("terminated")
        process.expect("value 8", "ended 0", "JobError", "ConfigurationError", "True")
        assert process.end()[0] == 0
