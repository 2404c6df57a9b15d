"""The checks of ``kinetic doctor``, a module per subject, and the code that runs them.

It may import every adapter. It needs neither gcloud nor kubectl, and leaves nothing behind: the
checks of a bucket write one small object and remove it.
"""
