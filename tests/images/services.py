"""Minimal stand-ins for Cloud Build and an image registry, with their published interfaces.

Like the service, the builder reads the context from the bucket, writes the log to the bucket piece
by piece, and pushes to the registry. A script of the test replaces the build's steps.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import tarfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from aiohttp import web
from google.cloud.devtools import cloudbuild_v1
from google.longrunning import operations_pb2
from google.protobuf import any_pb2

from tests.gcs.server import GcsServer, Stored

SERVICE = "google.devtools.cloudbuild.v1.CloudBuild"
Status = cloudbuild_v1.Build.Status
ENDED = {Status.SUCCESS, Status.FAILURE, Status.CANCELLED, Status.TIMEOUT, Status.INTERNAL_ERROR}


class RegistryServer:
    """``async with RegistryServer() as registry``: serves the manifests of ``images``.

    ``answers`` are the statuses of the next requests; ``asked`` counts requests by their status.
    """

    def __init__(self) -> None:
        self.images: set[str] = set()
        self.answers: list[int] = []
        self.asked: Counter[int] = Counter()
        self.tokens: set[str] | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/v2/{name:.+}/manifests/{reference}", self._manifest)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.host = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _manifest(self, request: web.Request) -> web.Response:
        status = self.answers.pop(0) if self.answers else 0
        name, reference = request.match_info["name"], request.match_info["reference"]
        assert "application/vnd.oci.image.manifest.v1+json" in request.headers["Accept"]
        if not status:
            status = 200 if f"{self.host}/{name}:{reference}" in self.images else 404
        self.asked[status] += 1
        if status == 200:
            return web.json_response({"schemaVersion": 2})
        body = {"errors": [{"code": "X", "message": f"no {name}:{reference} for you"}]}
        return web.json_response(body, status=status)


@dataclass
class StartedBuild:
    """A build as the server has it; ``context`` has the files that it got."""

    build: Any
    context: dict[str, bytes] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        return str(self.build.id)


Script = Callable[["BuildServer", StartedBuild], Awaitable[None]]


async def succeed(server: BuildServer, started: StartedBuild) -> None:
    """Write a log and succeed; this is the default script."""
    server.log(started, "Step 1/2 : FROM python\n", "Step 2/2 : RUN uv\n")
    server.end(started, Status.SUCCESS)


class BuildServer:
    """``async with BuildServer(bucket, registry) as builds``: listens on ``builds.host``.

    ``script`` runs in each build. ``faults`` has, by method, the codes that replace the next
    answers; with ``late``, the call takes effect before. ``held`` has, by method, the event that a
    call waits for before it does anything. ``fault_message`` goes with the codes.
    """

    def __init__(self, bucket: GcsServer, registry: RegistryServer) -> None:
        self.bucket = bucket
        self.registry = registry
        self.builds: dict[str, StartedBuild] = {}
        self.calls: Counter[str] = Counter()
        self.script: Script = succeed
        self.faults: dict[str, list[grpc.StatusCode]] = {}
        self.held: dict[str, asyncio.Event] = {}
        self.late = False
        self.fault_message = "injected"
        self.authorizations: set[str] = set()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        handlers = {
            "CreateBuild": self._handler(self._create, cloudbuild_v1.CreateBuildRequest),
            "GetBuild": self._handler(self._get, cloudbuild_v1.GetBuildRequest),
            "CancelBuild": self._handler(self._cancel, cloudbuild_v1.CancelBuildRequest),
            "ListBuilds": self._handler(self._list, cloudbuild_v1.ListBuildsRequest),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        self.host = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(0.2)

    async def settled(self) -> None:
        """Wait until no build runs."""
        await asyncio.gather(*self._tasks)

    def _handler(self, method: Any, request: Any) -> Any:
        async def serve(asked: Any, context: Any) -> Any:
            name = method.__name__.strip("_")
            self.calls[name] += 1
            self.authorizations |= {
                value for key, value in context.invocation_metadata() if key == "authorization"
            }
            if name in self.held:
                await self.held[name].wait()
            faults = self.faults.get(name, [])
            fault = faults.pop(0) if faults else None
            if fault is not None and not self.late:
                await context.abort(fault, self.fault_message)
            answer = await method(asked, context)
            if fault is not None:
                await context.abort(fault, self.fault_message)
            return answer

        return grpc.unary_unary_rpc_method_handler(
            serve,
            request_deserializer=request.deserialize,
            response_serializer=_serialized,
        )

    async def _create(self, request: Any, context: Any) -> Any:
        build = request.build
        build.id = f"build-{next(self._numbers)}"
        build.project_id = request.project_id
        build.status = Status.QUEUED
        build.log_url = f"https://console.test/builds/{build.id}"
        started = StartedBuild(build)
        source = build.source.storage_source
        archive = self.bucket.objects.get(source.object_)
        if archive is not None:
            started.context = unpacked(archive.body)
        self.builds[build.id] = started
        self.changed.set()
        task = asyncio.create_task(self._run(started))
        self._tasks.add(task)
        metadata = any_pb2.Any()
        metadata.Pack(
            cloudbuild_v1.BuildOperationMetadata.pb(
                cloudbuild_v1.BuildOperationMetadata(build=build)
            )
        )
        return operations_pb2.Operation(name=f"operations/build/{build.id}", metadata=metadata)

    async def _run(self, started: StartedBuild) -> None:
        started.build.status = Status.WORKING
        await self.script(self, started)

    async def _get(self, request: Any, context: Any) -> Any:
        return await self._found(request.id, context)

    async def _found(self, build_id: str, context: Any) -> Any:
        if build_id not in self.builds:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no build {build_id}")
        return self.builds[build_id].build

    async def _cancel(self, request: Any, context: Any) -> Any:
        build = await self._found(request.id, context)
        if build.status in ENDED:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is not running")
        self.end(self.builds[request.id], Status.CANCELLED)
        self.builds[request.id].cancelled.set()
        return build

    async def _list(self, request: Any, context: Any) -> Any:
        wanted = request.filter.removeprefix('tags="').removesuffix('"')
        builds = [started.build for started in self.builds.values()]
        found = [build for build in builds if wanted in build.tags]
        return cloudbuild_v1.ListBuildsResponse(builds=found)

    # --- methods for scripts ---

    def log(self, started: StartedBuild, *pieces: str) -> None:
        """Write to the build's log, if it has one in the bucket."""
        folder = str(started.build.logs_bucket).partition("gs://")[2].partition("/")[2]
        if not started.build.logs_bucket:
            return
        name = f"{folder}/log-{started.id}.txt"
        before = self.bucket.objects[name].body if name in self.bucket.objects else b""
        body = before + "".join(pieces).encode()
        self.bucket.objects[name] = Stored(body, {}, 1)

    def end(self, started: StartedBuild, status: Any, detail: str = "", kind: str = "") -> None:
        """End the build."""
        build = started.build
        if build.status in ENDED:
            return
        if status == Status.SUCCESS:
            self.registry.images |= set(build.images)
        else:
            build.failure_info.detail = detail
            if kind:
                build.failure_info.type_ = cloudbuild_v1.Build.FailureInfo.FailureType[kind]
            for step in build.steps:
                step.status = Status.FAILURE
                step.exit_code = 1
        build.status = status
        self.changed.set()


def _serialized(message: Any) -> bytes:
    plain = isinstance(message, operations_pb2.Operation)
    return message.SerializeToString() if plain else type(message).serialize(message)


def unpacked(archive: bytes) -> dict[str, bytes]:
    """Return the files of a ``tar.gz``."""
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        for entry in packed:
            file = packed.extractfile(entry)
            assert file is not None
            contents[entry.name] = file.read()
    return contents


__all__ = ["ENDED", "BuildServer", "RegistryServer", "Script", "StartedBuild", "Status"]
