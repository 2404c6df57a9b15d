"""Compositions of adapters, one module per backend; `kinetic.aio.platforms` lists them.

May import every adapter; nothing may import it.
"""
