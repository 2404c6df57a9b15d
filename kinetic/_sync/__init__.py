"""The bridge by which threads call coroutines on kinetic's event loop. Imports nothing of `aio`."""
