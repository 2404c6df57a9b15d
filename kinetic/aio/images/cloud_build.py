"""Build images with Cloud Build: start a build, follow its log, and cancel it.

The first build imports google-cloud-build in a worker thread, because the import takes a third of a
second and starts threads.
"""

from __future__ import annotations

import asyncio
import importlib
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from kinetic._runner.protocol import google_refusals
from kinetic._tasks import in_thread, release
from kinetic.aio._net.retry import Outage, RetryPolicy, growing_pauses, retry
from kinetic.aio._net.tokens import Credentials, with_token
from kinetic.aio.images import recipe
from kinetic.aio.images.docker_hub import login_step
from kinetic.aio.images.registry import BuildSettings
from kinetic.aio.ports import Store
from kinetic.errors import (
    AuthError,
    BackendError,
    BuildError,
    KineticError,
    Refused,
    Throttled,
    Unavailable,
)

if TYPE_CHECKING:
    from google.cloud.devtools import cloudbuild_v1

HOST = "cloudbuild.googleapis.com"
LIBRARY = "google.cloud.devtools.cloudbuild_v1"
DOCKER = "gcr.io/cloud-builders/docker"
BUILD_TIMEOUT_S = 3600
"""How long Cloud Build lets a build run, in seconds."""

CALL_TIMEOUT_S = 30.0
"""The timeout of one call to Cloud Build, in seconds."""

LOG_TIMEOUT_S = 5.0
"""The timeout of one read of the log, in seconds; a failed read doesn't fail the build."""

SHOWN_LINES, SHOWN_CHARACTERS = 20, 400
"""How many of the log's last lines an error shows, and how many characters of each line."""


class BuildLog:
    """Shows the log of a build: the object *name* of *store*, which Cloud Build keeps extending.

    ``last_lines`` has the lines that an error shows.
    """

    def __init__(self, store: Store, name: str, show: Callable[[str], None]) -> None:
        self._store = store
        self._name = name
        self._show = show
        self._offset = 0
        self._unfinished = b""
        self.last_lines: deque[str] = deque(maxlen=SHOWN_LINES)

    async def show_new_lines(self, *, is_over: bool) -> None:
        """Show the lines added since the previous call; log a failure to read them.

        Keep an unfinished line for the next call, unless *is_over* says that the build is over.
        """
        try:
            async with asyncio.timeout(LOG_TIMEOUT_S):
                stored = await self._store.look(self._name)
                if stored is not None and stored.size > self._offset:
                    body = (await self._store.get(self._name, start=self._offset)).body
                    self._offset += len(body)
                    self._unfinished += body
        except (KineticError, TimeoutError) as exc:
            logging.log_first_n(logging.WARNING, "can't read the build log: %r", 1, exc)
            return
        *complete, self._unfinished = self._unfinished.split(b"\n")
        if is_over and self._unfinished:
            complete, self._unfinished = [*complete, self._unfinished], b""
        for raw_line in complete:
            # A progress bar overwrites its line after a carriage return; keep only its last text.
            line = raw_line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
            if line.strip():
                self.last_lines.append(line[:SHOWN_CHARACTERS])
                self._show(line)


_STATUS_TEXTS = {
    "TIMEOUT": "took too long",
    "CANCELLED": "was cancelled",
    "EXPIRED": "waited too long in the queue; the project's quota of builds may be used up",
    "INTERNAL_ERROR": "failed inside Cloud Build; try again",
}
_FAILURE_TEXTS = {
    "PUSH_FAILED": "the image was built but could not be pushed",
    "PUSH_IMAGE_NOT_FOUND": "the build made no image to push",
    "PUSH_NOT_AUTHORIZED": (
        "the builds' service account lacks the permission to push: give it "
        "roles/artifactregistry.writer on the repository"
    ),
    "LOGGING_FAILURE": (
        "the builds' service account lacks the permission to write the log: give it "
        "roles/storage.objectAdmin on the bucket of builds"
    ),
    "FETCH_SOURCE_FAILED": (
        "the builds' service account lacks the permission to read the build's context: give it "
        "roles/storage.objectAdmin on the bucket of builds"
    ),
}


def build_error(build: cloudbuild_v1.Build, uri: str, lines: Sequence[str]) -> BuildError | None:
    """Return the error of a finished build, or None if the build made the image *uri*.

    The message quotes *lines*, the last lines of the log.
    """
    status = build.status.name
    if status == "SUCCESS":
        return None
    kind = build.failure_info.type_.name
    detail = build.failure_info.detail or build.status_detail
    parts = [
        f"the image {uri} was not built: build {build.id} {_STATUS_TEXTS.get(status, 'failed')}"
    ]
    if detail:
        parts.append(f" ({detail.strip()})")
    if kind in _FAILURE_TEXTS:
        parts.append(f"; {_FAILURE_TEXTS[kind]}")
    parts.append("; ")
    if lines:
        parts += ["the last lines of the log:\n", *(f"  {line}\n" for line in lines)]
    parts.append(f"the whole log: {build.log_url or f'build {build.id} in the console'}")
    return BuildError("".join(parts), build_id=build.id, log_url=build.log_url)


