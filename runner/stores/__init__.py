"""The stores as a job sees them: a directory, or a bucket. May import the protocol."""
