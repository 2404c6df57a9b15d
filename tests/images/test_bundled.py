"""Images that contain the dependencies: clients share builds, show logs, and can be cancelled."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from kinetic.aio.images.container import COMMAND, ContainerImages
from kinetic.aio.images.recipe import wheel
from kinetic.aio.ports import Image
from kinetic.errors import (
    AuthError,
    BackendError,
    BuildError,
    ConfigurationError,
    PackError,
    Throttled,
    Unavailable,
)
from tests.images.conftest import ABOUT, OWN, Cloud
from tests.images.services import BuildServer, StartedBuild, Status
from tests.jobs import eventually


class Gate:
    """A script whose build waits until the test sets ``go``."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, server: BuildServer, started: StartedBuild) -> None:
        self.started.set()
        await self.go.wait()
        server.end(started, Status.SUCCESS)


def waiting_in(images: ContainerImages) -> int:
    """Return how many callers wait for the builds of this client."""
    return images._confirmed_images._calls._callers.total()


def left(cloud: Cloud) -> list[str]:
    """List the objects in the bucket of builds, without logs, which kinetic keeps."""
    return [name for name in cloud.bucket.objects if not name.startswith("logs/")]


def assert_only_build_cancelled(cloud: Cloud) -> None:
    """Assert that the only build was cancelled, and that its context was deleted."""
    (started,) = cloud.builds.builds.values()
    assert started.build.status == Status.CANCELLED
    assert left(cloud) == []


async def start_cancelling(cloud: Cloud, resolving: asyncio.Task[Image]) -> None:
    """Cancel a task once its build has started; hold the cancellation in Cloud Build."""
    default_script, gate = cloud.builds.script, Gate()
    cloud.builds.script, cloud.builds.held["cancel"] = gate, asyncio.Event()
    await gate.started.wait()
    cloud.builds.script = default_script
    resolving.cancel()
    await eventually(lambda: cloud.builds.calls["cancel"])


async def test_an_image_is_built_with_all_files_and_arguments(cloud: Cloud, request_of) -> None:
    image = await cloud.images().resolve(request_of())
    assert image.command == COMMAND and image.uri in cloud.registry.images
    (started,) = cloud.builds.builds.values()
    assert list(started.build.images) == [image.uri]
    assert image.uri.startswith(f"{cloud.registry.host}/kn/kn-c1/base:cpu-")
    assert started.context["install/requirements.txt"] == b"numpy==2.0\n"
    assert started.context[f"install/{OWN.name}"] == OWN.content
    assert b"FROM python:3.12-slim" in started.context["Dockerfile"]
    assert b"kinetic_runner" in started.context["app/remote_runner.py"]
    (build_step,) = started.build.steps
    assert list(build_step.args) == ["build", "--tag", image.uri, "."]
    account = "projects/kn/serviceAccounts/kn-c1-builds@kn.iam.gserviceaccount.com"
    assert started.build.service_account == account


async def test_an_existing_image_is_looked_up_once_and_not_built(cloud: Cloud, request_of) -> None:
    first = await cloud.images().resolve(request_of())
    cloud.registry.asked.clear()
    other = cloud.images()
    assert [await other.resolve(request_of()) for _ in range(3)] == [first] * 3
    assert cloud.registry.asked == {200: 1}
    assert cloud.builds.calls["create"] == 1
    assert left(cloud) == []


async def test_every_different_input_gives_another_image(
    cloud: Cloud, request_of, project: Path
) -> None:
    newer = wheel({"kinetic/__init__.py": b"__version__ = '7.2'\n"}, "7.2", ABOUT)
    images = cloud.images()
    uris = [
        (await images.resolve(request_of())).uri,
        (await images.resolve(request_of(category="tpu"))).uri,
        (await images.resolve(request_of(python="3.13.0"))).uri,
        (await cloud.images(own=lambda: newer).resolve(request_of())).uri,
        (await images.resolve(request_of(entry_dir=None, root=None))).uri,
    ]
    assert len(set(uris)) == len(uris)
    assert (await images.resolve(request_of(python="3.12.9"))).uri == uris[0]
    (project / "requirements.txt").write_text("numpy==2.1\n")
    assert (await images.resolve(request_of())).uri not in uris


