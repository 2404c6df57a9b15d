"""Implement the port `Store` for a bucket of Cloud Storage.

Its modules may import the ports, `aio._net`, and the values, but no other adapter or the engine.
"""
