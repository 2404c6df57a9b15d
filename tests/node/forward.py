"""Forward connections: ``python -m tests.node.forward HOST PORT TO_HOST TO_PORT``.

It replaces kube-proxy: containers reach the API server at its service's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

PIECE = 1 << 16


async def main(host: str, port: str, to_host: str, to_port: str) -> None:
    """Forward until the process is stopped."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, upstream = await asyncio.open_connection(to_host, int(to_port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pass_on(reader, upstream), pass_on(answers, writer))

    server = await asyncio.start_server(serve, host, int(port))
    await server.serve_forever()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy all data, then close *writer*."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
