"""``python -m benchmarks [name…] [--quick] [--record FILE]``: answer each question in a process.

``--record`` also appends the figures to FILE, for ``python -m benchmarks.record``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

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
    parser.add_argument("--record", type=Path, metavar="FILE", help="also append the figures to it")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.names) - set(QUESTIONS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(QUESTIONS)}")
    print(figures.machine())
    if chosen.record:
        os.environ[figures.RECORD] = str(chosen.record.absolute())
    failed = 0
    for name in chosen.names or QUESTIONS:
        print(f"\n== {name}", flush=True)
        run = {"name": name, "machine": figures.machine(), "version": version()}
        figures.record("question", run)
        arguments = QUESTIONS[name] if chosen.quick else []
        answer = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments])
        failed += answer.returncode != 0
    return failed


def version() -> str:
    """Return the commit of this clone, or "unknown"."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    said = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
