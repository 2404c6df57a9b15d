"""Jobs in images that lack kinetic's runner: real processes of bare interpreters."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kinetic._runner.protocol import wire
from kinetic.aio.images import bootstrap, recipe
from tests.images.packages import UV, needs_uv, repack_runner
from tests.runner.calls import RUNNER
from tests.runner.pods import Pods

PYTHON = ".".join(map(str, sys.version_info[:3]))
ABSENT = "/app/remote_runner.py"
WITHOUT_UV = {"PATH": os.defpath}


def container(pods: Pods, python: str, runner: str = ABSENT, submitted: str = PYTHON) -> Pods:
    """Let *pods* start as on a cluster, in an image with *python* and perhaps a *runner*."""
    name, content = bootstrap.runner_archive()
    pods.objects.create(name, content)
    pods.environ = {**pods.environ, **bootstrap.variables(pods.store, name, submitted)}
    pods.command = (python, *bootstrap.COMMAND[1:], "-u", runner)
    return pods


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """Make an interpreter without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return str(tmp_path / "bare" / "bin" / "python3")


def add_packages(python: str) -> None:
    """Give *python* the packages of this interpreter."""
    (site,) = Path(python).parents[1].glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))


def look_around() -> Callable[[], tuple[str, list[str]]]:
    """Return a function that travels by value: where the runner is, and variables of its start."""
    return lambda: (
        __import__("kinetic_runner").__file__,
        [
            name
            for name in __import__("os").environ
            if name.startswith(("KINETIC_BOOTSTRAP", "KINETIC_RUNNER"))
        ],
    )


def test_an_image_with_the_runner_is_used_unchanged(tmp_path: Path) -> None:
    pods = container(Pods.over_directory(tmp_path), sys.executable, str(RUNNER))
    pod = pods.run(pods.order(look_around()))
    assert pod.code == 0, pod.output
    assert pods.value() == (str(RUNNER.with_name("__init__.py")), [])
    assert pod.output == ""


def test_an_image_with_the_packages_gets_only_the_runner(tmp_path: Path, bare: str) -> None:
    add_packages(bare)
    pods = container(Pods.over_directory(tmp_path), bare)
    pod = pods.run(pods.order(look_around()), TMPDIR=str(tmp_path))
    assert pod.code == 0, pod.output
    runner, kept = pods.value()
    assert Path(runner).is_relative_to(tmp_path) and not kept
    assert f"this image has no {ABSENT}" in pod.output
    assert re.search(r"installed the runner in \d+\.\d s\n", pod.output)
    assert not [*tmp_path.glob("kinetic-*/packages")]


def refused(pods: Pods, **environ: str) -> tuple[int | None, str]:
    pod = pods.run(pods.order(lambda: 1), **environ)
    assert not pods.objects.exists(pods.key("claim"))
    return pod.code, pod.output


def test_another_version_of_python_is_refused_before_an_installation(
    tmp_path: Path, bare: str
) -> None:
    code, output = refused(container(Pods.over_directory(tmp_path), bare, submitted="3.99.1"))
    assert code == wire.EXIT_FINAL
    assert output == (
        f"kinetic: this job cannot be run: its image has Python {PYTHON}, and the job was "
        "submitted from Python 3.99.1; use an image with the same minor version\n"
    )


def test_old_versions_of_python_can_read_the_text_and_refuse_the_job() -> None:
    text = bootstrap.variables("gs://bucket", "code/0.runner", PYTHON)["KINETIC_BOOTSTRAP"]
    ast.parse(text, feature_version=(3, 6))


def test_an_image_that_can_install_nothing_is_refused(tmp_path: Path, bare: str) -> None:
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    (site / "early.pth").write_text("import sys; sys.modules['ensurepip'] = None\n")  # as on Debian
    pods = container(Pods.over_directory(tmp_path), bare)
    code, output = refused(pods, **WITHOUT_UV)
    assert code == wire.EXIT_FINAL
    assert "neither uv nor pip to install it; use an image that contains the runner" in output


