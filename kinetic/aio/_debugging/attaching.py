"""Attach to the debugger of a job: wait until it listens, forward its port, print instructions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import anyio.to_thread
from absl import logging

from kinetic import accelerators, configuration, errors
from kinetic._runner.protocol import wire
from kinetic._tasks import in_thread, release
from kinetic.aio._debugging.forwarder import LOOPBACK, ForwardRequest, port_in_use_error
from kinetic.aio._engine.session import JobRef
from kinetic.aio._net.retry import growing_pauses
from kinetic.configuration import Target

Forwarder: TypeAlias = "subprocess.Popen[bytes]"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""First and longest pause between two checks for the debugger, in seconds."""

CHECKS_PER_REPORT = 8
"""After this number of checks for the debugger, kinetic reads and logs the job's state."""

START_S = 60.0
"""How long a forwarder may take to start, in seconds."""

GRACE_S = 5.0
"""How long a forwarder may take to end before it is killed, in seconds."""

PLACEHOLDER = "${workspaceFolder}"
"""VS Code replaces this by the folder that it has open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebuggerAddress:
    """Where a debugger listens: port *port* of host number *host* of the attempt called *name*.

    ``root`` is the folder of the workspace on that host. ``project`` is the project's folder on the
    machine that submitted the job.
    """

    name: str
    host: int
    port: int
    root: str = ""
    project: str = ""


def require_person() -> None:
    """Refuse to wait for a debugger without a terminal."""
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if not has_terminal and os.environ.get("KINETIC_NO_TTY_DEBUG") != "1":
        raise errors.ConfigurationError(
            "debug=True waits for a person to attach a debugger, and there is no terminal; set "
            "KINETIC_NO_TTY_DEBUG=1 to wait all the same"
        )


def require_port(port: int) -> None:
    """Check that *port* of this machine is free; 0 stands for any free port."""
    if type(port) is not int or not 0 <= port < 65536:
        raise errors.ConfigurationError(f"local_port must be a port's number, not {port!r}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as exc:
            raise port_in_use_error(port, exc) from exc


def require_worker(worker: int, accelerator: str, job_id: str) -> None:
    """Check that the job has the host *worker*, before waiting for its debugger."""
    hosts = accelerators.parse(accelerator).hosts
    if type(worker) is not int or not 0 <= worker < hosts:
        available = f"workers 0 to {hosts - 1}" if hosts > 1 else "only worker 0"
        raise errors.ConfigurationError(f"{job_id} ({accelerator}) has {available}, not {worker!r}")


async def until_ready(
    job: JobRef,
    job_id: str,
    host: int,
    job_error: Callable[[wire.Item], Awaitable[Exception]],
    timeout: float | None = None,
) -> DebuggerAddress:
    """Wait until the debugger on host number *host* of the job listens.

    If the job has ended, raise the error that *job_error* makes. *timeout* is in seconds; if it's
    None, wait as long as the job waits for a debugger.
    """
    seconds = configuration.debug_wait_s() if timeout is None else timeout
    clock = asyncio.get_running_loop().time
    started_at, checks = clock(), 0
    pauses = growing_pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, 1.5)
    submission = job.submission
    item = await submission.read_item(job.index)
    while True:
        if item.state.final:
            raise await job_error(item)
        prefix = wire.attempt_key(submission.identity.scope, job.index, item.attempt, "")
        found = await job.session.platform.store.list(prefix)
        objects = {info.name.removeprefix(prefix): info.metadata for info in found}
        # A debugger whose attempt has ended listens no more.
        reply = None if "outcome" in objects else objects.get(wire.debugger_mark(host))
        if reply is not None:
            return _address_of(job, item.attempt, host, reply)
        left = started_at + seconds - clock()
        if left <= 0:
            raise errors.ResultTimeout(
                f"{job_id} was not ready for a debugger within {seconds:g} s. The job is "
                f"{_status_text(job)}, and continues: call debug_attach() again, cancel the job, "
                "or wait longer with KINETIC_DEBUG_WAIT_S",
                job_id=job_id,
            )
        if checks % CHECKS_PER_REPORT == CHECKS_PER_REPORT - 1:
            logging.info("%s isn't ready for a debugger yet: %s", job_id, _status_text(job))
        checks += 1
        await asyncio.sleep(min(next(pauses), left))
        if "outcome" in objects or checks % CHECKS_PER_REPORT == 0:
            item = await submission.read_item(job.index)


def _status_text(job: JobRef) -> str:
    error = job.submission.error(job.index)
    return f"{job.submission.status(job.index).value}{f' ({error})' if error else ''}"


def _address_of(job: JobRef, attempt: int, host: int, reply: Mapping[str, str]) -> DebuggerAddress:
    name = job.submission.identity.attempt_name(job.index, attempt)
    try:
        port = int(reply["port"])
    except (KeyError, ValueError) as exc:
        raise errors.WireError(f"the report of {name}'s debugger is damaged: {exc!r}") from exc
    folders = {"root": reply.get("root", ""), "project": reply.get("project", "")}
    return DebuggerAddress(name=name, host=host, port=port, **folders)


async def forward(
    target: Target, address: DebuggerAddress, local_port: int
) -> tuple[Forwarder, int]:
    """Start a forwarder to *address*, wait until it listens, and return its port.

    Cancelled: kinetic ends the forwarder.
    """
    request = ForwardRequest(
        target=target,
        name=address.name,
        host=address.host,
        port=address.port,
        local_port=local_port,
    )
    started: list[Forwarder] = []
    try:
        await in_thread(lambda: started.append(_start_forwarder(request)))
        (process,) = started
        reply = await anyio.to_thread.run_sync(_read_reply, process, abandon_on_cancel=True)
        if "port" not in reply:
            error_class = getattr(errors, str(reply.get("error")), errors.Unavailable)
            fallback = f"the forwarder to {request.name} ended or did not start; try again"
            raise error_class(str(reply.get("message") or fallback))
    except BaseException:
        for process in started:
            await release(
                in_thread(end, process), operation=f"ending the forwarder to {request.name}"
            )
        raise
    return process, int(reply["port"])


def _start_forwarder(request: ForwardRequest) -> Forwarder:
    """Start a process that runs `forwarder.main`, and send it *request*."""
    source_root = str(Path(__file__).parents[3])
    import_paths = [source_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kinetic.aio._debugging.forwarder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(import_paths)},
        start_new_session=True,  # Ctrl-C must not end the forwarder
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # the forwarder has ended; its output says why
        process.stdin.write(request.to_line())
        process.stdin.flush()
    # Without a reference, Python closes the forwarder's stdin, and so ends it.
    _RUNNING.difference_update([other for other in _RUNNING if other.poll() is not None])
    _RUNNING.add(process)
    return process


def _read_reply(process: Forwarder) -> dict[str, Any]:
    """Return what a forwarder prints first, its port or its error; empty after `START_S`."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    reply = process.stdout.readline() if poll.poll(START_S * 1000) else b""
    with contextlib.suppress(ValueError):
        fields: Any = json.loads(reply)
        if isinstance(fields, dict):
            return cast("dict[str, Any]", fields)
    return {}


_RUNNING: set[Forwarder] = set()


def end(process: Forwarder) -> None:
    """End a forwarder, and wait until it has ended."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    _RUNNING.discard(process)


def instructions(address: DebuggerAddress, port: int, working_dir: str | None) -> str:
    """Return instructions to attach, with the entry for VS Code."""
    configuration = json.dumps(launch_configuration(address, port, working_dir), indent=2)
    return (
        f"{address.name} waits for a debugger on {LOOPBACK}:{port}. With VS Code: add this to "
        f'"configurations" in .vscode/launch.json, and start it.\n{configuration}'
    )


def launch_configuration(
    address: DebuggerAddress, port: int, working_dir: str | None
) -> dict[str, Any]:
    """Return an entry of VS Code's ``launch.json`` that attaches to *port* of this machine."""
    folder = address.project if address.project and os.path.isdir(address.project) else PLACEHOLDER
    return {
        "name": f"Attach to {address.name}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": LOOPBACK, "port": port},
        "pathMappings": [{"localRoot": working_dir or folder, "remoteRoot": address.root}],
    }
