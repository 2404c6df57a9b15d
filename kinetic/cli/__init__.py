"""The command ``kinetic``: one module for each group of commands, over `kinetic.aio`.

Importing these modules loads click and no heavy module: a command imports what it needs when it
runs. Values are unpickled only with ``--unpickle``.
"""
