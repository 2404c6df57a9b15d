"""Implement the port `Images`: choose the image that a job runs in, and build it if it is missing.

The modules of this package may import the ports, `aio._net`, and the values. They import neither
another adapter nor the engine.
"""
