"""Builds by Cloud Build: ordered, watched with their log, cancelled.

google-cloud-build is imported when the first build is ordered, in a worker
thread: it takes a third of a second and starts threads.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio.to_thread
from absl import logging

from kinetic._tasks import asked_to_end, release
from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import Outage, RetryPolicy, growing, retry
from kinetic.aio._net.tokens import Credentials, with_token
from kinetic.aio.images.registry import Http
from kinetic.errors import (
    AuthError,
    BackendError,
    BuildError,
    ClientClosed,
    KineticError,
    Throttled,
    Unavailable,
)

if TYPE_CHECKING:
    from google.cloud.devtools import cloudbuild_v1

KEPT = 1000
"""Lines that are kept for telling what failed."""

TOLD = 20
LONGEST = 400
_STEP = re.compile(r"Step #(\d+)(?: - \"[^\"]*\")?: ?")


class BuildLog:
    """The object ``{folder}log-{id}.txt`` of a bucket, which Cloud Build goes on writing.

    *server* is the address of the storage API.
    """

    def __init__(self, http: Http, server: str, bucket: str, name: str) -> None:
        self._http = http
        self._url = f"{server}/storage/v1/b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"
        self._read = 0
        self._rest = b""
        self.lines: deque[str] = deque(maxlen=KEPT)

    async def more(self, *, last: bool = False) -> list[str]:
        """The lines that have come since, without their newlines.

        *last* says that nothing more will come: an unfinished line is one.

        Raises:
            AuthError: It may not be read, or there are no credentials.
            Unavailable: The server does not answer.
        """
        headers = {"Range": f"bytes={self._read}-", "Accept-Encoding": "identity"}
        try:
            answer = await self._http.ask("GET", f"{self._url}?alt=media", headers)
        except HttpError as exc:
            if exc.status in (401, 403):
                raise AuthError(
                    f"it was refused ({exc.status}): you need storage.objects.get on the bucket "
                    "of builds, which roles/storage.objectAdmin has"
                ) from exc
            body = b""  # there is none yet, or no more than was read
        else:  # 206, or the whole from a server that does not know ranges
            body = answer.body[self._read if answer.status == 200 else 0 :]
        self._read += len(body)
        *whole, self._rest = (self._rest + body).split(b"\n")
        if last and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        # A progress bar ends its pieces by a carriage return: the last one counts.
        lines = [line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2] for line in whole]
        self.lines += lines
        return lines


def failing_lines(lines: Collection[str], step: int | None, count: int = TOLD) -> list[str]:
    """The last lines of step number *step*, or of the whole log where lines name no step."""
    named = [(_STEP.match(line), line) for line in lines]
    of_step = [
        line[match.end() :] for match, line in named if match is not None and match[1] == str(step)
    ]
    chosen = of_step or list(lines)
    told = [line[:LONGEST] for line in chosen if line.strip()]
    return told[-count:]


_ENDED = MappingProxyType(
    {
        "TIMEOUT": "took too long",
        "CANCELLED": "was cancelled",
        "EXPIRED": "waited too long for its turn; the project's quota of builds may be used up",
        "INTERNAL_ERROR": "failed inside Cloud Build; try again",
    }
)
_ADVICE = MappingProxyType(
    {
        "PUSH_FAILED": "the image was built but could not be pushed",
        "PUSH_IMAGE_NOT_FOUND": "the image was built but could not be found to be pushed",
        "PUSH_NOT_AUTHORIZED": (
            "the builds' service account may not push: give it roles/artifactregistry.writer on "
            "the repository"
        ),
        "LOGGING_FAILURE": (
            "the builds' service account may not write logs: give it roles/logging.logWriter"
        ),
        "FETCH_SOURCE_FAILED": (
            "the builds' service account may not read the build's context: give it "
            "roles/storage.objectAdmin on the bucket of builds"
        ),
    }
)
_PASSING = frozenset(
    {"UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "ABORTED", "RESOURCE_EXHAUSTED", "UNKNOWN"}
)


def explained_build(
    build: cloudbuild_v1.Build, uri: str, lines: Sequence[str]
) -> BuildError | None:
    """The error of a build that is over; None if it gave the image *uri*.

    *lines* are the last ones of the step that failed. Its notes are the names of
    the build's status and, if Cloud Build tells it, the kind of failure.
    """
    status = build.status.name
    if status == "SUCCESS":
        return None
    kind = build.failure_info.type_.name
    detail = build.failure_info.detail or build.status_detail
    parts = [f"the image {uri} was not built: build {build.id} {_ENDED.get(status, 'failed')}"]
    if detail:
        parts.append(f" ({detail.strip()})")
    if kind in _ADVICE:
        parts.append(f"; {_ADVICE[kind]}")
    if lines:
        parts.append("; the last lines of the failing step:\n")
        parts.append("\n".join(f"  {line}" for line in lines))
        parts.append("\n")
    else:
        parts.append("; ")
    parts.append(f"the whole log: {build.log_url or 'in the console, by the id of the build'}")
    failure = BuildError("".join(parts), build_id=build.id, log_url=build.log_url)
    failure.add_note(status)
    if kind != "FAILURE_TYPE_UNSPECIFIED":
        failure.add_note(kind)
    return failure


def _status(failure: BaseException) -> str:
    """The name of a gRPC status; empty for anything else."""
    code: Any = getattr(failure, "grpc_status_code", None)
    return str(getattr(code, "name", ""))


def passing(failure: BaseException) -> bool:
    """Whether the same call may work a moment later."""
    return _status(failure) in _PASSING


def refuses_token(failure: BaseException) -> bool:
    """Whether the access token is too old, or was never one."""
    return _status(failure) == "UNAUTHENTICATED"


def explained_call(failure: Exception, project: str) -> BackendError | BuildError:
    """A call that Cloud Build refused, or did not answer, as our own error."""
    status, said = _status(failure), str(getattr(failure, "message", "") or failure)
    match status:
        case "PERMISSION_DENIED":
            return AuthError(
                f"Cloud Build of project {project} refused ({said}): you need "
                "roles/cloudbuild.builds.editor there, and roles/iam.serviceAccountUser on the "
                "builds' service account; and the API cloudbuild.googleapis.com must be enabled"
            )
        case "UNAUTHENTICATED":
            return AuthError(
                f"Cloud Build did not accept the credentials ({said}); run "
                "`gcloud auth application-default login`"
            )
        case "RESOURCE_EXHAUSTED":
            return Throttled(
                f"Cloud Build of project {project} takes no more ({said}); try again later, or "
                "ask for more quota",
                retryable=True,
            )
        case "NOT_FOUND" | "FAILED_PRECONDITION" | "INVALID_ARGUMENT" | "OUT_OF_RANGE":
            return BuildError(
                f"Cloud Build of project {project} refused the build ({said}); the cluster's "
                "set-up makes the bucket, the repository and the service account it names"
            )
        case _ if status in _PASSING:
            return Unavailable(
                f"Cloud Build did not answer ({status}: {said}); check the network, or try again "
                "later",
                retryable=True,
            )
        case _:
            return BackendError(f"Cloud Build answered {status or type(failure).__name__}: {said}")


HOST = "cloudbuild.googleapis.com"
DOCKER = "gcr.io/cloud-builders/docker"
TIMEOUT_S = 3600
CALL_S = 30.0
PATIENCE_S = 60.0
_ABANDONED = frozenset({"CANCELLED", "EXPIRED", "INTERNAL_ERROR"})
FIRST_LOOK_S, LONGEST_LOOK_S = 0.5, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An image to be built from a context: the ``tar.gz`` ``source`` of a bucket.

    ``logs`` is the folder of the bucket for the log, ``account`` the service
    account that builds, by its full name.
    """

    project: str
    uri: str
    bucket: str
    source: str
    logs: str
    account: str


