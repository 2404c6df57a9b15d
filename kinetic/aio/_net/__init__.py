"""What all adapters need to talk to a server: sessions, tokens, retries.

May import the ports, errors and values.
"""
