"""An HTML page about a batch: its facts, their statistics, and the page that shows both.

Pure functions, without event loop and store: `kinetic.aio._engine.report` reads the facts. May
import the public values, `kinetic._progress.tally`, and the runner's protocol.
"""
