"""How fast are jobs submitted to a Kubernetes cluster, and how soon is their outcome here?

The control plane on loopback is real (`tests.cluster`). Its pods are processes of this machine, or
containers with ``--node``. A GCS server keeps its objects in memory. In each round each contender
takes a turn in a new namespace and a new bucket: kinetic; a bare loop over aiohttp; and
with ``--peer``, keras-kinetic, the public package, in a separate virtualenv.

1. Submitting jobs at once while the scheduler stands still: from the first call to the answer for
   the last Job, as the API server's audit log has it. The bare loop sends the same bytes as
   kinetic, 64 requests at a time. A regression: less than 0.5 of the bare loop. keras-kinetic
   submits a batch.
2. A batch whose items share a few workers: the delay between the end of a function and the arrival
   of its value, the time until all values are here, and the time until all is removed. The bare
   loop starts a Job for each item, whose process only tells the time, and watches their pods. A
   regression: a value later than 1.5 of the bare loop.
3. One job after the other, warm.
4. Requests per item of a batch of 20, by kind, from start to removal; with ``--many``, also of a
   batch of 10,000 items and 20 workers.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import figures, setting
from benchmarks.cluster import bare_client, kinetic_client, peer_client
from benchmarks.cluster.recorder import Recording, record
from benchmarks.cluster.servers import (
    Cluster,
    MissingProgram,
    Workspace,
    start_on_node,
    start_with_processes,
)
from tests.gcs.server import GcsServer
from tests.gke.proxy import Front

KINETIC, BARE, PEER = "kinetic", "bare aiohttp loop", peer_client.PACKAGE
SIZES, QUICK_SIZES = (20, 200), (20,)
SLOTS = 4
"""How many pods run at a time, and how many workers a batch has."""

IN_FLIGHT = 64
"""Maximum number of submitted Jobs of the bare loop that have not ended: the peer's default."""

PEER_COMPLETES = 20
"""The largest batch that the peer completes: it removes one job after the other, 2 s each."""

SINGLE_JOBS = 5
COUNTED_ITEMS = 20
MANY_ITEMS, MANY_WORKERS = 10_000, 20
"""Sizes of the measurements of single jobs and of requests."""

READS = ("get ", "list ", "watch ")
"""How requests to the API server begin that change nothing."""

FINISH = '''"""What the jobs do."""

import time


def now(_: int) -> float:
    return time.time()
'''


@dataclass(frozen=True, slots=True)
class Turns:
    """The contenders, which take turns in each round."""

    cluster: Cluster
    peer: peer_client.Peer | None
    rounds: int

    def order(self, number: int) -> list[str]:
        """Return the order of contenders in a round; each round begins with the next one."""
        names = [BARE, KINETIC, *([PEER] if self.peer else [])]
        first = number % len(names)
        return names[first:] + names[:first]

    def run(self, action: str, jobs: int, workspace: Workspace) -> Any:
        """Run *action* with the peer; see `peer_client.Peer.run`."""
        assert self.peer is not None
        return self.peer.run(action, jobs, workspace)


@dataclass(slots=True)
class Batches:
    """Seconds in each round: lag of each item, time to all values, time to removal."""

    lags: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    gone: list[float] = field(default_factory=list)

    def note(
        self, started_at: float, moments: Sequence[Sequence[float]], removed_at: float | None
    ) -> None:
        """Add one batch; *moments* has the end of each function and the arrival of its value."""
        lags = [arrived - ended for ended, arrived in moments]
        self.lags += lags
        self.medians.append(statistics.median(lags))
        self.values.append(max(arrived for _, arrived in moments) - started_at)
        if removed_at is not None:
            self.gone.append(removed_at - started_at)


# --- submitting ---


async def record_submission(cluster: Cluster, jobs: int) -> Recording:
    """Record the requests by which kinetic submits *jobs* jobs."""
    with cluster.workspace() as workspace:
        async with record(cluster, workspace) as recording:
            await kinetic_client.submit(
                cluster, recording.workspace, jobs, warm=recording.requests.clear
            )
            return recording


