"""What all adapters need to talk to a server: sessions, tokens, retries.

May import errors and values.
"""
