"""Play single seeds and print what happened: ``python -m tests.simulation [crowded] 17 [18 …]``.

Instead of ``crowded``, you can pass ``collecting``, ``forged``, or ``budgeted``. For ``budgeted``,
KINETIC_PRICES must name a file with a price of ``tpu-v5e-1``.
"""

from __future__ import annotations

import sys

from absl import logging

from .scenario import budgeted, collecting, crowded, forged, play


def main(seeds: list[str]) -> int:
    logging.set_verbosity(logging.FATAL)
    failed = 0
    changes = {change.__name__: change for change in (budgeted, collecting, crowded, forged)}
    change = changes.get(seeds[0] if seeds else "")
    for seed in seeds[change is not None :]:
        report = play(int(seed), change=change) if change else play(int(seed))
        print(report.text())
        failed += report.violation is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
