"""What comes to an address goes to another: ``python -m tests.node.forward HOST PORT TO PORT``.

In place of the cluster's proxy: containers find the API server where its service says.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

PIECE = 1 << 16


async def main(host: str, port: str, to_host: str, to_port: str) -> None:
    """Until it is ended."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(to_host, int(to_port))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    server = await asyncio.start_server(serve, host, int(port))
    await server.serve_forever()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, and its end."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
