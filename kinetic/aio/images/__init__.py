"""The Images port: what image a job runs in, and who builds it.

May import the ports, `aio._net`, the lease (builds take turns) and the values; no other
adapter, nothing of the engine.
"""
