"""The protocol of client and job: names, formats, and signatures of objects in a store.

May import the standard library only. It is all that the client's engine imports of the runner.
"""
