"""Check a call, pickle it, and upload it, before anything of it starts.

These modules turn a function, its arguments or inputs, and its `Data` into content of the store.
They may import packing, the connection, the ports, and the values, but nothing of a submission.
"""