class Builder:
    """Cloud Build in one project.

    *open_log* gives the log of a build by its id. *emulator* is ``host:port`` of
    a server without TLS and credentials, in place of Google's. *look* is the
    pause between two looks at a build, the first and the longest, in seconds.
    """

    def __init__(
        self,
        credentials: Credentials | None,
        open_log: Callable[[str, str], BuildLog],
        *,
        emulator: str = "",
        look: tuple[float, float] = (FIRST_LOOK_S, LONGEST_LOOK_S),
        patience: float = PATIENCE_S,
    ) -> None:
        self._credentials = credentials
        self._open_log = open_log
        self._emulator = emulator
        self._look = look
        self._policy = RetryPolicy(total_s=patience)
        self._outage = Outage("Cloud Build")
        self._client: Any = None  # its methods' types are not all known
        self._closed = False

    async def build(
        self,
        order: Order,
        *,
        adopt: str = "",
        begun: Callable[[str], Awaitable[None]],
        told: Callable[[str], None],
    ) -> None:
        """Build it, or go on with the build *adopt* that somebody else ordered.

        *begun* is awaited with the id of the build, *told* called with each line of its log.

        Raises:
            BuildError: It failed; the message has the last lines of the step that did.
            AuthError: Something is not allowed.
            Unavailable: Cloud Build does not answer.

        Cancelled: the build is cancelled, too.
        """
        if adopt and await self._adopted(order, adopt, told):
            return
        build_id = await self._ordered(order, to_bucket=True)
        failed = await self._begun(order, build_id, begun, told)
        if failed is None:
            return
        logging.info("the builds' account may not write to %s; logging elsewhere", order.bucket)
        build_id = await self._ordered(order, to_bucket=False)
        if (failed := await self._begun(order, build_id, begun, told)) is not None:
            raise failed

    async def _adopted(self, order: Order, build_id: str, told: Callable[[str], None]) -> bool:
        """Whether the build of a process that is gone gave the image; one that fails does, too."""
        logging.info("going on with build %s, whose process is gone", build_id)
        try:
            await self._followed(order, build_id, told)
        except BuildError as exc:
            if exc.build_id and _ABANDONED.isdisjoint(getattr(exc, "__notes__", ())):
                raise
            logging.info("build %s came to nothing; beginning another", build_id)
            return False
        except BaseException:
            await release(self.cancel(order.project, build_id), what=f"cancelling build {build_id}")
            raise
        return True

    async def _begun(
        self,
        order: Order,
        build_id: str,
        begun: Callable[[str], Awaitable[None]],
        told: Callable[[str], None],
    ) -> BuildError | None:
        """Follow a build of ours; what is returned failed only for where its log goes."""
        try:
            await begun(build_id)
            await self._followed(order, build_id, told)
        except BuildError as exc:
            if exc.build_id and "LOGGING_FAILURE" in getattr(exc, "__notes__", ()):
                return exc
            raise
        except BaseException:
            await release(self.cancel(order.project, build_id), what=f"cancelling build {build_id}")
            raise
        return None

    async def cancel(self, project: str, build_id: str) -> None:
        """End a build; one that has ended already does not matter."""
        try:
            await self._call("cancel_build", {"project_id": project, "id": build_id})
        except BuildError as exc:  # it is over, or was never there
            logging.info("build %s was not cancelled: %s", build_id, exc)

    # --- ordering ---

    async def _ordered(self, order: Order, *, to_bucket: bool) -> str:
        unwanted = asyncio.Event()
        ordering = asyncio.create_task(
            self._order_once(order, to_bucket, unwanted), name=f"kinetic order {order.uri}"
        )
        try:
            return await asyncio.shield(ordering)
        except asyncio.CancelledError:
            unwanted.set()
            await release(
                self._cancel_ordered(ordering, order.project),
                what=f"cancelling {order.uri}",
                # The order's last call, a look for what it began, and a cancellation, the latter
                # with a call before and after their patience: what is given up before that may
                # go on for an hour, and nobody knows of it.
                grace=5 * CALL_S + 2 * self._policy.total_s + self._policy.longest_s,
            )
            raise

    async def _cancel_ordered(self, ordering: asyncio.Task[str], project: str) -> None:
        try:
            await asyncio.wait({ordering})
        finally:
            ordering.cancel()  # should even that have taken too long
        if not ordering.cancelled() and ordering.exception() is None and ordering.result():
            await self.cancel(project, ordering.result())

    async def _order_once(self, order: Order, to_bucket: bool, unwanted: asyncio.Event) -> str:
        """Ordering is not repeatable: after a lost reply, look for what it may have begun.

        Once it is *unwanted* nothing more is ordered; what is returned may be empty then.
        """
        build = _described(order, to_bucket=to_bucket)
        request = {"project_id": order.project, "build": build}
        doubtful = False  # whether an order whose reply was lost may have begun one

        async def begun() -> str:
            nonlocal doubtful
            found = await self._under_way(order, build["tags"][-1]) if doubtful else ""
            doubtful = False
            return found

        async def attempt() -> str:
            nonlocal doubtful
            if found := await begun():
                return found
            if unwanted.is_set():
                return ""
            try:
                operation = await self._call("create_build", request, once=True)
            except BackendError as exc:
                doubtful = exc.retryable
                if found := await begun():
                    return found
                raise
            return str(operation.metadata.build.id)

        return await retry(attempt, self._policy, self._outage)

    async def _under_way(self, order: Order, mark: str) -> str:
        request = {"project_id": order.project, "filter": f'tags="{mark}"', "page_size": 10}
        page = await self._call("list_builds", request)
        statuses = importlib.import_module("google.cloud.devtools.cloudbuild_v1").Build.Status
        waiting = (statuses.PENDING, statuses.QUEUED, statuses.WORKING, statuses.SUCCESS)
        return next((str(one.id) for one in page.builds if one.status in waiting), "")

    # --- following ---

    async def _followed(self, order: Order, build_id: str, told: Callable[[str], None]) -> None:
        log = self._open_log(order.bucket, f"{order.logs}/log-{build_id}.txt")
        pauses = growing(*self._look, 1.5)
        while True:
            build: cloudbuild_v1.Build = await self._call(
                "get_build", {"project_id": order.project, "id": build_id}
            )
            over = _is_over(build)
            await self._tell(log, told, last=over)
            if over:
                break
            await asyncio.sleep(next(pauses))
        step = next(
            (number for number, one in enumerate(build.steps) if one.exit_code or _failed(one)),
            None,
        )
        failure = explained_build(build, order.uri, failing_lines(log.lines, step))
        if failure is not None:
            raise failure

    async def _tell(self, log: BuildLog, told: Callable[[str], None], *, last: bool) -> None:
        try:
            for line in await log.more(last=last):
                told(line)
        except KineticError as exc:  # the build does not depend on it
            logging.log_first_n(logging.WARNING, "the build log cannot be read: %s", 1, exc)

    # --- calling ---

    async def _call(self, method: str, request: dict[str, Any], *, once: bool = False) -> Any:
        def again(exc: Exception) -> bool:
            return passing(exc) and not once

        try:
            return await retry(
                lambda: self._authorized(method, request),
                self._policy,
                self._outage,
                is_passing=again,
            )
        except KineticError:
            raise
        except asyncio.CancelledError:  # gRPC's word for a channel that was closed
            if not asked_to_end():
                self._check("was closed meanwhile")
            raise
        except Exception as exc:
            self._check("was closed meanwhile")
            raise explained_call(exc, str(request["project_id"])) from exc

    async def _authorized(self, method: str, request: dict[str, Any]) -> Any:
        call = getattr(await self._opened(), method)
        # No policy of the library's own: one, and it is above.
        call = functools.partial(call, request=request, retry=None, timeout=CALL_S)
        if self._credentials is None:
            return await call()
        return await with_token(
            self._credentials,
            lambda token: call(metadata=[("authorization", f"Bearer {token}")]),
            refuses_token,
        )

    async def _opened(self) -> Any:
        self._check("is closed")
        if self._client is None:
            library = await anyio.to_thread.run_sync(_library)
            self._check("is closed")
            if self._client is None:
                self._client = _connected(library, self._emulator)
        return self._client

    def _check(self, closed: str) -> None:
        if self._closed:
            raise ClientClosed(f"the client of Cloud Build {closed}; open another")

    async def aclose(self) -> None:
        """Close the connection; builds go on."""
        self._closed = True
        if self._client is not None:
            await self._client.transport.close()


