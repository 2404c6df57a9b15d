"""The small Cloud Storage of the tests, with its faults, for what is no coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.gcs.server import GcsServer


@contextmanager
def served() -> Iterator[GcsServer]:
    """The server on a loop in a thread of its own; faults may be set from here."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gcs-server")
    thread.start()
    try:
        server = GcsServer()
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(60)
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
