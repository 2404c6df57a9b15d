"""The problem of two of the examples: at which angle does a ball fly farthest?

Without air it would be 45°. With air there is no formula: each throw is
computed step by step, and a sweep tries a thousand of them.
"""

from __future__ import annotations

from math import cos, hypot, radians, sin

import kinetic

SPEED = 40.0  # metres a second: a good throw
DRAG = 0.0053  # one over metres: a baseball's
STEP = 0.002  # seconds


@kinetic.run(backend="local", accelerator="cpu")
def reach(angle: float) -> float:
    """How many metres a ball flies that is thrown at *angle* degrees."""
    x, y = 0.0, 1.5
    u, v = SPEED * cos(radians(angle)), SPEED * sin(radians(angle))
    while y > 0:
        drag = DRAG * hypot(u, v)
        u, v = u - STEP * drag * u, v - STEP * (drag * v + 9.81)
        x, y = x + STEP * u, y + STEP * v
    return x


def angles(count: int) -> list[float]:
    """So many angles between 0° and 90°."""
    return [90 * (n + 0.5) / count for n in range(count)]
