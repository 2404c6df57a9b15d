"""What runs a submission: it begins the submission, asks for workers, and finds its ends.

These modules decide and act. They may import `_submissions`, `_preparing`, the lease, and
`_net.retry`, but neither an adapter nor `_reading`.
"""
