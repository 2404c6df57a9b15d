"""The Images port: which image a job runs in, and how it is built.

May import the ports, `aio._net`, and the values; no other adapter, and nothing of the engine.
"""
