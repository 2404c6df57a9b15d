"""Install the dependencies that an image lacks, before a job does anything else."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

from ..protocol import wire
from .opening import read_input

if TYPE_CHECKING:
    from ..stores.objects import Objects


def install(part: wire.Input, objects: Objects, folder: str) -> None:
    """Install the requirements file *part* for this interpreter; *folder* is for scratch files.

    The job's log gets the output of uv or pip.

    Raises:
        KeyError: The object does not exist.
        ValueError: The file's content differs from what was submitted.
        RuntimeError: The installation failed; the message has the last lines of its output.
    """
    requirements, _, constraints = read_input(objects, part).decode().partition(wire.CONSTRAINTS)
    paths = [os.path.join(folder, name) for name in ("requirements.txt", "constraints.txt")]
    for path, text in zip(paths, (requirements, constraints), strict=True):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    options = ["--constraint", paths[1]] if constraints else []
    _install("the project's dependencies", "--requirement", paths[0], *options)


def add_package(package: str, folder: str) -> None:
    """Install *package* into the new *folder*, for this process only.

    Raises:
        RuntimeError: The installation failed; the message has the last lines of its output.
    """
    _install(package, "--target", folder, package)
    sys.path.append(folder)


def _install(subject: str, *arguments: str) -> None:
    """Run uv or pip with *arguments*; *subject* names what they install, in messages."""
    command = [*_install_command(subject), *arguments]
    sys.stderr.write(f"kinetic: installing {subject}\n")
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        lines: deque[str] = deque(maxlen=30)
        try:
            for line in process.stdout:
                sys.stderr.write(line)
                lines.append(line)
        except BaseException:  # the job was asked to stop: don't wait for the installation
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(
            f"can't install {subject}: `{os.path.basename(command[0])}` exited with code "
            f"{process.returncode}:\n{''.join(lines)}"
        )
    importlib.invalidate_caches()


def _install_command(subject: str) -> list[str]:
    """Return the command of uv, or of pip without uv, that installs into this interpreter."""
    # The environment of this interpreter may not be in PATH.
    if uv := shutil.which("uv") or shutil.which("uv", path=os.path.dirname(sys.executable)):
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    raise RuntimeError(
        f"can't install {subject}: this image has neither uv nor pip; install uv into it, or build "
        "the base image with `kinetic build-image`"
    )
