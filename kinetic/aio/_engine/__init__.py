"""A submission of one item or many, from the call to its outcomes.

May import the ports, the lease, `_net.retry`, packing, the values and the runner's
protocol; nothing of an adapter.
"""
