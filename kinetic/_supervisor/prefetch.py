"""What the supervisor does for a job before its process exists.

A fork copies each page of memory that it writes to, and so does its parent
after it; the supervisor never forks jobs. None of the user's code runs here.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from kinetic._runner.job import opening
from kinetic._runner.protocol import wire
from kinetic._runner.stores.directory import DirectoryObjects
from kinetic._supervisor.jobs import Job
from kinetic._supervisor.protocol import Order, Shared, edition

BATCHES = 16
"""For how many batches to keep what their orders have in common."""


class _Terms:
    """What the orders of a batch have in common, once it is read."""

    def __init__(self, shared: Shared) -> None:
        content = json.loads(shared.body)
        self.orders = wire.Orders(content["assignment"])
        self.key = bytes.fromhex(content["key"])
        self.objects = DirectoryObjects.from_url(content["assignment"]["store"])


class Prefetch:
    """Takes a job's first steps."""

    def __init__(self) -> None:
        self._runner = str(Path(opening.__file__).resolve().parents[1])
        self._edition = edition(Path(self._runner))
        self._terms: dict[Shared, _Terms | None] = {}
        self._claims: dict[Job, opening.Opening] = {}

    def read(self, job: Job, order: Order) -> wire.Assignment | None:
        """Read what *job* has to do; None where only its own process can."""
        terms = self._of(order)
        if terms is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return terms.orders.assignment(json.loads(job.body)["assignment"])
        return None

    def take(self, job: Job, order: Order, assignment: wire.Assignment) -> bytes | None:
        """Claim the attempt of *job* and return its arguments; None if that was not possible.

        The job's own process meets whatever goes wrong again, and says so.
        """
        terms = self._of(order)
        if terms is not None:
            with contextlib.suppress(Exception):
                taken = opening.begin(assignment, terms.key, job.executor, terms.objects)
                if taken is not None:
                    self._claims[job] = taken.opening
                    return taken.arguments
        return None

    def withdraw(self, job: Job) -> None:
        """Take the claim of *job* back: there was never a process for it."""
        if (claim := self._claims.get(job)) is not None:
            with contextlib.suppress(OSError):
                claim.withdraw()

    def forget(self, job: Job) -> None:
        """Drop what is kept of *job*, which has ended."""
        self._claims.pop(job, None)

    def _of(self, order: Order) -> _Terms | None:
        shared = order.shared
        if shared not in self._terms:
            while len(self._terms) >= BATCHES:
                del self._terms[next(iter(self._terms))]
            self._terms[shared] = self._read(order)
        return self._terms[shared]

    def _read(self, order: Order) -> _Terms | None:
        """Return None where another runner than ours is asked for: it may take other steps."""
        if order.edition != self._edition or os.path.realpath(order.runner) != self._runner:
            return None
        try:
            return _Terms(order.shared)
        except (ValueError, KeyError, TypeError):
            return None
