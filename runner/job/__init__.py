"""One attempt at a job, from its order to its outcome. It may import stores and the protocol."""
