"""Play single seeds and tell what happened: ``python -m tests.simulation 17 [18 …]``."""

from __future__ import annotations

import sys

from absl import logging

from .scenario import play


def main(seeds: list[str]) -> int:
    logging.set_verbosity(logging.FATAL)
    bad = 0
    for seed in seeds:
        report = play(int(seed))
        print(report.told())
        bad += report.violation is not None
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
