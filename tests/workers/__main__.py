"""Play single seeds and print what happened: ``python -m tests.workers 17 [18 …]``."""

from __future__ import annotations

import sys

from .scenario import play


def main(seeds: list[str]) -> int:
    """Return 1 if a seed breaks an invariant."""
    reports = [play(int(seed)) for seed in seeds]
    for report in reports:
        print(report.text())
    return 1 if any(report.violation for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
