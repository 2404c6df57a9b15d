"""How fast are jobs submitted to a Kubernetes cluster, and how soon is their outcome here?

A real control plane on loopback (`tests.cluster`) whose pods are processes of this machine, or with
``--node`` containers, and a GCS server that keeps its objects in memory. In each round everybody
takes a turn in a namespace and a bucket that are new: kinetic; a bare loop over aiohttp; and
keras-kinetic, the public package, in a separate virtualenv.

1. Submitting a batch while the scheduler stands still: from the call to the answer for the last of
   its Jobs, as the API server's audit log has it. The bare loop sends the very bytes that kinetic
   sent, 32 requests at a time. A regression: less than 0.5 of the bare loop.
2. A batch with room for a few pods at a time: how long after a function returned its value is
   here, until all are, and until nothing is left. The bare loop starts processes that only tell
   the time, and watches their pods: nobody can know sooner.
3. One job after the other, warm.
4. Requests of a batch of 20 that runs, a job, by what was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import figures, setting
from benchmarks.cluster import ours, raw, theirs
from benchmarks.cluster.place import Absent, Corner, Place, on_node, opened
from benchmarks.cluster.recorder import Tape, recording

KINETIC, RAW, PEER = "kinetic", "bare aiohttp loop", theirs.PACKAGE
SAME = "bare watch of kinetic's"
SIZES, QUICK_SIZES = (20, 200), (20,)
SLOTS = 4
"""Pods that run at a time: processes of a machine with few processors."""

IN_FLIGHT = 64
"""Jobs that are submitted and not over, as many as the others have by default."""

SINGLE = 5
COUNTED = 20
FINISH = '''"""What the jobs do."""

import time


def now(_: int) -> float:
    return time.time()
'''


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of all contenders."""

    place: Place
    peer: theirs.Peer | None
    rounds: int

    def order(self, number: int) -> list[str]:
        """The order of contenders in a round; each round begins with the next one."""
        names = [RAW, KINETIC, *([PEER] if self.peer else [])]
        first = number % len(names)
        return names[first:] + names[:first]

    def run(self, what: str, jobs: int, corner: Corner) -> Any:
        """See `theirs.Peer.run`."""
        assert self.peer is not None
        return self.peer.run(what, jobs, corner)


@dataclass(slots=True)
class Batches:
    """Seconds in each round: lag of each item, time to all values, time to removal."""

    lags: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    gone: list[float] = field(default_factory=list)

    def note(self, began: float, seen: Sequence[Sequence[float]], gone: float | None) -> None:
        """One batch: moments of a function's end and of its value's arrival."""
        lags = [arrived - ended for ended, arrived in seen]
        self.lags += lags
        self.medians.append(statistics.median(lags))
        self.values.append(max(arrived for _, arrived in seen) - began)
        if gone is not None:
            self.gone.append(gone - began)


# --- submitting ---


async def taped(place: Place, jobs: int) -> Tape:
    """Record the requests by which kinetic submits *jobs* jobs."""
    with place.corner() as corner:
        async with recording(place, corner) as tape:
            await ours.submit(place, tape.corner, jobs, warm=tape.requests.clear)
            return tape


def submitting(turns: Turns, jobs: int) -> None:
    """Rates and ratios."""
    place, seen, costs = turns.place, dict[str, list[float]](), dict[str, list[float]]()
    with place.plane.frozen_scheduler():
        tape = asyncio.run(taped(place, jobs))
        for number in range(turns.rounds):
            for name in turns.order(number):
                with place.corner() as corner:
                    before = 0 if name == RAW else 1
                    if name == RAW:
                        began, used = asyncio.run(raw.submit(place, corner, tape))
                    elif name == KINETIC:
                        began, used = asyncio.run(ours.submit(place, corner, jobs))
                    else:
                        said = turns.run("submit", jobs, corner)
                        began, used = said["began"], said["used"]
                    last = place.until_created(corner, before + jobs)[-1]
                    seen.setdefault(name, []).append(jobs / (last - began))
                    costs.setdefault(name, []).append(used / jobs * 1000)
    titles = ("median/s", "best/s", "x bare", "x kinetic", "cpu ms/job")
    figures.head(f"submitting {jobs}", *titles)
    for name, rates in seen.items():
        cells = [f"{statistics.median(rates):.1f}", f"{max(rates):.1f}"]
        cells += [f"{figures.ratio(rates, seen[other]):.3f}" for other in (RAW, KINETIC)]
        figures.row(name, *cells, f"{statistics.median(costs[name]):.1f}")


# --- until the outcome is here ---


