"""Local jobs use the current interpreter, or an environment that uv creates."""

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
    """Return an environment in which uv finds only the packages of the folder."""
    return {**os.environ, "UV_FIND_LINKS": str(index), "UV_OFFLINE": "1"}


Images = Callable[[], CurrentInterpreter]


@pytest.fixture
def images(environ: dict[str, str], home: Path) -> Images:
    return lambda: CurrentInterpreter(home, environ, wheel=small_wheel)


def output_of(image: Image, code: str) -> str:
    return programs.output(*image.command, "-I", "-c", code).strip()


Create = Callable[[str], Awaitable[Image]]


@pytest.fixture
def create(images: Images, request_of: Callable[..., ImageRequest], project: Path) -> Create:
    """Return a function that creates an environment with these requirements in a new client."""

    async def create(requirements: str) -> Image:
        (project / "requirements.txt").write_text(requirements)
        return await images().resolve(request_of(mode="prebuilt"))

    return create


@needs_uv
async def test_the_environment_has_the_dependencies_and_kinetic(create: Create) -> None:
    image = await create("knsix==1.0\nkinetic-aio==99\n")
    assert image.uri == "" and image.requirements is None
    code = "import knsix, kinetic; print(knsix.VERSION, kinetic.__version__)"
    assert output_of(image, code) == "1.0 7.1"
    assert output_of(image, "import sys; print(sys.version_info[:2])") == str(sys.version_info[:2])


@needs_uv
async def test_an_environment_is_created_once_for_the_same_dependencies(
    create: Create, home: Path
) -> None:
    images = await asyncio.gather(*(create("knsix==1.0\n") for _ in range(3)))
    assert len(set(images)) == 1
    (made,) = (home / "cache" / "environments").glob("*/venv/pyvenv.cfg")
    stamp = made.stat()
    await create("knsix==1.0\n")
    assert made.stat() == stamp
    other = await create("knsix==2.0\n")
    assert other not in images
    assert output_of(other, "import knsix; print(knsix.VERSION)") == "2.0"
    assert output_of(images[0], "import knsix; print(knsix.VERSION)") == "1.0"


@needs_uv
async def test_jax_is_installed_because_no_image_has_it(
    create: Create, caplog: pytest.LogCaptureFixture
) -> None:
    image = await create("jaxlib==0.1\n")
    assert output_of(image, "import jaxlib; print(jaxlib.VERSION)") == "0.1"
    assert "left to the image" not in caplog.text


@needs_uv
async def test_constraints_apply_to_what_is_installed_and_install_nothing(
    create: Create, project: Path
) -> None:
    (project / "pins.txt").write_text("knsix==1.0\nabsent-package==1.0\n")
    image = await create("knsix\n-c pins.txt\n")
    assert output_of(image, "import knsix; print(knsix.VERSION)") == "1.0"


@needs_uv
async def test_a_failed_installation_shows_uvs_message_and_leaves_nothing(
    create: Create, home: Path
) -> None:
    with pytest.raises(BuildError, match=r"knsix==3\.0"):
        await create("knsix==3.0\n")
    assert [*(home / "cache" / "environments").iterdir()] == []
    await create("knsix==2.0\n")


@needs_uv
async def test_an_incomplete_environment_is_created_again(create: Create) -> None:
    image = await create("knsix==1.0\n")
    folder = Path(image.command[0]).parents[2]
    (folder / "kinetic-ready").unlink()
    (site,) = folder.glob("venv/lib/python*/site-packages")
    (site / "knsix.py").unlink()
    await create("knsix==1.0\n")
    assert output_of(image, "import knsix; print(knsix.VERSION)") == "1.0"


@needs_uv
async def test_cancelling_ends_the_installer_and_others_need_not_wait_for_it(
    request_of: Callable[..., ImageRequest], create: Create, tmp_path: Path, home: Path
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
        other = await create("knsix==1.0\n")
    resolving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    left = Path(other.command[0]).parents[2]
    assert [*(home / "cache" / "environments").iterdir()] == [left]


async def test_bundled_mode_uses_the_current_interpreter(
    images: Images, request_of: Callable[..., ImageRequest], project: Path
) -> None:
    (project / "requirements.txt").write_text("-e .\n")  # kinetic installs nothing
    assert await images().resolve(request_of()) == Image(uri="", command=(sys.executable,))
    assert CurrentInterpreter() is not None


async def test_a_container_image_is_refused(
    images: Images, request_of: Callable[..., ImageRequest]
) -> None:
    with pytest.raises(ConfigurationError, match="processes, not containers"):
        await images().resolve(request_of(mode="python:3.12"))


@pytest.mark.full
@needs_uv
def test_a_job_runs_in_its_environment(project: Path, environ: dict[str, str], index: Path) -> None:
    """Start from the decorator, and install the wheel of the tested kinetic."""
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
    completed = programs.run(sys.executable, "job.py", cwd=project, env=online)
    if "Failed to fetch" in completed.stderr or "Could not connect" in completed.stderr:
        pytest.skip("no package index is reachable for kinetic's dependencies")
    assert completed.returncode == 0, completed.stderr
    version, prefix = completed.stdout.split()
    assert version == "1.0" and prefix != sys.prefix
