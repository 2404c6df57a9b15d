"""How long does a command of ``kinetic`` take, and how many modules does it load?

Fresh processes, with a bare interpreter in the same rounds to compare with:
``--help``, and ``jobs list`` and ``batches list`` on a store with few and with
many jobs and batches; with ``--peer PYTHON``, an interpreter that has it, also
``--help`` of keras-kinetic. A regression: ``--help`` takes more than 6 times
a bare interpreter, or a list of many more than 3 times one of few.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import figures, setting

FEW, MANY = (10, 2), (1000, 100)
KINETIC = "from kinetic.cli.app import main; main({arguments!r})"
PEER = "import sys; sys.argv = ['kinetic', '--help']; from kinetic.cli.main import cli; cli()"
PROBE = """
import sys
before = len(sys.modules)
try:
    {code}
finally:
    print("modules", len(sys.modules) - before, file=sys.stderr)
"""


def probe(code: str, python: str = sys.executable) -> tuple[float, int]:
    """Seconds of the process as it is; modules, by another one, beyond a bare interpreter's."""
    started = time.perf_counter()
    subprocess.run([python, "-c", code], capture_output=True, check=True)
    wall = time.perf_counter() - started
    told = subprocess.run(
        [python, "-c", PROBE.format(code=code)], capture_output=True, check=True, text=True
    )
    return wall, int(told.stderr.rpartition("modules ")[2])


def filled(scratch: Path, jobs: int, batches: int) -> Path:
    """Make a home whose store has *jobs* ended jobs and *batches* ended batches."""
    program = (
        "import kinetic.jobs, work\n"
        "square = kinetic.run('cpu')(work.square)\n"
        f"for job in [kinetic.jobs.submit(square, n) for n in range({jobs})]: job.wait()\n"
        f"for n in range({batches}): square.run_async_map([n]).wait()\n"
    )
    with setting.home(scratch, slots=2) as home:
        kept = scratch / f"kept-{jobs}"
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        home.rename(kept)
        home.mkdir()
    return kept


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, jobs and batches")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has keras-kinetic")
    chosen = parser.parse_args()
    rounds = chosen.rounds or (3 if chosen.quick else 15)
    many = (100, 20) if chosen.quick else MANY
    with setting.scratch() as scratch, setting.project(scratch):
        homes = {"few": filled(scratch, *FEW), "many": filled(scratch, *many)}
        os.environ["KINETIC_BACKEND"] = "local"
        orders = {"bare interpreter": ("pass", "few", sys.executable)}
        help_of = KINETIC.format(arguments=["--help"])
        orders["kinetic --help"] = (help_of, "few", sys.executable)
        if chosen.peer:
            orders["keras-kinetic --help"] = (PEER, "few", chosen.peer)
        for what in ("jobs", "batches"):
            code = KINETIC.format(arguments=[what, "list"])
            orders |= {f"{what} list, {size}": (code, size, sys.executable) for size in homes}
        seen: dict[str, list[tuple[float, int]]] = {name: [] for name in orders}
        for turn in range(rounds + 1):  # the first compiles what has to be
            for name, (code, size, python) in orders.items():
                os.environ["KINETIC_HOME"] = str(homes[size])
                took = probe(code, python)
                if turn:
                    seen[name].append(took)
        walls = {name: [wall for wall, _ in runs] for name, runs in seen.items()}
        figures.head(f"{rounds} rounds, {many[0]} jobs", "modules", "median ms", "min ms", "x bare")
        for name, runs in seen.items():
            ratio = figures.ratio(walls[name], walls["bare interpreter"])
            figures.row(name, runs[-1][1], *figures.shown(walls[name], 1e3, 0), f"{ratio:.1f}")


if __name__ == "__main__":
    main()
