"""The client's side of the local platform: its cluster, its store, and its garbage collection.

May import the ports, the values, `kinetic._supervisor` and the runner's store of a directory;
no other adapter, nothing of the engine.
"""
