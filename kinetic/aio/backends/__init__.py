"""Compositions of adapters, one module a backend; `kinetic.aio.platforms` names them."""
