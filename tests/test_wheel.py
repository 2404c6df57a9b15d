"""The wheel has the right files, the source archive builds the same one, and it runs a job."""

from __future__ import annotations

import os
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[1]

SCRIPT = """
import kinetic


@kinetic.run(accelerator="cpu", backend="local")
def where(a, b):
    import os, kinetic_runner
    return a + b, os.getpid(), kinetic_runner.__file__


if __name__ == "__main__":
    total, pid, runner = where(10, 32)
    print(total, kinetic.__file__, runner, sep="\\n")
"""


def build(kind: str, project: Path, into: Path) -> Path:
    programs.python("-m", "hatchling", "build", "-t", kind, "-d", into, cwd=project)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def files(wheel: Path) -> dict[str, int]:
    """Return name → size of the files, without the list of files that the build writes."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            entry.filename: entry.file_size
            for entry in archive.infolist()
            if not entry.filename.endswith("/RECORD")
        }


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(files(wheel))
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kinetic", "kinetic_aio"}
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "kinetic").rglob("*.py")
        if "_runner" not in path.parts
    }
    runner = {
        f"kinetic/_runner/{path.relative_to(ROOT / 'runner').as_posix()}"
        for path in (ROOT / "runner").rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == source | runner
    assert "kinetic/py.typed" in names
    assert {f"kinetic/_report/page.{kind}" for kind in ("html", "css", "js")} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_wheel_holds_files_not_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for path in (ROOT / "runner").rglob("*.py"):
            name = path.relative_to(ROOT / "runner").as_posix()
            assert archive.read(f"kinetic/_runner/{name}") == path.read_bytes()


@pytest.mark.full
def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as unpacked:
        unpacked.extractall(tmp_path / "source", filter="data")
    (project,) = (tmp_path / "source").iterdir()
    assert files(build("wheel", project, tmp_path / "wheel")) == files(wheel)


@pytest.mark.full
def test_the_wheel_alone_runs_a_job(wheel: Path, tmp_path: Path) -> None:
    """Install it in a fresh environment that shares only the dependencies with this one."""
    venv = tmp_path / "venv"
    programs.python("-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    install = (python, "-m", "pip", "--disable-pip-version-check", "install")
    programs.output(*install, "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "job.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    out = programs.output(python, "job.py", cwd=tmp_path / "project", env=env).splitlines()
    assert out[0] == "42"
    assert Path(out[1]).is_relative_to(site)
    assert Path(out[2]).is_relative_to(site), "the job used a runner outside the wheel"
