"""Sessions, tokens, and retries for all adapters that talk to a server.

May import the ports, errors and values.
"""
