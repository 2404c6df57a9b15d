"""What leaves this machine: the project's archive, the function and its arguments.

Synchronous: the engine calls it from worker threads. May import the values and the runner's
protocol; nothing of `kinetic.aio`.
"""
