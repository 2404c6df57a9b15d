"""How jobs on a cluster end when somebody, or something, does something to their objects."""
