"""What client and job agree on: names, formats and signatures of what lies in a store.

May import the standard library only. It is all that the client's engine imports of the runner.
"""
