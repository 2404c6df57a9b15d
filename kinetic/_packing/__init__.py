"""Pack what a job gets from this machine: the project, the function, and its arguments.

Its functions block, so the engine calls them in worker threads. They import the value classes and
the runner's protocol, but nothing of `kinetic.aio`.
"""