def measure_submission(turns: Turns, jobs: int) -> None:
    """Print the rates of submitting *jobs* jobs, and their ratios."""
    cluster, all_rates, cpu_ms = turns.cluster, dict[str, list[float]](), dict[str, list[float]]()
    with cluster.plane.frozen_scheduler():
        recording = asyncio.run(record_submission(cluster, jobs))
        for number in range(turns.rounds):
            for name in turns.order(number):
                with cluster.workspace() as workspace:
                    warm_jobs = 0 if name == BARE else 1
                    if name == BARE:
                        started_at, cpu_seconds = asyncio.run(
                            bare_client.submit(cluster, workspace, recording)
                        )
                    elif name == KINETIC:
                        started_at, cpu_seconds = asyncio.run(
                            kinetic_client.submit(cluster, workspace, jobs)
                        )
                    else:
                        answer = turns.run("submit", jobs, workspace)
                        started_at, cpu_seconds = answer["started_at"], answer["cpu_seconds"]
                    last_created = cluster.wait_for_jobs(workspace, warm_jobs + jobs)[-1]
                    all_rates.setdefault(name, []).append(jobs / (last_created - started_at))
                    cpu_ms.setdefault(name, []).append(cpu_seconds / jobs * 1000)
    titles = ("median/s", "best/s", "x bare", "x kinetic", "cpu ms/job")
    figures.head(f"submitting {jobs}", *titles)
    for name, rates in all_rates.items():
        cells = [f"{statistics.median(rates):.1f}", f"{max(rates):.1f}"]
        cells += [f"{figures.ratio(rates, all_rates[other]):.3f}" for other in (BARE, KINETIC)]
        figures.row(name, *cells, f"{statistics.median(cpu_ms[name]):.1f}")


# --- until the outcome is here ---


