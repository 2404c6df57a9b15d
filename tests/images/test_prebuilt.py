"""Base images, and custom images of users."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from kinetic import __version__
from kinetic.aio.images import bootstrap
from kinetic.aio.images.container import COMMAND
from kinetic.aio.ports import Image
from kinetic.errors import ConfigurationError
from kinetic.images import base_image
from tests.images.conftest import Cloud


async def test_a_job_installs_what_its_base_image_lacks(cloud: Cloud, request_of) -> None:
    image = await cloud.images().resolve(request_of(mode="prebuilt", base_image_repo="me/bases/"))
    assert image.uri == f"me/bases/base-cpu:{__version__}"
    assert image.command == COMMAND
    part = image.requirements
    assert part is not None
    body = (await cloud.jobs.get(part.name)).body
    assert body == b"numpy==2.0\n"
    assert (part.start, part.stop) == (0, len(body))
    assert part.digest == hashlib.sha256(body).hexdigest()
    assert not cloud.registry.asked  # kinetic can't log in to a registry of others


@pytest.mark.parametrize(
    ("text", "installs"),
    [
        ("", False),
        ("# nothing\n", False),
        ("--index-url https://i.test/simple\n", False),
        ("jax\n", False),
        ("-e git+https://example.com/a/b#egg=c\n", True),
        ("--requirement https://example.com/r.txt\n", True),
    ],
)
async def test_a_job_installs_only_if_a_line_asks_for_that(
    cloud: Cloud, request_of, project: Path, text: str, installs: bool
) -> None:
    (project / "requirements.txt").write_text(text)
    image = await cloud.images().resolve(request_of(mode="prebuilt", category="tpu"))
    assert (image.requirements is not None) == installs
    assert image.uri == f"kinetic/base-tpu:{__version__}"
    assert bool(cloud.jobs.requests) == installs


NAMELESS = r"KINETIC_BASE_IMAGE_REPO.*container_image out"


@pytest.mark.parametrize(
    ("repo", "message"), [(None, NAMELESS), ("", NAMELESS), ("https://r.io/x", "base_image_repo=")]
)
async def test_a_repository_that_is_missing_or_malformed_is_refused(
    cloud: Cloud, request_of, repo: str | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        await cloud.images().resolve(request_of(mode="prebuilt", base_image_repo=repo))
    assert not cloud.jobs.requests


async def test_an_unpublished_base_image_is_an_error_if_its_registry_is_reachable(
    cloud: Cloud, request_of
) -> None:
    images = cloud.images()
    request = request_of(mode="prebuilt", base_image_repo=f"{cloud.registry.host}/p/bases")
    with pytest.raises(ConfigurationError, match="was not published"):
        await images.resolve(request)
    cloud.registry.images.add(f"{cloud.registry.host}/p/bases/base-cpu:{__version__}")
    uris = {(await images.resolve(request)).uri for _ in range(3)}
    assert uris == cloud.registry.images
    assert cloud.registry.asked == {404: 1, 200: 1}


async def test_without_access_to_the_registry_the_cluster_decides(cloud: Cloud, request_of) -> None:
    cloud.registry.answers = [403]
    request = request_of(mode="prebuilt", base_image_repo=f"{cloud.registry.host}/p/bases")
    assert (await cloud.images().resolve(request)).uri.endswith(f"base-cpu:{__version__}")


async def test_a_custom_image_is_used_unchanged(cloud: Cloud, request_of, project: Path) -> None:
    (project / "requirements.txt").write_text("-e .\n")  # a custom image ignores it
    images, request = cloud.images(), request_of(mode="ghcr.io/me/mine:1")
    image = await images.resolve(request)
    name, content = bootstrap.runner_archive()
    variables = bootstrap.variables(cloud.jobs.url, name, request.python)
    assert image == Image(
        uri="ghcr.io/me/mine:1", command=bootstrap.COMMAND, environment=variables, runner=name
    )
    assert (await cloud.jobs.get(name, limit=None)).body == content
    sent = len(cloud.jobs.requests)
    assert await images.resolve(request) == image and len(cloud.jobs.requests) == sent
    assert not (cloud.registry.asked or cloud.bucket.requests or cloud.builds.calls)


@pytest.mark.parametrize(
    ("image", "certain"),
    [
        ("python:3.12-slim", True),
        ("python", True),
        ("mirror.gcr.io/library/python:3.12", True),
        ("ghcr.io/me/mine:1", False),
        ("me/mine", False),
    ],
)
async def test_an_image_without_the_runner_is_said_once(
    cloud: Cloud, request_of, caplog: pytest.LogCaptureFixture, image: str, certain: bool
) -> None:
    images = cloud.images()
    with caplog.at_level("INFO", "absl"):
        for _ in range(2):
            await images.resolve(request_of(mode=image))
    (said,) = (one for one in caplog.records if "kinetic's runner" in one.getMessage())
    assert (said.levelname == "WARNING") == certain
    assert re.match(f"{image} (may lack|lacks) kinetic's runner", said.getMessage())


@pytest.mark.parametrize(
    "image", ["python:3.13", "python:3.13.1-slim", "docker.io/library/python:3.9-slim"]
)
async def test_a_public_image_of_another_python_is_refused(
    cloud: Cloud, request_of, image: str
) -> None:
    instead = f"container_image='{image.partition(':')[0]}:3.12-slim'"
    with pytest.raises(ConfigurationError, match=instead):
        await cloud.images().resolve(request_of(mode=image))
    assert not cloud.jobs.requests


async def test_a_plain_base_image_has_no_jax_and_jobs_install_it_if_the_project_lists_it(
    cloud: Cloud, request_of, project: Path
) -> None:
    (project / "requirements.txt").write_text("jax\n")
    repo = "r.io/me/plain"
    image = await cloud.images().resolve(request_of(mode="prebuilt", base_image_repo=repo))
    assert image.uri == f"r.io/me/plain/base-cpu:{__version__}" == base_image("cpu", repo).image
    assert image.requirements is not None
    assert (await cloud.jobs.get(image.requirements.name)).body == b"jax\n"
