"""Read submissions for a user: their outcomes, progress, metrics, records, and lists.

These modules change nothing. They may import the engine, which imports none of them.
"""
