"""List the jobs of a platform, the newest first, and complete the prefix of an ID."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from absl import logging

from kinetic import _labels
from kinetic._collector import directory_of
from kinetic._runner.protocol import wire
from kinetic._tasks import in_thread
from kinetic.aio._engine.session import Session
from kinetic.aio._submissions.ids import scope_of
from kinetic.aio._submissions.manifest import job_record, read_manifest
from kinetic.errors import AuthError, ConfigurationError, NotFound, WireError

MAX_READS = 32
"""Maximum number of jobs whose records are read at once."""

MAX_NAMED = 5
"""Maximum number of IDs that an error about an ambiguous prefix names."""


_FoundJobs = dict[tuple[str, int], str]
"""Submission and index → when the job appeared, as ISO 8601; empty if unknown.

The record of a single job is created a moment before its first attempt's job appears. The record of
a batch's item, or of a job that was retried, can be hours older.
"""

NO_TIME = "~"
"""Represents an unknown time, and sorts after every time in ISO 8601."""

SECOND_LENGTH = len("2026-01-01T00:00:00")
"""Length of a time in ISO 8601 without fractions of a second and time zone."""


async def records(
    session: Session,
    other_sessions: Iterable[Session],
    limit: int | None = None,
    *,
    items: bool = True,
) -> list[dict[str, Any]]:
    """Return the records of the *limit* newest jobs of *session* and *other_sessions*.

    Without *items*, leave out the items of batches.
    """
    found: _FoundJobs = {}
    await _find_jobs(session, found)
    if items:
        await _find_worker_items(session, found, limit)
    for other in other_sessions:
        try:
            await _find_jobs(other, found)
        except AuthError as exc:  # a user without jobs on this backend may lack the permission
            logging.info("the list omits jobs on %s: %s", other.target.backend, exc)
    # If the store is a directory, also find jobs in it. In a bucket, kinetic would have to list all
    # objects.
    if (directory := directory_of(session.platform.store.url)) is not None:
        for job_id, created in (await in_thread(_unstopped_jobs, directory.objects.root)).items():
            found.setdefault((job_id, 0), created)
    listable = ((appeared or NO_TIME, *job) for job, appeared in found.items())
    jobs: list[_FoundJob] = sorted(
        (job for job in listable if items or job[1].startswith("job-")), reverse=True
    )
    listed: list[_Listed] = []
    manifests: dict[str, Any] = {}
    size = limit or MAX_READS
    while jobs and limit != 0:
        # More than one read may be needed: a job whose objects are in another store has no record
        # here.
        listed += await _read_records(session, jobs[:size], manifests)
        listed = sorted(listed, key=lambda entry: entry[:2], reverse=True)[:limit]
        jobs, size = jobs[size:], min(2 * size, MAX_READS)
        if limit is not None and len(listed) >= limit:
            # A record is created before its job appears: the records of jobs that appeared before
            # the oldest listed record are older.
            oldest = listed[-1][0][:SECOND_LENGTH]
            jobs = [job for job in jobs if job[0][:SECOND_LENGTH] > oldest]
    unreadable = [error for error in manifests.values() if isinstance(error, Exception)]
    if unreadable:
        logging.warning(
            "the list omits %d jobs or batches, because kinetic can't read their manifests; first "
            "error: %s",
            len(unreadable),
            unreadable[0],
        )
    return [record for _, _, record in listed]


_FoundJob = tuple[str, str, int]
"""When a job appeared, its submission, and its index in the submission."""

_Listed = tuple[str, _FoundJob, dict[str, Any]]
"""When a job's record was created, the `_FoundJob` entry of the job, and the record."""


def _unstopped_jobs(store: Path) -> dict[str, str]:
    """Return job ID → creation time (ISO 8601) of each single job without a stop request."""
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for folder in os.listdir(store / "jobs"):
            if os.path.exists(store / wire.control_key(f"jobs/{folder}/", 0)):
                continue
            with contextlib.suppress(OSError):
                modified = os.stat(store / "jobs" / folder / "handle.json").st_mtime
                found[folder] = datetime.fromtimestamp(modified, UTC).isoformat()
    return found


async def _find_jobs(session: Session, found: _FoundJobs) -> None:
    for observation in await session.platform.cluster.find(labels={"app": session.platform.app}):
        if _labels.INDEX in observation.labels:  # a worker has none
            job = (observation.labels[_labels.SUBMISSION], int(observation.labels[_labels.INDEX]))
            found[job] = max(found.get(job, ""), observation.created_at)


async def _find_worker_items(session: Session, found: _FoundJobs, limit: int | None) -> None:
    """Add the items that workers have taken, of the newest batches with *limit* items.

    The platform knows only those that run now.
    """
    store, count = session.platform.store, 0
    batches = [
        (info.metadata.get("created", ""), info.name.rpartition("/")[2])
        for info in await store.list(wire.group_key(""))
    ]
    for _, batch in sorted(batches, reverse=True):
        if limit is not None and count >= limit:
            break
        items = dict[int, str]()
        for info in await store.list(f"{scope_of(batch)}attempts/"):
            if not info.name.endswith(".claim"):
                continue
            index, _ = wire.parse_attempt_key(info.name)
            claimed = wire.claim_time(info.metadata)
            appeared = "" if claimed is None else datetime.fromtimestamp(claimed, UTC).isoformat()
            items[index] = max(items.get(index, ""), appeared)
        found.update(((batch, index), appeared) for index, appeared in items.items())
        count += len(items)


async def _read_records(
    session: Session, jobs: Iterable[_FoundJob], manifests: dict[str, Any]
) -> list[_Listed]:
    """Read the records of *jobs*; *manifests* caches each manifest, or the error of reading it."""
    names = [name for name in dict.fromkeys(name for _, name, _ in jobs) if name not in manifests]
    reading = (read_manifest(session, name) for name in names)
    found = await asyncio.gather(*reading, return_exceptions=True)
    for name, manifest in zip(names, found, strict=True):
        if isinstance(manifest, BaseException) and not isinstance(
            manifest, (AuthError, ConfigurationError, NotFound, WireError)
        ):
            raise manifest
        manifests[name] = manifest
    readable = [job for job in jobs if not isinstance(manifests[job[1]], Exception)]
    records = [job_record(manifests[name], name, index) for _, name, index in readable]
    return [
        (record["created_at"], job, record) for job, record in zip(readable, records, strict=True)
    ]


async def full_id(session: Session, prefix: str) -> str:
    """Return the only ID in the store that begins with *prefix*."""
    store = session.platform.store
    folder = wire.group_key("") if prefix.startswith("grp-") else "jobs/"
    listed = await store.list(f"{folder}{prefix}")
    found = sorted({info.name.removeprefix(folder).partition("/")[0] for info in listed})
    if not found:
        raise NotFound(f"no ID in {store.url} begins with {prefix!r}")
    if len(found) > 1:
        shown = ", ".join(found[:MAX_NAMED]) + (", …" if len(found) > MAX_NAMED else "")
        raise ConfigurationError(
            f"{len(found)} IDs begin with {prefix!r}: {shown}; type more of the ID"
        )
    return found[0]
