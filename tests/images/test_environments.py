"""On this machine: the interpreter that runs, or an environment that uv makes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kinetic.aio.images.current import CurrentInterpreter
from kinetic.aio.ports import Image, ImageRequest
from kinetic.errors import BuildError, ConfigurationError
from tests import programs
from tests.images.conftest import small_wheel
from tests.images.packages import needs_uv


@pytest.fixture
def environ(index: Path, home: Path) -> dict[str, str]:
    """No network: what is not in the folder is nowhere."""
    return {**os.environ, "UV_FIND_LINKS": str(index), "UV_OFFLINE": "1"}


Images = Callable[[], CurrentInterpreter]


@pytest.fixture
def images(environ: dict[str, str], home: Path) -> Images:
    return lambda: CurrentInterpreter(home, environ, wheel=small_wheel)


def said_by(image: Image, code: str) -> str:
    return programs.output(*image.command, "-I", "-c", code).strip()


Made = Callable[[str], Awaitable[Image]]


@pytest.fixture
def made(images: Images, request_of: Callable[..., ImageRequest], project: Path) -> Made:
    """Makes the environment of a project with these requirements, as another process would."""

    async def make(requirements: str) -> Image:
        (project / "requirements.txt").write_text(requirements)
        return await images().resolve(request_of(mode="prebuilt"))

    return make


@needs_uv
async def test_the_environment_has_the_dependencies_and_kinetic(made: Made) -> None:
    image = await made("knsix==1.0\nkinetic-aio==99\n")
    assert image.uri == "" and image.requirements is None
    code = "import knsix, kinetic; print(knsix.VERSION, kinetic.__version__)"
    assert said_by(image, code) == "1.0 7.1"
    assert said_by(image, "import sys; print(sys.version_info[:2])") == str(sys.version_info[:2])


@needs_uv
async def test_it_is_made_once_for_the_same_dependencies(made: Made, home: Path) -> None:
    images = await asyncio.gather(*(made("knsix==1.0\n") for _ in range(3)))
    assert len(set(images)) == 1
    (mark,) = (home / "cache" / "environments").glob("*/kinetic-ready")
    stamp = mark.stat().st_mtime_ns
    await made("knsix==1.0\n")
    assert mark.stat().st_mtime_ns == stamp
    other = await made("knsix==2.0\n")
    assert other not in images
    assert said_by(other, "import knsix; print(knsix.VERSION)") == "2.0"
    assert said_by(images[0], "import knsix; print(knsix.VERSION)") == "1.0"


@needs_uv
async def test_no_image_has_jax_here_so_it_is_installed(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    image = await made("jaxlib==0.1\n")
    assert said_by(image, "import jaxlib; print(jaxlib.VERSION)") == "0.1"
    assert "left to the image" not in caplog.text


@needs_uv
async def test_what_cannot_be_installed_is_told_in_uvs_words_and_can_be_mended(made: Made) -> None:
    with pytest.raises(BuildError, match=r"knsix==3\.0"):
        await made("knsix==3.0\n")
    await made("knsix==2.0\n")


@needs_uv
async def test_a_half_made_environment_is_made_anew(made: Made) -> None:
    image = await made("knsix==1.0\n")
    place = Path(image.command[0]).parents[1]
    (place / "kinetic-ready").unlink()
    (site,) = place.glob("lib/python*/site-packages")
    (site / "knsix.py").unlink()
    await made("knsix==1.0\n")
    assert said_by(image, "import knsix; print(knsix.VERSION)") == "1.0"


async def test_cancelled_the_installer_is_ended(
    request_of: Callable[..., ImageRequest], tmp_path: Path, home: Path
) -> None:
    pid = tmp_path / "pid"
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60\n")
    uv.chmod(0o755)
    environ = {**os.environ, "PATH": f"{uv.parent}:{os.environ['PATH']}"}
    images = CurrentInterpreter(home, environ, wheel=small_wheel)
    resolving = asyncio.create_task(images.resolve(request_of(mode="prebuilt")))
    async with asyncio.timeout(60):
        while not pid.exists():
            await asyncio.sleep(0.01)
    resolving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_bundled_is_the_interpreter_that_runs(
    images: Images, request_of: Callable[..., ImageRequest], project: Path
) -> None:
    (project / "requirements.txt").write_text("-e .\n")  # nothing is installed
    assert await images().resolve(request_of()) == Image(uri="", command=(sys.executable,))
    assert CurrentInterpreter() is not None


async def test_a_container_image_is_refused(
    images: Images, request_of: Callable[..., ImageRequest]
) -> None:
    with pytest.raises(ConfigurationError, match="processes, not containers"):
        await images().resolve(request_of(mode="python:3.12"))


@needs_uv
def test_a_job_runs_in_it(project: Path, environ: dict[str, str], index: Path) -> None:
    """From the decorator to the value, with the wheel of this very kinetic."""
    (project / "requirements.txt").write_text("knsix==1.0\n")
    (project / "job.py").write_text(
        "import kinetic\n"
        "@kinetic.run(accelerator='cpu', backend='local', container_image='prebuilt')\n"
        "def job():\n"
        "    import knsix, sys\n"
        "    return knsix.VERSION, sys.prefix\n"
        "if __name__ == '__main__':\n"
        "    print(*job())\n"
    )
    online = {**environ, "UV_OFFLINE": "0"}
    done = programs.run(sys.executable, "job.py", cwd=project, env=online)
    if "Failed to fetch" in done.stderr or "Could not connect" in done.stderr:
        pytest.skip("no package index can be reached for what kinetic depends on")
    assert done.returncode == 0, done.stderr
    version, prefix = done.stdout.split()
    assert version == "1.0" and prefix != sys.prefix
