"""The progress that users see: steps, tallies, and where they are drawn.

May import the public values and the runner's protocol.
"""
