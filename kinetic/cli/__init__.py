"""The command ``kinetic``: one module for each group of commands, all on the asyncio face.

Importing these modules loads click and nothing of kinetic that is heavy: a command
imports what it needs when it runs. Values are never unpickled unless that is asked for.
"""
