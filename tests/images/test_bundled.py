"""Images with the dependencies inside: built once, by one, with the log, and ended with us."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.cloud.devtools.cloudbuild_v1 import Build

from kinetic.aio._lease import ProcessIdentity
from kinetic.aio.images.bundled import COMMAND
from kinetic.aio.images.container import ContainerImages
from kinetic.aio.images.recipe import Wheel, wheel
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
from tests.gcs.server import Stored
from tests.images.conftest import IMPATIENT, METADATA, OWN, Cloud, small_wheel
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


async def called(cloud: Cloud, method: str) -> None:
    """Wait until Cloud Build was called so."""
    async with asyncio.timeout(60):
        while not cloud.builds.calls[method]:
            await asyncio.sleep(0.01)


async def asked(cloud: Cloud, times: int) -> None:
    """Wait until the registry was asked so often for what it does not have."""
    async with asyncio.timeout(60):
        while cloud.registry.asked[404] < times:
            await asyncio.sleep(0.01)


async def joined(images: ContainerImages, count: int) -> None:
    """Wait until so many wait here for the build that was begun."""
    assert images._bundled is not None
    async with asyncio.timeout(60):
        while sum(flight._waiting for flight in images._bundled._flights) < count:
            await asyncio.sleep(0.01)


def left(cloud: Cloud) -> list[str]:
    """What is in the bucket of builds, without logs, which are kept."""
    return [name for name in cloud.bucket.objects if not name.startswith("logs/")]


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
    newer = wheel({"kinetic/__init__.py": b"__version__ = '7.2'\n"}, METADATA)
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


async def test_many_that_want_it_at_once_have_it_built_once(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    clients = [cloud.images() for _ in range(4)]
    waiting = [
        asyncio.create_task(images.resolve(request_of())) for images in clients for _ in range(3)
    ]
    await gate.begun.wait()
    await asked(cloud, 2 + 3)  # the one that builds, before and after it took its turn; the others
    gate.go.set()
    assert len({image.uri for image in await asyncio.gather(*waiting)}) == 1
    assert cloud.builds.calls["create"] == 1
    assert left(cloud) == []


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
    async with asyncio.timeout(60):
        while "[build] Step 1/9 : FROM python" not in caplog.messages:
            await asyncio.sleep(0.01)
    assert not resolving.done()
    seen.set()
    await resolving
    told = [line for line in caplog.messages if line.startswith("[build]")]
    assert told[1:] == ["[build] half of a line", "[build] the end without a newline"]


async def test_a_failure_shows_the_last_lines_of_the_step_that_failed(
    cloud: Cloud, request_of
) -> None:
    async def script(server: BuildServer, one: Underway) -> None:
        server.log(one, *[f"Step #0: line {n}\n" for n in range(100)], "Finished\n")
        server.end(one, Status.FAILURE, "build step 0 failed", "USER_BUILD_STEP")

    cloud.builds.script = script
    with pytest.raises(BuildError, match="build step 0 failed") as caught:
        await cloud.images().resolve(request_of())
    message = str(caught.value)
    assert "  line 99\n" in message and "  line 80\n" in message and "line 79\n" not in message
    assert caught.value.build_id == "build-1"
    assert caught.value.log_url == "https://console.test/builds/build-1"
    assert caught.value.log_url in message


async def test_who_waited_for_a_build_that_fails_does_not_try_the_same_again(
    cloud: Cloud, request_of
) -> None:
    gate = Gate()

    async def script(server: BuildServer, one: Underway) -> None:
        gate.begun.set()
        await gate.go.wait()
        server.end(one, Status.FAILURE, "no such package")

    cloud.builds.script = script
    first = asyncio.create_task(cloud.images().resolve(request_of()))
    await gate.begun.wait()
    second = asyncio.create_task(cloud.images().resolve(request_of()))
    await asked(cloud, 2 + 2)  # the second has looked at whose turn it is, and looks again
    gate.go.set()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert ["no such package" in str(one) for one in results] == [True, True]
    assert "by another process" in str(results[1])
    assert cloud.builds.calls["create"] == 1
    # Who comes later may know better.
    with pytest.raises(BuildError, match="no such package"):
        await cloud.images().resolve(request_of())
    assert cloud.builds.calls["create"] == 2


async def test_cancelled_so_is_the_build_and_nothing_is_left(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await gate.begun.wait()
    resolving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    (one,) = cloud.builds.builds.values()
    assert one.build.status == Status.CANCELLED
    assert left(cloud) == []


async def test_cancelled_while_it_is_ordered_so_is_the_build(cloud: Cloud, request_of) -> None:
    images = cloud.images()
    resolving = asyncio.create_task(images.resolve(request_of()))
    await cloud.builds.changed.wait()  # the server has it; the reply is on its way
    resolving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    (one,) = cloud.builds.builds.values()
    assert one.build.status in (Status.CANCELLED, Status.SUCCESS)
    assert left(cloud) == []


async def test_one_of_two_that_wait_here_can_be_cancelled(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    images = cloud.images()
    one, other = (asyncio.create_task(images.resolve(request_of())) for _ in range(2))
    await gate.begun.wait()
    await joined(images, 2)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    gate.go.set()
    assert (await other).uri in cloud.registry.images
    assert cloud.builds.calls["cancel"] == 0


async def test_who_comes_while_a_build_is_cancelled_has_another_one_built(
    cloud: Cloud, request_of
) -> None:
    gate = cloud.builds.script = Gate()
    cloud.builds.held["cancel"] = asyncio.Event()
    images = cloud.images()
    first = asyncio.create_task(images.resolve(request_of()))
    await gate.begun.wait()
    first.cancel()
    await called(cloud, "cancel")
    before = cloud.registry.asked[404]
    second = asyncio.create_task(images.resolve(request_of()))
    await asked(cloud, before + 1)  # it waits for its turn
    cloud.builds.held["cancel"].set()
    gate.go.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).uri in cloud.registry.images
    assert cloud.builds.calls["create"] == 2
    assert left(cloud) == []


async def test_when_the_holder_is_cancelled_the_next_one_builds(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    first = asyncio.create_task(cloud.images().resolve(request_of()))
    await gate.begun.wait()
    second = asyncio.create_task(cloud.images().resolve(request_of()))
    await asked(cloud, 2 + 1)
    first.cancel()
    await asyncio.wait({first})
    gate.go.set()
    assert (await second).uri in cloud.registry.images
    assert cloud.builds.calls["create"] == 2


def marker_of(cloud: Cloud, uri: str, **fields: object) -> None:
    """Another machine's marker, which nobody renews."""
    owner = dataclasses.asdict(dataclasses.replace(ProcessIdentity.me(), host="elsewhere"))
    content = json.dumps({"token": "x", "owner": owner, **fields}).encode()
    name = f"builders/{uri.rpartition(':')[2]}"
    cloud.bucket.objects[name] = Stored(content, {}, 7)


