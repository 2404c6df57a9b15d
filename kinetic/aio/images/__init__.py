"""The Images port: what image a job runs in, and who builds it.

May import the ports, `aio._net`, and the values; no other
adapter, nothing of the engine.
"""
