"""How many modules does an import load, and how long does it take?

Modules beyond those of a bare interpreter, and milliseconds in a fresh process,
with `import asyncio` in the same rounds to compare with. A regression: more
than the one module for ``import kinetic`` (tests/test_imports.py asserts it),
or a higher ratio to `asyncio` for the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import figures

ROOT = Path(__file__).parents[1]
IMPORTS = {
    "import asyncio": "import asyncio",
    "import kinetic": "import kinetic",
    "kinetic.run": "import kinetic; kinetic.run()(lambda: 0)",
    "import kinetic.aio": "import kinetic.aio",
    "kinetic.aio.Client()": "import kinetic.aio; kinetic.aio.Client(backend='local')",
}
PROBE = """
import json, sys, time
before, started = len(sys.modules), time.perf_counter()
{code}
print(json.dumps([time.perf_counter() - started, len(sys.modules) - before]))
"""


def probe(code: str) -> tuple[float, int]:
    """Return the seconds and the modules of an import."""
    command = [sys.executable, "-c", PROBE.format(code=code)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    wall, modules = json.loads(output)
    return wall, modules


def main() -> None:
    """Print the table."""
    effort = figures.effort(__doc__, full=20, quick=5)
    results = {name: [probe(code)] for name, code in IMPORTS.items()}  # the first run compiles
    for _ in range(effort.rounds):
        for name, code in IMPORTS.items():
            results[name].append(probe(code))
    walls = {name: [wall for wall, _ in runs[1:]] for name, runs in results.items()}
    figures.head(f"{effort.rounds} rounds", "modules", "median ms", "min ms", "x asyncio")
    for name, runs in results.items():
        ratio = figures.ratio(walls[name], walls["import asyncio"])
        figures.row(name, runs[-1][1], *figures.median_and_min(walls[name], 1e3), f"{ratio:.2f}")


if __name__ == "__main__":
    main()
