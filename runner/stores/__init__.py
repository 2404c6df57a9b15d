"""A job's access to its store, a directory or a bucket.

The package may import `protocol`.
"""
