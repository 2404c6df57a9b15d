"""The HTML report of a batch: its facts, their statistics, and the page.

This folder uses neither an event loop nor the store: `kinetic.aio._reading.report` reads the facts.
May import the public values, `kinetic._progress.tally`, and the runner's protocol.
"""
