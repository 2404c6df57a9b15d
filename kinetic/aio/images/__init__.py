"""Implement the port `Images`: choose the image that a job runs in, and build it if it is missing.

Its modules may import the ports, `aio._net`, and the values, but no other adapter or the engine.
"""