async def uri_of(cloud: Cloud, request_of, own: Callable[[], Wheel] = small_wheel) -> str:
    """The name of the image, without leaving a trace of it."""
    image = await cloud.images(own=own).resolve(request_of())
    cloud.registry.images.clear()
    cloud.builds.calls.clear()
    cloud.builds.builds.clear()
    return image.uri


async def test_a_marker_that_stands_still_is_taken_over(cloud: Cloud, request_of) -> None:
    uri = await uri_of(cloud, request_of)
    marker_of(cloud, uri)
    started = asyncio.get_running_loop().time()
    await cloud.images(IMPATIENT).resolve(request_of())
    assert asyncio.get_running_loop().time() - started >= IMPATIENT.patience_s
    assert cloud.builds.calls["create"] == 1
    assert left(cloud) == []


@pytest.mark.parametrize(("status", "created"), [(Status.SUCCESS, 0), (Status.CANCELLED, 1)])
async def test_the_build_of_a_process_that_is_gone_is_gone_on_with(
    cloud: Cloud, request_of, status, created: int
) -> None:
    uri = await uri_of(cloud, request_of)
    gate = cloud.builds.script = Gate()
    lost = asyncio.create_task(cloud.images().resolve(request_of()))
    await gate.begun.wait()
    (build_id,) = cloud.builds.builds
    async with asyncio.timeout(60):
        while build_id.encode() not in cloud.bucket.objects[left_marker(cloud)].body:
            await asyncio.sleep(0.01)
    marker_of(cloud, uri, build=build_id)  # from here on it is not `lost`'s any more
    cloud.builds.calls.clear()
    second = asyncio.create_task(cloud.images(IMPATIENT).resolve(request_of()))
    async with asyncio.timeout(60):
        while b'"token": "x"' in cloud.bucket.objects[left_marker(cloud)].body:
            await asyncio.sleep(0.01)
    if created:
        gate.go.set()
    cloud.builds.end(cloud.builds.builds[build_id], status)
    assert (await second).uri == uri
    assert cloud.builds.calls["create"] == created
    gate.go.set()
    await asyncio.gather(lost, return_exceptions=True)


