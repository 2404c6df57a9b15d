"""What ``kinetic doctor`` looks at: checks with what they need, by subject, and what runs them.

It stands above all that runs jobs, and may import every adapter. Neither gcloud nor kubectl is
needed, and nothing changes that lasts: the checks of a bucket write one small object and remove it.
"""