async def test_the_calls_of_one_client_share_a_build(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    images = cloud.images()
    waiting = [asyncio.create_task(images.resolve(request_of())) for _ in range(3)]
    await gate.started.wait()
    await eventually(lambda: waiting_in(images) == 3)
    gate.go.set()
    assert len({image.uri for image in await asyncio.gather(*waiting)}) == 1
    assert cloud.builds.calls["create"] == 1 and cloud.registry.asked == {404: 1}
    assert left(cloud) == []


async def test_two_clients_that_build_the_same_image_do_not_disturb_each_other(
    cloud: Cloud, request_of
) -> None:
    gate = cloud.builds.script = Gate()
    cancelled, other = (asyncio.create_task(cloud.images().resolve(request_of())) for _ in range(2))
    await eventually(lambda: len(cloud.builds.builds) == 2)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    states = [started.build.status for started in cloud.builds.builds.values()]
    assert sorted(states) == sorted([Status.CANCELLED, Status.WORKING])
    assert len(left(cloud)) == 1, "the other's context stays"
    gate.go.set()
    assert (await other).uri in cloud.registry.images
    assert left(cloud) == []


async def test_a_build_costs_a_fixed_number_of_requests(cloud: Cloud, request_of) -> None:
    async def script(server: BuildServer, started: StartedBuild) -> None:
        server.log(started, "one\n")
        server.end(started, Status.SUCCESS)

    cloud.builds.script = script
    await cloud.images().resolve(request_of())
    assert cloud.registry.asked == {404: 1}
    looks = cloud.builds.calls["get"]
    assert cloud.builds.calls == {"create": 1, "get": looks}
    # Upload the context, look at the log with each look at the build, read it, delete the context.
    requests = cloud.bucket.requests
    assert sum(requests.values()) <= 1 + looks + 2 + 1, requests


async def test_the_log_is_shown_while_it_is_written(
    cloud: Cloud, request_of, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "absl")
    seen = asyncio.Event()

    async def script(server: BuildServer, started: StartedBuild) -> None:
        server.log(started, "Step 1/9 : FROM python\nhalf of a l")
        await seen.wait()
        server.log(started, "ine\nthe end without a newline")
        server.end(started, Status.SUCCESS)

    cloud.builds.script = script
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await eventually(lambda: "[build] Step 1/9 : FROM python" in caplog.messages)
    assert not resolving.done()
    seen.set()
    await resolving
    shown = [line for line in caplog.messages if line.startswith("[build]")]
    assert shown[1:] == ["[build] half of a line", "[build] the end without a newline"]


async def test_a_failure_shows_the_last_lines_of_the_log(cloud: Cloud, request_of) -> None:
    async def script(server: BuildServer, started: StartedBuild) -> None:
        server.log(started, *[f"Step #0: line {n}\n" for n in range(100)], "Finished\n")
        server.end(started, Status.FAILURE, "build step 0 failed", "USER_BUILD_STEP")

    cloud.builds.script = script
    with pytest.raises(BuildError, match="build step 0 failed") as caught:
        await cloud.images().resolve(request_of())
    message = str(caught.value)
    assert "line 99\n" in message and "line 81\n" in message and "line 80\n" not in message
    assert caught.value.build_id == "build-1"
    assert caught.value.log_url == "https://console.test/builds/build-1"
    assert caught.value.log_url in message


async def test_cancelling_during_the_request_cancels_the_build(cloud: Cloud, request_of) -> None:
    cloud.builds.script = Gate()
    cloud.builds.held["create"] = asyncio.Event()
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await eventually(lambda: cloud.builds.calls["create"])
    resolving.cancel()
    for _ in range(20):  # the cancellation passes through several tasks without waiting
        await asyncio.sleep(0)
    cloud.builds.held["create"].set()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    assert_only_build_cancelled(cloud)


async def test_cancelling_cancels_a_build_whose_reply_was_lost(cloud: Cloud, request_of) -> None:
    cloud.builds.script = Gate()
    cloud.builds.faults["create"] = [grpc.StatusCode.UNAVAILABLE]
    cloud.builds.late = True  # the build exists although its reply is lost
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await eventually(lambda: cloud.builds.calls["get"])
    resolving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    states = [started.build.status for started in cloud.builds.builds.values()]
    assert states == [Status.CANCELLED] * 2
    assert left(cloud) == []


async def test_cancelling_cancels_the_build_even_if_builds_cannot_be_listed(
    cloud: Cloud, request_of
) -> None:
    cloud.builds.script = Gate()
    cloud.builds.faults["list"] = [grpc.StatusCode.PERMISSION_DENIED]
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await eventually(lambda: cloud.builds.calls["get"])
    resolving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    assert cloud.builds.calls["list"]
    assert_only_build_cancelled(cloud)


async def test_a_build_that_cannot_be_watched_is_cancelled(cloud: Cloud, request_of) -> None:
    cloud.builds.script = Gate()
    cloud.builds.faults["get"] = [grpc.StatusCode.PERMISSION_DENIED]
    with pytest.raises(AuthError):
        await cloud.images().resolve(request_of())
    assert_only_build_cancelled(cloud)


async def test_an_unreadable_log_does_not_stop_a_build(cloud: Cloud, request_of) -> None:
    cloud.bucket.fail("metadata", times=9, status=403)
    assert (await cloud.images().resolve(request_of())).uri in cloud.registry.images


async def test_one_of_two_callers_of_a_build_can_be_cancelled(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    images = cloud.images()
    cancelled, other = (asyncio.create_task(images.resolve(request_of())) for _ in range(2))
    await gate.started.wait()
    await eventually(lambda: waiting_in(images) == 2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gate.go.set()
    assert (await other).uri in cloud.registry.images
    assert cloud.builds.calls["cancel"] == 0


async def test_a_request_during_a_cancellation_starts_another_build(
    cloud: Cloud, request_of
) -> None:
    images = cloud.images()
    first = asyncio.create_task(images.resolve(request_of()))
    await start_cancelling(cloud, first)
    before = cloud.registry.asked[404]
    second = asyncio.create_task(images.resolve(request_of()))
    await eventually(lambda: cloud.registry.asked[404] > before)
    cloud.builds.held["cancel"].set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).uri in cloud.registry.images
    assert cloud.builds.calls["create"] == 2
    assert left(cloud) == []


async def test_a_call_that_fails_temporarily_is_repeated(cloud: Cloud, request_of) -> None:
    cloud.builds.faults = {
        "create": [grpc.StatusCode.UNAVAILABLE],
        "get": [grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED],
    }
    await cloud.images().resolve(request_of())
    assert len(cloud.builds.builds) == 1


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, AuthError, "roles/cloudbuild.builds.editor"),
        (grpc.StatusCode.UNAUTHENTICATED, AuthError, "gcloud auth"),
        (grpc.StatusCode.NOT_FOUND, BuildError, "kinetic up"),
        (grpc.StatusCode.INVALID_ARGUMENT, BuildError, "refused the build"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Throttled, "quota"),
        (grpc.StatusCode.UNAVAILABLE, Unavailable, "is unavailable"),
    ],
)
async def test_a_refusal_says_what_to_do(
    cloud: Cloud, request_of, code: grpc.StatusCode, error: type[Exception], message: str
) -> None:
    cloud.builds.faults["create"] = [code] * 100
    with pytest.raises(error, match=message):
        await cloud.images(patience=1.0).resolve(request_of())
    assert not cloud.builds.builds
    assert left(cloud) == []


