"""Build the platform of a backend from adapters; `kinetic.aio.platforms` lists the backends.

These modules may import every adapter. Adapters and the engine don't import them.
"""
