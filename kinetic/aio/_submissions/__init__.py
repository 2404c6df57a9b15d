"""Hold what a client knows of a submission: its names, manifest, items, and their states.

These modules read the store and note what others observe. They start and end nothing. They may
import `_preparing`, the ports, the values, and the runner's protocol, but nothing of the engine.
"""
