"""The client's half of the local platform: its cluster, its store, and what collects them.

May import the ports, the values, `kinetic._supervisor` and the runner's store of a directory;
no other adapter, nothing of the engine.
"""
