"""Play single seeds and tell what happened: ``python -m tests.simulation [crowded] 17 [18 …]``.

In place of ``crowded`` it may say ``collecting``, ``forged``, or ``budgeted`` where KINETIC_PRICES
names a file with a price of ``tpu-v5e-1``.
"""

from __future__ import annotations

import sys

from absl import logging

from .scenario import budgeted, collecting, crowded, forged, play


def main(seeds: list[str]) -> int:
    logging.set_verbosity(logging.FATAL)
    bad = 0
    changes = {one.__name__: one for one in (budgeted, collecting, crowded, forged)}
    change = changes.get(seeds[0] if seeds else "")
    for seed in seeds[change is not None :]:
        report = play(int(seed), change=change) if change else play(int(seed))
        print(report.told())
        bad += report.violation is not None
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
