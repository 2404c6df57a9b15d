"""The client's half of the local platform: its cluster, its store, and what collects them."""
