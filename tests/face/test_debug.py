"""A debugger in a job of this machine: attached to, forwarded, and gone with whoever wanted it."""

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
from kinetic.aio._engine import debugging
from tests.conftest import processes_of
from tests.face.child import Child, listener
from tests.face.editor import Editor, attached

pytestmark = pytest.mark.full

DEADLINE_S = 60.0
PROGRAM = """
import time
import kinetic

@kinetic.run(backend="local", accelerator="cpu", debug=True)
def doubled(x):
    y = x * 2
    breakpoint()
    return y

@kinetic.run(backend="local", accelerator="cpu")
def last_long():
    print("here")
    time.sleep(600)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The user's module ``experiment``."""
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


def listening(home: Path) -> set[str]:
    """The addresses that processes of *home* listen on."""
    found = []
    for process in processes_of(home):
        with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
            found += process.net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


def test_a_forwarder_is_ended_and_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as forwarder:
        kinetic.debug.cleanup_port_forward(forwarder)
        assert forwarder.returncode is not None
        kinetic.debug.cleanup_port_forward(forwarder)
    kinetic.debug.cleanup_port_forward(None)


async def test_the_function_stops_where_the_editor_says(
    client: aio.Client, project: ModuleType, home: Path
) -> None:
    """And at ``breakpoint()``. A port is free again when its forwarder was ended.

    Nothing listens but on the loopback.
    """

    def step() -> list[Any]:
        with Editor(told["connect"]["port"]) as editor:
            assert editor.begin(told, Path(str(project.__file__)), 8)
            seen = [editor.stopped()]
            editor.go_on()
            seen.append(editor.stopped())
            editor.go_on()
            editor.event("terminated")
        return seen

    async with asyncio.timeout(DEADLINE_S):
        job = await client.submit(project.doubled, 21)
        first, told = await attached(job, working_dir="/elsewhere")
        assert told["pathMappings"][0]["localRoot"] == "/elsewhere"
        port = told["connect"]["port"]
        with pytest.raises(errors.ConfigurationError, match=f"port {port} .* local_port="):
            await job.debug_attach(local_port=port)
        await asyncio.to_thread(kinetic.debug.cleanup_port_forward, first)
        debugging.require_port(port)
        forwarder, told = await attached(job)
        assert listening(home) == {"127.0.0.1"}
        (frame, variables), (later, _) = await asyncio.to_thread(step)
        assert (frame["source"]["path"], frame["name"]) == (project.__file__, "doubled")
        assert variables == {"x": "21", "y": "42"}
        assert later["line"] == 9
        assert await job.result() == 42
        assert await job.status() is kinetic.JobStatus.SUCCEEDED, "it is not cleaned up"
        assert await asyncio.to_thread(forwarder.wait, DEADLINE_S) == 0, "it ends with the job"
    kinetic.debug.cleanup_port_forward(forwarder)