async def test_the_build_of_a_process_that_is_gone_is_cancelled_if_it_cannot_be_watched(
    cloud: Cloud, request_of
) -> None:
    uri = await uri_of(cloud, request_of)
    lost = Underway(Build(id="lost", status=Status.WORKING))
    cloud.builds.builds["lost"] = lost
    marker_of(cloud, uri, build="lost")
    cloud.builds.faults["get"] = [grpc.StatusCode.PERMISSION_DENIED]
    with pytest.raises(AuthError):
        await cloud.images(IMPATIENT).resolve(request_of())
    assert lost.build.status == Status.CANCELLED
    assert cloud.builds.calls["create"] == 0
    assert left(cloud) == []


def large_wheel() -> Wheel:
    """A kinetic that makes the context one that is uploaded in pieces."""
    body = random.Random(1).randbytes(2_000_000)
    return wheel({"kinetic/__init__.py": b"", "kinetic/large": body}, METADATA)


@pytest.mark.parametrize("how", ["refused", "cancelled"])
async def test_the_build_of_a_process_that_is_gone_is_cancelled_if_its_context_cannot_be_stored(
    cloud: Cloud, request_of, how: str
) -> None:
    """It is ours from the moment on that we have its marker: the next one would know nothing."""
    uri = await uri_of(cloud, request_of, large_wheel)
    lost = Underway(Build(id="lost", status=Status.WORKING))
    cloud.builds.builds["lost"] = lost
    marker_of(cloud, uri, build="lost")
    cloud.bucket.requests.clear()
    cloud.bucket.fail("put", times=9, **({"status": 403} if how == "refused" else {"stall": True}))
    resolving = asyncio.create_task(cloud.images(IMPATIENT, large_wheel).resolve(request_of()))
    async with asyncio.timeout(60):
        while not cloud.bucket.requests["put"]:
            await asyncio.sleep(0.01)
        if how == "cancelled":
            resolving.cancel()
        with pytest.raises(AuthError if how == "refused" else asyncio.CancelledError):
            await resolving
    assert lost.build.status == Status.CANCELLED
    assert cloud.builds.calls["create"] == 0
    assert left(cloud) == []


def left_marker(cloud: Cloud) -> str:
    return next(name for name in cloud.bucket.objects if name.startswith("builders/"))


async def test_where_the_log_may_not_go_to_the_bucket_it_goes_elsewhere(
    cloud: Cloud, request_of
) -> None:
    async def script(server: BuildServer, one: Underway) -> None:
        if one.build.logs_bucket:
            server.end(one, Status.FAILURE, "no access", "LOGGING_FAILURE")
        else:
            server.end(one, Status.SUCCESS)

    cloud.builds.script = script
    image = await cloud.images().resolve(request_of())
    assert image.uri in cloud.registry.images
    modes = [one.build.options.logging.name for one in cloud.builds.builds.values()]
    assert modes == ["GCS_ONLY", "CLOUD_LOGGING_ONLY"]


