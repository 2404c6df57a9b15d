"""A job's access to its store, a directory or a bucket. May import the protocol."""
