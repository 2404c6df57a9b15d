"""How many isolated jobs with durable results run in a second, at 1 and at 2 slots?

Jobs per second of a batch that squares numbers, from the call to the list of
values; no file is synced to the disk. Everybody takes a turn in a round, in memory
with a project of 5 files; then kinetic and the bare fork server do so in memory and
on the disk of the default home, with 5 and with 100 files. Ratios are taken within a
round. Run it as root and as an ordinary user: they mount in different ways. A
regression: less than 0.5 of the bare fork server in memory, or, on the disk, less
than 0.7 of the rate of 5 files with 100.

For kinetic and the bare fork server also: processor milliseconds per job of
everybody involved, and the minor page faults of a job's process.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from dataclasses import dataclass, field

from benchmarks import figures, setting
from benchmarks.contenders import BARE, CONTENDERS, FRESH, KINETIC, Contender

JOBS, QUICK_JOBS, FEWEST = 1000, 120, 5
QUICK = (BARE, KINETIC, FRESH)
LIMIT_S = 600.0
"""For one round of one contender; who takes longer is left out from then on."""


@dataclass(slots=True)
class Seen:
    """Jobs per second, and milliseconds (or faults) per job by name, of each round."""

    rates: list[float] = field(default_factory=list)
    costs: dict[str, list[float]] = field(default_factory=dict)

    def cost(self, name: str, value: float) -> None:
        """Note one cost of one round."""
        self.costs.setdefault(name, []).append(value)


PLACES = [(disk, files) for disk in (False, True) for files in (5, 100)]


def measure(contender: Contender, slots: int, jobs: int, seen: Seen, *, disk: bool = False) -> None:
    """One round of one contender."""
    with setting.scratch(disk=disk) as scratch, contender.open(slots, scratch) as crew:
        before = {name: setting.spent(process) for name, process in crew.processes.items()}
        client = client_seconds()
        started = time.perf_counter()
        values = crew.run(range(jobs))
        seen.rates.append(jobs / (time.perf_counter() - started))
        assert values == [x * x for x in range(jobs)], f"{contender.name} computes wrongly"
        if not crew.processes:
            return
        per_job = 1000 / jobs
        everybody = client_seconds() - client
        seen.cost("client", everybody * per_job)
        for name, process in crew.processes.items():
            used = setting.spent(process).since(before[name])
            seen.cost(name, used.own * per_job)
            everybody += used.own
        # The jobs are the children of whoever came last.
        seen.cost("job", used.children * per_job)
        seen.cost("all", (everybody + used.children) * per_job)
        seen.cost("faults", used.faults / jobs)


def client_seconds() -> float:
    """Processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def table(all_seen: dict[Contender, Seen]) -> None:
    """Rates and ratios."""
    rates = {contender.name: seen.rates for contender, seen in all_seen.items()}
    figures.head("", "median/s", "best/s", "x bare", "x fresh", "isolated", "durable")
    for contender, seen in all_seen.items():
        shared = len(seen.rates)
        ratios = [
            f"{figures.ratio(seen.rates, rates[name][:shared]):.2f}" for name in (BARE, FRESH)
        ]
        figures.row(
            contender.name,
            f"{statistics.median(seen.rates):.1f}",
            f"{max(seen.rates):.1f}",
            *ratios,
            contender.isolated,
            contender.durable,
        )


def breakdown(all_seen: dict[Contender, Seen]) -> None:
    """Where the time goes, median per job."""
    names = ["client", "supervisor", "parent", "server", "job", "all", "faults"]
    figures.head("cpu ms per job", *names)
    for contender, seen in all_seen.items():
        if seen.costs:
            cells = [
                f"{statistics.median(seen.costs[name]):.{0 if name == 'faults' else 2}f}"
                if name in seen.costs
                else ""
                for name in names
            ]
            figures.row(contender.name, *cells)


def places(effort: figures.Effort) -> None:
    """Print kinetic's rates where the home, and the size of the project, differ."""
    jobs = QUICK_JOBS if effort.quick else JOBS // 2
    both = {one.name: one for one in CONTENDERS if one.name in (BARE, KINETIC)}
    rates: dict[tuple[str, bool, int], list[float]] = {}
    for _ in range(effort.rounds):
        for disk, files in PLACES:
            with setting.scratch(disk=disk) as scratch, setting.project(scratch, files):
                for name, contender in both.items():
                    seen = Seen()
                    measure(contender, 2, jobs, seen, disk=disk)
                    rates.setdefault((name, disk, files), []).extend(seen.rates)
    who = "root" if os.geteuid() == 0 else "an ordinary user"
    figures.caption(f"2 slots, {effort.rounds} rounds of {jobs} jobs, as {who}")
    figures.head("kinetic", "median/s", "best/s", "x bare", "x 5 files")
    for disk, files in PLACES:
        mine = rates[KINETIC, disk, files]
        figures.row(
            f"{'disk' if disk else 'memory'}, {files} files",
            f"{statistics.median(mine):.1f}",
            f"{max(mine):.1f}",
            f"{figures.ratio(mine, rates[BARE, disk, files]):.2f}",
            f"{figures.ratio(mine, rates[KINETIC, disk, 5]):.2f}",
        )


def main() -> None:
    """Print the tables."""
    effort = figures.effort(__doc__, full=5, quick=2)
    total = QUICK_JOBS if effort.quick else JOBS
    chosen = [one for one in CONTENDERS if one.installed]
    if effort.quick:
        chosen = [one for one in chosen if one.name in QUICK]
    with setting.scratch() as scratch, setting.project(scratch):
        for slots in (1, 2):
            seen = {contender: Seen() for contender in chosen}
            for number in range(effort.rounds):
                for contender in chosen.copy():
                    if number >= contender.rounds:
                        continue
                    jobs = max(FEWEST, int(total * contender.share))
                    try:
                        with figures.limited(LIMIT_S):
                            measure(contender, slots, jobs, seen[contender])
                    except TimeoutError as late:
                        print(f"{contender.name}, {jobs} jobs: {late}, so left out", flush=True)
                        chosen.remove(contender)
            figures.caption(
                f"{slots} slots, {effort.rounds} rounds of {total} jobs, in {scratch.parent}"
            )
            seen = {contender: one for contender, one in seen.items() if one.rates}
            table(seen)
            breakdown(seen)
            print()
    places(effort)
    missing = [one.name for one in CONTENDERS if not one.installed]
    if missing:
        print(f"not installed, so left out: {', '.join(missing)}")


if __name__ == "__main__":
    main()
