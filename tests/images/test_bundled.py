"""Images with the dependencies inside: built once, by one, with the log, and ended with us."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
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
from tests.images.services import BuildServer, Status, Underway


class Gate:
    """A build that goes on when it is told to."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, server: BuildServer, one: Underway) -> None:
        self.begun.set()
        await self.go.wait()
        server.end(one, Status.SUCCESS)


async def until(condition: Callable[[], object]) -> None:
    """Wait until *condition* is true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def waiting_in(images: ContainerImages) -> int:
    """Return how many callers wait for the builds of this client."""
    return sum(build.waiting for build in images._running_builds.values())


def left(cloud: Cloud) -> list[str]:
    """What is in the bucket of builds, without logs, which are kept."""
    return [name for name in cloud.bucket.objects if not name.startswith("logs/")]


def was_cancelled(cloud: Cloud) -> None:
    """The only build has been cancelled, and nothing of it is left."""
    (one,) = cloud.builds.builds.values()
    assert one.build.status == Status.CANCELLED
    assert left(cloud) == []


async def is_cancelled(cloud: Cloud, resolving: asyncio.Task[Image]) -> None:
    """Cancel it once its build has begun; Cloud Build takes until it may to cancel that."""
    usual, gate = cloud.builds.script, Gate()
    cloud.builds.script, cloud.builds.held["cancel"] = gate, asyncio.Event()
    await gate.begun.wait()
    cloud.builds.script = usual
    resolving.cancel()
    await until(lambda: cloud.builds.calls["cancel"])


async def test_an_image_is_built_from_everything_that_goes_in(cloud: Cloud, request_of) -> None:
    image = await cloud.images().resolve(request_of())
    assert image.command == COMMAND and image.uri in cloud.registry.images
    (one,) = cloud.builds.builds.values()
    assert list(one.build.images) == [image.uri]
    assert image.uri.startswith(f"{cloud.registry.host}/kn/kn-c1/base:cpu-")
    assert one.context["install/requirements.txt"] == b"numpy==2.0\n"
    assert one.context[f"install/{OWN.name}"] == OWN.content
    assert b"FROM python:3.12-slim" in one.context["Dockerfile"]
    assert b"kinetic_runner" in one.context["app/remote_runner.py"]
    (build_step,) = one.build.steps
    assert list(build_step.args) == ["build", "--tag", image.uri, "."]
    account = "projects/kn/serviceAccounts/kn-c1-builds@kn.iam.gserviceaccount.com"
    assert one.build.service_account == account


async def test_what_is_there_is_not_built_and_is_asked_for_once(cloud: Cloud, request_of) -> None:
    first = await cloud.images().resolve(request_of())
    cloud.registry.asked.clear()
    other = cloud.images()
    assert [await other.resolve(request_of()) for _ in range(3)] == [first] * 3
    assert cloud.registry.asked == {200: 1}
    assert cloud.builds.calls["create"] == 1
    assert left(cloud) == []


async def test_another_image_for_anything_else_that_goes_in(
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
    await gate.begun.wait()
    await until(lambda: waiting_in(images) == 3)
    gate.go.set()
    assert len({image.uri for image in await asyncio.gather(*waiting)}) == 1
    assert cloud.builds.calls["create"] == 1 and cloud.registry.asked == {404: 1}
    assert left(cloud) == []


async def test_two_clients_that_build_the_same_image_do_not_disturb_each_other(
    cloud: Cloud, request_of
) -> None:
    gate = cloud.builds.script = Gate()
    cancelled, other = (asyncio.create_task(cloud.images().resolve(request_of())) for _ in range(2))
    await until(lambda: len(cloud.builds.builds) == 2)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    states = [one.build.status for one in cloud.builds.builds.values()]
    assert sorted(states) == sorted([Status.CANCELLED, Status.WORKING])
    assert len(left(cloud)) == 1, "the other's context stays"
    gate.go.set()
    assert (await other).uri in cloud.registry.images
    assert left(cloud) == []


async def test_a_build_costs_a_fixed_number_of_requests(cloud: Cloud, request_of) -> None:
    async def script(server: BuildServer, one: Underway) -> None:
        server.log(one, "one\n")
        server.end(one, Status.SUCCESS)

    cloud.builds.script = script
    await cloud.images().resolve(request_of())
    assert cloud.registry.asked == {404: 1}
    looks = cloud.builds.calls["get"]
    assert cloud.builds.calls == {"create": 1, "get": looks}
    # The context; a look at the log for each look at the build; its one change; the removal.
    requests = cloud.bucket.requests
    assert sum(requests.values()) <= 1 + looks + 2 + 1, requests


async def test_the_log_is_told_while_it_is_written(
    cloud: Cloud, request_of, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "absl")
    seen = asyncio.Event()

    async def script(server: BuildServer, one: Underway) -> None:
        server.log(one, "Step 1/9 : FROM python\nhalf of a l")
        await seen.wait()
        server.log(one, "ine\nthe end without a newline")
        server.end(one, Status.SUCCESS)

    cloud.builds.script = script
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await until(lambda: "[build] Step 1/9 : FROM python" in caplog.messages)
    assert not resolving.done()
    seen.set()
    await resolving
    told = [line for line in caplog.messages if line.startswith("[build]")]
    assert told[1:] == ["[build] half of a line", "[build] the end without a newline"]


async def test_a_failure_shows_the_last_lines_of_the_log(cloud: Cloud, request_of) -> None:
    async def script(server: BuildServer, one: Underway) -> None:
        server.log(one, *[f"Step #0: line {n}\n" for n in range(100)], "Finished\n")
        server.end(one, Status.FAILURE, "build step 0 failed", "USER_BUILD_STEP")

    cloud.builds.script = script
    with pytest.raises(BuildError, match="build step 0 failed") as caught:
        await cloud.images().resolve(request_of())
    message = str(caught.value)
    assert "line 99\n" in message and "line 81\n" in message and "line 80\n" not in message
    assert caught.value.build_id == "build-1"
    assert caught.value.log_url == "https://console.test/builds/build-1"
    assert caught.value.log_url in message


async def test_cancelled_while_it_is_ordered_so_is_the_build(cloud: Cloud, request_of) -> None:
    cloud.builds.script = Gate()
    cloud.builds.held["create"] = asyncio.Event()
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await until(lambda: cloud.builds.calls["create"])
    resolving.cancel()
    for _ in range(20):  # the cancellation goes from task to task and waits for nobody
        await asyncio.sleep(0)
    cloud.builds.held["create"].set()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    was_cancelled(cloud)


async def test_cancelled_so_is_a_build_whose_reply_was_lost(cloud: Cloud, request_of) -> None:
    cloud.builds.script = Gate()
    cloud.builds.faults["create"] = [grpc.StatusCode.UNAVAILABLE]
    cloud.builds.late = True  # the build is there when its reply is lost
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await until(lambda: cloud.builds.calls["get"])
    resolving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    states = [one.build.status for one in cloud.builds.builds.values()]
    assert states == [Status.CANCELLED] * 2
    assert left(cloud) == []


async def test_cancelled_so_is_the_build_if_no_others_can_be_listed(
    cloud: Cloud, request_of
) -> None:
    cloud.builds.script = Gate()
    cloud.builds.faults["list"] = [grpc.StatusCode.PERMISSION_DENIED]
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await until(lambda: cloud.builds.calls["get"])
    resolving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    assert cloud.builds.calls["list"]
    was_cancelled(cloud)


async def test_a_build_that_cannot_be_watched_is_cancelled(cloud: Cloud, request_of) -> None:
    cloud.builds.script = Gate()
    cloud.builds.faults["get"] = [grpc.StatusCode.PERMISSION_DENIED]
    with pytest.raises(AuthError):
        await cloud.images().resolve(request_of())
    was_cancelled(cloud)


async def test_a_log_that_cannot_be_read_holds_nothing_up(cloud: Cloud, request_of) -> None:
    cloud.bucket.fail("metadata", times=9, status=403)
    assert (await cloud.images().resolve(request_of())).uri in cloud.registry.images


async def test_one_of_two_that_wait_here_can_be_cancelled(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    images = cloud.images()
    one, other = (asyncio.create_task(images.resolve(request_of())) for _ in range(2))
    await gate.begun.wait()
    await until(lambda: waiting_in(images) == 2)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    gate.go.set()
    assert (await other).uri in cloud.registry.images
    assert cloud.builds.calls["cancel"] == 0


async def test_who_comes_while_a_build_is_cancelled_has_another_one_built(
    cloud: Cloud, request_of
) -> None:
    images = cloud.images()
    first = asyncio.create_task(images.resolve(request_of()))
    await is_cancelled(cloud, first)
    before = cloud.registry.asked[404]
    second = asyncio.create_task(images.resolve(request_of()))
    await until(lambda: cloud.registry.asked[404] > before)
    cloud.builds.held["cancel"].set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).uri in cloud.registry.images
    assert cloud.builds.calls["create"] == 2
    assert left(cloud) == []


async def test_a_call_that_fails_for_a_moment_is_repeated(cloud: Cloud, request_of) -> None:
    cloud.builds.faults = {
        "create": [grpc.StatusCode.UNAVAILABLE],
        "get": [grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED],
    }
    await cloud.images().resolve(request_of())
    assert len(cloud.builds.builds) == 1


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, AuthError, "roles/cloudbuild.builds.editor"),
        (grpc.StatusCode.UNAUTHENTICATED, AuthError, "gcloud auth"),
        (grpc.StatusCode.NOT_FOUND, BuildError, "set-up"),
        (grpc.StatusCode.INVALID_ARGUMENT, BuildError, "refused the build"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Throttled, "quota"),
        (grpc.StatusCode.UNAVAILABLE, Unavailable, "did not answer"),
    ],
)
async def test_a_refusal_says_what_to_do(
    cloud: Cloud, request_of, code: grpc.StatusCode, error: type[Exception], words: str
) -> None:
    cloud.builds.faults["create"] = [code] * 100
    with pytest.raises(error, match=words):
        await cloud.images(patience=1.0).resolve(request_of())
    assert not cloud.builds.builds
    assert left(cloud) == []


@pytest.mark.parametrize(
    ("answers", "error"),
    [([403] * 9, AuthError), ([400] * 9, BackendError), ([500] * 99, Unavailable)],
)
async def test_a_registry_that_says_neither_yes_nor_no_starts_no_build(
    cloud: Cloud, request_of, answers: list[int], error: type[Exception]
) -> None:
    cloud.registry.answers = answers
    with pytest.raises(error):
        await cloud.images(patience=1.0).resolve(request_of())
    assert not cloud.builds.builds


async def test_a_registry_in_trouble_is_asked_again(cloud: Cloud, request_of) -> None:
    cloud.registry.answers = [503, 429]
    await cloud.images().resolve(request_of())
    assert cloud.registry.asked == {503: 1, 429: 1, 404: 1}


async def test_what_only_this_machine_has_is_refused_before_anybody_is_asked(
    cloud: Cloud, request_of, project: Path
) -> None:
    (project / "requirements.txt").write_text("-e ./mine\n")
    with pytest.raises(PackError, match="this machine only"):
        await cloud.images().resolve(request_of())
    assert not cloud.registry.asked and not cloud.bucket.requests


async def test_without_a_project_nothing_can_be_built(cloud: Cloud, request_of) -> None:
    from kinetic import configuration

    images = ContainerImages(
        configuration.resolve(environ={"KINETIC_KUBE_CONTEXT": "mine"}),
        jobs=cloud.jobs,
        builds=cloud.jobs,
        environ={},
    )
    with pytest.raises(ConfigurationError, match="KINETIC_PROJECT"):
        await images.resolve(request_of())
    custom = await images.resolve(request_of(mode="ghcr.io/me/mine:1"))
    assert custom == Image(uri="ghcr.io/me/mine:1", command=COMMAND)
    await images.aclose()


async def test_closing_ends_what_is_being_built(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    images = cloud.images()
    waiting = [asyncio.create_task(images.resolve(request_of())) for _ in range(2)]
    await gate.begun.wait()
    await until(lambda: waiting_in(images) == 2)
    await images.aclose()
    for one in waiting:
        with pytest.raises(BackendError, match="was closed meanwhile"):
            await one
    with pytest.raises(BackendError, match="is closed; open another"):
        await images.resolve(request_of())
    was_cancelled(cloud)


async def test_making_and_watching_a_build_does_not_hold_the_loop(
    cloud: Cloud, request_of, loop_guard
) -> None:
    await cloud.images().resolve(request_of())  # imports
    cloud.registry.images.clear()
    with loop_guard():
        await cloud.images().resolve(request_of())


async def test_what_images_begin_with_can_be_named(cloud: Cloud, request_of) -> None:
    await cloud.images(KINETIC_PYTHON_IMAGE="m.test/py:{python}").resolve(request_of())
    (one,) = cloud.builds.builds.values()
    assert one.context["Dockerfile"].startswith(b"FROM m.test/py:3.12\n")
    with pytest.raises(ConfigurationError, match="KINETIC_PYTHON_IMAGE"):
        cloud.images(KINETIC_PYTHON_IMAGE="FROM scratch")


async def test_closing_waits_for_a_build_that_is_being_cancelled(cloud: Cloud, request_of) -> None:
    images = cloud.images()
    resolving = asyncio.create_task(images.resolve(request_of()))
    await is_cancelled(cloud, resolving)
    closing = asyncio.create_task(images.aclose())
    await asyncio.sleep(0)
    cloud.builds.held["cancel"].set()
    await closing
    await asyncio.wait({resolving})
    was_cancelled(cloud)
