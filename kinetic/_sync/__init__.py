"""The bridge from threads to the event loop. Imports nothing of `aio`."""
