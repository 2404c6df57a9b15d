"""A job's access to its store, a directory or a bucket. It may import the protocol."""
