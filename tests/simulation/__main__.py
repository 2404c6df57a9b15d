"""Play single seeds and print what happened: ``python -m tests.simulation [CHANGE …] 17 [18 …]``.

Changes are ``crowded``, ``collecting``, ``clustered``, ``forged``, ``strained``, ``budgeted``. For
``budgeted``, KINETIC_PRICES must name a file with a price of ``tpu-v5e-1``.
"""

from __future__ import annotations

import sys

from absl import logging

from .scenario import budgeted, chained, clustered, collecting, crowded, forged, play, strained

CHANGES = {it.__name__: it for it in (budgeted, clustered, collecting, crowded, forged, strained)}


def main(arguments: list[str]) -> int:
    """Return 1 if a seed breaks an invariant."""
    logging.set_verbosity(logging.FATAL)
    names = [it for it in arguments if it in CHANGES]
    change = chained(*(CHANGES[name] for name in names))
    reports = [play(int(seed), change=change) for seed in arguments[len(names) :]]
    for report in reports:
        print(report.text())
    return 1 if any(report.violation for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
