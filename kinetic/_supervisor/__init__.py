"""The local platform: a supervisor process that owns this machine's slots and runs jobs in them.

The package imports only the standard library and small modules of kinetic, such as the runner, so
that the process starts in milliseconds. The process outlives its clients, which connect to it
through `kinetic.aio.local.cluster`.
"""
