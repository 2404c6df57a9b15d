"""A file whose function `kinetic run` is asked to run on a cluster."""

from __future__ import annotations

import kinetic
from tests.gke.conftest import IMAGE


@kinetic.run(accelerator="cpu", container_image=IMAGE, cpu=0.1)
def double(x: int) -> int:
    print("doubling", x)
    if x < 0:
        raise ValueError("below zero")
    return 2 * x
