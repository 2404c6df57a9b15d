"""A worker: it opens a submission once, and then runs items until none is left for it."""