@pytest.mark.full
def test_an_index_that_does_not_answer_is_named(tmp_path: Path, bare: str) -> None:
    pods = container(Pods.over_directory(tmp_path), bare)
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1"}
    code, output = refused(pods, **WITHOUT_UV, **unreachable)
    assert code == wire.EXIT_RETRY
    line = output.splitlines()[-1]
    assert "cannot install absl-py" in line and "Connection refused" in line
    assert "capture PIP_INDEX_URL" in line


def test_a_runner_that_was_changed_in_the_store_is_refused(tmp_path: Path, bare: str) -> None:
    add_packages(bare)
    pods = container(Pods.over_directory(tmp_path), bare)
    name, content = bootstrap.runner_archive()
    pods.objects.delete([name])
    pods.objects.create(name, content + b"#")
    assert "other content than was submitted" in refused(pods)[1]


def test_the_versions_are_those_of_the_constraints() -> None:
    root = Path(__file__).parents[2]
    known = (root / "constraints.txt").read_text().splitlines()
    lines = bootstrap.CONSTRAINTS.read_text().splitlines()
    assert {line.partition(" ")[0] for line in lines} <= {line.partition(" ")[0] for line in known}
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    assert pyproject["dependency-groups"]["runner"] == [*recipe.RUNNER_NEEDS]
    packages = {line.partition("==")[0] for line in lines}
    assert {need.partition(">")[0] for need in recipe.RUNNER_NEEDS} <= packages


# --- installations --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of packages in place of an index."""
    folder = tmp_path_factory.mktemp("wheels")
    repack_runner(folder)
    return folder


def with_pip(python: str) -> dict[str, str]:
    subprocess.run([python, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
    return WITHOUT_UV


def without_pip(python: str) -> dict[str, str]:
    return WITHOUT_UV


def with_uv(python: str) -> dict[str, str]:
    return {"PATH": f"{Path(UV).parent}:{os.defpath}"}


@pytest.mark.full
@needs_uv
@pytest.mark.parametrize("prepare", [with_pip, without_pip, with_uv])
def test_a_bare_image_gets_runner_and_packages(
    tmp_path: Path,
    gcs_server: str,
    bare: str,
    wheels: Path,
    prepare: Callable[[str], dict[str, str]],
) -> None:
    folder = str(wheels)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder}
    offline |= {"UV_OFFLINE": "1", "UV_FIND_LINKS": folder}
    pods = container(Pods.over_bucket(tmp_path, gcs_server), bare)
    pod = pods.run(pods.order(lambda: (2, [*__import__("sys").path])), **prepare(bare), **offline)
    assert pod.code == 0, pod.output
    value, path = pods.value()
    assert value == 2
    kinds = [Path(entry).name for entry in path]
    assert kinds.index("site-packages") < kinds.index("packages"), "the image's come first"


@pytest.mark.full
def test_a_package_that_does_not_fit_is_named(tmp_path: Path, bare: str, wheels: Path) -> None:
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    old = site / "protobuf-3.20.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: protobuf\nVersion: 3.20.0\n")
    pods = Pods.over_bucket(tmp_path, "http://127.0.0.1:1")
    name, _ = bootstrap.runner_archive()
    pods.environ = bootstrap.variables(pods.store, name, PYTHON)
    pods.command = (bare, *bootstrap.COMMAND[1:], "-u", ABSENT)
    pod = pods.run(
        wire.Order(
            store=pods.store,
            scope="s/",
            job_id="j",
            index=0,
            attempt=1,
            function=wire.Input("f", 0, 1, hashlib.sha256(b"f").hexdigest()),
            arguments=wire.Input("a", 0, 1, hashlib.sha256(b"a").hexdigest()),
        ),
        **WITHOUT_UV,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(wheels),
    )
    assert pod.code == wire.EXIT_RETRY
    assert "protobuf" in pod.output
    assert "cannot install" in pod.output and "conflicting dependencies" in pod.output
