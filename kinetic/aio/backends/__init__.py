"""Compositions of adapters, one module a backend; `kinetic.aio.platforms` names them.

May import every adapter; nothing may import it.
"""
