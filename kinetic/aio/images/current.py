"""The images of the local platform: the running interpreter, or an environment that uv makes."""

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
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from kinetic import configuration
from kinetic._progress.steps import Step, step
from kinetic._runner.protocol.private import make_folder
from kinetic._tasks import in_thread, release
from kinetic.aio.ports import Image, ImageRequest
from kinetic.errors import BuildError, ConfigurationError

if TYPE_CHECKING:
    from kinetic.aio.images.recipe import Wheel

LOCK_POLL_S = 0.1
"""Seconds between two tries to lock an environment that another process is creating."""

SHOWN_LINES = 20
"""How many of uv's last lines an error shows."""


class CurrentInterpreter:
    """`kinetic.aio.ports.Images` without containers.

    *home* is the folder whose cache has the environments, `configuration.home` by default.
    *wheel* returns the wheel of kinetic to install; default: that of the running kinetic.
    """

    def __init__(
        self,
        home: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        *,
        wheel: Callable[[], Wheel] | None = None,
    ) -> None:
        self._home = home
        self._environ = environ
        self._wheel = wheel
        self._logged_notices: set[str] = set()

    async def resolve(self, request: ImageRequest) -> Image:
        """Return the running interpreter or, for "prebuilt", the interpreter of an environment.

        The environment has only kinetic and the project's dependencies. A cluster's base image has
        JAX; here, the project must list JAX if the job needs it.

        Raises:
            ConfigurationError: A container image was requested, or uv is missing.
            PackError: The dependencies can't be read, or exist on this machine only.
            BuildError: uv failed; the message has its last lines.

        Cancelled: uv is killed, and what it has made is removed.
        """
        if request.mode == "bundled":
            return Image(uri="", command=(sys.executable,))
        if request.mode == "prebuilt":
            return Image(uri="", command=(str(await self._ensure_environment(request)),))
        raise ConfigurationError(
            "the local platform starts processes, not containers: it cannot run "
            f"container_image={request.mode!r}; omit container_image, or choose another backend"
        )

    async def _ensure_environment(self, request: ImageRequest) -> Path:
        """Return the interpreter of the environment for the dependencies; create a missing one.

        The folder of an environment has a mark if it is complete, whose time is that of the last
        use. A process locks the folder while it makes, uses, or removes the environment.
        """
        from kinetic._collector import ENVIRONMENT_MARK
        from kinetic.aio.images.dependencies import FILES, dependencies_of
        from kinetic.aio.images.recipe import installed_wheel

        dependencies = await in_thread(
            dependencies_of, request, self._logged_notices, keep_accelerator=True
        )
        wheel = await in_thread(self._wheel or installed_wheel)
        home = self._home or configuration.home(self._environ)
        folder = home / "cache" / "environments" / _environment_name(wheel, dependencies.text)
        environment, mark = folder / "venv", folder / ENVIRONMENT_MARK
        if not _is_there(mark):
            async with _hold_lock(folder):
                if not _is_there(mark):
                    files = {wheel.name: wheel.content} | {
                        FILES[option]: text.encode() for option, text in dependencies.parts.items()
                    }
                    try:
                        await self._create_environment(environment, files, dependencies.parts)
                    except BaseException:
                        removal = in_thread(shutil.rmtree, folder, ignore_errors=True)
                        await release(removal, operation=f"removing {folder}", grace=60.0)
                        raise
                    mark.touch()
        return environment / "bin" / "python"

    async def _create_environment(
        self, folder: Path, files: Mapping[str, bytes], options: Iterable[str]
    ) -> None:
        """Install *files*: kinetic's wheel, then a file for each of *options*."""
        uv = find_uv(self._environ)
        logging.info("Creating an environment with the project's dependencies: %s", folder)
        with (
            step("installing the dependencies") as installing,
            tempfile.TemporaryDirectory(prefix="kinetic-") as scratch,
        ):
            wheel, *parts = await in_thread(_write_files, Path(scratch), files)
            arguments: list[str | Path] = []
            for option, part in zip(options, parts, strict=True):
                arguments += [option, part]
            venv = (uv, "venv", "--clear", "--python", sys.executable, folder)
            await self._run_uv(venv, installing)
            install = (uv, "pip", "install", "--python", folder / "bin" / "python")
            await self._run_uv((*install, wheel, *arguments), installing)

    async def _run_uv(self, command: Sequence[str | Path], installing: Step) -> None:
        """Run *command*, a command of uv; show each line of output as the title of *installing*."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self._environ),
        )
        lines: deque[str] = deque(maxlen=SHOWN_LINES)
        try:
            assert process.stdout is not None
            async for raw_line in process.stdout:
                line = raw_line.decode("utf-8", "replace").rstrip()
                lines.append(line)
                installing.set_title(f"installing: {line}")
            code = await process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await release(process.wait(), operation="ending uv")
            raise
        if code != 0:
            last_lines = "\n".join(f"  {line}" for line in lines)
            raise BuildError(
                f"the environment wasn't created: `uv {command[1]}` ended with exit code {code}:\n"
                f"{last_lines}\nfix the project's dependencies, or check the network"
            )

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""


def _environment_name(wheel: Wheel, requirements: str) -> str:
    """Return the name of an environment's folder: a hash of all that determines its content."""
    python, version = os.path.realpath(sys.executable), platform.python_version()
    parts = (python, version, platform.machine(), wheel.name, requirements)
    digest = hashlib.sha256("\n".join(parts).encode() + wheel.content).hexdigest()
    return f"py{'.'.join(version.split('.')[:2])}-{digest[:16]}"


def _write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write *files*, contents by name, to *folder*; return their paths in the same order."""
    for name, body in files.items():
        (folder / name).write_bytes(body)
    return [folder / name for name in files]


def find_uv(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of uv: on the PATH, or in the Python package uv.

    Raises:
        ConfigurationError: uv isn't installed.
    """
    path = shutil.which("uv", path=environ.get("PATH"))
    if path is None:
        with contextlib.suppress(ImportError, FileNotFoundError):
            package: Any = importlib.import_module("uv")
            path = package.find_uv_bin()
    if path is None:
        raise ConfigurationError(
            'container_image="prebuilt" on the local platform needs uv, which is not on the PATH: '
            "run `pip install uv`, or leave container_image out to run in this interpreter"
        )
    return path


def _is_there(mark: Path) -> bool:
    """Return whether *mark* exists, and note the use of what it marks."""
    with contextlib.suppress(OSError):  # a read-only disk keeps no time of use
        os.utime(mark)
    return mark.exists()


@contextlib.asynccontextmanager
async def _hold_lock(folder: Path) -> AsyncGenerator[None]:
    """Hold an exclusive lock on the folder *folder*, which may be new.

    The kernel releases the lock if this process dies.
    """
    while True:
        make_folder(folder)
        with contextlib.ExitStack() as opened:
            try:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, fd)
                with step("waiting for another installation") as waiting:
                    while True:
                        try:
                            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            break
                        except BlockingIOError:
                            waiting.update(0, 0)
                            await asyncio.sleep(LOCK_POLL_S)
                is_removed = not os.path.samestat(os.fstat(fd), os.stat(folder))
            except FileNotFoundError:
                is_removed = True
            if not is_removed:
                yield
                return
