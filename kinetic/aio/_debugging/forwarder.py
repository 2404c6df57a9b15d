"""Forward a port of this machine to a port on a job's loopback.

`debug_attach` runs this module as a separate process (``python -m``), because it returns a
`subprocess.Popen`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from kinetic import errors
from kinetic._runner.protocol import wire
from kinetic._runner.protocol.workers import WorkerId
from kinetic._tasks import end_all
from kinetic.aio._submissions.ids import attempt_of, scope_of, worker_name
from kinetic.aio.platforms import Platform, open_platform
from kinetic.aio.ports import Cluster
from kinetic.configuration import Target

LOOPBACK = "127.0.0.1"
UNUSED_PORT = 9
"""A port without a listener: connecting to it shows whether the user may connect."""

CHECK_S = 2.0
"""How long the forwarder waits before it asks again whether the job still runs, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRequest:
    """Forward *local_port* to *port* of host *host* of the attempt called *name*."""

    target: Target
    name: str
    host: int
    port: int
    local_port: int

    def to_line(self) -> bytes:
        """Return the request as one line, which the forwarder reads."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> ForwardRequest:
        """Return the request that `to_line` has written as *line*."""
        fields: dict[str, Any] = json.loads(line)
        fields["target"] = Target(**fields["target"])
        return cls(**fields)


def port_in_use_error(port: int, cause: OSError) -> errors.ConfigurationError:
    """Return the error for a port that is in use."""
    return errors.ConfigurationError(
        f"can't listen on port {port} of this machine ({cause.strerror or cause}): another program "
        "uses it, perhaps an earlier debug_attach(); end that program, or choose another port with "
        "local_port= (or, for a call that waits, KINETIC_DEBUG_PORT)"
    )


def main() -> int:
    """Carry out the request from stdin; return the exit code."""
    request = ForwardRequest.of(sys.stdin.buffer.readline())
    try:
        asyncio.run(_forward(request, sys.stdin.buffer))
    except errors.KineticError as exc:
        public_class = next(
            base for base in type(exc).__mro__ if base.__module__ == errors.__name__
        )
        _write_reply({"error": public_class.__name__, "message": str(exc)})
        return 1
    return 0


async def _forward(request: ForwardRequest, stdin: BinaryIO) -> None:
    """Forward connections until the parent process or the job has ended."""
    platform = await open_platform(request.target)
    try:
        name, outcome = await _find_job(platform, request.name)
        request = replace(request, name=name)
        with suppress(errors.Unavailable):  # fail now if kinetic can't reach the job
            stream = await platform.cluster.dial(request.name, UNUSED_PORT, host=request.host)
            await stream.aclose()
        try:
            listener = await anyio.create_tcp_listener(
                local_host=LOOPBACK, local_port=request.local_port
            )
        except OSError as exc:
            raise port_in_use_error(request.local_port, exc) from exc
        async with listener:
            _write_reply({"port": listener.extra(SocketAttribute.local_port)})
            end_tasks = [
                asyncio.create_task(_until_closed(stdin), name="kinetic forwarder: its starter"),
                asyncio.create_task(_until_ended(platform, request, outcome), name="its job"),
            ]
            connect = partial(_connect, platform.cluster, request)
            serving = asyncio.create_task(listener.serve(connect), name="kinetic forwarder")
            await asyncio.wait({*end_tasks, serving}, return_when=asyncio.FIRST_COMPLETED)
            for result in await end_all([*end_tasks, serving]):
                if isinstance(result, Exception):
                    _print_error(
                        f"forwarding to {request.name} has ended: {type(result).__name__}: {result}"
                    )
    finally:
        await platform.aclose()


async def _find_job(platform: Platform, name: str) -> tuple[str, str]:
    """Return the job that carries out the attempt *name*, and the object that shows its end.

    These are the attempt's worker and outcome. If the platform shows the attempt itself, they are
    *name* and an empty text.
    """
    attempt = attempt_of(name)
    if attempt is None or platform.cluster.shows_items:
        return name, ""
    group_id, index, number = attempt
    scope = scope_of(group_id)
    claim = await platform.store.look(wire.attempt_key(scope, index, number, "claim"))
    worker = None if claim is None else WorkerId.parse(claim.metadata.get("worker", ""))
    if worker is None:
        return name, ""
    return worker_name(group_id, worker), wire.attempt_key(scope, index, number, "outcome")


async def _until_closed(stdin: BinaryIO) -> None:
    """Return when the parent process has ended or closed its pipe."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stdin)
    try:
        while await reader.read(4096):
            pass
    finally:
        transport.close()


async def _until_ended(platform: Platform, request: ForwardRequest, outcome: str) -> None:
    """Return when the job has ended, or the object *outcome* exists."""
    while True:
        try:
            if outcome and await platform.store.look(outcome) is not None:
                return
            found = await platform.cluster.find(names=[request.name])
            if all(it.name != request.name or it.phase.is_over for it in found):
                return
        except errors.BackendError as exc:
            _print_error(f"can't ask whether {request.name} still runs: {exc}")
        await asyncio.sleep(CHECK_S)


async def _connect(cluster: Cluster, request: ForwardRequest, local: SocketStream) -> None:
    async with local:
        try:
            remote = await cluster.dial(request.name, request.port, host=request.host)
        except errors.KineticError as exc:
            _print_error(str(exc))
            return
        async with remote, anyio.create_task_group() as group:
            group.start_soon(_copy, local, remote, group.cancel_scope)
            group.start_soon(_copy, remote, local, group.cancel_scope)


async def _copy(source: ByteStream, sink: ByteStream, scope: anyio.CancelScope) -> None:
    """Copy *source* to *sink*; at its end, cancel *scope*, which ends both directions."""
    try:
        async for data in source:
            await sink.send(data)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass
    except errors.Unavailable as exc:
        _print_error(str(exc))
    scope.cancel()


def _write_reply(fields: dict[str, Any]) -> None:
    with suppress(OSError):  # the parent has ended
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def _print_error(message: str) -> None:
    sys.stderr.write(f"kinetic: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
