"""What the tests of the face need of pytest."""

from __future__ import annotations

import asyncio

# Without this, asyncio makes up a loop for the main thread when pytest-asyncio asks for "the" loop,
# and nobody closes it: the warning would fail whichever test the garbage collector runs in.
asyncio.set_event_loop(None)
