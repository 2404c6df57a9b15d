"""What a person sees of work under way: steps, tallies, and where they are shown.

May import the public values and the runner's protocol.
"""