_TEMPORARY_STATUSES = frozenset(
    {"UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "ABORTED", "RESOURCE_EXHAUSTED", "UNKNOWN"}
)


def _status(failure: BaseException) -> str:
    """Return the name of a gRPC status; empty for any other failure."""
    code: Any = getattr(failure, "grpc_status_code", None)
    return str(getattr(code, "name", ""))


def call_error(failure: Exception, project: str) -> BackendError | BuildError:
    """Return kinetic's error for the *failure* of a call to Cloud Build of *project*."""
    status, message = _status(failure), str(getattr(failure, "message", "") or failure)
    refused = f"Cloud Build of project {project} refused ({message})"
    text = f"{getattr(failure, 'reason', None) or ''} {message}"
    rights = {
        "cloudbuild": "roles/cloudbuild.builds.editor in the project",
        "iam": "roles/iam.serviceAccountUser on the builds' service account",
    }
    match status:
        case "PERMISSION_DENIED":
            for api, role in rights.items():
                if right := google_refusals.missing_permission(api, text):
                    return AuthError(f"{refused}: the credentials lack {right}; grant {role}")
            if advice := google_refusals.advice(text):
                return Refused(f"{refused}; {advice}", passing=True)
            return AuthError(
                f"{refused}; kinetic needs {' and '.join(rights.values())}. If you have both, ask "
                "the owner of the project what it requires"
            )
        case "UNAUTHENTICATED":
            return AuthError(
                f"Cloud Build did not accept the credentials ({message}); run "
                "`gcloud auth application-default login`"
            )
        case "RESOURCE_EXHAUSTED":
            return Throttled(
                f"Cloud Build of project {project} accepts no more calls now ({message}); try "
                "again later, or ask for more quota",
                retryable=True,
            )
        case "NOT_FOUND" | "FAILED_PRECONDITION" | "INVALID_ARGUMENT" | "OUT_OF_RANGE":
            return BuildError(
                f"Cloud Build of project {project} refused the build ({message}); "
                + (
                    google_refusals.advice(text)
                    or "run `kinetic up`, which creates the bucket, the repository, and the "
                    "service account of builds"
                )
            )
        case _ if status in _TEMPORARY_STATUSES:
            return Unavailable(
                f"Cloud Build is unavailable ({status}: {message}); check the network, or try "
                "again later",
                retryable=True,
            )
        case _:
            return BackendError(
                f"the call to Cloud Build failed ({status or type(failure).__name__}): {message}"
            )


class Builder:
    """Builds images with Cloud Build in the project of *settings*.

    *store*, a bucket or a folder in a bucket, holds each build's context until the build ends, and
    the logs. If *credentials* is None, calls carry no token. *emulator* is ``host:port`` of a
    server without TLS to use instead of Google's. *has_docker_hub* returns whether the project has
    Docker Hub credentials, which builds then use; None means that the project has none. *poll_s*
    has the first and the longest pause between two status requests, and *retry_s* is how long to
    retry a call; all in seconds.
    """

    def __init__(
        self,
        settings: BuildSettings,
        store: Store,
        credentials: Credentials | None,
        *,
        emulator: str = "",
        has_docker_hub: Callable[[], Awaitable[bool]] | None = None,
        poll_s: tuple[float, float] = (0.5, 5.0),
        retry_s: float = 60.0,
    ) -> None:
        self._settings = settings
        self._store = store
        self._credentials = credentials
        self._emulator = emulator
        self._has_docker_hub = has_docker_hub
        self._poll_s = poll_s
        self._policy = RetryPolicy(total_s=retry_s)
        self._outage = Outage("Cloud Build")
        self._client: Any = None  # the library doesn't type all of its methods

    async def build(
        self, uri: str, context: Mapping[str, bytes], show: Callable[[str], None]
    ) -> None:
        """Build *context*, push it as *uri*, and pass each line of the log to *show*.

        Raises:
            BuildError: The build failed; the message has the last lines of its log.
            AuthError: A permission is missing.
            Unavailable: Cloud Build or the store doesn't answer.

        Cancelled: kinetic also cancels the build in Cloud Build, and deletes its context.
        """
        # Each build has its own name, so no build deletes the context of another build.
        name = f"kinetic-{uuid.uuid4().hex}"
        source = f"contexts/{name}.tar.gz"
        try:
            content = await in_thread(recipe.pack_context, context)
            await self._store.create(source, content, shared=True)
            await self._start_and_follow(uri, name, source, show)
        finally:
            await release(self._store.delete([source]), operation=f"deleting {source}")

    async def _start_and_follow(
        self, uri: str, name: str, source: str, show: Callable[[str], None]
    ) -> None:
        """Build the context *source* as build *name*. Show its log, and raise its failure."""
        # If a reply is lost, a retry starts a second build of the same image. That is harmless.
        build = self._build_request(uri, name, source)
        if self._has_docker_hub is not None and await self._has_docker_hub():
            login, build["available_secrets"] = login_step(self._settings.project, DOCKER)
            build["steps"] = [login, *build["steps"]]
        start_request = asyncio.create_task(self._call("create_build", {"build": build}))
        try:
            operation = await asyncio.shield(start_request)
            await self._follow(uri, str(operation.metadata.build.id), show)
        except BuildError:
            raise  # nothing to cancel: Cloud Build refused the build, or the build has ended
        except BaseException:
            # `_cancel` waits for the start request, then makes calls. All of them have retries.
            grace = 2 * (CALL_TIMEOUT_S + self._policy.total_s)
            cancellation = self._cancel(start_request, name)
            await release(cancellation, operation=f"cancelling the build of {uri}", grace=grace)
            raise

    async def _cancel(self, start_request: asyncio.Task[Any], name: str) -> None:
        """Cancel the build that the task *start_request* starts."""
        await asyncio.wait({start_request})
        if start_request.exception() is None:
            await self._cancel_build(str(start_request.result().metadata.build.id))
        # An earlier try of the request may have started a build, if its reply was lost.
        page = await self._call("list_builds", {"filter": f'tags="{name}"', "page_size": 10})
        for build in page.builds:
            if not _is_over(build):
                await self._cancel_build(str(build.id))

    async def _cancel_build(self, build_id: str) -> None:
        try:
            await self._call("cancel_build", {"id": build_id})
        except BuildError as exc:
            logging.info("build %s ended before it was cancelled: %s", build_id, exc)

    async def _follow(self, uri: str, build_id: str, show: Callable[[str], None]) -> None:
        """Show the log of a build until the build ends; raise its error, if any."""
        log = BuildLog(self._store, f"logs/log-{build_id}.txt", show)
        pauses = growing_pauses(*self._poll_s, 1.5)
        while True:
            build: cloudbuild_v1.Build = await self._call("get_build", {"id": build_id})
            is_over = _is_over(build)
            await log.show_new_lines(is_over=is_over)
            if is_over:
                break
            await asyncio.sleep(next(pauses))
        if (failure := build_error(build, uri, log.last_lines)) is not None:
            raise failure

    async def _call(self, method: str, request: dict[str, Any]) -> Any:
        """Call *method* of the library's client with retries; raise kinetic's errors."""
        request = {"project_id": self._settings.project, **request}

        async def send(token: str = "") -> Any:
            metadata = [("authorization", f"Bearer {token}")] if token else []
            # `retry` repeats the call, so the library must not.
            return await getattr(self._client, method)(
                request=request, retry=None, timeout=CALL_TIMEOUT_S, metadata=metadata
            )

        async def call_once() -> Any:
            if self._client is None:
                library = await in_thread(importlib.import_module, LIBRARY)
                # Another call may have made the client while the thread imported the library.
                self._client = self._client or _new_client(library, self._emulator)
            if self._credentials is None:
                return await send()
            return await with_token(
                self._credentials, send, lambda failure: _status(failure) == "UNAUTHENTICATED"
            )

        try:
            return await retry(
                call_once,
                self._policy,
                self._outage,
                should_retry=lambda failure: _status(failure) in _TEMPORARY_STATUSES,
            )
        except KineticError:
            raise
        except Exception as exc:
            raise call_error(exc, self._settings.project) from exc

    async def aclose(self) -> None:
        """Close the connection; call this only after all calls of `build` have ended."""
        if self._client is not None:
            await self._client.transport.close()

    def _build_request(self, uri: str, name: str, source: str) -> dict[str, Any]:
        """Return the request for a build, in the form that Cloud Build's API expects."""
        bucket, _, folder = self._store.url.partition("://")[2].partition("/")
        folder = f"{folder.rstrip('/')}/" if folder else ""
        return {
            "source": {"storage_source": {"bucket": bucket, "object_": f"{folder}{source}"}},
            "steps": [{"name": DOCKER, "args": ["build", "--tag", uri, "."]}],
            "images": [uri],
            "timeout": {"seconds": BUILD_TIMEOUT_S},
            "service_account": self._settings.service_account,
            "options": {"logging": "GCS_ONLY"},
            "logs_bucket": f"gs://{bucket}/{folder}logs",
            "tags": ["kinetic", uri.rpartition(":")[2], name],
        }


def _new_client(library: Any, emulator: str) -> Any:
    """Return a client whose connection has no credentials: each call carries its access token."""
    grpc: Any = importlib.import_module("grpc")
    if emulator:
        channel = grpc.aio.insecure_channel(emulator)
    else:
        channel = grpc.aio.secure_channel(HOST, grpc.ssl_channel_credentials())
    transport = library.CloudBuildAsyncClient.get_transport_class("grpc_asyncio")
    return library.CloudBuildAsyncClient(transport=transport(channel=channel))


def _is_over(build: cloudbuild_v1.Build) -> bool:
    return build.status.name not in ("STATUS_UNKNOWN", "PENDING", "QUEUED", "WORKING")
