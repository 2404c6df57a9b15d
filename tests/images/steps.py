"""The steps of a build as processes of this machine, for a `BuildServer`.

With ``run_steps(["buildah"])`` as its script the server builds images for real.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from tests.images.services import BuildServer, Script, Status, Underway

DOCKER = "gcr.io/cloud-builders/docker"


async def kept(uri: str) -> None:
    """The image stays where the program has put it."""


def run_steps(program: Sequence[str], publish: Callable[[str], Awaitable[None]] = kept) -> Script:
    """What a build does: *program* stands for the builder that steps name.

    *publish* is awaited with the name of each image that was made.
    """

    async def script(server: BuildServer, one: Underway) -> None:
        with tempfile.TemporaryDirectory(prefix="kn-build-") as folder:
            for name, body in one.context.items():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(body)
            for number, step in enumerate(one.build.steps):
                assert step.name == DOCKER
                command = [*program, *step.args]
                code = await _run(server, one, f"Step #{number}: ", command, folder)
                if one.cancelled.is_set():
                    return
                if code:
                    server.end(one, Status.FAILURE, f"step {number} ended with {code}")
                    return
        for uri in one.build.images:
            await publish(uri)
        server.end(one, Status.SUCCESS)

    return script


async def _run(
    server: BuildServer, one: Underway, prefix: str, command: Sequence[str], folder: str
) -> int:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    cancelled = asyncio.create_task(one.cancelled.wait())
    cancelled.add_done_callback(lambda _: _end(process))
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            server.log(one, prefix + line.decode())
        return await process.wait()
    finally:
        cancelled.cancel()
        _end(process)
        await process.wait()


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
