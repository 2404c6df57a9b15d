"""One attempt at a job, from its order to its outcome. May import stores and the protocol."""