def measure_completion(turns: Turns, jobs: int) -> None:
    """Print milliseconds from the end of the function, and seconds of the whole batch."""
    cluster, batches_by_name = turns.cluster, dict[str, Batches]()
    for number in range(turns.rounds):
        for name in turns.order(number):
            removed: float | None = None
            with cluster.workspace() as workspace:
                if name == BARE:
                    started, moments = asyncio.run(
                        bare_client.complete(cluster, workspace, jobs, IN_FLIGHT)
                    )
                elif name == KINETIC:
                    started, moments, removed = asyncio.run(
                        kinetic_client.complete(cluster, workspace, jobs, SLOTS)
                    )
                else:
                    answer = turns.run("complete", jobs, workspace)
                    started, moments = answer["started_at"], answer["moments"]
                    removed = answer["removed_at"]
            assert len(moments) == jobs, f"{name} has {len(moments)} values of {jobs}"
            batches_by_name.setdefault(name, Batches()).note(started, moments, removed)
    titles = ("p50 ms", "p99 ms", "max ms", "x bare", "values s", "removed s")
    figures.head(f"{jobs} items, {SLOTS} at a time", *titles)
    for name, batches in batches_by_name.items():
        lags = sorted(batches.lags)
        cells = [lags[len(lags) // 2], lags[int(len(lags) * 0.99)], lags[-1]]
        figures.row(
            name,
            *(f"{cell * 1000:.0f}" for cell in cells),
            f"{figures.ratio(batches.medians, batches_by_name[BARE].medians):.1f}",
            f"{statistics.median(batches.values):.1f}",
            f"{statistics.median(batches.gone):.1f}" if batches.gone else "",
        )


def measure_single_jobs(turns: Turns) -> None:
    """Print milliseconds of one job."""
    cluster, moments_by_name = turns.cluster, dict[str, list[Sequence[float]]]()
    with cluster.workspace() as workspace:
        moments_by_name[KINETIC] = [
            *asyncio.run(kinetic_client.one_by_one(cluster, workspace, 1 + SINGLE_JOBS))[1:]
        ]
    if turns.peer is not None:
        with cluster.workspace() as workspace:
            moments_by_name[PEER] = turns.run("one_by_one", 1 + SINGLE_JOBS, workspace)["moments"][
                1:
            ]
    figures.head("one after the other", "submit ms", "after end ms", "call to value ms")
    for name, moments in moments_by_name.items():
        parts = [
            [submitted - called for called, submitted, _, _ in moments],
            [arrived - ended for _, _, ended, arrived in moments],
            [arrived - called for called, _, _, arrived in moments],
        ]
        figures.row(name, *(f"{statistics.median(part) * 1000:.0f}" for part in parts))


# --- requests ---


async def count_requests(
    turns: Turns, name: str, items: int, workers: int, server: GcsServer | None = None
) -> tuple[Counter[str], Front, Front]:
    """Run a batch from start to removal; its objects are in *server*, if that is given.

    Returns:
        The requests of the client to the API server, those of the client to the bucket, and those
        of the pods to the bucket.
    """
    cluster, gcs = turns.cluster, server.url if server else turns.cluster.gcs
    assert cluster.kubelet is not None, "pods that are processes reach a proxy on loopback"
    with cluster.workspace() as workspace:
        if server is not None:
            server.buckets.add(workspace.bucket)
        async with Front(gcs) as client, Front(gcs) as pods:
            counted = cluster.workspace_at(workspace.name, cluster.plane.server, client.url)
            cluster.kubelet.set_environment(STORAGE_EMULATOR_HOST=pods.url)
            try:
                if name == KINETIC:
                    _, moments, _ = await kinetic_client.complete(cluster, counted, items, workers)
                else:
                    answer = await asyncio.to_thread(turns.run, "complete", items, counted)
                    moments = answer["moments"]
            finally:
                cluster.kubelet.set_environment(STORAGE_EMULATOR_HOST=cluster.gcs)
        assert len(moments) == items, f"{name} has {len(moments)} values of {items}"
        return cluster.count_requests(workspace), client, pods


def print_requests(name: str, items: int, api: Counter[str], client: Front, pods: Front) -> None:
    """Print the requests of a batch by kind, and what they say about its workers."""
    for way, counts in (
        ("client to API server", api),
        ("client to bucket", Counter(request.kind for request in client.requests)),
        ("pods to bucket", Counter(request.kind for request in pods.requests)),
    ):
        summary = ", ".join(f"{request} {count}" for request, count in counts.most_common())
        print(f"{name}, batch of {items}: {way} {counts.total() / items:.2f} an item ({summary})")
    writes = sum(count for request, count in api.items() if not request.startswith(READS))
    refused = sum(
        request.kind == "create" and request.name.endswith(".claim") and request.status == 412
        for request in pods.requests
    )
    print(f"{name}, batch of {items}: {writes} writes to the API server, {refused} claims refused")


def measure_requests(turns: Turns) -> None:
    """Print the requests of a small batch."""
    for name in (KINETIC, *((PEER,) if turns.peer else ())):
        counts = asyncio.run(count_requests(turns, name, COUNTED_ITEMS, SLOTS))
        print_requests(name, COUNTED_ITEMS, *counts)


async def measure_many(turns: Turns) -> None:
    """Print the requests of a large batch of kinetic."""
    assert turns.cluster.kubelet is not None
    turns.cluster.kubelet.add_node("more", pods=MANY_WORKERS - SLOTS)
    print(
        f"{MANY_ITEMS} items, {MANY_WORKERS} workers; the bucket is tests.gcs.server, because each "
        "object makes the next create of fake-gcs-server slower",
        flush=True,
    )
    async with GcsServer() as server:
        counts = await count_requests(turns, KINETIC, MANY_ITEMS, MANY_WORKERS, server)
    print_requests(KINETIC, MANY_ITEMS, *counts)


@contextlib.contextmanager
def project(scratch: Path) -> Iterator[None]:
    """Enter a small project with the function of the jobs, during the block."""
    with setting.project(scratch):
        Path("finish.py").write_text(FINISH)
        del os.environ["PYTHONPATH"]  # pods have their own path
        yield


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of 20 jobs, without others")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument(
        "--peer", type=Path, metavar="PYTHON", help=f"an interpreter that has {PEER}"
    )
    pods = parser.add_mutually_exclusive_group()
    pods.add_argument("--node", action="store_true", help="containers on a real node; as root")
    pods.add_argument("--many", action="store_true", help="also a batch of 10,000 items")
    options: Any = parser.parse_args()
    sizes = QUICK_SIZES if options.quick else SIZES
    python = None if options.node else options.peer
    try:
        with (
            setting.scratch() as scratch,
            project(scratch),
            start_on_node(scratch)
            if options.node
            else start_with_processes(scratch, SLOTS) as cluster,
        ):
            peer = peer_client.Peer(cluster, python, scratch) if python else None
            turns = Turns(cluster, peer, options.rounds or (1 if options.quick else 3))
            if not options.node:  # containers of the node can't reach the recorder on loopback
                for size in sizes:
                    measure_submission(turns, size)
                    print(flush=True)
                measure_requests(turns)
                print(flush=True)
            measure_single_jobs(turns)
            for size in sizes:
                print(flush=True)
                with_peer = size <= PEER_COMPLETES
                measure_completion(turns if with_peer else replace(turns, peer=None), size)
            if options.many:
                print(flush=True)
                asyncio.run(measure_many(turns))
    except MissingProgram as missing:
        print(f"left out: {missing}")
        return 0
    if python is None:
        print(f"left out: {PEER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
