"""Implement `kinetic.aio.ports.Cluster` for Kubernetes, for jobs on one host or several.

The modules of this package may import the ports, `aio._net`, and the values. They import neither
another adapter nor the engine.
"""
