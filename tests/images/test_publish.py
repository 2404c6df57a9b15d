"""Base images, published by the library and by the command."""

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
from tests.images.services import BuildServer, Status, Underway


async def test_a_base_image_is_built_once_and_again_when_that_is_wanted(cloud: Cloud) -> None:
    plan = base_image("tpu", f"{cloud.registry.host}/me")
    assert plan.image == f"{cloud.registry.host}/me/base-tpu:{__version__}"
    images = cloud.images()
    assert await images.publish(plan.image, plan.context)
    assert plan.image in cloud.registry.images
    (one,) = cloud.builds.builds.values()
    assert one.context["Dockerfile"].decode() == plan.dockerfile
    assert "jax[tpu]" in plan.dockerfile
    assert not await images.publish(plan.image, plan.context)
    assert len(cloud.builds.builds) == 1
    assert await images.publish(plan.image, plan.context, again=True)
    assert len(cloud.builds.builds) == 2
    assert not [name for name in cloud.bucket.objects if not name.startswith("logs/")]


async def test_where_cloud_build_cannot_push_it_is_not_asked(cloud: Cloud) -> None:
    plan = base_image("cpu", "docker.io/me")
    with pytest.raises(ConfigurationError, match=r"python -m kinetic\.images base"):
        await cloud.images().publish(plan.image, plan.context)
    assert not cloud.builds.calls


@pytest.mark.parametrize(
    ("category", "repo", "words"),
    [("npu", "r.io/me", "there are cpu, gpu, tpu"), ("cpu", "https://r.io/me", "without a scheme")],
)
def test_a_wrong_name_is_refused(category: str, repo: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        base_image(category, repo)


def test_a_dockerfile_of_ones_own_has_the_same_files_beside_it() -> None:
    own = base_image("cpu", "r.io/me", tag="7", dockerfile="FROM mine\n")
    assert own.image == "r.io/me/base-cpu:7" and own.dockerfile == "FROM mine\n"
    assert own.context.keys() == base_image("cpu", "r.io/me").context.keys()


async def test_an_image_that_is_shown_is_the_one_that_is_built(cloud: Cloud, request_of) -> None:
    """By its tag: its registry is another one than that of the tests."""
    folder = Path(__file__).parent  # where the function's code is

    def function() -> None: ...

    target = configuration.resolve(backend="local", project="kn", cluster="c1")
    shown = image_of(function, target)
    found = request_of(
        entry_dir=folder, root=folder.parents[1], python=platform.python_version(), category="tpu"
    )
    built = await cloud.images(own=installed_wheel).resolve(found)
    assert shown.image.startswith("us-docker.pkg.dev/kn/kn-c1/base:tpu-")
    assert shown.image.rpartition(":")[2] == built.uri.rpartition(":")[2]


async def ran(cloud: Cloud, home: Path, *arguments: str) -> tuple[int, str, str]:
    """The command, in a process of its own, beside the servers of this one."""
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


async def test_the_command_publishes_them_side_by_side(cloud: Cloud, tmp_path: Path) -> None:
    repo = f"{cloud.registry.host}/me"
    order = ("build-image", "--repo", repo, "--project", "kn", "--cluster", "c1", "--json")
    cpu = base_image("cpu", repo).image
    cloud.registry.images.add(cpu)

    async def but_one(server: BuildServer, one: Underway) -> None:
        failed = "base-gpu" in one.build.images[0]
        server.end(one, Status.FAILURE if failed else Status.SUCCESS)

    cloud.builds.script = but_one
    code, out, err = await ran(cloud, tmp_path, *order)
    items = {one["category"]: one for one in json.loads(out)["items"]}
    assert {name: one["state"] for name, one in items.items()} == {
        "cpu": "there",
        "gpu": "failed",
        "tpu": "built",
    }
    assert code == 1 and "base-gpu" in items["gpu"]["error"] and "base-gpu" in err
    assert cloud.registry.images == {cpu, items["tpu"]["image"]}

    code, _, err = await ran(cloud, tmp_path, *order, "--category", "tpu")
    assert code == 0 and f"KINETIC_BASE_IMAGE_REPO={repo}" in err


async def test_what_cannot_be_built_anywhere_is_a_wrong_setting(
    cloud: Cloud, tmp_path: Path
) -> None:
    code, _, err = await ran(cloud, tmp_path, "build-image", "--repo", f"{cloud.registry.host}/me")
    assert code == 2 and err.count("KINETIC_PROJECT") == 1
    order = ("build-image", "--repo", "docker.io/me", "--project", "kn")
    code, _, err = await ran(cloud, tmp_path, *order)
    assert code == 2 and "base-tpu" in err
    assert not cloud.builds.calls


async def test_to_plan_and_to_build_an_image_are_coroutines_of_aio(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repo = f"{cloud.registry.host}/me"
    configured = {"KINETIC_HOME": str(tmp_path), "KINETIC_PROJECT": "kn", "KINETIC_CLUSTER": "c1"}
    for name, value in (cloud.environ | configured | {"KINETIC_BASE_IMAGE_REPO": repo}).items():
        monkeypatch.setenv(name, value)
    wants = kinetic.run(accelerator="cpu", container_image="prebuilt")(os.getpid)
    plan = await kinetic.aio.image_of(wants)
    assert plan.image == base_image("cpu", repo).image
    assert not cloud.builds.builds, "nothing is built to plan an image"
    assert await kinetic.aio.build_image(plan)
    assert cloud.registry.images == {plan.image}
    assert not await kinetic.aio.build_image(plan), "the registry has it"
    assert await kinetic.aio.build_image(plan, again=True)


async def test_an_image_is_built_in_a_configured_project_only(cloud: Cloud) -> None:
    with pytest.raises(ConfigurationError, match="KINETIC_PROJECT"):
        await kinetic.aio.build_image(base_image("cpu", f"{cloud.registry.host}/me"))
