"""What is done with a call before anything of it starts: it is checked, pickled, and uploaded.

These modules turn a function, its arguments or inputs, and its `Data` into content of the store.
They may import packing, the connection, the ports, and the values, but nothing of a submission.
"""
