"""A sweep of 1,000 throws in plain sync code: which angle carries a ball farthest?

python examples/sync_sweep.py [THROWS]

A live line shows how far it is. Ctrl-C ends it, and nothing is left running.
Should this very process be killed, the batch can be found and finished from
any other one: see docs/guides/batches.md.
"""

from __future__ import annotations

import sys

from throwing import angles, reach

from kinetic import Succeeded


def main(throws: int) -> None:
    best, farthest = 0.0, 0.0
    with reach.run_async_map(angles(throws), name="throws", retries=2) as batch:
        for _, angle, outcome in batch.outcomes():
            match outcome:
                case Succeeded(metres) if metres > farthest:
                    best, farthest = angle, metres
                case Succeeded():
                    pass
                case _:
                    print(f"{angle:.2f}°: {outcome.error}", file=sys.stderr)
    print(f"the best of {throws} throws: {best:.2f}° carries {farthest:.2f} m")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
