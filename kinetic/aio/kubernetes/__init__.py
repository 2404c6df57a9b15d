"""Implement `kinetic.aio.ports.Cluster` for Kubernetes, for jobs on one host or several.

May import the ports, `aio._net` and the values; no other adapter, and nothing of the engine.
"""
