"""The parts of images: the wheel, the context, and the names; without any server."""

from __future__ import annotations

import csv
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kinetic import configuration
from kinetic.aio.images import recipe
from kinetic.aio.images.current import find_uv
from kinetic.aio.images.dependencies import Dependencies
from kinetic.aio.images.recipe import installed_wheel, package_files, wheel
from kinetic.aio.images.registry import build_settings, registry_of
from kinetic.errors import ConfigurationError
from kinetic.options import checked_image
from tests import programs
from tests.images.conftest import ABOUT, OWN

ROOT = Path(__file__).parents[2]


# --- the wheel ---


def test_the_wheel_of_the_running_kinetic_installs_and_runs(tmp_path: Path) -> None:
    own = installed_wheel()
    (tmp_path / own.name).write_bytes(own.content)
    site = tmp_path / "site"
    programs.output(
        *(find_uv(), "pip", "install", "--no-deps", "--offline", "--no-cache", "--quiet"),
        *("--python", sys.executable, "--target", site, tmp_path / own.name),
    )
    code = "import kinetic, kinetic._runner as runner; print(kinetic.__file__, runner.__file__)"
    files = programs.python("-c", code, cwd=tmp_path, env={"PYTHONPATH": str(site)}).split()
    assert [Path(file).is_relative_to(site) for file in files] == [True, True]


def test_the_wheel_has_all_files_of_the_package_and_lists_them() -> None:
    installed_wheel.cache_clear()  # files of a checkout may have changed since
    with zipfile.ZipFile(io.BytesIO(installed_wheel().content)) as archive:
        names = set(archive.namelist())
        (record,) = (name for name in names if name.endswith("/RECORD"))
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
    assert {row[0] for row in rows} == names
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "kinetic").rglob("*.py")
        if "_runner" not in path.parts
    }
    runner = {
        f"kinetic/_runner/{path.relative_to(ROOT / 'runner').as_posix()}"
        for path in (ROOT / "runner").rglob("*.py")
    }
    assert sources | runner | {"kinetic/py.typed"} <= names


