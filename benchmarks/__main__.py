"""``python -m benchmarks [name…] [--quick]``: answer each question in a separate process."""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import figures

QUESTIONS = {  # and what makes it quick
    "imports": ["--quick"],
    "cli": ["--quick"],
    "sync_overhead": ["--quick"],
    "latency": ["--quick"],
    "printing": ["--quick"],
    "throughput": ["--quick"],
    "fanout": ["--quick"],
    "pack": ["--rounds", "1"],
    "kubernetes": ["--quick"],
}


def main() -> int:
    """Ask the questions that are named, or all; the number of those that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(QUESTIONS))
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of minutes")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.names) - set(QUESTIONS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(QUESTIONS)}")
    print(figures.machine())
    failed = 0
    for name in chosen.names or QUESTIONS:
        print(f"\n== {name}", flush=True)
        arguments = QUESTIONS[name] if chosen.quick else []
        answer = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments])
        failed += answer.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