async def test_a_build_whose_reply_was_lost_is_found(cloud: Cloud, request_of) -> None:
    cloud.builds.faults["create"] = [grpc.StatusCode.UNAVAILABLE]
    cloud.builds.late = True
    await cloud.images().resolve(request_of())
    assert len(cloud.builds.builds) == 1


async def test_a_build_is_never_ordered_again_without_a_look(cloud: Cloud, request_of) -> None:
    cloud.builds.faults["create"] = [grpc.StatusCode.UNAVAILABLE] * 2
    cloud.builds.held["list"] = asyncio.Event()
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await called(cloud, "list")
    cloud.builds.late = True  # the second one is there when its reply is lost
    cloud.builds.held["list"].set()
    await resolving
    assert (cloud.builds.calls["create"], len(cloud.builds.builds)) == (2, 1)


async def test_what_is_cancelled_while_it_is_ordered_is_not_ordered_again(
    cloud: Cloud, request_of
) -> None:
    cloud.builds.faults["create"] = [grpc.StatusCode.UNAVAILABLE]
    cloud.builds.held["list"] = asyncio.Event()
    resolving = asyncio.create_task(cloud.images().resolve(request_of()))
    await called(cloud, "list")
    resolving.cancel()
    for _ in range(20):  # it goes from task to task, and waits for nobody
        await asyncio.sleep(0)
    cloud.builds.held["list"].set()
    with pytest.raises(asyncio.CancelledError):
        await resolving
    assert cloud.builds.calls["create"] == 1
    assert not cloud.builds.builds and left(cloud) == []


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
    assert [name for name in left(cloud) if not name.startswith("builders/")] == []


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
    assert cloud.registry.asked == {503: 1, 429: 1, 404: 2}


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
    await joined(images, 2)
    await images.aclose()
    for one in waiting:
        with pytest.raises(BackendError, match="was closed meanwhile"):
            await one
    with pytest.raises(BackendError, match="is closed; open another"):
        await images.resolve(request_of())
    (build,) = cloud.builds.builds.values()
    assert build.build.status == Status.CANCELLED
    assert left(cloud) == []


async def test_closing_waits_for_a_build_that_is_being_cancelled(cloud: Cloud, request_of) -> None:
    gate = cloud.builds.script = Gate()
    cloud.builds.held["cancel"] = asyncio.Event()
    images = cloud.images()
    resolving = asyncio.create_task(images.resolve(request_of()))
    await gate.begun.wait()
    resolving.cancel()
    await called(cloud, "cancel")
    closing = asyncio.create_task(images.aclose())
    await asyncio.sleep(0)
    cloud.builds.held["cancel"].set()
    await closing
    await asyncio.wait({resolving})
    (build,) = cloud.builds.builds.values()
    assert build.build.status == Status.CANCELLED
    assert left(cloud) == []


async def test_making_and_watching_a_build_does_not_hold_the_loop(
    cloud: Cloud, request_of, loop_guard
) -> None:
    await uri_of(cloud, request_of)  # imports
    with loop_guard():
        await cloud.images().resolve(request_of())


async def test_what_images_begin_with_can_be_named(cloud: Cloud, request_of) -> None:
    await cloud.images(KINETIC_PYTHON_IMAGE="m.test/py:{python}").resolve(request_of())
    (one,) = cloud.builds.builds.values()
    assert one.context["Dockerfile"].startswith(b"FROM m.test/py:3.12\n")
    with pytest.raises(ConfigurationError, match="KINETIC_PYTHON_IMAGE"):
        cloud.images(KINETIC_PYTHON_IMAGE="FROM scratch")