@pytest.mark.parametrize(
    ("answers", "error"),
    [([403] * 9, AuthError), ([400] * 9, BackendError), ([500] * 99, Unavailable)],
)
async def test_a_failing_registry_starts_no_build(
    cloud: Cloud, request_of, answers: list[int], error: type[Exception]
) -> None:
    cloud.registry.answers = answers
    with pytest.raises(error):
        await cloud.images(patience=1.0).resolve(request_of())
    assert not cloud.builds.builds


async def test_a_registry_request_that_fails_temporarily_is_repeated(
    cloud: Cloud, request_of
) -> None:
    cloud.registry.answers = [503, 429]
    await cloud.images().resolve(request_of())
    assert cloud.registry.asked == {503: 1, 429: 1, 404: 1}


async def test_a_requirement_that_only_this_machine_has_is_refused_before_any_request(
    cloud: Cloud, request_of, project: Path
) -> None:
    (project / "requirements.txt").write_text("-e ./mine\n")
    with pytest.raises(PackError, match="this machine only"):
        await cloud.images().resolve(request_of())
    assert not cloud.registry.asked and not cloud.bucket.requests


async def test_without_a_project_no_image_can_be_built(cloud: Cloud, request_of) -> None:
    from kinetic import configuration

    images = ContainerImages(
        configuration.resolve(environ={"KINETIC_KUBE_CONTEXT": "mine"}),
        jobs=cloud.jobs,
        builds=cloud.jobs,
        environ={},
    )
    with pytest.raises(ConfigurationError, match=r"KINETIC_PROJECT.*python:3\.12-slim"):
        await images.resolve(request_of())
    custom = await images.resolve(request_of(mode="ghcr.io/me/mine:1"))
    assert custom.uri == "ghcr.io/me/mine:1"
    await images.aclose()


async def test_starting_and_watching_a_build_does_not_hold_the_loop(
    cloud: Cloud, request_of, loop_guard
) -> None:
    await cloud.images().resolve(request_of())  # imports
    cloud.registry.images.clear()
    with loop_guard():
        await cloud.images().resolve(request_of())


async def test_the_base_image_can_be_set(cloud: Cloud, request_of) -> None:
    await cloud.images(KINETIC_PYTHON_IMAGE="m.test/py:{python}").resolve(request_of())
    (started,) = cloud.builds.builds.values()
    assert started.context["Dockerfile"].startswith(b"FROM m.test/py:3.12\n")
    with pytest.raises(ConfigurationError, match="KINETIC_PYTHON_IMAGE"):
        cloud.images(KINETIC_PYTHON_IMAGE="FROM scratch")
