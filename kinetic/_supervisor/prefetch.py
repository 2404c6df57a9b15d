"""What the supervisor does for a job before its process exists.

A fork copies each page of memory that it writes to, and so does its parent
after it; the supervisor never forks jobs. None of the user's code runs here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from kinetic._runner.job import opening, processes, workspace
from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._supervisor.jobs import Job
from kinetic._supervisor.protocol import Order, Shared, edition

__all__ = ["Prefetch"]

BATCHES = 16
"""For how many batches it is kept at once what their orders have in common."""

READY_BYTES = 1 << 20
"""Arguments of more bytes are not read before the job's turn."""


class _Terms:
    """What the orders of a batch have in common, once it is read."""

    def __init__(self, shared: Shared) -> None:
        content = json.loads(shared.body)
        self.orders = wire.Orders(content["assignment"])
        self.key = bytes.fromhex(content["key"])
        self.objects = DirectoryObjects.from_url(content["assignment"]["store"])


@dataclass(slots=True)
class _Made:
    """What was made for a job."""

    terms: _Terms
    assignment: wire.Assignment
    site: workspace.Site
    ready: opening.Ready
    taken: opening.Taken | None = None


class Prefetch:
    """Takes a job's first steps, and clears its folder away in the end."""

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self._runner = str(Path(opening.__file__).resolve().parents[1])
        self._edition = edition(Path(self._runner))
        self._terms: dict[Shared, _Terms | None] = {}
        self._made: dict[Job, _Made | None] = {}  # None: it was tried before the job's turn

    def make_ready(self, job: Job, order: Order, folder: str) -> None:
        """Do what says nothing to anybody, while *job* still waits for a slot."""
        if job not in self._made and not order.fresh:
            self._make(job, order, folder, READY_BYTES)

    def take(self, job: Job, order: Order, folder: str) -> bytes | None:
        """The arguments of *job*, all else before its call being done; None if it is not.

        Whatever goes wrong: the job's own process meets it again, and says so.
        """
        made = self._made.get(job) or self._make(job, order, folder)
        if made is None:
            return None
        terms = made.terms
        with contextlib.suppress(Exception):
            made.taken = opening.begin(
                made.assignment, terms.key, job.executor, terms.objects, made.ready
            )
        if made.taken is None:
            self.clear(job)
            return None
        return made.taken.arguments

    def output_dir(self, job: Job) -> str:
        """The output directory in the order of *job*.

        Raises:
            ValueError, KeyError, TypeError: The order cannot be read.
        """
        if (made := self._made.get(job)) is not None:
            return made.assignment.output_dir
        folder: str = json.loads(job.body)["assignment"]["output_dir"]
        return folder

    def clear(self, job: Job) -> bool:
        """Remove the folder of a job that has ended; False if something of it may be there."""
        made = self._made.pop(job, None)
        return made is not None and workspace.clear(made.ready.tree, made.site)

    def forget(self, job: Job) -> bool:
        """The same of a job that never had a process; False if something of it is there."""
        if self._made.get(job) is None:
            self._made.pop(job, None)  # what was tried in vain is not kept, either
            return True
        return self.clear(job)

    def withdraw(self, job: Job) -> None:
        """There was never a process for *job*: its claim goes."""
        made = self._made.get(job)
        if made is not None and made.taken is not None:
            with contextlib.suppress(OSError):
                made.taken.opening.withdraw()

    def _make(self, job: Job, order: Order, folder: str, limit: float = math.inf) -> _Made | None:
        self._made[job] = None
        terms = self._of(order)
        if terms is None:
            return None
        site = workspace.Site(work=folder, cache=self._cache, mounts=processes.LINUX)
        try:
            assignment = terms.orders.assignment(json.loads(job.body)["assignment"])
            if assignment.arguments.stop - assignment.arguments.start > limit:
                return None
            ready = opening.make_ready(assignment, terms.objects, site)
        except Exception:
            return None
        if ready is not None:
            self._made[job] = _Made(terms, assignment, site, ready)
        return self._made[job]

    def _of(self, order: Order) -> _Terms | None:
        shared = order.shared
        if shared not in self._terms:
            while len(self._terms) >= BATCHES:
                del self._terms[next(iter(self._terms))]
            self._terms[shared] = self._read(order)
        return self._terms[shared]

    def _read(self, order: Order) -> _Terms | None:
        """None: another runner than ours is asked for; it may take other steps."""
        if order.edition != self._edition or os.path.realpath(order.runner) != self._runner:
            return None
        try:
            return _Terms(order.shared)
        except (ValueError, KeyError, TypeError):
            return None