def _library() -> Any:
    try:
        return importlib.import_module("google.cloud.devtools.cloudbuild_v1")
    except ImportError as exc:
        raise BuildError(
            f"images are built by google-cloud-build, which cannot be imported here ({exc}); "
            'install it, or name an image with container_image="..."'
        ) from exc


def _connected(library: Any, emulator: str) -> Any:
    """A client on a channel of its own; the token goes with each call."""
    grpc: Any = importlib.import_module("grpc")
    if emulator:
        channel = grpc.aio.insecure_channel(emulator)
    else:
        channel = grpc.aio.secure_channel(HOST, grpc.ssl_channel_credentials())
    transport = library.CloudBuildAsyncClient.get_transport_class("grpc_asyncio")
    return library.CloudBuildAsyncClient(transport=transport(channel=channel))


def _described(order: Order, *, to_bucket: bool) -> dict[str, Any]:
    """The build as the service takes it."""
    tag = order.uri.rpartition(":")[2]
    mark = f"kinetic-{tag}-{order.source.rpartition('/')[2].partition('.')[0]}"
    build: dict[str, Any] = {
        "source": {"storage_source": {"bucket": order.bucket, "object_": order.source}},
        "steps": [{"name": DOCKER, "args": ["build", "--tag", order.uri, "."]}],
        "images": [order.uri],
        "timeout": {"seconds": TIMEOUT_S},
        "service_account": order.account,
        "options": {"logging": "GCS_ONLY" if to_bucket else "CLOUD_LOGGING_ONLY"},
        "tags": ["kinetic", tag, mark[:128]],
    }
    if to_bucket:
        build["logs_bucket"] = f"gs://{order.bucket}/{order.logs}"
    return build


def _is_over(build: cloudbuild_v1.Build) -> bool:
    return build.status.name not in ("STATUS_UNKNOWN", "PENDING", "QUEUED", "WORKING")


def _failed(step: cloudbuild_v1.BuildStep) -> bool:
    return step.status.name in ("FAILURE", "TIMEOUT", "INTERNAL_ERROR")
