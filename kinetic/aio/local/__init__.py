"""The client's side of the local platform: its cluster, its store, and the way to its supervisor.

Its modules import the ports, `kinetic._supervisor`, and the runner's store of a directory. They
import no other adapter, and nothing of the engine.
"""
