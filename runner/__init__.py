"""The runner: runs the user's function in a pod, or in a process of this machine.

It imports no other part of kinetic. In the client, it is the package ``kinetic._runner``. The
client imports `protocol`, and the local platform also imports what it shares with jobs. In a job,
the same files are the package ``kinetic_runner``.
"""
