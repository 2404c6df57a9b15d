"""The bridge from threads to the event loop. May import errors and the values, nothing of `aio`."""
