"""The images of the local platform: the interpreter that is running now, or one made by uv."""

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
from typing import TYPE_CHECKING, Any

from absl import logging

from kinetic import configuration
from kinetic._messages import one_line
from kinetic._progress.steps import Step, step
from kinetic._runner.protocol.private import make_folder
from kinetic._tasks import in_thread, release
from kinetic.aio.images.recipe import Wheel, digest, installed_wheel
from kinetic.aio.ports import Image, ImageRequest
from kinetic.errors import BuildError, ConfigurationError

if TYPE_CHECKING:
    from kinetic.aio.images.recipe import Wheel

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


class CurrentInterpreter:
    """`kinetic.aio.ports.Images` where nothing runs in a container.

    *home* is where environments are kept, `configuration.home` by default;
    *wheel* makes kinetic's own, by default of what is running.
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
        self._said: set[str] = set()

    async def resolve(self, request: ImageRequest) -> Image:
        """This interpreter; for "prebuilt", one that has the project's dependencies and kinetic.

        Nothing else is in that one: what the base image of a cluster would have
        must be among the dependencies, JAX too.

        Raises:
            ConfigurationError: A container image was asked for, or there is no uv.
            PackError: The dependencies cannot be read, or name what only this machine has.
            BuildError: They cannot be installed.
        """
        if request.mode == "prebuilt":
            return Image(uri="", command=(str(await self._installed(request)),))
        if request.mode != "bundled":
            raise ConfigurationError(
                f"the local platform starts processes, not containers: it cannot run "
                f"container_image={request.mode!r}; leave it out, or choose another backend"
            )
        return Image(uri="", command=(sys.executable,))

    async def _installed(self, request: ImageRequest) -> Path:
        from kinetic.aio.images.recipe import dependencies_of, installed_wheel

        found = await in_thread(dependencies_of, request, self._said, own_accelerator=True)
        home = self._home or configuration.home(self._environ)
        folder = home / "cache" / "environments"
        wheel = self._wheel or installed_wheel
        return await Environments(folder, self._environ, wheel=wheel).python(found.text)

    async def aclose(self) -> None:
        """Nothing is held."""
