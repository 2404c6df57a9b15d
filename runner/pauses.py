"""The pauses between polls, for every loop in the runner that waits for another process.

The client's loops use tenacity, but a job's image may lack it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator


def pauses(first_s: float, longest_s: float, total_s: float = math.inf) -> Iterator[float]:
    """Yield pauses in seconds until *total_s* is over.

    Each pause is 1.5 times the one before, up to *longest_s*. Up to a quarter of each pause is
    random, so that pods that failed together don't retry together.
    """
    import random  # each fork would seed its generator

    end, pause = time.monotonic() + total_s, first_s
    while time.monotonic() < end:
        yield pause * random.uniform(0.75, 1.0)
        pause = min(longest_s, pause * 1.5)
