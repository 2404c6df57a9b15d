"""A real node, with real containers, for a machine that may be thrown away: ``tox -e node``."""
