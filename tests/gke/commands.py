"""Define the function that `kinetic run` runs on a cluster."""

from __future__ import annotations

from tests.cluster.fixtures import on_cluster


@on_cluster
def double(x: int) -> int:
    print("doubling", x)
    if x < 0:
        raise ValueError("below zero")
    return 2 * x