async def test_what_cannot_be_attached_to_says_why(
    client: aio.Client, project: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_DEBUG_WAIT_S", "0.2")
    async with asyncio.timeout(DEADLINE_S):
        plain = await client.submit(project.last_long)
        with pytest.raises(errors.ConfigurationError, match=r"not submitted with debug=True"):
            await plain.debug_attach()
        await plain.cancel()
        unattended = await client.submit(project.doubled, 4)
        with pytest.raises(errors.ConfigurationError, match=r"no worker but 0, not 1"):
            await unattended.debug_attach(worker=1)
        assert await unattended.result() == 8, "it goes on when nobody has come"
        with pytest.raises(errors.JobError, match="has ended"):
            await unattended.debug_attach(local_port=0)
        (tmp_path / "debugpy.py").write_text("raise ImportError('there is no debugpy')")
        without = await client.submit(project.doubled, 4)
        monkeypatch.setenv("KINETIC_DEBUG_WAIT_S", "60")
        with pytest.raises(errors.JobError, match=r"install debugpy for .*local jobs"):
            await without.debug_attach(local_port=0)


async def test_a_job_that_does_not_start_is_not_waited_for_without_end(
    client: aio.Client, project: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KINETIC_LOCAL_SLOTS", "1")
    monkeypatch.setenv("KINETIC_DEBUG_WAIT_S", "0.2")
    async with asyncio.timeout(DEADLINE_S):
        before = await client.submit(project.last_long)
        while await before.status() is not kinetic.JobStatus.RUNNING:  # it has the slot
            await asyncio.sleep(0.01)
        queued = await client.submit(project.doubled, 1)
        with pytest.raises(errors.ResultTimeout, match=r"not ready .* it is PENDING"):
            await queued.debug_attach(local_port=0)
        for job in (queued, before):
            await job.cancel()


CALL = """
import os, sys
import kinetic

@kinetic.run(backend="local", accelerator="cpu", debug=True)
def doubled(x):
    y = x * 2
    return y
"""


def test_a_call_waits_for_an_editor_on_the_usual_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is free. Ctrl-C ends the waiting, and the job."""
    monkeypatch.setenv("KINETIC_NO_TTY_DEBUG", "1")
    with listener() as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("KINETIC_DEBUG_PORT", str(port))
        code = """
try:
    doubled(1)
except kinetic.errors.ConfigurationError as error:
    print("KINETIC_DEBUG_PORT" in str(error), kinetic.list_jobs())
input()
print(doubled(4))
try:
    doubled(5)
except KeyboardInterrupt:
    print([job.status().value for job in kinetic.list_jobs()])
"""
        process = Child(CALL + code, folder=tmp_path, deadline=DEADLINE_S)
        with process:
            process.expect("True []")
            taken.close()
            process.say("")
            assert f"waits for a debugger on 127.0.0.1:{port}" in process.line()
            while process.line() != "}":
                pass
            with Editor(port) as editor:
                mapping = [{"localRoot": str(tmp_path), "remoteRoot": "/nowhere"}]
                editor.begin({"pathMappings": mapping}, tmp_path / "none.py", 1)
            process.expect("8")
            while process.line() != "}":
                pass
            process.interrupt()
            process.expect("['SUCCEEDED']")
            assert process.end()[0] == 0


def test_a_forwarder_dies_with_the_process_that_has_it(tmp_path: Path) -> None:
    code = """
job = doubled.run_async(4)
forwarder = job.debug_attach(local_port=0)
del job
print("forwarder", forwarder.pid, flush=True)
input()
"""
    with Child(CALL + code, folder=tmp_path, deadline=DEADLINE_S) as process:
        while not (words := process.line()).startswith("forwarder"):
            pass
        forwarder = psutil.Process(int(words.split()[-1]))
        psutil.Process(process.pid).kill()
        forwarder.wait(DEADLINE_S)


def test_the_steps_of_attaching_can_be_taken_one_by_one(tmp_path: Path) -> None:
    """Wait, forward, tell; a job without a debugger, or one that has ended, is told."""
    with listener() as taken:
        local = taken.getsockname()[1]
    code = f"""
from kinetic.debug import *

job = doubled.run_async(4)
port = wait_for_debug_server(job)
forwarder = start_port_forward(job.k8s_name, job.namespace, {local}, port)
print_attach_instructions({local}, working_dir={str(tmp_path)!r})
print("value", job.result())
print("ended", forwarder.wait(60))
cleanup_port_forward(forwarder)
for wrong in (job, doubled.options(debug=False).run_async(1)):
    try:
        wait_for_debug_server(wrong, timeout=60)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__)
try:
    start_port_forward(job.k8s_name, job.namespace, {local}, port)
except kinetic.errors.NotFound as error:
    print(job.k8s_name in str(error))
job.cleanup()
"""
    with Child(CALL + code, folder=tmp_path, deadline=DEADLINE_S) as process:
        assert f"127.0.0.1:{local}" in process.line()
        entry = process.line()
        while not entry.endswith("\n}"):
            entry += "\n" + process.line()
        told = json.loads(entry)
        assert told["pathMappings"] == [{"localRoot": str(tmp_path), "remoteRoot": "."}]
        with Editor(local) as editor:
            assert editor.begin(told, tmp_path / "script.py", 8)
            frame, variables = editor.stopped()
            assert (frame["source"]["path"], variables["x"]) == (str(tmp_path / "script.py"), "4")
            editor.go_on()
            editor.event("terminated")
        process.expect("value 8", "ended 0", "JobError", "ConfigurationError", "True")
        assert process.end()[0] == 0
