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

from kinetic._collector import directory_of
from kinetic._runner.protocol import wire
from kinetic._tasks import in_thread
from kinetic.aio._engine.manifest import job_record, read_manifest
from kinetic.aio._engine.session import Session
from kinetic.aio._engine.submission import LABEL_INDEX, LABEL_SUBMISSION
from kinetic.errors import AuthError, ConfigurationError, NotFound, WireError

LISTING = 32
"""Maximum number of handles read at once."""

FEW = 5
"""Maximum number of IDs that an error about an ambiguous prefix names."""


_Jobs = dict[tuple[str, int], str]
"""Submission and index → when the job appeared, as ISO 8601; empty if unknown.

Its record was made before: a moment before, or hours before for an item of a batch or a retry.
"""

ANY_TIME = "~"
"""Later than every moment."""

SECOND = len("2026-01-01T00:00:00")


async def records(
    session: Session, beside: Iterable[Session], limit: int | None = None
) -> list[dict[str, Any]]:
    """Return the records of the *limit* newest jobs, also of the *beside* backends."""
    found: _Jobs = {}
    await _look(session, found)
    for other in beside:
        try:
            await _look(other, found)
        except AuthError as exc:  # a user without such jobs needs no permission to see them
            logging.info("jobs of %s are not listed: %s", other.target.backend, exc)
    # Only in a directory: in a bucket, this would take a listing of all objects.
    if (directory := directory_of(session.platform.store.url)) is not None:
        for job_id, made in (await in_thread(_forgotten, directory.objects.root)).items():
            found.setdefault((job_id, 0), made)
    jobs = sorted(((when or ANY_TIME, *job) for job, when in found.items()), reverse=True)
    listed: list[_Listed] = []
    manifests: dict[str, Any] = {}
    start, size = 0, limit or LISTING
    while start < len(jobs):
        if limit is not None and len(listed) >= limit:
            oldest = listed[-1][0] if listed else ANY_TIME
            if jobs[start][0][:SECOND] <= oldest[:SECOND]:
                break  # a record is made before its job appears, so all others are older
        listed += await _read(session, jobs[start : start + size], manifests)
        listed = sorted(listed, key=lambda one: one[:2], reverse=True)[:limit]
        # A job's objects may be in another store.
        start, size = start + size, min(2 * size, LISTING)
    refused = [why for why in manifests.values() if isinstance(why, Exception)]
    if refused:
        why = refused[0]
        logging.warning("left out, without a handle: %d jobs or batches; %s", len(refused), why)
    return [record for _, _, record in listed]


_Known = tuple[str, str, int]
"""When a job appeared, its submission, and its index in the submission."""

_Listed = tuple[str, _Known, dict[str, Any]]
"""When a job's record was made, the `_Known` entry of the job, and the record."""


def _forgotten(store: Path) -> dict[str, str]:
    """Return the single jobs in a directory that no request stops, and when each was made.

    This looks at two files of each job.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for folder in os.listdir(store / "jobs"):
            if os.path.exists(store / wire.control_key(f"jobs/{folder}/", 0)):
                continue
            with contextlib.suppress(OSError):
                made = os.stat(store / "jobs" / folder / "handle.json").st_mtime
                found[folder] = datetime.fromtimestamp(made, UTC).isoformat()
    return found


async def _look(session: Session, found: _Jobs) -> None:
    for one in await session.platform.cluster.find(labels={"app": session.platform.app}):
        if LABEL_SUBMISSION in one.labels:
            job = (one.labels[LABEL_SUBMISSION], int(one.labels[LABEL_INDEX]))
            found[job] = max(found.get(job, ""), one.created_at)


async def _read(
    session: Session, jobs: Iterable[_Known], manifests: dict[str, Any]
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
    there = [job for job in jobs if not isinstance(manifests[job[1]], Exception)]
    records = [job_record(manifests[name], name, index) for _, name, index in there]
    return [(one["created_at"], job, one) for job, one in zip(there, records, strict=True)]


async def full_id(session: Session, prefix: str) -> str:
    """Return the only ID in the store that begins with *prefix*.

    Raises:
        ConfigurationError: Several IDs begin with it.
        NotFound: No ID begins with it.
    """
    store = session.platform.store
    place = wire.group_key("") if prefix.startswith("grp-") else "jobs/"
    listed = await store.list(f"{place}{prefix}")
    found = sorted({one.name.removeprefix(place).partition("/")[0] for one in listed})
    if not found:
        raise NotFound(f"no id in {store.url} begins with {prefix!r}")
    if len(found) > 1:
        some = ", ".join(found[:FEW]) + (", …" if len(found) > FEW else "")
        raise ConfigurationError(
            f"{len(found)} IDs begin with {prefix!r}: {some}; type more of the ID"
        )
    return found[0]
