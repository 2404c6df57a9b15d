"""Run the tests' Cloud Storage server in a thread, for tests that aren't coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.gcs.server import GcsServer


@contextmanager
def served() -> Iterator[GcsServer]:
    """Run the server on an event loop in another thread; the caller may set its faults."""
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
