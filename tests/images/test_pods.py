"""Pods use the runner that an image contains, and install missing dependencies at their start."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kinetic import images
from kinetic._runner.protocol import wire
from kinetic.errors import ConfigurationError
from tests.images.packages import UV, index, needs_uv
from tests.runner.calls import RUNNER
from tests.runner.pods import Pods

__all__ = ["index"]


def pods_in(folder: Path, *command: str, **environ: str) -> Pods:
    pods = Pods.over_directory(folder, environ)
    pods.command = command or pods.command
    return pods


def test_the_runner_that_is_written_for_an_image_runs_a_job(tmp_path: Path) -> None:
    app = tmp_path / "app"
    subprocess.run([sys.executable, "-m", "kinetic.images", "runner", str(app)], check=True)
    pods = pods_in(tmp_path, sys.executable, "-u", str(app / "remote_runner.py"))
    pod = pods.run(pods.order(lambda: (sys.path[:], __import__("kinetic_runner").__file__)))
    assert pod.code == 0, pod.output
    path, runner = pods.value()
    assert str(app) not in path
    assert Path(runner).is_relative_to(app)


@pytest.fixture
def venv(tmp_path: Path) -> str:
    """Make an interpreter like that of an image, with the dependencies of the runner."""
    folder = tmp_path / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "runner.pth").write_text(sysconfig.get_path("purelib"))
    return str(folder / "bin" / "python")


def offline(index: Path) -> dict[str, str]:
    """Return an environment in which uv finds only the packages of *index*."""
    path = f"{Path(UV).parent}:{os.environ['PATH']}"
    return {"PATH": path, "UV_FIND_LINKS": str(index), "UV_OFFLINE": "1"}


def requirements(pods: Pods, text: str) -> wire.Input:
    body = text.encode()
    digest = hashlib.sha256(body).hexdigest()
    pods.objects.create(f"requirements/{digest}.txt", body)
    return wire.Input(name=f"requirements/{digest}.txt", start=0, stop=len(body), digest=digest)


@needs_uv
def test_a_job_can_import_packages_installed_at_its_start(
    tmp_path: Path, venv: str, index: Path
) -> None:
    pods = pods_in(tmp_path, venv, "-u", str(RUNNER), **offline(index))
    order = pods.order(
        lambda: __import__("knsix").VERSION, requirements=requirements(pods, "knsix==2.0\n")
    )
    pod = pods.run(order)
    assert pod.code == 0, pod.output
    assert pods.value() == "2.0"
    assert "knsix==2.0" in pod.output  # the log has uv's output


@needs_uv
def test_a_failed_installation_is_the_jobs_error(tmp_path: Path, venv: str, index: Path) -> None:
    pods = pods_in(tmp_path, venv, "-u", str(RUNNER), **offline(index))
    pods.run(pods.order(lambda: 1, requirements=requirements(pods, "knsix==9\n")))
    error = pods.error()
    assert "knsix==9" in error["message"] and error["phase"] == "requirements"


def test_the_folder_of_a_base_image_is_written(tmp_path: Path) -> None:
    images.main(["base", "tpu", str(tmp_path / "base"), "--python", "3.13"])
    text = (tmp_path / "base" / "Dockerfile").read_text()
    assert text.startswith("FROM python:3.13-slim\n") and "jax[tpu]" in text
    assert (tmp_path / "base/app/remote_runner.py").read_bytes() == RUNNER.read_bytes()
    (own,) = (tmp_path / "base/install").iterdir()
    assert own.name in text
    images.main(["base", "cpu", str(tmp_path / "plain"), "--flavor", "plain"])
    assert "jax" not in (tmp_path / "plain" / "Dockerfile").read_text()
    with pytest.raises(ConfigurationError, match="cpu, gpu, tpu"):
        images.write_base("npu", tmp_path)
