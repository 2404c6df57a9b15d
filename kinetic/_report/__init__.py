"""The HTML report of a batch: read the facts, compute statistics, render the page.

Pure functions, without event loop and store: `kinetic.aio._engine.report` reads the facts. May
import the public values, `kinetic._progress.tally`, and the runner's protocol.
"""
