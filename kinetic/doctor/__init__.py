"""The checks of ``kinetic doctor``, a module per subject, and the code that runs them.

These modules may import every adapter. The checks need neither gcloud nor kubectl. They leave
nothing behind: the checks of a store write one small object and remove it.
"""
