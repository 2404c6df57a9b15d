"""The bridge by which threads call coroutines on kinetic's loop. It imports nothing of `aio`."""
