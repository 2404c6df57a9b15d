"""The Store port for a bucket of Cloud Storage: requests, transfers, the store.

May import the ports, `aio._net` and the values; no other adapter, nothing of the engine.
"""
