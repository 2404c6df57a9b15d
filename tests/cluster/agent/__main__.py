"""``python -m tests.cluster.agent``: takes its settings and orders from standard input, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.cluster.agent.kubelet import Kubelet, Settings
from tests.cluster.rest import Account, Session


async def main() -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    given = json.loads(await reader.readline())
    account = Account(server=given["server"], ca=Path(given["ca"]), token=given["token"])
    settings = Settings(
        account=account,
        certificate=Path(given["certificate"]),
        key=Path(given["key"]),
        port=given["port"],
        folder=Path(given["folder"]),
    )
    orders: asyncio.Queue[Callable[[Kubelet], Awaitable[None]] | None] = asyncio.Queue(100)
    async with Session(account) as session, asyncio.TaskGroup() as group:
        group.create_task(Kubelet(settings, session).serve(orders), name="kubelet")
        while line := await reader.readline():
            await orders.put(ordered(json.loads(line)))
        await orders.put(None)


def ordered(order: dict[str, Any]) -> Callable[[Kubelet], Awaitable[None]]:
    """One order; its answer goes to standard output."""

    async def follow(kubelet: Kubelet) -> None:
        try:
            await getattr(kubelet, order["do"])(**order["with"])
            answer = {"error": None}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)

    return follow


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # ours, not our containers'
    asyncio.run(main())
