"""Run the steps of a build as processes on this machine, for a `BuildServer`.

With ``run_steps(["buildah"])`` as its script, the server really builds images.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tests.images.services import BuildServer, Script, StartedBuild, Status

DOCKER = "gcr.io/cloud-builders/docker"


async def kept(uri: str) -> None:
    """Leave the image where the program stored it."""


def run_steps(program: Sequence[str], publish: Callable[[str], Awaitable[None]] = kept) -> Script:
    """Return a script that runs the steps with *program* as their builder.

    It awaits *publish* with the name of each image.
    """

    async def script(server: BuildServer, started: StartedBuild) -> None:
        with tempfile.TemporaryDirectory(prefix="kn-build-") as folder:
            for name, body in started.context.items():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(body)
            for number, step in enumerate(started.build.steps):
                assert step.name == DOCKER
                command = [*program, *step.args]
                code = await _run(server, started, f"Step #{number}: ", command, folder)
                if started.cancelled.is_set():
                    return
                if code:
                    server.end(started, Status.FAILURE, f"step {number} ended with {code}")
                    return
        for uri in started.build.images:
            await publish(uri)
        server.end(started, Status.SUCCESS)

    return script


async def _run(
    server: BuildServer, started: StartedBuild, prefix: str, command: Sequence[str], folder: str
) -> int:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    cancelled = asyncio.create_task(started.cancelled.wait())
    cancelled.add_done_callback(lambda _: _end(process))
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            server.log(started, prefix + line.decode())
        return await process.wait()
    finally:
        cancelled.cancel()
        _end(process)
        await process.wait()


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
