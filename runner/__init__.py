"""What runs beside the user's function: in the pod, or in a process of this machine.

May import nothing of kinetic. To the client it is the package ``kinetic._runner``, of which
it imports `protocol`, and the local platform what it shares with jobs; in a job the same
files are the package ``kinetic_runner``.
"""
