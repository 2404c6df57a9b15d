"""The local platform: a supervisor process that owns this machine's slots and runs jobs in them.

May import the standard library, the collector, `kinetic.errors` and the runner: it starts
in milliseconds and outlives its clients. The client talks to it through
`kinetic.aio.local.cluster`.
"""
