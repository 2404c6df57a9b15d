"""The way to a job's debugger: wait until it listens, and forward a port of this machine to it.

These modules may import the engine, which imports none of them.
"""
