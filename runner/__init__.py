"""What runs beside the user's function: in the pod, or in a process of this machine.

It imports nothing of kinetic. The client imports `wire`, `frames`, `pickles`
and `directory` from here, under the name ``kinetic._runner``; in a job the
same files are the package ``kinetic_runner``.
"""
