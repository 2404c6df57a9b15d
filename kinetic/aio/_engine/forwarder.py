"""Forward a port of this machine to a port on a job's loopback.

``python -m kinetic.aio._engine.forwarder`` is a separate process, because the API returns its
`subprocess.Popen`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.streams.stapled import MultiListener

from kinetic import errors
from kinetic.aio.platforms import open_platform
from kinetic.aio.ports import Cluster, Phase
from kinetic.configuration import Target

LOOPBACK = "127.0.0.1"
NOBODY = 9
"""A port without a listener: connecting to it shows whether the user may connect."""

OVER = (Phase.ENDED, Phase.GONE)
LOOK_S = 2.0
"""How often the forwarder asks whether the job still runs, in seconds."""


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
        """Read what `to_line` has returned."""
        fields: dict[str, Any] = json.loads(line)
        fields["target"] = Target(**fields["target"])
        return cls(**fields)


def taken(port: int, cause: OSError) -> errors.ConfigurationError:
    """Return the error for a port that is in use."""
    return errors.ConfigurationError(
        f"port {port} of this machine cannot be listened on ({cause.strerror or cause}): another "
        "program has it, perhaps an earlier debug_attach(); end that, or choose another port with "
        "local_port= (or, for a call that waits, KINETIC_DEBUG_PORT)"
    )


def main() -> int:
    """Carry out the request from stdin; return the exit code."""
    order = ForwardRequest.of(sys.stdin.buffer.readline())
    try:
        asyncio.run(_forward(order, sys.stdin.buffer))
    except errors.KineticError as exc:
        public = next(one for one in type(exc).__mro__ if one.__module__ == errors.__name__)
        _reply({"error": public.__name__, "message": str(exc)})
        return 1
    return 0


async def _forward(order: ForwardRequest, orders: BinaryIO) -> None:
    platform = await open_platform(order.target)
    try:
        await _check_reachable(platform.cluster, order)
        listener = await _listen(order.local_port)
        async with listener:
            _reply({"port": listener.extra(SocketAttribute.local_port)})
            ends = [
                asyncio.create_task(_until_closed(orders), name="kinetic forwarder: its starter"),
                asyncio.create_task(_until_ended(platform.cluster, order), name="its job"),
            ]

            async def carry(near: SocketStream) -> None:
                await _connect(platform.cluster, order, near)

            serving = asyncio.create_task(listener.serve(carry), name="kinetic forwarder")
            await asyncio.wait({*ends, serving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (*ends, serving):
                task.cancel()
            for came in await asyncio.gather(*ends, serving, return_exceptions=True):
                if isinstance(came, Exception):
                    _print_error(
                        f"forwarding to {order.name} has ended: {type(came).__name__}: {came}"
                    )
    finally:
        await platform.aclose()


async def _check_reachable(cluster: Cluster, order: ForwardRequest) -> None:
    """Check whether the job can be reached, without a connection to its debugger.

    Raises:
        NotFound: The job isn't running.
        AuthError: A permission is missing.
    """
    with suppress(errors.Unavailable):
        stream = await cluster.dial(order.name, NOBODY, host=order.host)
        await stream.aclose()


async def _listen(port: int) -> MultiListener[SocketStream]:
    try:
        return await anyio.create_tcp_listener(local_host=LOOPBACK, local_port=port)
    except OSError as exc:
        raise taken(port, exc) from exc


async def _until_closed(orders: BinaryIO) -> None:
    """Return when the parent process has ended or closed its pipe."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), orders
    )
    try:
        while await reader.read(4096):
            pass
    finally:
        transport.close()


async def _until_ended(cluster: Cluster, order: ForwardRequest) -> None:
    """Return when the job has ended."""
    while True:
        try:
            found = await cluster.find(names=[order.name])
            if not any(one.name == order.name and one.phase not in OVER for one in found):
                return
        except errors.BackendError as exc:
            _print_error(f"can't ask whether {order.name} still runs: {exc}")
        await asyncio.sleep(LOOK_S)


async def _connect(cluster: Cluster, order: ForwardRequest, near: SocketStream) -> None:
    """Forward one connection until it ends."""
    async with near:
        try:
            far = await cluster.dial(order.name, order.port, host=order.host)
        except errors.KineticError as exc:
            _print_error(str(exc))
            return
        async with far, anyio.create_task_group() as both:
            both.start_soon(_carry, near, far, both.cancel_scope)
            both.start_soon(_carry, far, near, both.cancel_scope)


async def _carry(source: ByteStream, sink: ByteStream, both: anyio.CancelScope) -> None:
    """Copy the bytes of *source*; its end ends both directions."""
    try:
        async for piece in source:
            await sink.send(piece)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass
    except errors.Unavailable as exc:
        _print_error(str(exc))
    both.cancel()


def _reply(words: dict[str, Any]) -> None:
    with suppress(OSError):  # the parent has ended
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


def _print_error(words: str) -> None:
    sys.stderr.write(f"kinetic: {words}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
