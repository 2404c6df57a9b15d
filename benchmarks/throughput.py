"""How many isolated jobs with durable results run in a second, at 1 and at 2 slots?

Jobs per second of a batch that squares numbers, from the call to the list of
values; no file is synced to the disk. Each contender takes a turn in a round, in memory
with a project of 5 files; then kinetic and the bare fork server do so in memory and
on the disk of the default home, with 5 and with 100 files. Ratios are taken within a
round. Run it as root and as an ordinary user: they mount in different ways. A
regression: less than 0.5 of the bare fork server in memory, or, on the disk, less
than 0.7 of the rate of 5 files with 100.

For kinetic and the bare fork server also: processor milliseconds per job of
all processes involved, and the minor page faults of a job's process.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field

from benchmarks import figures, setting
from benchmarks.contenders import BARE, CONTENDERS, FRESH, KINETIC, Contender

JOBS, QUICK_JOBS, MIN_JOBS = 1000, 120, 5
QUICK = (BARE, KINETIC, FRESH)
LIMIT_S = 600.0
"""Maximum seconds of one round; a contender that takes longer leaves the comparison."""


@dataclass(slots=True)
class Measurements:
    """Jobs per second, and milliseconds (or faults) per job by name, of each round."""

    rates: list[float] = field(default_factory=list)
    costs: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


HOMES = [(disk, files) for disk in (False, True) for files in (5, 100)]


def measure(
    contender: Contender, slots: int, jobs: int, measurements: Measurements, *, disk: bool = False
) -> None:
    """Run one round of one contender."""
    with setting.scratch(disk=disk) as scratch, contender.open(slots, scratch) as session:
        use_before = {
            name: setting.resource_use(process) for name, process in session.processes.items()
        }
        client_before = client_seconds()
        started = time.perf_counter()
        values = session.run(range(jobs))
        measurements.rates.append(jobs / (time.perf_counter() - started))
        assert values == [number * number for number in range(jobs)], (
            f"{contender.name} computes wrongly"
        )
        if not session.processes:
            return
        session.settle()
        per_job = 1000 / jobs
        total_cpu = client_seconds() - client_before
        measurements.costs["client"].append(total_cpu * per_job)
        for name, process in session.processes.items():
            use_during = setting.resource_use(process).since(use_before[name])
            measurements.costs[name].append(use_during.own * per_job)
            total_cpu += use_during.own
        # Jobs are children of the last process in `Session.processes`, which the loop saw last.
        measurements.costs["job"].append(use_during.children * per_job)
        measurements.costs["all"].append((total_cpu + use_during.children) * per_job)
        measurements.costs["faults"].append(use_during.faults / jobs)


def client_seconds() -> float:
    """Return the processor time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def table(measurements_by_contender: dict[Contender, Measurements]) -> None:
    """Print rates and ratios."""
    rates = {
        contender.name: measurements.rates
        for contender, measurements in measurements_by_contender.items()
    }
    figures.head("", "median/s", "best/s", "x bare", "x fresh", "isolated", "durable")
    for contender, measurements in measurements_by_contender.items():
        rounds = len(measurements.rates)
        ratios = [
            f"{figures.ratio(measurements.rates, rates[name][:rounds]):.2f}"
            for name in (BARE, FRESH)
        ]
        figures.row(
            contender.name,
            f"{statistics.median(measurements.rates):.1f}",
            f"{max(measurements.rates):.1f}",
            *ratios,
            contender.isolated,
            contender.durable,
        )


def breakdown(measurements_by_contender: dict[Contender, Measurements]) -> None:
    """Print the median cost of each process per job."""
    names = ["client", "supervisor", "parent", "server", "job", "all", "faults"]
    figures.head("cpu ms per job", *names)
    for contender, measurements in measurements_by_contender.items():
        if measurements.costs:
            cells = [
                f"{statistics.median(measurements.costs[name]):.{0 if name == 'faults' else 2}f}"
                if name in measurements.costs
                else ""
                for name in names
            ]
            figures.row(contender.name, *cells)


def compare_homes(effort: figures.Effort) -> None:
    """Print kinetic's rates where the home, and the size of the project, differ."""
    jobs = QUICK_JOBS if effort.quick else JOBS // 2
    contenders = {
        contender.name: contender for contender in CONTENDERS if contender.name in (BARE, KINETIC)
    }
    rates: dict[tuple[str, bool, int], list[float]] = {}
    for _ in range(effort.rounds):
        for disk, files in HOMES:
            with setting.scratch(disk=disk) as scratch, setting.project(scratch, files):
                for name, contender in contenders.items():
                    measurements = Measurements()
                    measure(contender, 2, jobs, measurements, disk=disk)
                    rates.setdefault((name, disk, files), []).extend(measurements.rates)
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    figures.caption(f"2 slots, {effort.rounds} rounds of {jobs} jobs, as {user}")
    figures.head("kinetic", "median/s", "best/s", "x bare", "x 5 files")
    for disk, files in HOMES:
        kinetic_rates = rates[KINETIC, disk, files]
        figures.row(
            f"{'disk' if disk else 'memory'}, {files} files",
            f"{statistics.median(kinetic_rates):.1f}",
            f"{max(kinetic_rates):.1f}",
            f"{figures.ratio(kinetic_rates, rates[BARE, disk, files]):.2f}",
            f"{figures.ratio(kinetic_rates, rates[KINETIC, disk, 5]):.2f}",
        )


def main() -> None:
    """Print the tables."""
    effort = figures.effort(__doc__, full=5, quick=2)
    total = QUICK_JOBS if effort.quick else JOBS
    contenders = [contender for contender in CONTENDERS if contender.installed]
    if effort.quick:
        contenders = [contender for contender in contenders if contender.name in QUICK]
    with setting.scratch() as scratch, setting.project(scratch):
        for slots in (1, 2):
            measurements_by_contender = {contender: Measurements() for contender in contenders}
            for number in range(effort.rounds):
                for contender in contenders.copy():
                    if number >= contender.rounds:
                        continue
                    jobs = max(MIN_JOBS, int(total * contender.share))
                    try:
                        with figures.time_limit(LIMIT_S):
                            measure(contender, slots, jobs, measurements_by_contender[contender])
                    except TimeoutError as error:
                        print(f"{contender.name}, {jobs} jobs: {error}, so left out", flush=True)
                        contenders.remove(contender)
            figures.caption(
                f"{slots} slots, {effort.rounds} rounds of {total} jobs, in {scratch.parent}"
            )
            measurements_by_contender = {
                contender: measurements
                for contender, measurements in measurements_by_contender.items()
                if measurements.rates
            }
            table(measurements_by_contender)
            breakdown(measurements_by_contender)
            print()
    compare_homes(effort)
    missing = [contender.name for contender in CONTENDERS if not contender.installed]
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}")


if __name__ == "__main__":
    main()
