"""Fork jobs from a process that has imported what they need.

The package may import all of the runner but `pod`.
"""
