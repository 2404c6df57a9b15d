"""What jobs there are, by what the platform knows and by the records of those in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from kinetic.aio import _manifest
from kinetic.aio._session import LABEL_INDEX, LABEL_SUBMISSION, Session
from kinetic.errors import AuthError, ConfigurationError, NotFound, WireError

__all__ = ["records"]

LISTING = 32
"""Handles that are read at once."""


async def records(session: Session, beside: Iterable[Session]) -> list[dict[str, Any]]:
    """The records of the jobs there are, and of those of other backends in the same place."""
    found: dict[str, set[int]] = {}
    await _look(session, found)
    for other in beside:
        try:
            await _look(other, found)
        except AuthError as exc:  # who has none of them needs no right to see them
            logging.info("jobs of %s are not listed: %s", other.target.backend, exc)
    if session.platform.store.url.startswith("file://"):  # a bucket's listing would be all objects
        for one in await session.platform.store.list("jobs/"):
            if one.name.endswith("/handle.json"):
                found.setdefault(one.name.split("/")[1], {0})
    names = [*found]
    listed: list[dict[str, Any]] = []
    for start in range(0, len(names), LISTING):
        some = {name: found[name] for name in names[start : start + LISTING]}
        listed += await _read(session, some)
    return listed


async def _look(session: Session, found: dict[str, set[int]]) -> None:
    for one in await session.platform.cluster.find(labels={"app": "kinetic"}):
        if LABEL_SUBMISSION in one.labels:
            indices = found.setdefault(one.labels[LABEL_SUBMISSION], set())
            indices.add(int(one.labels[LABEL_INDEX]))


async def _read(session: Session, found: Mapping[str, Iterable[int]]) -> list[dict[str, Any]]:
    reading = (_manifest.read_manifest(session, name) for name in found)
    manifests = await asyncio.gather(*reading, return_exceptions=True)
    listed: list[dict[str, Any]] = []
    for name, manifest in zip(found, manifests, strict=True):
        if isinstance(manifest, NotFound):
            continue  # the platform's jobs may have their objects in another store
        if isinstance(manifest, (ConfigurationError, WireError)):
            logging.warning("a job without a handle was left out: %s", manifest)
        elif isinstance(manifest, BaseException):
            raise manifest
        else:
            listed += (_manifest.job_record(manifest, name, index) for index in found[name])
    return listed
