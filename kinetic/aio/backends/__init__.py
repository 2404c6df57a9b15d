"""Compositions of adapters, one module per backend; `kinetic.aio.platforms` lists them.

These modules may import every adapter. The adapters and the engine don't import these modules.
"""
