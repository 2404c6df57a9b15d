"""Pack what a job gets from this machine: the project, the function, and its arguments.

Synchronous: the engine calls it from worker threads. May import the values and the runner's
protocol; nothing of `kinetic.aio`.
"""
