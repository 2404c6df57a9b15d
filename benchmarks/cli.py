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
    """Return the seconds of a process, and the number of modules that *code* loads."""
    started = time.perf_counter()
    subprocess.run([python, "-c", code], capture_output=True, check=True)
    wall = time.perf_counter() - started
    completed = subprocess.run(
        [python, "-c", PROBE.format(code=code)], capture_output=True, check=True, text=True
    )
    return wall, int(completed.stderr.rpartition("modules ")[2])


def make_home(scratch: Path, jobs: int, batches: int) -> Path:
    """Make a home whose store has *jobs* ended jobs and *batches* ended batches."""
    program = (
        "import kinetic.jobs, work\n"
        "square = kinetic.run('cpu')(work.square)\n"
        f"for job in [kinetic.jobs.submit(square, n) for n in range({jobs})]: job.wait()\n"
        f"for n in range({batches}): square.run_async_map([n]).wait()\n"
    )
    with setting.home(scratch, slots=2) as home:
        filled_home = scratch / f"kept-{jobs}"
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        home.rename(filled_home)
        home.mkdir()
    return filled_home


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, jobs and batches")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has keras-kinetic")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 15)
    many = (100, 20) if options.quick else MANY
    with setting.scratch() as scratch, setting.project(scratch):
        homes = {"few": make_home(scratch, *FEW), "many": make_home(scratch, *many)}
        os.environ["KINETIC_BACKEND"] = "local"
        commands = {"bare interpreter": ("pass", "few", sys.executable)}
        help_code = KINETIC.format(arguments=["--help"])
        commands["kinetic --help"] = (help_code, "few", sys.executable)
        if options.peer:
            commands["keras-kinetic --help"] = (PEER, "few", options.peer)
        for group in ("jobs", "batches"):
            code = KINETIC.format(arguments=[group, "list"])
            commands |= {f"{group} list, {size}": (code, size, sys.executable) for size in homes}
        measurements: dict[str, list[tuple[float, int]]] = {name: [] for name in commands}
        for number in range(rounds + 1):  # the first round compiles
            for name, (code, size, python) in commands.items():
                os.environ["KINETIC_HOME"] = str(homes[size])
                measurement = probe(code, python)
                if number:
                    measurements[name].append(measurement)
        walls = {name: [wall for wall, _ in runs] for name, runs in measurements.items()}
        figures.head(f"{rounds} rounds, {many[0]} jobs", "modules", "median ms", "min ms", "x bare")
        for name, runs in measurements.items():
            ratio = figures.ratio(walls[name], walls["bare interpreter"])
            figures.row(
                name, runs[-1][1], *figures.median_and_min(walls[name], 1e3, 0), f"{ratio:.1f}"
            )


if __name__ == "__main__":
    main()
