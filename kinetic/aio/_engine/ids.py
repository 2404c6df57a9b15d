"""What an id names: a job of its own, a batch, or one job of a batch."""

from __future__ import annotations

import re

from kinetic._messages import one_line
from kinetic.errors import ConfigurationError

__all__ = ["entry_of", "is_batch", "item_of", "refuse_job", "scope_of"]

_ID = re.compile(r"(?:job|grp)-[0-9a-z-]+", re.ASCII)
_BATCH = re.compile(r"grp-(?:[a-z]+-)?[0-9a-f]{12}", re.ASCII)
_ITEM = re.compile(r"(grp-.+)-([0-9]+)", re.ASCII)


def item_of(job_id: str) -> tuple[str, int] | None:
    """The batch and the place in it, None for a job of its own.

    Raises:
        ConfigurationError: It is a batch's id.
    """
    _refuse_others(job_id)
    if job_id.startswith("job-"):
        return None
    item = _ITEM.fullmatch(job_id)
    if _BATCH.fullmatch(job_id) or item is None:
        raise ConfigurationError(
            f"{job_id} is the id of a batch: attach_batch({job_id!r}) returns its handle, "
            f"attach('{job_id}-0') that of its first job"
        )
    return item[1], int(item[2])


def refuse_job(group_id: str) -> None:
    """Refuse what is no id of a batch.

    Raises:
        ConfigurationError: If it is that of a job, it says which call takes it.
    """
    _refuse_others(group_id)
    item = None if _BATCH.fullmatch(group_id) else _ITEM.fullmatch(group_id)
    if item is not None and _BATCH.fullmatch(item[1]):
        raise ConfigurationError(
            f"{group_id} is the id of one job of a batch: attach({group_id!r}) returns its "
            f"handle, attach_batch({item[1]!r}) that of the batch"
        )
    if group_id.startswith("job-"):
        raise ConfigurationError(
            f"{group_id} is the id of a job, no batch's: attach({group_id!r}) returns its handle"
        )


def is_batch(submission: str) -> bool:
    """Whether it names a batch; else it names a job of its own.

    Raises:
        ConfigurationError: It names neither.
    """
    _refuse_others(submission)
    item = None if _BATCH.fullmatch(submission) else _ITEM.fullmatch(submission)
    if item is not None:
        raise ConfigurationError(
            f"{submission} is the id of one job of a batch, whose objects go with the batch: "
            f"cleanup({item[1]!r}) removes it"
        )
    return submission.startswith("grp-")


def scope_of(submission: str) -> str:
    """The prefix of the objects of a batch or a job of its own."""
    return f"{'batches' if submission.startswith('grp-') else 'jobs'}/{submission}/"


def entry_of(submission: str) -> str:
    """The object that describes it, which is there until it is cleaned up."""
    name = "manifest" if submission.startswith("grp-") else "handle.json"
    return f"{scope_of(submission)}{name}"


def _refuse_others(text: str) -> None:
    if not _ID.fullmatch(text):
        raise ConfigurationError(
            f"{one_line(repr(text), 80)} is no id: those of jobs begin with job-, those of batches "
            "with grp-, as in a handle's job_id and group_id"
        )
