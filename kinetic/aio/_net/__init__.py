"""Sessions, tokens, and retries for all adapters that talk to a server.

The modules of this package may import the ports, the errors, and the values.
"""
