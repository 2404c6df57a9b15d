"""One attempt at a job, from its order to its outcome.

The package may import `stores` and `protocol`.
"""
