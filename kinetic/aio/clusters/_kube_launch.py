"""A job is started: its Secret and its Job are made, whatever is there of earlier tries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from kinetic.aio._release import release
from kinetic.aio.clusters._api import Api
from kinetic.aio.clusters._job_manifest import ATTEMPT, Placement, job_manifest
from kinetic.aio.clusters._kube_paths import Paths, by_items
from kinetic.aio.clusters._kube_secrets import Secrets, submission_secret
from kinetic.aio.clusters._kube_watch import found
from kinetic.aio.clusters._reasons.documents import part
from kinetic.aio.clusters._reasons.held import refused_request
from kinetic.aio.clusters._reasons.verdict import Outlook
from kinetic.aio.ports import JobSpec, Phase
from kinetic.errors import AlreadyThere, LaunchError, NotFound, Refused, Throttled, Unavailable

__all__ = ["launched", "made"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
LEAVING_S = 10.0
"""How long after its grace a pod of the attempt before may take to be gone."""

GOING_S = 120.0
"""How long is waited for a Job of this name that is being deleted."""


async def launched(api: Api, paths: Paths, secrets: Secrets, at: Placement, job: JobSpec) -> None:
    """Start *job*; one with this name already there is success, but not one that is going.

    A batch's Secret comes before its first Job. A single job's comes after it,
    because the Job owns it: the pod waits for it in between.

    Raises:
        LaunchError: It was refused.
        Throttled: A quota is used up.
        AuthError: A right is missing.
        Unavailable: The API server does not answer.

    Cancelled: the job may or may not exist; delete it by name.
    """
    if not job.name:
        raise LaunchError("'' is no name for a job", reason="order")
    secret = submission_secret(job)
    manifest = job_manifest(job, replace(at, secret=secret))
    if await _comes_by_itself(api, paths, job):
        return
    await made(api, paths, secrets, job, secret, manifest)


async def made(
    api: Api, paths: Paths, secrets: Secrets, job: JobSpec, secret: str, manifest: dict[str, Any]
) -> None:
    """Make *manifest*, and *secret* for its pods; see `launched`.

    Raises:
        LaunchError: It was refused.
    """
    shared = bool(job.assignment.get("group_id"))
    try:
        if shared:
            await secrets.ensure(job, secret)
        owner, new = await _created(api, paths, manifest)
        if not shared:
            async with _undone(api, paths, owner if new else None):
                await secrets.give(job, secret, owner)
    except Refused as exc:
        raise _explained(exc, job.name) from exc


async def _comes_by_itself(api: Api, paths: Paths, job: JobSpec) -> bool:
    """Whether the Job of an earlier attempt makes a pod for this one.

    It does when the platform ended its last one. While that one is on its way
    out this is not decided, and waited for.
    """
    number = job.labels.get(ATTEMPT, "")
    if not number.isdecimal() or int(number) < 2:
        return False
    loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
    deadline = loop.time() + job.grace + LEAVING_S
    while True:
        seen = await found(api, paths, by_items([job.name]))
        mine = [one for one in seen if one.name == job.name]
        if mine:
            return True
        if all(one.phase in (Phase.ENDED, Phase.GONE) for one in seen) or loop.time() > deadline:
            return False
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_S, pause * 1.5)


@asynccontextmanager
async def _undone(api: Api, paths: Paths, made: dict[str, Any] | None) -> AsyncGenerator[None]:
    """Remove the Job that was just made when it does not get what it needs."""
    try:
        yield
    except BaseException:
        if made is not None:
            options = {
                "propagationPolicy": "Background",
                "preconditions": {"uid": made["metadata"]["uid"]},
            }
            path = f"{paths.jobs}/{made['metadata']['name']}"
            removal = api.call("DELETE", path, body=options)
            await release(removal, what=f"removing {path} after a failure")
        raise


async def _created(api: Api, paths: Paths, manifest: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The Job, and whether it was made now."""
    name, pause = str(manifest["metadata"]["name"]), FIRST_PAUSE_S
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GOING_S
    while True:
        try:
            return await api.call("POST", paths.jobs, body=manifest), True
        except AlreadyThere:
            pass
        try:
            there = await api.call("GET", f"{paths.jobs}/{name}")
        except NotFound:
            continue
        if not part(there, "metadata").get("deletionTimestamp"):
            return there, False
        if loop.time() > deadline:
            raise Unavailable(
                f"Job {name} is being deleted for more than {GOING_S:g} s, so none can be made in "
                "its place; see what holds it (its finalizers)",
                retryable=True,
            )
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_S, pause * 1.5)


def _explained(refused: Refused, name: str) -> Exception:
    """What the server said, in the words of the user; a quota may have room again."""
    found = refused_request(refused.answer)
    words = f"{name} was refused: {found.text}" if refused.answer else str(refused)
    if found.outlook is Outlook.OPEN:
        return Throttled(words, retryable=True)
    return LaunchError(words, reason=found.reason.value if found.reason is not None else "")
