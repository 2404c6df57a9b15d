"""Run a submission: begin it, ask for workers, and find its ends.

These modules decide and act. They may import `_submissions`, `_preparing`, the lease, and
`_net.retry`, but neither an adapter nor `_reading`.
"""
