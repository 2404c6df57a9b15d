"""Environments of this machine that uv makes, one for each set of dependencies."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from kinetic._runner.private import make_folder
from kinetic._steps import Step, step
from kinetic._words import one_line
from kinetic.aio._release import in_thread, release
from kinetic.aio.images._recipe import digest
from kinetic.aio.images._wheel import Wheel, installed_wheel
from kinetic.errors import BuildError, ConfigurationError

__all__ = ["Environments", "find_uv"]

READY = "kinetic-ready"
LOOK_S = 0.1
GRACE_S = 5.0
TOLD = 20


class Environments:
    """Under *folder*, each made once; processes that want the same one wait for each other."""

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str] = os.environ,
        *,
        wheel: Callable[[], Wheel] = installed_wheel,
    ) -> None:
        self._folder = folder
        self._environ = environ
        self._wheel = wheel

    async def python(self, requirements: str) -> Path:
        """The interpreter of an environment with *requirements* and kinetic, of this Python.

        Raises:
            ConfigurationError: There is no uv.
            BuildError: They cannot be installed; the message has uv's last lines.

        Cancelled: uv is ended; what it has done is done again by whoever wants it.
        """
        own = await in_thread(self._wheel)
        place = self._folder / _name(requirements, own)
        python = place / "bin" / "python"
        if not (place / READY).exists():
            async with _locked(place.with_suffix(".lock")):
                if not (place / READY).exists():
                    with step("installing the dependencies") as installing:
                        await self._made(place, python, requirements, own, installing)
        return python

    async def _made(
        self, place: Path, python: Path, requirements: str, own: Wheel, installing: Step
    ) -> None:
        uv = find_uv(self._environ)
        logging.info("Making an environment with the project's dependencies: %s", place)
        with tempfile.TemporaryDirectory(prefix="kinetic-") as folder:
            wheel, wanted = await in_thread(_written, Path(folder), own, requirements)
            await self._run(
                [uv, "venv", "--clear", "--python", sys.executable, str(place)], installing
            )
            await self._run(
                [
                    *(uv, "pip", "install", "--python", str(python)),
                    *(str(wheel), "--requirement", str(wanted)),
                ],
                installing,
            )
        (place / READY).touch()

    async def _run(self, command: Sequence[str], installing: Step) -> None:
        """Run uv to its end; its last words are those of the error."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self._environ),
        )
        lines: deque[str] = deque(maxlen=TOLD)
        try:
            assert process.stdout is not None
            async for raw in process.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                lines.append(line)
                installing.title = one_line(f"installing: {line}", 60)
                installing.update(0, 0)
            code = await process.wait()
        except BaseException:
            await release(_ended(process), what="ending uv")
            raise
        if code != 0:
            shown = "\n".join(f"  {line}" for line in lines)
            raise BuildError(
                f"the environment was not made: `uv {' '.join(command[1:3])}` ended with {code}:\n"
                f"{shown}\ncorrect the project's dependencies, or check the network"
            )


def _written(folder: Path, own: Wheel, requirements: str) -> tuple[Path, Path]:
    wheel, wanted = folder / own.name, folder / "requirements.txt"
    wheel.write_bytes(own.content)
    wanted.write_text(requirements)
    return wheel, wanted


def find_uv(environ: Mapping[str, str] = os.environ) -> str:
    """The program: on the PATH, beside this interpreter, or as an installed package.

    Raises:
        ConfigurationError: It is nowhere.
    """
    beside = os.path.dirname(sys.executable)
    found = shutil.which("uv", path=environ.get("PATH")) or shutil.which("uv", path=beside)
    if found is None:
        with contextlib.suppress(ImportError, FileNotFoundError):
            package: Any = importlib.import_module("uv")  # it need not be installed
            found = package.find_uv_bin()
    if found is None:
        raise ConfigurationError(
            'container_image="prebuilt" on the local platform needs uv, which is not on the PATH: '
            "`pip install uv`, or leave container_image out to run in this interpreter"
        )
    return found


def _name(requirements: str, own: Wheel) -> str:
    """What decides the environment, as a name."""
    base = os.path.realpath(sys.executable)
    whole = f"{base}\n{platform.python_version()}\n{platform.machine()}\n{requirements}"
    parts = {"environment": whole.encode(), own.name: hashlib.sha256(own.content).digest()}
    return f"py{sys.version_info[0]}.{sys.version_info[1]}-{digest(parts)[:16]}"


@contextlib.asynccontextmanager
async def _locked(file: Path) -> AsyncGenerator[None]:
    """Wait for a lock that goes with the process that holds it."""
    make_folder(file.parent)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOOK_S)
        yield
    finally:
        os.close(fd)


async def _ended(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
