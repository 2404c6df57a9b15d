"""The progress that users see: steps, tallies, and the surfaces on which they are drawn.

May import the public values and the runner's protocol.
"""
