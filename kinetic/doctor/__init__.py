"""What ``kinetic doctor`` checks, by subject, and what runs the checks.

It may import every adapter. It needs neither gcloud nor kubectl, and leaves nothing behind: the
checks of a bucket write one small object and remove it.
"""
