"""IDs of jobs and batches, and the names of objects and attempts that follow from them."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from kinetic._labels import ROUND, SUBMISSION
from kinetic._messages import one_line
from kinetic._runner.protocol.retry_budgets import RetryBudgets
from kinetic.aio._process_identity import ProcessIdentity
from kinetic.errors import ConfigurationError, NotFound

if TYPE_CHECKING:
    from kinetic._runner.protocol.workers import WorkerId

_ID = re.compile(r"(?:job|grp)-[0-9a-z-]+", re.ASCII)
_FULL_ID = re.compile(r"(?:job|grp)-(?:[a-z]+-)?[0-9a-f]{12}", re.ASCII)
_ITEM = re.compile(r"(grp-.+)-([0-9]+)", re.ASCII)
_ATTEMPT = re.compile(r"(grp-.+)-([0-9]+)-([0-9]+)", re.ASCII)


def item_of(job_id: str) -> tuple[str, int] | None:
    """Return the batch and the index of an item; None for a single job."""
    submission, index = _parse(job_id)
    if index is not None:
        return submission, index
    if not job_id.startswith("job-"):
        raise ConfigurationError(
            f"{job_id} is the ID of a batch: use attach_batch({job_id!r}) or `kinetic batches`. "
            f"Its first job is '{job_id}-0', for attach() or `kinetic jobs`"
        )
    return None


def attempt_of(name: str) -> tuple[str, int, int] | None:
    """Return batch, item, and number of the attempt that a platform calls *name*.

    None for the attempt of a single job, and for a name that isn't one of an attempt.
    """
    found = _ATTEMPT.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


def worker_name(group_id: str, worker: WorkerId) -> str:
    """Return the platform's name of a worker of a batch."""
    return f"{_round_name(group_id, worker.round)}.{worker.job}.{worker.rank}.{worker.restarts}"


def _round_name(submission_id: str, number: int) -> str:
    return f"{submission_id}-r{number}"


def require_batch_id(group_id: str) -> None:
    """Check that *group_id* is the ID of a batch."""
    submission, index = _parse(group_id)
    if index is not None:
        raise ConfigurationError(
            f"{group_id} is the ID of one job of a batch: attach({group_id!r}) and `kinetic jobs` "
            f"take it; attach_batch({submission!r}) and `kinetic batches` take the batch"
        )
    if group_id.startswith("job-"):
        raise ConfigurationError(
            f"{group_id} is the ID of a single job, not of a batch: attach({group_id!r}) and "
            "`kinetic jobs` take it"
        )


def require_submission_id(submission_id: str) -> None:
    """Check that *submission_id* is the ID of a batch or of a single job."""
    batch, index = _parse(submission_id)
    if index is not None:
        raise ConfigurationError(
            f"{submission_id} is the ID of one job of a batch. kinetic can only remove the whole "
            f"batch: cleanup({batch!r}), or `kinetic batches cleanup {batch}`"
        )


def is_full_id(text: str) -> bool:
    """Return whether *text* is a full ID, not only the beginning of an ID."""
    return _FULL_ID.fullmatch(_parse(text)[0]) is not None


def _parse(text: str) -> tuple[str, int | None]:
    """Return the submission that an ID names, and the index if it is an item's ID."""
    _require_id(text)
    matched = None if _FULL_ID.fullmatch(text) else _ITEM.fullmatch(text)
    return (text, None) if matched is None else (matched[1], int(matched[2]))


def scope_of(submission_id: str) -> str:
    """Return the prefix of the objects of a batch or a single job."""
    return f"{'batches' if submission_id.startswith('grp-') else 'jobs'}/{submission_id}/"


def manifest_name_of(submission_id: str) -> str:
    """Return the name of a submission's manifest, an object that exists until the cleanup."""
    name = "manifest" if submission_id.startswith("grp-") else "handle.json"
    return f"{scope_of(submission_id)}{name}"


def _require_id(text: str) -> None:
    if not _ID.fullmatch(text):
        shown, job_id = one_line(repr(text), 80), text.removeprefix("kinetic-")
        if job_id != text and _ID.fullmatch(job_id):
            raise ConfigurationError(
                f"{shown} is the name of the job on its platform; its ID is {job_id}"
            )
        raise NotFound(
            f"no job or batch has the ID {shown}: job IDs start with job-, batch IDs with grp-"
        )


YOUNG_S = 60.0
"""How long the launch of a new job may still be on its way, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identify a submission: a single job, or with `BatchIdentity` a batch.

    ``created`` is seconds since the epoch by the submitter's clock. A ``leased`` submission is
    a batch: the holder of its lease may still start attempts, and closes attempts that died.
    """

    leased: ClassVar[bool] = False

    id: str
    key: bytes
    budgets: RetryBudgets
    created: float
    submitter: ProcessIdentity | None = None
    output_base: str = ""
    """The base of the output directories: a path on the jobs' machine, or a ``gs://`` prefix."""
    scope: str = field(init=False)
    """The prefix of the names of the submission's objects."""
    manifest_name: str = field(init=False)
    """The name of the submission's manifest, an object that exists until the cleanup."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope", scope_of(self.id))
        object.__setattr__(self, "manifest_name", manifest_name_of(self.id))

    @property
    def labels(self) -> dict[str, str]:
        """The label that all jobs of the submission have."""
        return {SUBMISSION: self.id}

    def round_labels(self, number: int) -> dict[str, str]:
        """Return the labels that all workers of a round have."""
        return {**self.labels, ROUND: str(number)}

    @property
    def is_launch_over(self) -> bool:
        """Whether the submitter of a single job has died, or had 60 s to launch it."""
        if self.submitter is not None and self.submitter.is_dead:
            return True
        return time.time() - self.created > YOUNG_S

    @property
    def gone_error(self) -> NotFound:
        """The error of every call for a submission that was cleaned up."""
        return NotFound(
            f"{self.id} was cleaned up: its log and value are removed. result() cleans up a job "
            "after it has read the value, unless you pass cleanup=False"
        )

    def job_id(self, index: int) -> str:
        """Return the ID of one item's job."""
        return self.id

    def output_dir(self, index: int) -> str:
        """Return the ``KINETIC_OUTPUT_DIR`` of one item's job, the same for all its attempts."""
        return self.output_base

    def attempt_name(self, index: int, attempt: int) -> str:
        """Return the platform's name of one attempt; every process computes the same."""
        return f"kinetic-{self.id}" if attempt == 1 else f"kinetic-{self.id}-{attempt}"

    def round_name(self, number: int) -> str:
        """Return the platform's name of a round of workers; it begins each worker's name."""
        return _round_name(self.id, number)

    def attempts_to_ask(self, attempt: int) -> Collection[int]:
        """Return the attempts to ask the platform about when *attempt* is the open one.

        The platform may replace the attempts of a single job, so it may have later attempts than
        the store.
        """
        return range(1, attempt + self.budgets.infrastructure + 1)


class BatchIdentity(Identity):
    """Identify a batch."""

    __slots__ = ()
    leased: ClassVar[bool] = True

    @property
    def gone_error(self) -> NotFound:
        return NotFound(
            f"batch {self.id} was cleaned up: its inputs, jobs and outcomes are removed; submit "
            "the batch again, and call cleanup() only when you no longer need it"
        )

    def job_id(self, index: int) -> str:
        return f"{self.id}-{index}"

    def output_dir(self, index: int) -> str:
        return f"{self.output_base}/{index}"

    def attempt_name(self, index: int, attempt: int) -> str:
        return f"{self.id}-{index}-{attempt}"

    def attempts_to_ask(self, attempt: int) -> Collection[int]:
        return (attempt,)