def test_the_same_tree_is_the_same_wheel_whenever_it_was_written(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        package = tmp_path / folder / "kinetic"
        (package / "sub").mkdir(parents=True)
        files = ["b.py", "a.py", "sub/c.txt"]
        for name in files if folder == "first" else reversed(files):
            (package / name).write_text(name)
    (tmp_path / "second/kinetic/__pycache__").mkdir()
    (tmp_path / "second/kinetic/__pycache__/a.cpython-312.pyc").write_bytes(b"old")
    first, second = (
        wheel(package_files(tmp_path / folder / "kinetic"), "7.1", ABOUT)
        for folder in ("first", "second")
    )
    assert first == second
    assert first.name == "kinetic_aio-7.1-py3-none-any.whl"


# --- the context ---


def dockerfile(category: str, requirements: str = "numpy\n") -> str:
    found = Dependencies(text=requirements)
    context = recipe.image_context(category, "3.13.1", found, wheel=OWN)
    return context["Dockerfile"].decode()


@pytest.mark.parametrize(
    ("category", "jax"),
    [("cpu", '"jax=='), ("gpu", '"jax[cuda12]=='), ("tpu", '"jax[tpu]==')],
)
def test_an_image_has_the_jax_of_its_accelerator_in_one_version(category: str, jax: str) -> None:
    text = dockerfile(category)
    assert jax in text and text.startswith("FROM python:3.13-slim\n")
    assert ("--find-links" in text) == (category == "tpu")
    install = next(line for line in text.splitlines() if "uv pip install" in line)
    for part in (*recipe.RUNNER_NEEDS, OWN.name, "-r /tmp/install/requirements.txt"):
        assert part in install  # one resolution for all


@pytest.mark.parametrize("line", ["jax==0.4.25", "Jaxlib>=0.4", "libtpu @ https://i.test/l.whl"])
def test_a_jax_that_the_project_keeps_replaces_the_pinned_one(line: str) -> None:
    text = dockerfile("tpu", f"numpy\n{line} # kn:keep\n")
    assert '"jax[tpu]"' in text and "jax[tpu]==" not in text


@pytest.mark.parametrize(
    ("before", "library_path"),
    [("", "/usr/local/nvidia/lib64"), ("/opt/lib", "/opt/lib:/usr/local/nvidia/lib64")],
)
def test_an_image_for_gpus_finds_the_driver_that_the_node_has(
    before: str, library_path: str
) -> None:
    """GKE mounts the driver into containers, and the image must set the paths to it."""
    assert not any("nvidia" in dockerfile(category) for category in ("cpu", "tpu"))
    (line,) = [line for line in dockerfile("gpu").splitlines() if "nvidia" in line]
    # A Dockerfile expands variables like a shell.
    command = f"export {line.removeprefix('ENV ')}; echo $LD_LIBRARY_PATH; echo $PATH"
    environ = {"PATH": "/usr/bin"} | ({"LD_LIBRARY_PATH": before} if before else {})
    printed = programs.output("/bin/sh", "-c", command, env=environ)
    assert printed.split() == [library_path, "/usr/bin:/usr/local/nvidia/bin"]


def test_an_image_installs_with_the_constraints_of_the_project() -> None:
    found = Dependencies(text="numpy\n# kn:constraints\nsix==1\n")
    context = recipe.image_context("cpu", "3.13.1", found, wheel=OWN)
    assert context["install/requirements.txt"] == b"numpy\n"
    assert context["install/constraints.txt"] == b"six==1\n"
    assert "-c /tmp/install/constraints.txt" in context["Dockerfile"].decode()


def test_a_base_image_has_no_dependencies_of_a_project() -> None:
    context = recipe.image_context("cpu", "3.12.1", wheel=OWN)
    assert "requirements.txt" not in context["Dockerfile"].decode()
    assert "install/requirements.txt" not in context
    assert "app/remote_runner.py" in context and "app/protocol/wire.py" in context


def test_a_context_packs_to_the_files_it_has() -> None:
    context = recipe.image_context("cpu", "3.12", Dependencies(text="a\n"), wheel=OWN)
    with tarfile.open(fileobj=io.BytesIO(recipe.pack_context(context))) as archive:
        contents = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    assert contents == context
    assert recipe.pack_context(context) == recipe.pack_context(dict(reversed(context.items())))


def test_names_and_contents_cannot_be_exchanged() -> None:
    assert recipe.digest({"a": b"bc"}) != recipe.digest({"ab": b"c"})
    assert recipe.digest({"a": b"", "b": b"x"}) != recipe.digest({"a": b"x", "b": b""})


# --- names ---


@pytest.mark.parametrize(
    ("zone", "project", "image"),
    [
        ("us-central1-a", "p", "us-docker.pkg.dev/p/kn-c/base"),
        ("europe-west4-b", "p", "europe-docker.pkg.dev/p/kn-c/base"),
        ("asia-east1-c", "p", "asia-docker.pkg.dev/p/kn-c/base"),
        ("me-west1-a", "p", "me-west1-docker.pkg.dev/p/kn-c/base"),
        ("me-west1", "p", "me-west1-docker.pkg.dev/p/kn-c/base"),
        ("us-central1", "p", "us-docker.pkg.dev/p/kn-c/base"),
        ("us-east5-a", "example.com:p", "us-docker.pkg.dev/example.com/p/kn-c/base"),
    ],
)
def test_images_are_in_the_registry_of_the_cluster(zone: str, project: str, image: str) -> None:
    target = configuration.resolve(backend="gke", project=project, zone=zone, cluster="c")
    assert build_settings(target).image == image


def test_the_account_of_a_domains_project_has_its_own_form() -> None:
    target = configuration.resolve(backend="gke", project="example.com:p", cluster="c")
    account = "kn-c-builds@p.example.com.iam.gserviceaccount.com"
    assert (
        build_settings(target).service_account
        == f"projects/example.com:p/serviceAccounts/{account}"
    )


@pytest.mark.parametrize(
    "uri",
    [
        "python",
        "python:3.12-slim",
        "me/mine",
        "us-docker.pkg.dev/p/r/i:v1.0",
        "localhost:5000/a/b_c/d--e:T.a-g_1",
        "ghcr.io/a/b@sha256:" + "0" * 64,
        "ghcr.io/a/b:1@sha256:" + "0" * 64,
    ],
)
def test_a_valid_image_name_is_kept(uri: str) -> None:
    assert checked_image(uri) == uri


@pytest.mark.parametrize(
    "uri",
    [
        "https://ghcr.io/a/b",
        "a b",
        "me/Upper",
        "a:",
        "a:b:c",
        "a@sha256:12",
        "/a",
        "a//b",
        "pre built",
    ],
)
def test_an_invalid_image_name_is_refused(uri: str) -> None:
    with pytest.raises(ConfigurationError, match=r"isn't the name of a container image|resembles"):
        checked_image(uri)


def test_an_image_name_gives_its_registry() -> None:
    uris = {"me/mine:1": "", "ghcr.io/a:1": "ghcr.io", "localhost/a": "localhost", "python": ""}
    assert {uri: registry_of(uri) for uri in uris} == uris