def completing(turns: Turns, jobs: int) -> None:
    """Milliseconds after the end of the function, and seconds of the whole."""
    place, seen = turns.place, dict[str, Batches]()
    for number in range(turns.rounds):
        for name in turns.order(number):
            gone: float | None = None
            with place.corner() as corner:
                if name == RAW:
                    began, found = asyncio.run(raw.complete(place, corner, jobs, IN_FLIGHT))
                elif name == KINETIC:
                    began, parted, gone = asyncio.run(ours.complete(place, corner, jobs))
                    pods = [(ended, told) for ended, told, _ in parted]
                    seen.setdefault(SAME, Batches()).note(began, pods, None)
                    found = [(ended, arrived) for ended, _, arrived in parted]
                else:
                    said = turns.run("complete", jobs, corner)
                    began, found, gone = said["began"], said["seen"], said["removed"]
            assert len(found) == jobs, f"{name} has {len(found)} values of {jobs}"
            seen.setdefault(name, Batches()).note(began, found, gone)
    titles = ("p50 ms", "p99 ms", "max ms", "x bare", "x same pods", "values s", "removed s")
    figures.head(f"{jobs} jobs, {SLOTS} at a time", *titles)
    for name, one in seen.items():
        lags = sorted(one.lags)
        cells = [lags[len(lags) // 2], lags[int(len(lags) * 0.99)], lags[-1]]
        figures.row(
            name,
            *(f"{cell * 1000:.0f}" for cell in cells),
            f"{figures.ratio(one.medians, seen[RAW].medians):.1f}",
            f"{figures.ratio(one.medians, seen[SAME].medians):.2f}",
            f"{statistics.median(one.values):.1f}",
            f"{statistics.median(one.gone):.1f}" if one.gone else "",
        )


def single(turns: Turns) -> None:
    """Milliseconds of one job."""
    place, seen = turns.place, dict[str, list[Sequence[float]]]()
    with place.corner() as corner:
        seen[KINETIC] = list(asyncio.run(ours.one_by_one(place, corner, 1 + SINGLE)))[1:]
    if turns.peer is not None:
        with place.corner() as corner:
            seen[PEER] = turns.run("one_by_one", 1 + SINGLE, corner)["found"][1:]
    figures.head("one after the other", "submit ms", "after end ms", "call to value ms")
    for name, found in seen.items():
        parts = [
            [submitted - called for called, submitted, _, _ in found],
            [arrived - ended for _, _, ended, arrived in found],
            [arrived - called for called, _, _, arrived in found],
        ]
        figures.row(name, *(f"{statistics.median(part) * 1000:.0f}" for part in parts))


# --- requests ---


async def asked(turns: Turns, name: str) -> tuple[Counter[str], Counter[str]]:
    """Count the requests of a batch, from start to removal, to the API server and the GCS server.

    Not what its pods ask.
    """
    place = turns.place
    with place.corner() as corner:
        async with recording(place, corner) as tape:
            if name == KINETIC:
                _, found, _ = await ours.complete(place, tape.corner, COUNTED)
            else:
                said = await asyncio.to_thread(turns.run, "complete", COUNTED, tape.corner)
                found = said["seen"]
        assert len(found) == COUNTED, f"{name} has {len(found)} values of {COUNTED}"
        return place.requests(corner), tape.storage()


def counting(turns: Turns) -> None:
    """Requests by what was asked."""
    for name in (KINETIC, *((PEER,) if turns.peer else ())):
        api, storage = asyncio.run(asked(turns, name))
        for server, counted in (("API server", api), ("GCS", storage)):
            shown = ", ".join(f"{what} {number}" for what, number in counted.most_common())
            total = counted.total() / COUNTED
            print(f"{name}, batch of {COUNTED}: {server} {total:.1f} a job ({shown})")


@contextlib.contextmanager
def project(scratch: Path) -> Iterator[None]:
    """Stand in a small project with the function of the jobs."""
    with setting.project(scratch):
        Path("finish.py").write_text(FINISH)
        del os.environ["PYTHONPATH"]  # pods have their own
        yield


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of 20 jobs, without others")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument("--peer", metavar="PYTHON", help=f"an interpreter that has {PEER}")
    parser.add_argument("--alone", action="store_true", help=f"without {PEER}")
    parser.add_argument("--node", action="store_true", help="containers on a real node; as root")
    chosen: Any = parser.parse_args()
    sizes = QUICK_SIZES if chosen.quick else SIZES
    alone = chosen.alone or chosen.node or (chosen.quick and not chosen.peer)
    python = None if alone else theirs.installed(chosen.peer)
    try:
        with (
            setting.scratch() as scratch,
            project(scratch),
            on_node(scratch) if chosen.node else opened(scratch, SLOTS) as place,
        ):
            peer = theirs.Peer(place, python, scratch) if python else None
            turns = Turns(place, peer, chosen.rounds or (1 if chosen.quick else 3))
            if not chosen.node:  # its containers reach no recorder
                for size in sizes:
                    submitting(turns, size)
                    print(flush=True)
                counting(turns)
                print(flush=True)
            single(turns)
            for size in sizes:
                print(flush=True)
                completing(turns, size)
    except Absent as absent:
        print(f"left out: {absent}")
        return 0
    if python is None:
        print(f"left out: {PEER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
