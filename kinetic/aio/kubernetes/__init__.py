"""The Cluster port for Kubernetes: requests, manifests, watches, logs, and sets of hosts.

May import the ports, `aio._net` and the values; no other adapter, nothing of the engine.
"""
