"""Pack what a job gets from this machine: the project, the function, and its arguments.

The functions of this folder block, so `aio._preparing` calls them in worker threads. Its modules
import the value classes and the runner's protocol, but nothing of `kinetic.aio`.
"""
