"""Implement the port `Store` for a bucket of Cloud Storage.

The modules of this package may import the ports, `aio._net`, and the values. They import neither
another adapter nor the engine.
"""
