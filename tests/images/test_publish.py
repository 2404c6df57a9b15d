"""Publish base images with the library and with the command."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from pathlib import Path

import pytest

import kinetic
import kinetic.aio
from kinetic import __version__, configuration
from kinetic.aio.images.recipe import installed_wheel
from kinetic.errors import ConfigurationError
from kinetic.images import base_image, image_of
from tests.images.conftest import Cloud
from tests.images.services import BuildServer, StartedBuild, Status


async def test_a_base_image_is_built_once_and_again_on_request(cloud: Cloud) -> None:
    plan = base_image("tpu", f"{cloud.registry.host}/me")
    assert plan.image == f"{cloud.registry.host}/me/base-tpu:{__version__}"
    images = cloud.images()
    assert await images.publish(plan.image, plan.context)
    assert plan.image in cloud.registry.images
    (started,) = cloud.builds.builds.values()
    assert started.context["Dockerfile"].decode() == plan.dockerfile
    assert "jax[tpu]" in plan.dockerfile
    assert not await images.publish(plan.image, plan.context)
    assert len(cloud.builds.builds) == 1
    assert await images.publish(plan.image, plan.context, rebuild=True)
    assert len(cloud.builds.builds) == 2
    assert not [name for name in cloud.bucket.objects if not name.startswith("logs/")]


async def test_cloud_build_gets_no_request_if_it_cannot_push(cloud: Cloud) -> None:
    plan = base_image("cpu", "docker.io/me")
    with pytest.raises(ConfigurationError, match=r"python -m kinetic\.images base"):
        await cloud.images().publish(plan.image, plan.context)
    assert not cloud.builds.calls


@pytest.mark.parametrize(
    ("category", "repo", "message"),
    [("npu", "r.io/me", "there are cpu, gpu, tpu"), ("cpu", "https://r.io/me", "without a scheme")],
)
def test_a_wrong_name_is_refused(category: str, repo: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        base_image(category, repo)


def test_plain_images_have_no_jax_and_a_folder_of_their_own() -> None:
    plain = base_image("tpu", "r.io/me/", flavor="plain")
    assert plain.image == f"r.io/me/plain/base-tpu:{__version__}"
    assert "jax" not in plain.dockerfile and "keras" not in plain.dockerfile.lower()
    assert "cloudpickle" in plain.dockerfile and "libtpu" not in plain.dockerfile
    assert "nvidia" in base_image("gpu", "r.io/me", flavor="plain").dockerfile
    again = base_image("tpu", "r.io/me/plain")
    assert (again.image, again.digest) == (plain.image, plain.digest)
    assert base_image("cpu", "r.io/complain").image.startswith("r.io/complain/base-cpu:")
    with pytest.raises(ConfigurationError, match=r"r\.io/me/plain is for images of .* plain"):
        base_image("tpu", "r.io/me/plain", flavor="jax")
    with pytest.raises(ConfigurationError, match="no flavor 'torch'; there are jax, plain"):
        base_image("tpu", "r.io/me", flavor="torch")


def test_a_custom_dockerfile_gets_the_same_context() -> None:
    own = base_image("cpu", "r.io/me", tag="7", dockerfile="FROM mine\n")
    assert own.image == "r.io/me/base-cpu:7" and own.dockerfile == "FROM mine\n"
    assert own.context.keys() == base_image("cpu", "r.io/me").context.keys()


async def test_the_shown_image_is_the_one_that_is_built(cloud: Cloud, request_of) -> None:
    """Compare only the tags, because the tests have another registry."""
    folder = Path(__file__).parent  # the folder of the function's code

    def function() -> None: ...

    target = configuration.resolve(backend="local", project="kn", cluster="c1")
    shown = image_of(function, target)
    request = request_of(
        entry_dir=folder, root=folder.parents[1], python=platform.python_version(), category="tpu"
    )
    built = await cloud.images(own=installed_wheel).resolve(request)
    assert shown.image.startswith("us-docker.pkg.dev/kn/kn-c1/base:tpu-")
    assert shown.image.rpartition(":")[2] == built.uri.rpartition(":")[2]


async def run_kinetic(cloud: Cloud, home: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the command in another process; return its exit code, output, and error output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kinetic",
        *arguments,
        env={**os.environ, **cloud.environ, "KINETIC_HOME": str(home)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.mark.full
async def test_the_command_publishes_them_side_by_side(cloud: Cloud, tmp_path: Path) -> None:
    repo = f"{cloud.registry.host}/me"
    command = ("build-image", "--repo", repo, "--project", "kn", "--cluster", "c1", "--json")
    cpu = base_image("cpu", repo).image
    cloud.registry.images.add(cpu)

    async def fail_gpu(server: BuildServer, started: StartedBuild) -> None:
        failed = "base-gpu" in started.build.images[0]
        server.end(started, Status.FAILURE if failed else Status.SUCCESS)

    cloud.builds.script = fail_gpu
    code, out, err = await run_kinetic(cloud, tmp_path, *command)
    items = {item["category"]: item for item in json.loads(out)["items"]}
    assert {category: item["state"] for category, item in items.items()} == {
        "cpu": "there",
        "gpu": "failed",
        "tpu": "built",
    }
    assert code == 1 and "base-gpu" in items["gpu"]["error"] and "base-gpu" in err
    assert cloud.registry.images == {cpu, items["tpu"]["image"]}

    code, _, err = await run_kinetic(cloud, tmp_path, *command, "--category", "tpu")
    assert code == 0 and f"KINETIC_BASE_IMAGE_REPO={repo}\n" in err

    code, _, err = await run_kinetic(
        cloud, tmp_path, *command, "--category", "cpu", "--flavor", "plain"
    )
    assert code == 0 and f"KINETIC_BASE_IMAGE_REPO={repo}/plain\n" in err
    assert base_image("cpu", repo, flavor="plain").image in cloud.registry.images


async def test_a_build_without_a_project_or_with_a_foreign_registry_is_a_usage_error(
    cloud: Cloud, tmp_path: Path
) -> None:
    code, _, err = await run_kinetic(
        cloud, tmp_path, "build-image", "--repo", f"{cloud.registry.host}/me"
    )
    assert code == 2 and err.count("KINETIC_PROJECT") == 1
    command = ("build-image", "--repo", "docker.io/me", "--project", "kn")
    code, _, err = await run_kinetic(cloud, tmp_path, *command)
    assert code == 2 and "base-tpu" in err
    assert not cloud.builds.calls


async def test_aio_plans_and_builds_an_image(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repo = f"{cloud.registry.host}/me"
    configured = {"KINETIC_HOME": str(tmp_path), "KINETIC_PROJECT": "kn", "KINETIC_CLUSTER": "c1"}
    for name, value in (cloud.environ | configured | {"KINETIC_BASE_IMAGE_REPO": repo}).items():
        monkeypatch.setenv(name, value)
    function = kinetic.run(accelerator="cpu", container_image="prebuilt")(os.getpid)
    plan = await kinetic.aio.image_of(function)
    assert plan.image == base_image("cpu", repo).image
    assert not cloud.builds.builds, "nothing is built to plan an image"
    assert await kinetic.aio.build_image(plan)
    assert cloud.registry.images == {plan.image}
    assert not await kinetic.aio.build_image(plan), "the registry has it"
    assert await kinetic.aio.build_image(plan, again=True)


async def test_an_image_is_built_in_a_configured_project_only(cloud: Cloud) -> None:
    with pytest.raises(ConfigurationError, match="KINETIC_PROJECT"):
        await kinetic.aio.build_image(base_image("cpu", f"{cloud.registry.host}/me"))
