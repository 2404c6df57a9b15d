"""Sessions, tokens, and retries for all adapters that talk to a server.

Its modules may import the ports, the errors, and the values.
"""
