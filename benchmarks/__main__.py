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

QUESTIONS = (
    "imports",
    "cli",
    "sync_overhead",
    "latency",
    "printing",
    "throughput",
    "workers",
    "fanout",
    "sweeps",
    "pack",
    "kubernetes",
)


def main() -> int:
    """Answer the named questions, or all; return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(QUESTIONS))
    parser.add_argument("--quick", action="store_true", help="run for seconds instead of minutes")
    parser.add_argument("--record", type=Path, metavar="FILE", help="also append the figures to it")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(QUESTIONS))
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(QUESTIONS)}")
    print(figures.machine())
    # Images of Python often set this. Then each process compiles kinetic anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if options.record:
        os.environ[figures.RECORD] = str(options.record.absolute())
    failed = 0
    for name in options.names or QUESTIONS:
        print(f"\n== {name}", flush=True)
        question = {"name": name, "machine": figures.machine(), "version": version()}
        figures.record("question", question)
        arguments = ["--quick"] if options.quick else []
        completed = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments])
        failed += completed.returncode != 0
    return failed


def version() -> str:
    """Return the commit of this clone, or "unknown"."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    folder = Path(__file__).parent
    completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return completed.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
