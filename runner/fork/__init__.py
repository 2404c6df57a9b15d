"""A job forked from a process that has imported what jobs need. May import all but `pod`."""
