"""The protocol of client and job: names, formats, and signatures of objects in a store; messages.

It imports only the standard library and cloudpickle. The client's engine imports no other part of
the runner.
"""
