"""What leaves this machine: the project's archive, the function and its arguments.

Everything here is synchronous and knows nothing of asyncio; the engine calls
it from worker threads.
"""
