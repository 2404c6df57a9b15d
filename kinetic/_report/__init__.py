"""One HTML page about a batch: what is known of it, its statistics, and the page of both.

Pure: no event loop, no store. `kinetic.aio._engine.report` reads what it is made of. May import
the public values, what counts items for the display, and the runner's protocol.
"""
