"""The local platform: a supervisor process that owns this machine's slots and runs jobs in them.

Everything here loads the standard library only. The client talks to the
supervisor through `kinetic.aio.local.cluster`.
"""
