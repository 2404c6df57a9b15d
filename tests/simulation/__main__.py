"""Play single seeds and tell what happened: ``python -m tests.simulation [crowded] 17 [18 …]``."""

from __future__ import annotations

import sys

from absl import logging

from .scenario import crowded, play


def main(seeds: list[str]) -> int:
    logging.set_verbosity(logging.FATAL)
    bad = 0
    many = seeds[:1] == ["crowded"]
    for seed in seeds[many:]:
        report = play(int(seed), change=crowded) if many else play(int(seed))
        print(report.told())
        bad += report.violation is not None
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
