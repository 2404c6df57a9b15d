"""A job forked from a warm parent."""
